"""The accuracy reward for mathematics: numbers exactly, anything else by `math-verify` if it is installed."""

from __future__ import annotations

import functools
import importlib.util
import math
import time
import warnings
from collections.abc import Sequence

from grpo_fused.call.options import check_flag, check_number
from grpo_fused.rewards import math_verifier
from grpo_fused.rewards.answer import (
    digits_of,
    is_one_number,
    plain_number,
    reference_answer,
    stated_answer,
    without_power_of_ten,
)
from grpo_fused.rewards.text import Text, judge_each, text_of


def math_accuracy_reward(
    completions: Sequence[Text],
    answer: Sequence[str | float | None] | None = None,
    solution: Sequence[str | float | None] | None = None,
    *,
    accept_expressions: bool = False,
    use_math_verify: bool | None = None,
    seconds: float = 2.0,
    total_seconds: float = 60.0,
    **columns: object,
) -> list[float | None]:
    r"""1.0 if the completion's answer equals the data set's, else 0.0; None if the data set has none.

    The answer is the text in the only `<answer>` block, else in the last `\boxed{}`, else after the last `####`; or
    the whole text if it is one number. Two numbers are compared exactly, as fractions, without dollar and percent
    signs and the commas of thousands. Equal texts are equal. All other answers go to math-verify in a subprocess with
    limits on its time and memory; without math-verify they are wrong.

    If the right answer is a number, the answer must be one too, perhaps in scientific notation (`4.2 \times 10^1`) or
    with a unit that math-verify knows: `12*3+6`, `84/2`, `42 \times 10^0` and `\sqrt{1764}` are not 42. Otherwise a
    copy of the question would be a right answer. If the right answer is a formula, equal formulas are right in any
    form: a data set whose questions are to expand or to simplify needs another reward.

    Args:
        completions: N completions.
        answer: N right answers: numbers, their text, LaTeX, or GSM8K's "reasoning #### 72".
        solution: The same under its other usual name, read if there is no `answer`.
        accept_expressions: An expression counts as its value; for questions without one. Needs math-verify.
        use_math_verify: True requires it, False does not use it, None uses it if it is installed.
        seconds: The limit of one comparison in math-verify, in seconds of processor time, after which the answer is
            wrong. (Windows: of time.)
        total_seconds: The time that all comparisons of a call may take there, so that a policy which writes hostile
            formulas cannot stop the training; the remaining samples are then not judged.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards, 0.0 or 1.0, or None for a sample that was not judged.

    Raises:
        ImportError: `use_math_verify=True` or `accept_expressions=True` without it.
        TypeError: A right answer is neither text, number nor None, or an option is of another type.
        ValueError: Neither column, a column of another length than the completions, a right answer that is NaN or
            infinite, or `accept_expressions=True` with `use_math_verify=False`.

    Source: the accuracy rewards of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2) and Open-R1; GSM8K (arXiv 2110.14168).
    """
    column, right_answers = ("solution", solution) if answer is None else ("answer", answer)
    if right_answers is None:
        raise ValueError(f'expected a column "answer" or "solution"; the data set has {sorted(columns)}')
    check_flag(accept_expressions, "accept_expressions")
    if use_math_verify is not None:
        check_flag(use_math_verify, "use_math_verify")
    check_number(seconds, "seconds", above=0.0)
    check_number(total_seconds, "total_seconds", above=0.0)
    if accept_expressions and use_math_verify is False:
        raise ValueError("accept_expressions=True needs math-verify; got use_math_verify=False")
    required = accept_expressions or use_math_verify
    if required and not _installed():
        option = "accept_expressions" if accept_expressions else "use_math_verify"
        raise ImportError(f"{option}=True needs the package math-verify: pip install math-verify")
    verify, deadline = required or (use_math_verify is None and _installed()), time.monotonic() + total_seconds

    def judge(completion: Text, right: object) -> float | None:
        if isinstance(right, bool) or not isinstance(right, (str, int, float)):
            raise TypeError(f"the {column} column must hold str, int, float or None; got {type(right).__name__}")
        if isinstance(right, float) and not math.isfinite(right):
            raise ValueError(f"the {column} column must hold finite numbers, or None for no answer; got {right}")
        answer, reference = stated_answer(text_of(completion)), reference_answer(digits_of(right))
        if answer is None:
            return 0.0
        answer, reference = (x.replace("\N{MINUS SIGN}", "-") for x in (answer, reference))
        if answer == reference:
            return 1.0
        number, expected = plain_number(answer), plain_number(reference)
        wants_number = expected is not None or is_one_number(reference)
        if wants_number and not accept_expressions and not is_one_number(without_power_of_ten(answer)):
            return 0.0
        if number is not None and expected is not None:
            return float(number == expected)
        if expected is None and not _installed():
            warnings.warn(
                "some right answers are no plain numbers and are compared as text: math-verify is not installed",
                stacklevel=4,
            )
        if not verify:
            return 0.0
        return float(math_verifier.equal(reference, answer, seconds)) if time.monotonic() < deadline else None

    return judge_each(judge, completions, **{column: right_answers})


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None
