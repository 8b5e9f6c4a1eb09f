"""The countdown reward: does the answer reach the target with the given numbers?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from grpo_fused.call.options import check_flag
from grpo_fused.rewards.answer import digits_of, plain_number
from grpo_fused.rewards.arithmetic import evaluate_arithmetic
from grpo_fused.rewards.text import Text, extract_answer, judge_each, parse_completion, whole_completions


def countdown_reward(
    completions: Sequence[Text],
    target: Sequence[object],
    nums: Sequence[Sequence[object] | None],
    prompts: Sequence[Text] | None = None,
    *,
    use_all: bool = False,
    require_format: bool = True,
    think_opened: bool | None = None,
    **columns: object,
) -> list[float | None]:
    """1.0 if the `<answer>` is arithmetic over the given numbers that equals the target exactly, else 0.0.

    Args:
        completions: N completions.
        target: N targets, numbers or their text; None: this sample is not judged.
        nums: N lists of numbers; each may be used as often as it is listed, with either sign: minus is arithmetic.
        prompts: N prompts; one that ends with `<think>` has opened that block for its completion.
        use_all: Every listed number must be used.
        require_format: The completion must be `<think>…</think><answer>…</answer>`; else only one answer block.
        think_opened: As in `format_reward`.
        **columns: the other columns of the data set, unused.

    Returns:
        N rewards, 0.0 or 1.0, or None for a sample without target or numbers.

    Raises:
        TypeError: A target or one of the numbers is not a number, or `use_all` or `require_format` is not a bool.
        ValueError: A column has another length than the completions.

    Source: the number puzzle of the countdown exercise, without its `eval` and its rounding.
    """

    check_flag(use_all, "use_all")
    check_flag(require_format, "require_format")

    def judge(text: str, goal: object, given: Any) -> float:
        given = given.tolist() if hasattr(given, "tolist") else given  # a tensor or an array
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"the nums column must hold lists of numbers or None; got {given!r:.200}")
        value, numbers = _exact("target", goal), Counter(abs(_exact("nums", number)) for number in given)
        arithmetic = evaluate_arithmetic(extract_answer(text) or "")
        if arithmetic is None or arithmetic.value != value or (require_format and parse_completion(text) is None):
            return 0.0
        used = Counter(arithmetic.numbers)
        return float(used == numbers if use_all else used <= numbers)

    return judge_each(judge, whole_completions(completions, prompts, think_opened), target=target, nums=nums)


def _exact(column: str, number: Any) -> Fraction:
    """A column's number without rounding; a float counts as its printed value, so that 0.1 is a tenth."""
    number = number.item() if hasattr(number, "item") else number  # a scalar tensor or a numpy number
    if (exact := plain_number(digits_of(number))) is None:
        raise TypeError(f"the {column} column must hold numbers; got {number!r:.200}")
    return exact
