"""Mixed tasks: a reward function that judges the samples of one task and leaves the others to other functions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from grpo_fused.rewards.calling import RewardFunction, arguments_for


def only_for(function: RewardFunction, task: object, *, column: str = "task") -> RewardFunction:
    """The reward function for the samples whose `column` is `task`; the others are not judged.

    The function is called with these samples only, and not at all if a batch has none.

    Args:
        function: Any reward function, async ones too.
        task: The value that `column` must equal.
        column: A column of the data set.

    Returns:
        A reward function of the same name, async if the function is: its reward for its task, None for every other
        sample.

    Raises:
        TypeError: `function` is none.
    """
    if not callable(function):
        raise TypeError(f"function must be a reward function; got {function!r}")
    name = getattr(function, "__name__", type(function).__name__)

    def reward(completions: Sequence[object], **batch: Any) -> Any:
        if column not in batch:
            raise ValueError(f"expected a column {column!r}, which says what a sample's task is; got {sorted(batch)}")
        batch["completions"] = completions
        if not (chosen := [position for position, value in enumerate(batch[column]) if value == task]):
            return [None] * len(completions)
        judged = {
            key: [values[position] for position in chosen] if _is_column(values, len(completions)) else values
            for key, values in batch.items()
        }
        rewards = function(**arguments_for(name, function, judged))

        def spread(rewards: Sequence[float | None]) -> list[float | None]:
            if len(rewards) != len(chosen):
                raise ValueError(
                    f"expected one reward for each of {len(chosen)} samples of the task; got {len(rewards)}"
                )
            given = dict(zip(chosen, rewards, strict=True))
            return [given.get(position) for position in range(len(completions))]

        async def spread_later(rewards: Any) -> list[float | None]:
            return spread(await rewards)

        return spread_later(rewards) if inspect.isawaitable(rewards) else spread(rewards)

    async def reward_later(completions: Sequence[object], **batch: Any) -> Any:
        rewards = reward(completions, **batch)
        return await rewards if inspect.isawaitable(rewards) else rewards

    # TRL awaits only what is declared as async
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    made = reward_later if is_async else reward
    made.__name__ = made.__qualname__ = name
    if hasattr(function, "to"):  # a reward model, which the trainer moves to its device
        vars(made)["to"] = function.to
    return made


def _is_column(values: object, length: int) -> bool:
    """One value for each sample; not the other arguments of TRL's trainer (its state, its loggers)."""
    return isinstance(values, (list, tuple)) and len(values) == length
