"""Writes from the results of GPUs up to which H `impl="auto"` takes `triton`: `grpo_fused/engines/measured.json`.

    python -m benchmarks.choice

Of each architecture the newest results count that time `chunked` and `triton` on the same dense bf16 cases. `triton` is
taken up to the largest measured H such that it is not slower (medians) there and at every smaller one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import call
from benchmarks.results import RESULTS, Run, newest_first
from grpo_fused.engines.choice import MEASURED_FILE

ENGINES = ("chunked", "triton")


def run(
    results: Annotated[Path, "folder of the machines' folders"] = RESULTS,
    out: Annotated[Path, "the file that the package reads"] = MEASURED_FILE,
) -> None:
    """Write the file, and print a line for each architecture."""
    found: dict[str, dict[str, Any]] = {}
    for measured in newest_first("cuda", "loss", results):
        architecture, widest = measured.machine.get("architecture"), widest_triton(measured)
        if architecture is not None and widest is not None and architecture not in found:
            found[architecture] = {"widest": widest, "source": f"{measured.path.parent.name}/{measured.path.name}"}
    for architecture, entry in found.items():
        print(f"{architecture}: triton up to H = {entry['widest']} ({entry['source']})")
    if not found:
        raise SystemExit(f"no results of a GPU with {' and '.join(ENGINES)} in {results}; nothing was written")
    out.write_text(json.dumps(found, indent=1) + "\n")


def widest_triton(measured: Run) -> int | None:
    """The largest H up to which `triton` is not slower than `chunked`, or 0; None if nothing was timed."""
    times: dict[int, list[float]] = {}
    for case in measured.sections["loss"]["cases"].values():
        rows = [case["providers"].get(name, {}).get("forward_backward") for name in ENGINES]
        if case["shape"]["dtype"] == "bf16" and case["shape"]["pattern"] == "dense" and None not in rows:
            times[case["shape"]["H"]] = [row["ms"]["median"] for row in rows]
    widest = 0
    for width in sorted(times):
        chunked, triton = times[width]
        if triton > chunked:
            break
        widest = width
    return widest if times else None


if __name__ == "__main__":
    call(run)
