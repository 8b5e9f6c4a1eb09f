"""The tests of the integration with TRL under each of its releases: which programs are served.

    python -m benchmarks.releases --out results.json              # the releases of the table, some minutes each
    python -m benchmarks.releases --releases 1.17.0               # a new one: installed, tested, its row printed

A release is installed without its dependencies into a folder of `build`, which comes first on the path: the rest of the
environment stays. A release that is not known is tried with GRPO_FUSED_ANY_RELEASE=1 (docs/versions.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

from benchmarks.results import Run, where
from benchmarks.study import Section, main
from benchmarks.tables import grid

TRL = (
    "0.29.1", "1.0.0", "1.1.0", "1.2.0", "1.3.0", "1.4.0", "1.5.1", "1.6.0", "1.7.1", "1.8.0", "1.9.2", "1.10.0",
    "1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0", "1.16.0",
)  # fmt: skip
PROGRAMS = {
    "test_trl": "`FusedGRPOTrainer`: losses, metrics and weights are stock's",
    "test_trl_prediction": "its gradients in one pass",
    "test_trl_truncation": "`exact_truncation`",
    "test_trl_others": "`patch_trl()`: RLOO, DPO, KTO, SFT",
    "test_trl_cli": "`python -m grpo_fused trl`",
    "test_trl_divergence": "`DistillationTrainer`",
}
"""File of tests to what it tests."""
ROOT = Path(__file__).resolve().parents[1]
NOT_THERE = "not served"


def installed(release: str) -> Path:
    """The folder of a release of TRL, which is installed there if it is not."""
    folder = ROOT / "build" / f"trl-{release}"
    if not (folder / "trl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"trl=={release}"], check=True)
    return folder


def tested(release: str, full: bool) -> dict[str, dict[str, int]]:
    """Of each program the numbers of tests that passed, failed and were skipped."""
    folder = installed(release)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    files = [f"tests/integrations/{name}.py" for name in PROGRAMS]
    command = [sys.executable, "-m", "pytest", "-q", *["--full"] * full, f"--junit-xml={report}", *files]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GRPO_FUSED_ANY_RELEASE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return counts(ElementTree.parse(report).getroot())


def counts(report: ElementTree.Element) -> dict[str, dict[str, int]]:
    """The same, of pytest's report."""
    found = {name: Counter[str](passed=0, failed=0, skipped=0) for name in PROGRAMS}
    for case in report.iter("testcase"):
        name = (case.get("classname") or case.get("name") or "").split(".")[-1]
        outcomes = {child.tag for child in case}
        failed = outcomes & {"failure", "error"}
        found[name]["failed" if failed else "skipped" if "skipped" in outcomes else "passed"] += 1
    return {name: dict(of_file) for name, of_file in found.items()}


def run(
    releases: Annotated[tuple[str, ...], "of TRL"] = TRL,
    full: Annotated[bool, "all tests, not only those of the gate"] = False,
) -> Iterator[Section]:
    """The section `releases`."""
    cases = {}
    for release in releases:
        cases[f"trl {release}"] = {"full": full, "programs": tested(release, full)}
        yield {"cases": cases}
    if failed := [name for name, case in cases.items() for of_file in case["programs"].values() if of_file["failed"]]:
        sys.exit(f"tests failed under {', '.join(dict.fromkeys(failed))}")


def table(run: Run) -> str:
    """A row for each release: the tests that passed."""
    cases: dict[str, Any] = run.sections["releases"]["cases"]
    order = sorted(cases, key=lambda name: [int(part) for part in name.split()[1].split(".")])
    rows = [[name, *(_cell(cases[name]["programs"][file]) for file in PROGRAMS)] for name in order]
    some = "all" if all(case["full"] for case in cases.values()) else "the gate's"
    header = " | ".join(["| ", *PROGRAMS.values()]) + " |"
    return "\n".join([f"Tests that passed, of {some} ({where(run)}):", "", *grid(header, rows)])


def _cell(of_file: dict[str, int]) -> str:
    if of_file["failed"]:
        return f"{of_file['failed']} of {of_file['failed'] + of_file['passed']} failed"
    skipped = f", {of_file['skipped']} skipped" if of_file["skipped"] else ""
    return f"{of_file['passed']}{skipped}" if of_file["passed"] else NOT_THERE


if __name__ == "__main__":
    main("releases")
