"""A study measures one section of a run's file. All programs of this folder have one command line, from a signature.

    python -m benchmarks.threads --rounds 3 --out results.json    # a study: measured, shown, and put into a file
    python -m benchmarks.scaling --hidden 896                     # another program: a function that prints

`benchmarks.studies` has all studies.
"""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from benchmarks.results import Run, load, machine, new_path, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Section = dict[str, Any]


class Study(NamedTuple):
    """What one program measures, and how it is shown."""

    program: str
    """the module whose `run` yields the section, as far as it is measured; what `run` takes are the options"""
    section: str
    """in the file of a run; `{project}` stands for the option of that name"""
    table: Callable[[Run], str] | None = None
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
    machine(device)  # reads the load before this program adds to it
    if out is None and study.new_file and not options["small"]:
        out = new_path(device)
    section = study.section.format(**options)
    with TemporaryDirectory() as folder:
        file = out or Path(folder) / "run.json"
        known = load(file).sections.get(section, {}) if file.exists() else {}
        for data in study.run(**options):
            kept = {"cases": known.get("cases", {}) | data["cases"]} if study.keeps_cases else {}
            record(section, {"command": repeated(program, words), **data, **kept}, out=file, device=device)
        if study.table is not None:
            print(study.table(load(file)))
    if out is not None:
        print(f"written to {out}")


def repeated(program: str, words: list[str]) -> str:
    """The command that repeats a run, without its output file."""
    kept = [word for i, word in enumerate(words) if "--out" not in (word, *words[i - 1 : i])]
    return shlex.join(["python", "-m", f"benchmarks.{program}", *kept])


def call(function: Callable[..., Any], argv: Sequence[str] | None = None) -> Any:
    """Call a function with the options of the command line."""
    return function(**vars(parser_of(function).parse_args(argv)))


def parser_of(function: Callable[..., Any]) -> argparse.ArgumentParser:
    """Parameters with a default are options, the others are positional; `Annotated` has the help of one."""
    about = inspect.getmodule(function).__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint, words = hints[name], ""
        if get_origin(hint) is Annotated:
            hint, words = get_args(hint)
        how = {"help": words, **_reading(hint)}
        if parameter.default is parameter.empty:
            parser.add_argument(name, **how)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", default=parameter.default, **how)
    return parser


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"nargs": "*", **_reading(get_args(hint)[0])}
    plain = [kind for kind in get_args(hint) if kind is not NoneType]  # of `int | None`
    return {"type": plain[0] if plain else hint}
