"""Calling reward functions: with the columns they need, within a time limit, async ones side by side.

TRL's convention: `f(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]`, def or
async def. A function without `**columns` gets only what it names.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

Rewards = Sequence[float | None] | Awaitable[Sequence[float | None]]
RewardFunction = Callable[..., Rewards]
Batch = Mapping[str, Any]

GIVEN = ("prompts", "completions", "completion_ids")  # what every function gets; the rest of a batch are columns


class RewardError(RuntimeError):
    """A reward function raised or took too long; the message names it, and its exception is the cause."""


class TimeExceeded(BaseException):
    """Not an Exception, so that the `except Exception` of what is interrupted does not keep it."""


def call_reward_functions(
    functions: Mapping[str, RewardFunction], batch: Batch, timeout: float | None = None
) -> dict[str, object]:
    """What each function returns for a batch, unchecked.

    Args:
        functions: F functions under their names. Sync ones run one after the other, async ones then concurrently.
        batch: "prompts", "completions", "completion_ids" and the columns, each a list of N values.
        timeout: Seconds that each function may take, default any time. A sync function is interrupted in the main
            thread on Unix, unless it stays inside one C call; elsewhere the limit is found exceeded when it returns.

    Raises:
        RewardError: A function raised an exception or took longer than `timeout`.
        ValueError: A function needs a column that the batch has not.
    """
    results: dict[str, object] = {}
    try:
        for name, function in functions.items():
            arguments = arguments_for(name, function, batch)
            with _named(name, timeout), _limited(timeout):
                results[name] = function(**arguments)
    except BaseException:
        for result in results.values():
            if inspect.iscoroutine(result):
                result.close()  # it will not be awaited any more
        raise
    awaited = {name: result for name, result in results.items() if inspect.isawaitable(result)}
    return results | _gathered(awaited, timeout) if awaited else results


def arguments_for(name: str, function: RewardFunction, batch: Batch) -> dict[str, Any]:
    """What of the batch a function takes; every list is its own copy, so that no function changes another's input.

    Raises:
        ValueError: The function has a parameter without default that the batch does not fill.
    """
    own = {key: list(values) if isinstance(values, list) else values for key, values in batch.items()}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables of C do not tell
        return own
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in batch]
    if missing:
        columns = sorted(set(batch) - set(GIVEN))
        raise ValueError(
            f"reward function {name!r} needs {' and '.join(map(repr, missing))}; "
            f"it gets {', '.join(key for key in GIVEN if key in batch)} and the data set's columns {columns}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return own
    return {p.name: own[p.name] for p in named if p.name in own}


def check_time_limit(name: str, seconds: float | None) -> None:
    """Raises unless the limit is None or a positive number of seconds."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or None; got {seconds!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds or None; got {seconds!r}")


@contextlib.contextmanager
def _named(name: str, timeout: float | None) -> Iterator[None]:
    """Errors of a reward function with its name."""
    try:
        yield
    except TimeExceeded:
        raise RewardError(f"reward function {name!r} took longer than its {timeout:g} s") from None
    except Exception as error:
        raise RewardError(f"reward function {name!r} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Interrupts what it contains after `seconds`, by the interval timer of Unix.

    Only the main thread on Unix can be interrupted, and only between two steps of Python; and a call that sets an
    alarm of its own (math-verify does) takes the timer away. In these cases the time is looked at when it returns.

    Raises:
        TimeExceeded: It took longer.
    """
    started = time.monotonic()
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None:
        yield
        return
    if not (is_main and hasattr(signal, "setitimer")):
        yield
    else:
        delay, interval = signal.getitimer(signal.ITIMER_REAL)
        handler = signal.signal(signal.SIGALRM, _interrupt)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may still ring here, but once: the outer block runs
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
            if delay:  # somebody else's limit goes on; if it is over, it rings at once
                signal.setitimer(signal.ITIMER_REAL, max(delay - (time.monotonic() - started), 1e-3), interval)
    if time.monotonic() - started > seconds:  # it may also have caught the interruption
        raise TimeExceeded


def _interrupt(signum: int, frame: object) -> None:
    raise TimeExceeded


def _gathered(awaited: Mapping[str, Awaitable[object]], timeout: float | None) -> dict[str, object]:
    """The results of async functions, which run side by side on the event loop."""
    global _loop

    async def one(name: str, waiting: Awaitable[object]) -> object:
        task = asyncio.ensure_future(waiting)
        try:
            with _named(name, timeout):
                await asyncio.wait([task], timeout=timeout)  # and not `wait_for`: a TimeoutError may be its own
                if not task.done():
                    raise TimeExceeded
                return task.result()
        finally:
            task.cancel()

    async def all_of_them() -> list[object]:
        tasks = [asyncio.ensure_future(one(name, waiting)) for name, waiting in awaited.items()]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # the others, where one has failed

    future = asyncio.run_coroutine_threadsafe(all_of_them(), _event_loop())
    try:
        # One that blocks the loop cannot be cancelled; the loop is then given up. Others may block before it, in time.
        concurrent.futures.wait([future], timeout=None if timeout is None else timeout * len(awaited) + 1.0)
        if not future.done():
            _loop = None
            names = " or ".join(map(repr, awaited))
            raise RewardError(
                f"async reward function {names} took longer than its {timeout:g} s and blocks the event loop"
            )
        return dict(zip(awaited, future.result(), strict=True))
    finally:
        future.cancel()  # after a KeyboardInterrupt; does nothing to a finished one


_loop: tuple[int, asyncio.AbstractEventLoop] | None = None  # (process id, loop): threads do not survive a fork
_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all async functions, in a thread of its own.

    It lives as long as the process, because an HTTP client that a user makes once is bound to the loop of its first
    request; and in a thread, because a notebook has a loop of its own running.
    """
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            _loop = os.getpid(), asyncio.new_event_loop()
            threading.Thread(target=_loop[1].run_forever, name="reward-event-loop", daemon=True).start()
        return _loop[1]
