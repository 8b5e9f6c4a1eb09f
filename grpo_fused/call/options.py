"""Checks of options: of single ones, and of frozen dataclasses by their annotations and ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_NAMES = {int: "an integer", bool: "true or false"}
_of_class: dict[type, list[_Option]] = {}  # read once: torch.compile cannot trace annotations


def check_number(
    x: object, name: str, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> float:
    """A finite number in a range: Python's or NumPy's, no bool and no tensor."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be a number; got {x!r} of type {type(x).__name__}")
    number = float(x)
    if not abs(number) < math.inf:  # NaN neither; torch.compile can trace this, but not math.isfinite
        raise ValueError(f"{name} must be finite; got {x}")
    if not above < number or not least <= number <= most:
        sign, bracket, lower = ("at least", "[", least) if above == -math.inf else (">", "(", above)
        must = f"{sign} {lower:.10g}" if most == math.inf else f"in {bracket}{lower:.10g}, {most:.10g}]"
        raise ValueError(f"{name} must be {must}; got {x}")
    return number


def check_integer(x: object, name: str, *, least: int) -> None:
    """An int of at least `least`, no bool."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} must be an int; got {x!r}")
    check_number(x, name, least=least)


def check_flag(x: object, name: str) -> None:
    """A bool."""
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False; got {x!r}")


def check_choice(x: object, name: str, literal: Any) -> None:
    """One of the values of a `Literal`."""
    if x not in get_args(literal):
        raise ValueError(f"{name} must be one of {', '.join(get_args(literal))}; got {x!r}")


def option(default: float | None, *, least: float = 0, positive: bool = False, most: float = math.inf) -> Any:
    """A finite number with its range, checked by `check_options`: from `least`, or above 0 if it is `positive`."""
    return field(default=default, metadata={"above": 0, "most": most} if positive else {"least": least, "most": most})


def check_options(options: Any) -> None:
    """Raises unless each field of a dataclass is of its type, and a number in its range.

    Values that equal a number or a choice (NumPy's numbers, enumerations of texts) become that.
    """
    cls = type(options)
    if cls not in _of_class:
        hints = get_type_hints(cls)
        _of_class[cls] = [_Option(f.name, hints[f.name], dict(f.metadata)) for f in fields(cls)]
    for field_option in _of_class[cls]:
        object.__setattr__(options, field_option.name, field_option.checked(getattr(options, field_option.name)))


@dataclass
class _Option:
    name: str
    hint: Any
    range: dict[str, float]
    """arguments of `check_number`"""

    def __post_init__(self) -> None:
        is_union = isinstance(self.hint, UnionType) or NoneType in get_args(self.hint)
        kinds = get_args(self.hint) if is_union else (self.hint,)
        self.kind, self.may_be_none = kinds[0], NoneType in kinds
        self.choices = get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def checked(self, value: Any) -> Any:
        """The value, or the number or choice that it equals."""
        name, kind, choices = self.name, self.kind, self.choices
        if value is None and self.may_be_none:
            return None
        if choices:
            check_choice(value, name, kind)
            return choices[choices.index(value)]
        if kind == tuple[str, ...] and not _is_list_of_texts(value):
            raise TypeError(f"{name} must be a list of non-empty texts; got {value!r}")
        accepted: Any = kind if kind in (int, bool) or is_dataclass(kind) else object
        if not isinstance(value, accepted) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{name} must be {_NAMES.get(kind, f'a {kind.__name__}')}; got {value!r}")
        if kind not in (int, float):
            return value
        check_number(value, name, **self.range)
        return kind(value)  # 2 for 2.0 is not what transformers takes


def _is_list_of_texts(value: object) -> bool:
    """Of any class of lists (OmegaConf has its own)."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(text, str) and text for text in value)
