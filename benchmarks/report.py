"""Writes the tables of README.md and the pages in docs/, and the plots in docs/plots/, from the newest results.

    python -m benchmarks.report            # after a run
    python -m benchmarks.report --check    # prints what is not up to date and fails; the tests run this

A table is between `<!-- begin:NAME -->` and `<!-- end:NAME -->`; `benchmarks.pages.TABLES` has the names.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import Annotated

from benchmarks import plots
from benchmarks.command import call
from benchmarks.pages import TABLES
from benchmarks.results import RESULTS, ROOT, Run, all_runs

PLOTS = Path("docs/plots")


def rewritten(text: str, runs: list[Run]) -> str:
    """A page with its tables, made from the runs."""
    names = re.findall(r"<!-- (?:begin|end):([\w-]+) -->", text)
    for name in dict.fromkeys(names):
        begin, end = f"<!-- begin:{name} -->", f"<!-- end:{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one {begin} and one {end}, got {text.count(begin)} and {text.count(end)}")
        if name not in TABLES:
            raise ValueError(f"no table is named {name}; there are {', '.join(TABLES)}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n\n{TABLES[name](runs)}\n\n{end}{after}"
    return text


def pages(root: Path, runs: list[Run]) -> dict[Path, tuple[str, str]]:
    """Each page: its text, and what it should be."""
    texts = {page: page.read_text(encoding="utf-8") for page in (root / "README.md", *sorted(root.glob("docs/*.md")))}
    return {page: (text, rewritten(text, runs)) for page, text in texts.items()}


def outdated(root: Path, results: Path) -> str:
    """Differences from the results: a diff of the pages, and names of plots; empty if there are none."""
    lines: list[str] = []
    runs = all_runs(results)
    for page, (old, new) in pages(root, runs).items():
        lines += difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), str(page.relative_to(root)), "as measured"
        )
    lines += [
        f"{PLOTS / name} does not show the newest results\n"
        for name, picture in plots.plots(runs).items()
        if not plots.is_current(root / PLOTS / name, picture)
    ]
    return "".join(lines)


def write(root: Path, results: Path) -> None:
    """Update pages and plots; nothing is written if one of the pages has wrong markers."""
    runs = all_runs(results)
    for page, (_, new) in pages(root, runs).items():
        page.write_text(new, encoding="utf-8")
    for name, picture in plots.plots(runs).items():
        try:
            plots.save(root / PLOTS / name, picture)
        except ImportError:
            print("the plots were not drawn: matplotlib is not installed")
            break


def main(
    check: Annotated[bool, "write nothing; fail if anything is not up to date"] = False,
    root: Annotated[Path, "folder with README.md and docs/"] = ROOT,
    results: Annotated[Path, "folder with a folder for each machine"] = RESULTS,
) -> None:
    """Write, or check."""
    if not check:
        write(root, results)
    elif differences := outdated(root, results):
        sys.exit(differences + "\nnot up to date: run python -m benchmarks.report")


if __name__ == "__main__":
    call(main)
