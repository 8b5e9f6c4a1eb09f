"""Writes from the results of GPUs up to which H `impl="auto"` takes `triton`: `grpo_fused/engines/measured.json`.

    python -m benchmarks.choice

Of each architecture the newest results count that time `chunked` and `triton` on the same dense bf16 cases. `triton` is
taken up to the largest measured H such that it is right and not slower (medians) in all cases there and at every
smaller one.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import call
from benchmarks.results import RESULTS, Run, all_runs, newest_first
from grpo_fused.engines.choice import MEASURED_FILE

ENGINES = ("chunked", "triton")


def run(
    results: Annotated[Path, "folder of the machines' folders"] = RESULTS,
    out: Annotated[Path, "the file that the package reads"] = MEASURED_FILE,
) -> None:
    """Write the file, and print a line for each architecture."""
    found: dict[str, dict[str, Any]] = {}
    for measured in newest_first("cuda", "loss", all_runs(results)):
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
    wins: dict[int, bool] = {}
    for case in measured.sections["loss"]["cases"].values():
        shape, rows = case["shape"], [case["providers"].get(name) for name in ENGINES]
        if shape["dtype"] != "bf16" or shape["pattern"] != "dense" or None in rows:
            continue
        chunked, triton = (  # a result that is wrong is not timed
            row["forward_backward"]["ms"]["median"] if "forward_backward" in row else math.inf for row in rows
        )
        wins[shape["H"]] = wins.get(shape["H"], True) and triton <= chunked and triton < math.inf
    widths = sorted(wins)
    return max([0, *itertools.takewhile(wins.__getitem__, widths)]) if wins else None


if __name__ == "__main__":
    call(run)
