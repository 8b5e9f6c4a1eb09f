"""The built-in reward functions by their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping

from grpo_fused.rewards.answer import exact_answer_reward
from grpo_fused.rewards.calling import RewardFunction, Rewards
from grpo_fused.rewards.code_format import code_format_reward
from grpo_fused.rewards.countdown import countdown_reward
from grpo_fused.rewards.format import format_reward, reasoning_steps_reward, soft_format_reward, tag_count_reward
from grpo_fused.rewards.length import length_reward, relative_length_reward
from grpo_fused.rewards.math_accuracy import math_accuracy_reward
from grpo_fused.rewards.verifier import score_answer_reward

BUILT_INS: dict[str, RewardFunction] = {
    "format": format_reward,
    "soft_format": soft_format_reward,
    "tag_count": tag_count_reward,
    "reasoning_steps": reasoning_steps_reward,
    "length": length_reward,
    "relative_length": relative_length_reward,
    "exact_answer": exact_answer_reward,
    "math_accuracy": math_accuracy_reward,
    "countdown": countdown_reward,
    "code_format": code_format_reward,
    "score_answer": score_answer_reward,
}


def built_in(name: str, **options: object) -> RewardFunction:
    """The built-in reward function of that name with its options bound, e.g. `built_in("length", target_length=200)`.

    Args:
        name: One of `BUILT_INS`.
        **options: The function's keyword-only arguments.

    Returns:
        A reward function whose `__name__` is `name`. A column of the data set with the name of an option does not
        set that option.

    Raises:
        ValueError: An unknown name, or an option with a wrong value.
        TypeError: An unknown option, or one of a wrong type.
    """
    if name not in BUILT_INS:
        raise ValueError(f"the built-in rewards are {', '.join(BUILT_INS)}; got {name!r}")
    function = BUILT_INS[name]
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(
            f"the options of the {name} reward are {', '.join(known) or '(none)'}; got {', '.join(unknown)}"
        )
    bound = bind(function, options, known)
    vars(bound)["__name__"] = name
    # A wrong value should fail here, not after the first rollout: a batch without samples has every column.
    columns = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    bound(**{column: [] for column in columns})
    return bound


def bind(function: RewardFunction, options: Mapping[str, object], names: Collection[str] = ()) -> RewardFunction:
    """The function with its options; a column of the data set with the name of one does not set it.

    Args:
        function: Any reward function.
        options: Keyword arguments.
        names: Further options, which keep their defaults.

    Raises:
        TypeError: The function does not take an option.
    """
    signature, name = inspect.signature(function), getattr(function, "__name__", type(function).__name__)
    try:
        signature.bind_partial(**options)
    except TypeError as error:
        raise TypeError(
            f"options must be those of the reward function {name!r}: {error}; got {dict(options)}"
        ) from error
    taken = frozenset({*options, *names})
    bound = functools.partial(_call, function, taken, options)
    functools.update_wrapper(bound, function)
    vars(bound)["__name__"] = name
    columns = [p for p in signature.parameters.values() if p.name not in taken]
    vars(bound)["__signature__"] = signature.replace(parameters=columns)  # what is asked of a data set
    if hasattr(function, "to"):  # a reward model, which the trainer moves to its device
        vars(bound)["to"] = function.to
    return bound


def _call(
    function: RewardFunction, taken: frozenset[str], options: Mapping[str, object], /, *args: object, **batch: object
) -> Rewards:
    return function(*args, **{key: values for key, values in batch.items() if key not in taken}, **options)
