"""Length rewards: close to a target, or long relative to the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from grpo_fused.call.options import check_choice, check_integer
from grpo_fused.rewards.text import Text, check_column, text_of

LengthUnit = Literal["characters", "tokens"]


def length_reward(
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    target_length: int | None = 20,
    unit: LengthUnit = "characters",
    **columns: object,
) -> list[float]:
    """`-|target_length - length|`: 0.0 at the target, less on both sides of it.

    Args:
        completions: N completions.
        completion_ids: N lists of token ids; needed for `unit="tokens"`.
        target_length: The target, in units; None rewards the length itself, so the longest completion wins.
        unit: "characters" of the text or "tokens" of `completion_ids` (an EOS counts if it is one of them).
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards, at most 0.0 with a target length.

    Raises:
        ValueError: `unit` is neither, `target_length` is negative, or `unit="tokens"` came without `completion_ids`.
        TypeError: `target_length` is no integer.

    Source: the length rewards of the Hugging Face LLM course, chapter 12.
    """
    if target_length is not None:
        check_integer(target_length, "target_length", least=0)
    lengths = _lengths(completions, completion_ids, unit)
    return [float(length) if target_length is None else -float(abs(target_length - length)) for length in lengths]


def relative_length_reward(
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    unit: LengthUnit = "characters",
    **columns: object,
) -> list[float]:
    """`length / mean length of the batch`: above 1.0 for a completion longer than the average; 0.0 if all are empty.

    Args:
        completions: N completions, the whole batch.
        completion_ids: N lists of token ids; needed for `unit="tokens"`.
        unit: As in `length_reward`.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards from 0.0 to N, 1.0 on average.

    Source: the example of mixed reward functions in TRL's tests.
    """
    lengths = _lengths(completions, completion_ids, unit)
    total = sum(lengths)
    return [length * len(lengths) / total if total else 0.0 for length in lengths]


def _lengths(
    completions: Sequence[Text], completion_ids: Sequence[Sequence[int]] | None, unit: LengthUnit
) -> list[int]:
    check_choice(unit, "unit", LengthUnit)
    if unit == "characters":
        return [len(text_of(completion)) for completion in completions]
    if completion_ids is None:
        raise ValueError('unit="tokens" needs completion_ids; got none')
    check_column("completion_ids", completion_ids, completions)
    return [len(ids) for ids in completion_ids]
