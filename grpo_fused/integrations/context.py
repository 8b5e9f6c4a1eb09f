"""Values that hold for a block, in its thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
