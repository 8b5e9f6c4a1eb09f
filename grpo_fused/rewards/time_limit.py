"""A time limit on a call, by the interval timer of Unix."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class TimeExceeded(BaseException):
    """Not an Exception, so that the `except Exception` of what is interrupted does not keep it."""


def limited(call: Callable[[], T], seconds: float | None) -> T:
    """`call()`, interrupted after `seconds`.

    Only the main thread on Unix can be interrupted, and only between two steps of Python; and a call that sets an
    alarm of its own (math-verify does) takes the timer away. In these cases the time is looked at when it returns.

    Raises:
        TimeExceeded: It took longer.
    """
    if seconds is None:
        return call()
    started = time.monotonic()
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    result = _interrupted(call, seconds) if can_interrupt else call()
    if time.monotonic() - started > seconds:  # it may also have caught the interruption
        raise TimeExceeded
    return result


def check_time_limit(name: str, seconds: float | None) -> None:
    """Raises unless the limit is None or a positive number of seconds."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or None; got {seconds!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds or None; got {seconds!r}")


def _interrupted(call: Callable[[], T], seconds: float) -> T:
    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise TimeExceeded

    started = time.monotonic()
    previous_delay, previous_interval = signal.getitimer(signal.ITIMER_REAL)
    previous_handler = signal.signal(signal.SIGALRM, on_alarm)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may still ring here, but once: the outer block runs
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL if previous_handler is None else previous_handler)
        if previous_delay:  # somebody else's limit goes on; if it is over, it rings at once
            remaining = max(previous_delay - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, remaining, previous_interval)
