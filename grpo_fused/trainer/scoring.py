"""Scoring completions: the arguments of reward functions, and checks of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import cast

import torch
from torch import Tensor

from grpo_fused.call.options import check_number
from grpo_fused.rewards.calling import RewardFunction, call_reward_functions
from grpo_fused.rewards.registry import BUILT_INS
from grpo_fused.rewards.text import Text
from grpo_fused.trainer.data import Row, check_rows

_MAX_REWARD = torch.finfo(torch.float32).max  # beyond it a finite reward would become an infinite one


def reward_names(reward_functions: Sequence[RewardFunction]) -> list[str]:
    """One name for each function: its `__name__`, numbered if two functions share it.

    Raises:
        TypeError: One of them cannot be called, or is a bare Hugging Face model.
    """
    if isinstance(reward_functions, str) or not isinstance(reward_functions, Sequence):
        raise TypeError(f"reward_functions must be a function or a list of functions; got {reward_functions!r}")
    names: list[str] = []
    for position, function in enumerate(reward_functions):
        if isinstance(function, torch.nn.Module) and hasattr(function, "config"):
            raise TypeError(
                f"reward function {position} must be called with texts; got the model {type(function).__name__}: "
                "wrap it as RewardModel(model, tokenizer)"
            )
        if not callable(function):
            hint = f": pass built_in({function!r})" if function in list(BUILT_INS) else ""
            raise TypeError(f"reward function {position} must be callable; got {function!r}{hint}")
        name = first = getattr(function, "__name__", type(function).__name__)
        number = position
        while name in names:
            name, number = f"{first}_{number}", number + 1
        names.append(name)
    return names


def reward_weights_of(reward_functions: Sequence[RewardFunction], weights: Sequence[float] | None) -> list[float]:
    """One weight for each function, default 1.

    Raises:
        ValueError: There is no function, the number of weights is wrong, or one is NaN or infinite.
    """
    if not reward_functions:
        raise ValueError("reward_functions must hold at least one function; got none")
    found = [1.0] * len(reward_functions) if weights is None else [float(weight) for weight in weights]
    if len(found) != len(reward_functions) or not all(map(math.isfinite, found)):
        raise ValueError(
            f"reward_weights must be one finite weight for each of {len(reward_functions)} functions; got {found}"
        )
    return found


def score_completions(
    reward_functions: Mapping[str, RewardFunction],
    rows: Sequence[Row],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    timeout: float | None = None,
) -> Tensor:
    """Calls each function as `f(prompts=..., completions=..., completion_ids=..., **columns)`.

    A function may be `async def`; those of one call run concurrently. One without `**columns` gets only its parameters.

    Args:
        reward_functions: F functions by name.
        rows: N rows of the data set, one for each completion; each has a "prompt", its other keys become columns.
        completions: N texts or chat completions (`[{"role": "assistant", "content": "..."}]`).
        completion_ids: N lists of token ids; not passed on if None.
        timeout: Seconds that each function may take, default no limit. A sync function is interrupted in the main
            thread on Unix, unless it stays inside one C call; elsewhere the limit is found exceeded when it returns.

    Returns:
        [N, F] float32; NaN where a function returned None, "not judged".

    Raises:
        RewardError: A function raised (its exception is the cause) or took longer than `timeout`.
        TypeError: A function returned no list, or a list with an element that is neither a number nor None.
        ValueError: A function needs a column that the rows do not have, returned a wrong number of rewards, or one
            that is NaN, infinite or too large for fp32; or rows and completions differ in number.
    """
    if timeout is not None:
        check_number(timeout, "timeout", above=0.0)
    if not isinstance(reward_functions, Mapping):
        raise TypeError(
            f"reward_functions must be a mapping of names to functions; got {type(reward_functions).__name__}"
        )
    if not completions and not rows:
        return torch.empty(0, len(reward_functions))
    results = call_reward_functions(reward_functions, _as_batch(rows, completions, completion_ids), timeout)
    judged = [_checked(name, rewards, len(completions)) for name, rewards in results.items()]
    return torch.tensor(judged, dtype=torch.float32).reshape(len(judged), len(completions)).T  # [F, N] -> [N, F]


def _as_batch(
    rows: Sequence[Row], completions: Sequence[Text], completion_ids: Sequence[Sequence[int]] | None
) -> dict[str, list[object]]:
    if len(rows) != len(completions):
        raise ValueError(f"expected one row for each of {len(completions)} completions; got {len(rows)}")
    if completion_ids is not None and len(completion_ids) != len(completions):
        raise ValueError(
            f"expected completion_ids for each of {len(completions)} completions; got {len(completion_ids)}"
        )
    check_rows(rows, 1, name="the rows")
    given: dict[str, list[object]] = {"prompts": [row["prompt"] for row in rows], "completions": list(completions)}
    if completion_ids is not None:
        given["completion_ids"] = list(completion_ids)
    return given | {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}


def _checked(name: str, rewards: object, expected: int) -> list[float]:
    """The rewards of one function as floats, None as NaN; any other NaN is the function's error."""
    must = f"reward function {name!r} must return"
    if not isinstance(rewards, (list, tuple)):
        raise TypeError(f"{must} a list of {expected} floats (or None); got {type(rewards).__name__}")
    if len(rewards) != expected:
        raise ValueError(f"{must} one reward for each of {expected} completions; got {len(rewards)}")
    for position, reward in enumerate(rewards):
        if reward is not None and not isinstance(reward, Real):
            raise TypeError(f"{must} floats or None; got {reward!r} for completion {position}")
        if reward is not None and not -_MAX_REWARD <= cast(float, reward) <= _MAX_REWARD:  # False for NaN
            raise ValueError(
                f'{must} finite rewards that fp32 can hold (None for "not judged"); '
                f"got {_shown(reward)} for completion {position}"
            )
    return [math.nan if reward is None else float(reward) for reward in rewards]


def _shown(reward: Real) -> str:
    try:
        return repr(float(reward))
    except OverflowError:
        return f"{type(reward).__name__} beyond fp64"
