"""A study measures one section of a run's file. All programs of this folder have one command line, from a signature.

    python -m benchmarks.threads --rounds 3 --out results.json    # a study: measured, shown, and put into a file
    python -m benchmarks.scaling --hidden 896                     # another program: a function that prints

`benchmarks.studies` has all studies.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.command import parser_of
from benchmarks.results import Run, load, new_path, opened, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Section = dict[str, Any]


class Study(NamedTuple):
    """What one program measures, and how it is shown."""

    program: str
    """the module whose `run` yields the section, as far as it is measured; what `run` takes are the options"""
    section: str
    """in the file of a run; `{project}` stands for the option of that name"""
    table: Callable[[Section, Run], str] | None = None
    """of the section and the run that has it; without one the section is printed, unless it is put into a file"""
    plot: Callable[[Section], Figure] | None = None
    new_file: bool = False
    """whether it makes a file if none is named"""
    keeps_cases: bool = False
    """whether cases that the file has already stay"""

    @property
    def run(self) -> Callable[..., Iterator[Section]]:
        """Imported when it is used: some programs need packages that a report does not."""
        return resolve_name(f"benchmarks.{self.program}:run")


def main(program: str, argv: Sequence[str] | None = None) -> None:
    """Measure, put the section into a file, and print its table."""
    from benchmarks.studies import STUDIES  # whose tables know some of the programs

    study, words = STUDIES[program], list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(study.run)
    parser.add_argument("--out", type=Path, help="file of the run (see benchmarks.results)")
    options = vars(parser.parse_args(words))
    out, device = options.pop("out"), options.get("device", "cpu")
    if out is None and study.new_file and not options["small"]:
        out = new_path(device)
    section = study.section.format(**options)
    with TemporaryDirectory() as folder:
        file = out or Path(folder) / "run.json"
        # before anything is measured; it also reads the load before this program adds to it
        known = opened(file, device).sections.get(section, {})
        data: Section | None = None
        for data in study.run(**options):
            kept = {"cases": known.get("cases", {}) | data["cases"]} if study.keeps_cases else {}
            record(section, {"command": repeated(program, words), **data, **kept}, out=file, device=device)
        if data is None:
            return  # the program has printed why it measured nothing
        run = load(file)
        if study.table is not None:
            print(study.table(run.sections[section], run))
        elif out is None:
            print(json.dumps(run.sections, indent=1))
    if out is not None:
        print(f"written to {out}")


def repeated(program: str, words: list[str]) -> str:
    """The command that repeats a run, without its output file."""
    without = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    without.add_argument("--out")
    _, kept = without.parse_known_args(words)
    return shlex.join(["python", "-m", f"benchmarks.{program}", *kept])
