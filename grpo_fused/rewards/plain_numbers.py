"""Numbers as people write them, read exactly: `-$1,234.50`, `50%`, `3/4`, `72.`"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_MAX_CHARACTERS = 100  # an answer, not an attack: Fraction("1e999999999") would fill the memory
# sign, the number itself, what it is divided by
_NUMBER = re.compile(
    r"([-+]?\\?\$?|\\?\$?[-+])"
    r"(?=\.?[0-9])((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?)(?:/([0-9]+))?(?:\\?%)?"
)
_LATEX_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")

_WRAPPED = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf))?\{([^{}]*)\}|\(([^()]*)\)")
_ONE_NUMBER = re.compile(
    r"""
    (?:[A-Za-z]\w*\s*=\s*)?  # x =
    (?:[-+]?\\?\$?|\\?\$?[-+])
    (?:
        (?:[0-9]+\s*)?\\[dt]?frac(?:\{-?([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))
        | ([0-9]+)/([0-9]+)
        | [0-9.,]*[0-9.](?:\\overline\{[0-9]+\})?
    )
    (?:  # the unit: no number, and no operator but the slash of km/h and the exponent of m^2
        [\sA-Za-z°%.] | \\[%,;:!\ ] | \\(?:text|textbf|mathrm|mbox)\s*\{[A-Za-z.%/°\ ]*\}
        | \^?\{?(?:\\circ|\\degree)\}? | (?<=[A-Za-z])/(?=[A-Za-z]) | (?<=[A-Za-z}])\^\{?[23]\}?
    )*
    """,
    re.VERBOSE,
)


def is_one_number(text: str) -> bool:
    """Whether a text is a number with nothing left to work out: `42`, `x = 42`, `42 km/h`, `3/4`, `3\\frac{1}{2}`.

    `40+2`, `6*7`, `\\sqrt{16}`, `4 \\times 10^3` are not, nor is a fraction that is not in lowest terms: `84/2`.
    """
    text = text.strip().strip("$").strip()
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped:
        text = (wrapped[1] or wrapped[2] or "").strip()
    found = _ONE_NUMBER.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if not found:
        return False
    fraction = [int(digits) for digits in found.groups() if digits is not None]
    return not fraction or (fraction[1] > 1 and math.gcd(*fraction) == 1)


def plain_number(text: str) -> Fraction | None:
    """The value of one number, or None if the text is anything else.

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
