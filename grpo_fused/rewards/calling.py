"""Calling reward functions: with the columns they need, within a time limit, async ones concurrently.

TRL's convention: `f(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]`, def or
async def. A function without `**columns` gets only its named parameters.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import os
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

Rewards = Sequence[float | None] | Awaitable[Sequence[float | None]]
RewardFunction = Callable[..., Rewards]
Batch = Mapping[str, Any]

LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
"""If an error comes from a file in these folders, the line that is named is the one of the user that called it."""

GIVEN = ("prompts", "completions", "completion_ids")  # every function gets these; the rest of a batch are columns


class RewardError(RuntimeError):
    """A reward function raised or took too long; the message names it and the line; its exception is the cause."""


class TimeExceeded(BaseException):
    """Not an Exception, so that an `except Exception` in the interrupted code does not catch it."""


def call_reward_functions(
    functions: Mapping[str, RewardFunction], batch: Batch, timeout: float | None = None
) -> dict[str, object]:
    """The unchecked results of each function for a batch.

    Args:
        functions: F functions by name. Sync ones run one after the other, then async ones concurrently.
        batch: "prompts", "completions", "completion_ids" and the columns, each a list of N values.
        timeout: Seconds that each function may take, default no limit. A sync function is interrupted in the main
            thread on Unix, unless it stays inside one C call; elsewhere the limit is found exceeded when it returns.

    Raises:
        RewardError: A function raised an exception or took longer than `timeout`.
        ValueError: A function needs a column that the batch does not have.
    """
    results: dict[str, object] = {}
    try:
        for name, function in functions.items():
            arguments = arguments_for(name, function, batch)
            try:
                with _limited(timeout):
                    results[name] = function(**arguments)
            except (Exception, TimeExceeded) as error:
                raise _failure(name, error, timeout) from error
    except BaseException:
        for result in results.values():
            if inspect.iscoroutine(result):
                result.close()  # it will not be awaited any more
        raise
    awaited = {name: result for name, result in results.items() if inspect.isawaitable(result)}
    return results | _gathered(awaited, timeout) if awaited else results


def arguments_for(name: str, function: RewardFunction, batch: Batch) -> dict[str, Any]:
    """The part of the batch that a function takes; lists and dicts in it are copied.

    So no function changes another's input, the next sample's of the same row, or the data set.

    Raises:
        ValueError: The function has a parameter without default that is not in the batch.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables of C have no signature
        return {name: _own(values) for name, values in batch.items()}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in batch]:
        columns = sorted(set(batch) - set(GIVEN))
        raise ValueError(
            f"reward function {name!r} needs {' and '.join(map(repr, missing))}; "
            f"it gets {', '.join(key for key in GIVEN if key in batch)} and the data set's columns {columns}"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = batch if takes_all else [p.name for p in named if p.name in batch]
    return {name: _own(batch[name]) for name in names}


def _own(value: Any) -> Any:
    if type(value) is list:
        return [_own(each) if type(each) in (list, dict) else each for each in value]  # millions may be token ids
    return {key: _own(each) for key, each in value.items()} if type(value) is dict else value


def raised(error: BaseException) -> str:
    """What a user's code raised, and where."""
    text = f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")
    frames = traceback.extract_tb(error.__traceback__)
    imports = ("<frozen", importlib.__file__, frames[0].filename)  # that of the caller
    places = [frame for frame in frames if not frame.filename.startswith(imports)]
    places = [frame for frame in places if not frame.filename.startswith(LIBRARIES)] or places
    return text + (f" ({places[-1].filename}:{places[-1].lineno})" if places else "")


def _failure(name: str, error: BaseException, timeout: float | None) -> RewardError:
    """An error of a reward function, with its name."""
    if isinstance(error, TimeExceeded):
        return RewardError(f"reward function {name!r} took longer than its {timeout:g} s")
    return RewardError(f"reward function {name!r} {raised(error)}")


@contextlib.contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Interrupts the code in its block after `seconds`, by the interval timer of Unix.

    Only the main thread on Unix can be interrupted, and only between two steps of Python; and a call that sets
    another alarm (as math-verify does) replaces the timer. In these cases the time is checked when it returns.

    Raises:
        TimeExceeded: It took longer.
    """
    started = time.monotonic()
    is_main = threading.current_thread() is threading.main_thread()
    with _alarm(seconds) if seconds and is_main and hasattr(signal, "setitimer") else contextlib.nullcontext():
        yield
    if seconds is not None and time.monotonic() - started > seconds:  # it may also have caught the interruption
        raise TimeExceeded


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises TimeExceeded in its block after `seconds`; an alarm that was set before continues afterwards."""

    def interrupt(signum: int, frame: object) -> None:
        raise TimeExceeded

    started = time.monotonic()
    delay, interval = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may still fire here, but once: the outer block runs
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if delay:  # if it was due in between, it fires at once
            signal.setitimer(signal.ITIMER_REAL, max(delay - (time.monotonic() - started), 1e-3), interval)


def _gathered(awaited: Mapping[str, Awaitable[object]], timeout: float | None) -> dict[str, object]:
    """The results of async functions, which run concurrently on the event loop."""

    async def kept(waiting: Awaitable[object]) -> object:
        try:
            return await waiting
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop's thread
            raise RuntimeError(repr(error)) from error

    async def all_of_them() -> dict[str, object]:
        tasks = {name: asyncio.ensure_future(kept(waiting)) for name, waiting in awaited.items()}
        try:
            await asyncio.wait(tasks.values(), timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            results: dict[str, object] = {}
            for name in sorted(tasks, key=lambda name: not tasks[name].done()):  # first the one that may have failed
                try:
                    if not tasks[name].done():
                        raise TimeExceeded
                    results[name] = tasks[name].result()
                except (Exception, TimeExceeded, asyncio.CancelledError) as error:
                    raise _failure(name, error, timeout) from error
            return results
        finally:
            for task in tasks.values():
                task.cancel()

    loop, coroutine = _event_loop(os.getpid()), all_of_them()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        # Each may block the loop for its own time limit before the next one does.
        return future.result(None if timeout is None else timeout * len(awaited) + 1.0)
    except concurrent.futures.TimeoutError:
        _event_loop.cache_clear()  # what blocks it cannot be cancelled; it ends when that returns
        loop.call_soon_threadsafe(loop.stop)
        names = " or ".join(map(repr, awaited))
        raise RewardError(
            f"async reward function {names} took longer than its {timeout:g} s and blocks the event loop"
        ) from None
    finally:  # not future.cancel: a KeyboardInterrupt may come before there is a future
        with contextlib.suppress(RuntimeError):  # the loop is closed, after all of its tasks
            loop.call_soon_threadsafe(_cancel, coroutine)


def _cancel(coroutine: Coroutine[Any, Any, object]) -> None:
    """On the loop: cancels the task that runs the coroutine, if it has not finished."""
    for task in asyncio.all_tasks():
        if task.get_coro() is coroutine:
            task.cancel()


@functools.lru_cache(maxsize=1)
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """One loop for all async functions of a process, in its own thread, which does not survive a fork.

    It exists as long as the process or until something blocks it, because an HTTP client that a user creates once is
    bound to the loop of its first request; and in a thread, because a notebook already runs its own loop.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=_serve, args=(loop,), name="reward-event-loop", daemon=True).start()
    return loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop until it is stopped, and then what is left on it to the end: other threads may wait for it."""

    async def rest() -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)

    loop.run_forever()
    loop.run_until_complete(rest())
    loop.close()
