"""Calling reward functions: with the columns they need, within a time limit, async ones side by side.

TRL's convention: `f(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]`, def or
async def. A function without `**columns` gets only what it names.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from grpo_fused.rewards.event_loop import run_on_event_loop
from grpo_fused.rewards.time_limit import TimeExceeded, limited

Rewards = Sequence[float | None] | Awaitable[Sequence[float | None]]
RewardFunction = Callable[..., Rewards]
Batch = Mapping[str, Any]

GIVEN = ("prompts", "completions", "completion_ids")  # what every function gets; the rest of a batch are columns


class RewardError(RuntimeError):
    """A reward function raised or took too long; the message names it, and its exception is the cause."""


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
    awaited: dict[str, Awaitable[object]] = {}
    try:
        for name, function in functions.items():
            results[name] = result = _call(name, function, batch, timeout)
            if inspect.isawaitable(result):
                awaited[name] = result
    except BaseException:
        for waiting in awaited.values():
            if inspect.iscoroutine(waiting):
                waiting.close()  # it will not be awaited any more
        raise
    return results | _gather(awaited, timeout) if awaited else results


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


def _call(name: str, function: RewardFunction, batch: Batch, timeout: float | None) -> object:
    arguments = arguments_for(name, function, batch)
    try:
        return limited(lambda: function(**arguments), timeout)
    except TimeExceeded:
        raise _too_slow(name, timeout) from None
    except Exception as error:
        raise _failed(name, error) from error


def _gather(awaited: Mapping[str, Awaitable[object]], timeout: float | None) -> dict[str, object]:
    async def one(name: str, waiting: Awaitable[object]) -> object:
        try:
            return await waiting
        except Exception as error:
            raise _failed(name, error) from error

    async def one_in_time(name: str, waiting: Awaitable[object]) -> object:
        try:
            return await asyncio.wait_for(one(name, waiting), timeout)
        except asyncio.TimeoutError:  # only the limit's: one's own has become a RewardError
            raise _too_slow(name, timeout) from None

    async def gathered() -> list[object]:
        tasks = [asyncio.ensure_future(one_in_time(name, waiting)) for name, waiting in awaited.items()]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # the others, where one has failed

    # One that blocks the loop cannot be cancelled; the loop is then given up. Others may block before it, in time.
    patience = None if timeout is None else timeout * len(awaited) + 1.0
    try:
        return dict(zip(awaited, run_on_event_loop(gathered(), patience), strict=True))
    except TimeExceeded:
        names = " or ".join(map(repr, awaited))
        raise RewardError(
            f"async reward function {names} took longer than its {timeout:g} s and blocks the event loop"
        ) from None


def _too_slow(name: str, timeout: float | None) -> RewardError:
    return RewardError(f"reward function {name!r} took longer than its {timeout:g} s")


def _failed(name: str, error: Exception) -> RewardError:
    return RewardError(f"reward function {name!r} raised {type(error).__name__}: {error}")
