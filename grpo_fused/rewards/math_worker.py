"""The process that runs math-verify: one question a line on stdin, "equal" or "different" a line on stdout.

Run from its source (`math_verifier.py`), never imported by the package, so it imports nothing from there.
"""

import json
import os
import signal
import sys

MEMORY_BYTES = 2 << 30
HAS_TIMERS = hasattr(signal, "setitimer")  # elsewhere the asking side kills


class OutOfTime(BaseException):
    """Not an Exception: SymPy and math-verify swallow those."""


def limit_memory() -> None:
    """Allocations beyond the limit raise MemoryError (Unix; macOS may refuse)."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass


def out_of_time(signum: int, frame: object) -> None:
    """Interrupts what runs in Python."""
    raise OutOfTime


def set_timers(seconds: float) -> None:
    """After `seconds` Python code is interrupted; after one more of CPU time the process ends, wherever it is."""
    if HAS_TIMERS:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, seconds + 1.0 if seconds else 0.0)


def main() -> None:
    """Answers questions until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints
    limit_memory()
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except BaseException as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=answers, flush=True)
        return
    # LaTeX only: math-verify's other reader goes through SymPy's `parse_expr`, which evaluates its text as Python.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list[object]:
        box = "\\boxed{" + text.replace("\\$", "").replace("$", "") + "}"
        return list(parse(box, extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None))

    def are_equal(reference: str, answer: str) -> bool:
        right = read(reference)
        found = read(answer) if right else []
        return bool(found) and bool(verify(right, found, timeout_seconds=None))

    if HAS_TIMERS:
        signal.signal(signal.SIGALRM, out_of_time)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    are_equal("1", "2")  # the first question pays for SymPy's lazy imports; not a user's time
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        reference, answer, seconds = json.loads(line)
        try:
            try:
                set_timers(seconds)
                same = are_equal(reference, answer)
            finally:
                set_timers(0.0)
        except (Exception, OutOfTime):
            same = False
        print("equal" if same else "different", file=answers, flush=True)


if __name__ == "__main__":
    main()
