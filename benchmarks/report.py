"""Writes the README's tables and the plots in docs/plots/ from the newest results.

    python -m benchmarks.report            # after a run
    python -m benchmarks.report --check    # says what is not up to date, and fails then (the tests do this)

A table stands between `<!-- begin:NAME -->` and `<!-- end:NAME -->`; `benchmarks.tables.TABLES` has the names.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from benchmarks import plots
from benchmarks.results import RESULTS, ROOT
from benchmarks.tables import TABLES


def rewritten(text: str, folder: Path) -> str:
    """The text with every table as the results in `folder` give it."""
    for name, table in TABLES.items():
        begin, end = f"<!-- begin:{name} -->", f"<!-- end:{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected one {begin} and one {end}, got {text.count(begin)} and {text.count(end)}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n\n{table(folder)}\n\n{end}{after}"
    unknown = set(re.findall(r"<!-- begin:([\w-]+) -->", text)) - TABLES.keys()
    if unknown:
        raise ValueError(f"no table is named {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    return text


def outdated(readme: Path, folder: Path, plot_folder: Path) -> str:
    """What is not as the results give it: a diff of the README, and names of plots; empty if all is."""
    text = readme.read_text(encoding="utf-8")
    diff = difflib.unified_diff(
        text.splitlines(keepends=True), rewritten(text, folder).splitlines(keepends=True), str(readme), "as measured"
    )
    stale = [
        f"{plot_folder / name} does not show the newest results\n"
        for name, plot in plots.plots(folder).items()
        if not plots.is_current(plot_folder / name, plot)
    ]
    return "".join([*diff, *stale])


def write(readme: Path, folder: Path, plot_folder: Path) -> None:
    """Bring README and plots up to date."""
    readme.write_text(rewritten(readme.read_text(encoding="utf-8"), folder), encoding="utf-8")
    for name, plot in plots.plots(folder).items():
        try:
            plots.draw(plot_folder / name, plot)
        except ImportError:
            print("the plots were not drawn: matplotlib is not installed")
            break


def main(argv: list[str] | None = None) -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything is not up to date")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with a folder for each machine")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "plots")
    given = parser.parse_args(argv)
    places = given.readme, given.results, given.plots
    if not given.check:
        write(*places)
    elif found := outdated(*places):
        sys.exit(found + "\nnot up to date: run python -m benchmarks.report")


if __name__ == "__main__":
    main()
