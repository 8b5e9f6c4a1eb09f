"""The process that runs math-verify: a question in each line of stdin, "equal" or "different" in each line of stdout.

Run from its source (`math_verifier.py`), never imported by the package, so it imports nothing from there.
"""

import contextlib
import json
import os
import signal
import sys

MEMORY_BYTES = 2 << 30


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
        box = "\\boxed{" + text.replace("\\$", "").replace("$", "") + "}"
        return list(parse(box, extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None))

    for line in sys.stdin:
        reference, answer, seconds = json.loads(line)
        limit_time(seconds)
        try:
            right = read(reference)
            found = read(answer) if right else []
            same = bool(found) and verify(right, found, timeout_seconds=None)
        except Exception:
            same = False
        limit_time(0.0)
        print("equal" if same else "different", file=answers, flush=True)


if __name__ == "__main__":
    main()
