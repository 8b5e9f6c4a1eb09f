"""One command line for all programs of this folder: the options are the parameters of a function."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin


def call(function: Callable[..., Any], argv: Sequence[str] | None = None) -> Any:
    """Call a function with the options of the command line."""
    return function(**vars(parser_of(function).parse_args(argv)))


def parser_of(function: Callable[..., Any]) -> argparse.ArgumentParser:
    """Parameters with a default are options, the others are positional; `Annotated` has the help of one."""
    about = inspect.getmodule(function).__doc__
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        hint, words = parameter.annotation, ""
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
