"""The answer in a text: its place, its text, its value as a number; and the reward for equal texts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from grpo_fused.rewards.text import Text, extract_answer, judge_each

_MAX_CHARACTERS = 100  # a limit against attacks: Fraction("1e999999999") would fill the memory
# sign, the number itself, its divisor
_NUMBER = re.compile(
    r"([-+]?\\?\$?|\\?\$?[-+])"
    r"(?=\.?[0-9])((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?)(?:/([0-9]+))?(?:\s*\\?%)?"
)
_LATEX_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}(?:\s*\\?%)?")

_WRAPPED = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf))?\{([^{}]*)\}|\(([^()]*)\)")
_ONE_NUMBER = re.compile(
    r"""
    (?:[A-Za-z]\w*\s*=\s*)?  # x =
    (?:[-+]?\\?\$?|\\?\$?[-+])\s*
    (?:
        (?:[0-9]+\s*)?\\[dt]?frac(?:\{-?([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))
        | ([0-9]+)/([0-9]+)
        | (?:[0-9]{1,3}(?:(?:,|\{,\}|,\\!)[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?(?<=[0-9.])(?:\\overline\{[0-9]+\})?
    )
    (?:  # the unit: no number, and no operator but the slash of km/h and the exponent of m^2
        [\sA-Za-z°%.~] | \\[%,;:!\ ] | \\(?:text|textbf|mathrm|mbox)\s*\{[A-Za-z.%/°\ ]*\}
        | \^?\{?(?:\\circ|\\degree)\}? | (?<=[A-Za-z])/(?=[A-Za-z])
        | (?:(?<=[A-Za-z])|(?<=[A-Za-z]\})|(?<=[A-Za-z][.\ ]\}))\^\{?[23]\}?
    )*
    """,
    re.VERBOSE,
)

# of a number in scientific notation, which has one digit before the point
_POWER_OF_TEN = re.compile(
    r"(?<![0-9./])([1-9](?:\.[0-9]+)?)\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{\s*-?[0-9]{1,3}\s*\}|[0-9])"
)

_BOX = "\\boxed{"
_HASHES = "####"
_WRAPPERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))


def exact_answer_reward(
    completions: Sequence[Text], answer: Sequence[str | int | None], **columns: object
) -> list[float | None]:
    """1.0 if the completion's `<answer>` equals the `answer` column, else 0.0; None if that has no answer.

    Compared as text with white space at both ends removed: nothing is evaluated, and `07` is not `7`.

    Args:
        completions: N completions.
        answer: N right answers, text or integers; None: this sample is not judged.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards, 0.0 or 1.0, or None for a sample that was not judged.

    Source: the rule-based accuracy reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2).
    """
    return judge_each(_judge, completions, answer=answer)


def _judge(completion: Text, right: str | int) -> float:
    if not isinstance(right, (str, int)):
        raise TypeError(f"the answer column must hold str, int or None; got {type(right).__name__}")
    return float(extract_answer(completion) == str(right).strip())


def stated_answer(text: str) -> str | None:
    """The text in the only `<answer>` block, else in the last `\\boxed{}`, else after the last `####`; or None.

    The first of the three that the text has decides: a text with two answer blocks has no answer, also if it has a
    box. A box or hashes inside the answer block are removed, and so are the signs of LaTeX's math mode. A text that is
    only a number is its own answer.
    """
    if "<answer>" in text or "</answer>" in text:
        inside = extract_answer(text)
        return None if inside is None else _unwrapped(inside)
    if _BOX in text or _HASHES in text:
        return _unwrapped(text)
    return text.strip() if plain_number(text) is not None else None


def reference_answer(column: str) -> str:
    """The answer in a data set's text: that of `stated_answer`, else the whole text."""
    answer = stated_answer(column)
    return _without_math_mode(column.strip()) if answer is None else answer


def _unwrapped(text: str) -> str | None:
    if _BOX in text:
        text = _last_box(text)
    elif _HASHES in text:
        text = text.rpartition(_HASHES)[2].strip().partition("\n")[0]
    return _without_math_mode(text.strip()) or None


def _last_box(text: str) -> str:
    """The text between the braces of the last box; empty if they do not balance."""
    start = text.rindex(_BOX) + len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return ""


def _without_math_mode(text: str) -> str:
    for opening, closing in _WRAPPERS:
        if len(text) >= len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)].strip()
    return text


def is_one_number(text: str) -> bool:
    """Whether a text is a number with nothing left to compute: `42`, `x = 42`, `42 km/h`, `3/4`, `3\\frac{1}{2}`.

    `40+2`, `6*7`, `\\sqrt{16}`, `4 \\times 10^3` are not, nor is a fraction that is not in lowest terms: `84/2`.
    """
    text = text.strip().removesuffix(".").strip("$").strip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = (wrapped[1] or wrapped[2] or "").strip()
    found = _ONE_NUMBER.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if not found:
        return False
    fraction = [int(digits) for digits in found.groups() if digits is not None]
    return not fraction or (fraction[1] > 1 and math.gcd(*fraction) == 1)


def without_power_of_ten(text: str) -> str:
    """`1.2 \\times 10^{-4} m` becomes `1.2\\, m`; a text without a number in scientific notation stays as it is.

    The thin space ends the number: what follows is no part of it, and it is no part of a fraction.
    """
    return _POWER_OF_TEN.sub(r"\1\\,", text)


def digits_of(number: object) -> str:
    """The text of a number, without an exponent: `1e-05` would be e - 5."""
    return format(Decimal(repr(float(number))), "f") if isinstance(number, float) else str(number)


def plain_number(text: str) -> Fraction | None:
    """The value of one number, or None for any other text.

    White space around it, dollar signs, a percent sign (`50%` is 50) and a full stop after it are dropped. A comma
    must separate groups of three digits: `1,234` is a number, `1,2` is two. No exponents.
    """
    text = text.strip()
    if len(text) > _MAX_CHARACTERS:
        return None
    text = text.removesuffix(".").strip("$").strip()
    found = _LATEX_FRACTION.fullmatch(text) or _NUMBER.fullmatch(text)
    if not found:
        return None
    sign, over, under = found.groups(default="1")
    if int(under) == 0:
        return None
    value = Fraction(over.replace(",", "")) / int(under)
    return -value if "-" in sign else value
