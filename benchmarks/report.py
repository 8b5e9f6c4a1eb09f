"""Writes the tables of README.md and the pages in docs/, and the plots in docs/plots/, from the newest results.

    python -m benchmarks.report            # after a run
    python -m benchmarks.report --check    # prints what is not up to date and fails; the tests run this

A table is between `<!-- begin:NAME -->` and `<!-- end:NAME -->`; `benchmarks.tables.PAGES` has the names.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from benchmarks import plots
from benchmarks.results import RESULTS, ROOT
from benchmarks.tables import PAGES, TABLES

PLOTS = Path("docs/plots")


def rewritten(text: str, names: tuple[str, ...], results: Path) -> str:
    """A page with its tables of these names, made from the results."""
    for name in names:
        begin, end = f"<!-- begin:{name} -->", f"<!-- end:{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one {begin} and one {end}, got {text.count(begin)} and {text.count(end)}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n\n{TABLES[name](results)}\n\n{end}{after}"
    unknown = set(re.findall(r"<!-- begin:([\w-]+) -->", text)) - set(names)
    if unknown:
        raise ValueError(f"no table of this page is named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return text


def outdated(root: Path, results: Path) -> str:
    """Differences from the results: a diff of the pages, and names of plots; empty if there are none."""
    found: list[str] = []
    for page, names in PAGES.items():
        text = (root / page).read_text(encoding="utf-8")
        new = rewritten(text, names, results)
        found += difflib.unified_diff(
            text.splitlines(keepends=True), new.splitlines(keepends=True), page, "as measured"
        )
    found += [
        f"{PLOTS / name} does not show the newest results\n"
        for name, plot in plots.plots(results).items()
        if not plots.is_current(root / PLOTS / name, plot)
    ]
    return "".join(found)


def write(root: Path, results: Path) -> None:
    """Update pages and plots; nothing is written if one of the pages has wrong markers."""
    pages = {root / page: names for page, names in PAGES.items()}
    texts = {page: rewritten(page.read_text(encoding="utf-8"), names, results) for page, names in pages.items()}
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
    for name, plot in plots.plots(results).items():
        try:
            plots.draw(root / PLOTS / name, plot)
        except ImportError:
            print("the plots were not drawn: matplotlib is not installed")
            break


def main(argv: list[str] | None = None) -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with README.md and docs/")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with a folder for each machine")
    given = parser.parse_args(argv)
    if not given.check:
        write(given.root, given.results)
    elif found := outdated(given.root, given.results):
        sys.exit(found + "\nnot up to date: run python -m benchmarks.report")


if __name__ == "__main__":
    main()
