"""The process that runs math-verify: a question in each line of stdin, "equal" or "different" in each line of stdout.

Run from its source (`math_verifier.py`), never imported by the package, so it imports nothing from there.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 << 30
MATH_MODE = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]")  # not the \\[2pt] of a matrix
FRACTION_PERCENT = re.compile(r"(\\[dt]?frac(?:\{[0-9]+\}\{[0-9]+\}|[0-9]{2}))\s*\\?%\Z")  # math-verify cannot read it


def limit_memory() -> None:
    """Allocations beyond the limit raise MemoryError (Unix; macOS may refuse)."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(seconds: float) -> None:
    """After `seconds` of its processor time the process ends, in any code (Unix); 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def precision(right: Any) -> tuple[int, int]:
    """The decimals of a float and of any other number that must agree: math-verify's 6 and 15, more for one near 0.

    At least four digits of it must agree; 6.6e-34 would be equal to 0.0.
    """
    try:
        zeros = -math.floor(math.log10(abs(float(getattr(right, "rhs", right)))))
    except (TypeError, ValueError, OverflowError):  # a formula, a set, 0, infinity
        zeros = 0
    more = max(0, zeros - 3)
    return 6 + more, 15 + more


def main() -> None:
    """Answers questions until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to stderr
    limit_memory()
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except BaseException as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=answers, flush=True)
        return
    # LaTeX only: math-verify's other parser uses SymPy's `parse_expr`, which evaluates its text as Python.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list[object]:
        plain = MATH_MODE.sub("", text).replace("~", " ").strip().removesuffix(".")
        box = "\\boxed{" + FRACTION_PERCENT.sub(r"\1", plain) + "}"
        # The first match is the whole box. Any other is a part of a text that cannot be read, such as a fraction in it.
        return list(parse(box, latex, "no_fallback", "first_match", parsing_timeout=None))

    for line in sys.stdin:
        reference, answer, seconds = json.loads(line)
        limit_time(seconds)
        try:
            right = read(reference)
            found = read(answer) if right else []
            same = bool(found) and verify(right, found, *precision(right[0]), timeout_seconds=None)
        except Exception:
            same = False
        limit_time(0.0)
        print("equal" if same else "different", file=answers, flush=True)


if __name__ == "__main__":
    main()
