"""Calling reward functions, and refusing what they must not return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

RewardFunction = Callable[..., Sequence[float | None]]
Row = Mapping[str, object]


def reward_names(reward_functions: Sequence[RewardFunction]) -> list[str]:
    """One name for each function: its `__name__`, numbered where two functions share it."""
    names: list[str] = []
    for position, function in enumerate(reward_functions):
        if not callable(function):
            raise TypeError(f"reward function {position} must be callable; got {function!r}")
        name = getattr(function, "__name__", type(function).__name__)
        names.append(f"{name}_{position}" if name in names else name)
    return names


def score_completions(
    reward_functions: Mapping[str, RewardFunction],
    rows: Sequence[Row],
    completions: Sequence[str],
) -> Tensor:
    """Calls each function as `f(prompts=..., completions=..., **columns)`.

    Args:
        reward_functions: F functions under their names.
        rows: N rows of the data set, one for each completion; each has a "prompt", its other keys become columns.
        completions: N texts.

    Returns:
        [N, F] float32; NaN where a function answered None, "not judged".
    """
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    judged = [
        _checked(name, function(prompts=prompts, completions=list(completions), **columns), len(completions))
        for name, function in reward_functions.items()
    ]
    return torch.tensor(judged, dtype=torch.float32).T  # [F, N] -> [N, F]


def _checked(name: str, rewards: object, expected: int) -> list[float]:
    """The rewards of one function as floats, None as NaN; any other NaN is the function's error."""
    if not isinstance(rewards, (list, tuple)):
        raise TypeError(
            f"reward function {name!r} must return a list of {expected} floats (or None); got {type(rewards).__name__}"
        )
    if len(rewards) != expected:
        raise ValueError(
            f"reward function {name!r} must return one reward for each of {expected} completions; got {len(rewards)}"
        )
    return [_checked_reward(name, position, reward) for position, reward in enumerate(rewards)]


def _checked_reward(name: str, position: int, reward: object) -> float:
    if reward is None:
        return math.nan
    if not isinstance(reward, Real):
        raise TypeError(
            f"reward function {name!r} must return floats or None; got {reward!r} for completion {position}"
        )
    if not math.isfinite(reward):
        raise ValueError(
            f'reward function {name!r} must return finite rewards (None for "not judged"); '
            f"got {float(reward)} for completion {position}"
        )
    return float(reward)
