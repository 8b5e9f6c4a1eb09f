"""Time limits for tests; they do not depend on other programs on the machine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def processor_seconds(most: float) -> Iterator[None]:
    """Fails a block that uses more processor time; waiting does not count."""
    with _timer(signal.ITIMER_VIRTUAL, signal.SIGVTALRM, most, f"computes for more than {most:g} s"):
        yield


@contextlib.contextmanager
def hang_guard(most: float = 120.0) -> Iterator[None]:
    """Fails a block that would wait forever; generous, since a loaded machine is slow. It uses SIGALRM."""
    with _timer(signal.ITIMER_REAL, signal.SIGALRM, most, f"still waits after {most:g} s"):
        yield


@contextlib.contextmanager
def _timer(timer: int, number: signal.Signals, seconds: float, message: str) -> Iterator[None]:
    # pytest's failure is a BaseException: code that catches every Exception does not catch it
    previous = signal.signal(number, lambda *_: pytest.fail(message))
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, previous)
