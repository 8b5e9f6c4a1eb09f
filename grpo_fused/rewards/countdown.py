"""The countdown reward: does the answer reach the target with the given numbers?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from grpo_fused.rewards.answer import plain_number
from grpo_fused.rewards.arithmetic import evaluate_arithmetic
from grpo_fused.rewards.text import Text, check_column, extract_answer, parse_completion, whole_completions


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
    """1.0 where the `<answer>` is arithmetic over the given numbers that equals the target exactly, else 0.0.

    Args:
        completions: N completions.
        target: N targets, numbers or their text; None says that this sample is no such puzzle.
        nums: N lists of numbers; each may be used as often as it is listed.
        prompts: N prompts; one that ends with `<think>` has opened that block for its completion.
        use_all: Every listed number must be used.
        require_format: The completion must be `<think>…</think><answer>…</answer>`; otherwise one answer block does.
        think_opened: As in `format_reward`.
        **columns: the other columns of the data set, unused.

    Returns:
        N rewards, 0.0 or 1.0, or None for a sample without target or numbers.

    Raises:
        TypeError: A target or one of the numbers is not a number.
        ValueError: A column has another length than the completions.

    Source: the number puzzle of the countdown exercise, without its `eval` and its rounding.
    """
    check_column("target", target, completions)
    check_column("nums", nums, completions)
    rewards: list[float | None] = []
    for text, goal, given in zip(whole_completions(completions, prompts, think_opened), target, nums, strict=True):
        if goal is None or given is None:
            rewards.append(None)
            continue
        goal_value, numbers = _exact("target", goal), Counter(_exact("nums", number) for number in _listed(given))
        right_form = not require_format or parse_completion(text) is not None
        rewards.append(float(right_form and _solves(extract_answer(text) or "", goal_value, numbers, use_all)))
    return rewards


def _solves(answer: str, target: Fraction, given: Counter[Fraction], use_all: bool) -> bool:
    arithmetic = evaluate_arithmetic(answer)
    if arithmetic is None or arithmetic.value != target:
        return False
    used = Counter(arithmetic.numbers)
    return used == given if use_all else used <= given


def _listed(given: object) -> list[object]:
    if hasattr(given, "tolist"):  # a tensor or an array
        given = given.tolist()
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"the nums column must hold lists of numbers or None; got {given!r:.200}")
    return list(given)


def _exact(column: str, number: object) -> Fraction:
    """A column's number without rounding; a float counts as what it prints, so that 0.1 is a tenth."""
    if hasattr(number, "item"):  # a scalar tensor or a numpy number
        number = number.item()
    exact = plain_number(str(number))
    if exact is None:
        raise TypeError(f"the {column} column must hold numbers; got {number!r:.200}")
    return exact
