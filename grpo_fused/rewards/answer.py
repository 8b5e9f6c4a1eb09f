"""The exact-answer reward: is the text inside `<answer>` the right one?"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_fused.rewards.tags import extract_answer
from grpo_fused.rewards.text import Text, check_column, text_of


def exact_answer_reward(
    completions: Sequence[Text], answer: Sequence[str | int | None], **columns: object
) -> list[float | None]:
    """1.0 where the completion's `<answer>` equals the `answer` column, else 0.0; None where there is no answer.

    Compared as text with white space at both ends removed: nothing is evaluated, and `07` is not `7`.

    Args:
        completions: N completions.
        answer: N right answers, text or integers; None says that this question cannot be judged here.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards, 0.0 or 1.0, or None for a sample that was not judged.

    Source: the rule-based accuracy reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2).
    """
    check_column("answer", answer, completions)
    return [_judge(text_of(completion), right) for completion, right in zip(completions, answer, strict=True)]


def _judge(completion: str, right: str | int | None) -> float | None:
    if right is None:
        return None
    if not isinstance(right, (str, int)):
        raise TypeError(f"the answer column must hold str, int or None; got {type(right).__name__}")
    return float(extract_answer(completion) == str(right).strip())
