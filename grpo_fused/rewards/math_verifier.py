"""Asking math-verify from a safe distance.

SymPy computes what it is given: `9^{9^{9}}` would take hours and gigabytes, with gmpy2 inside one call of C that no
signal handler interrupts. So math-verify lives in a process of its own (`math_worker.py`), which has a limit on its
memory and ends at its time limit; the next question meets a new one. This also leaves SIGALRM, which math-verify would
use, to the caller, and works from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

_MAX_CHARACTERS = 300  # of an answer; a formula of that length is already a page of mathematics
_START_SECONDS = 120.0  # importing SymPy takes one, on a loaded machine with a cold disk many
_GRACE_SECONDS = 2.0  # the worker's own limit acts first
# A number to the power of a number to the power of a number: never an answer, and not worth a worker's life.
_TOWER = re.compile(r"[0-9)}]\s*(?:\^|\*\*)\s*[{(]*\s*[0-9]+\s*(?:\^|\*\*)")


def equal(reference: str, answer: str, seconds: float) -> bool:
    """Whether math-verify finds the two equal; False for what it cannot parse or not decide in `seconds`."""
    if max(len(reference), len(answer)) > _MAX_CHARACTERS or _TOWER.search(answer):
        return False
    return _ask(reference, answer, seconds)


@functools.lru_cache(maxsize=4096)  # the samples of a group tend to agree, in wrong answers too
def _ask(reference: str, answer: str, seconds: float) -> bool:
    with _lock:
        return _worker().ask(reference, answer, seconds) == "equal"


class _Worker:
    """One process, asked one question at a time. It ends with the process that asks, whose end of its stdin closes."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # a fork must not talk through its parent's pipes
        self.process = subprocess.Popen(
            # The source as -c: run as a file, it would put this folder in front of the standard library.
            [sys.executable, "-c", (Path(__file__).parent / "math_worker.py").read_text(encoding="utf-8")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            encoding="utf-8",
        )
        answer = self.ask("1", "2", _START_SECONDS)  # waits for the imports; SymPy's lazy ones are not a user's time
        if answer != "different":
            raise RuntimeError(f"math-verify could not be started: {answer or 'its process ended or gave no sign'}")

    def ask(self, reference: str, answer: str, seconds: float) -> str:
        """Its answer: "equal" or "different"; anything else, or "" if none came in time, and it is then ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        limit = threading.Timer(seconds + _GRACE_SECONDS, self.process.kill)  # Windows cannot wait for a pipe in time
        try:
            limit.start()
            with contextlib.suppress(OSError):
                self.process.stdin.write(json.dumps([reference, answer, seconds]) + "\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline().strip()
            return line
        finally:
            limit.cancel()
            if line not in ("equal", "different"):  # also after an interruption: its late verdict is another's answer
                self.process.kill()
                with contextlib.suppress(OSError):  # what was left in the buffer has no reader any more
                    self.process.communicate()

    @property
    def is_usable(self) -> bool:
        """Whether it is alive, and this process's own."""
        return self.pid == os.getpid() and self.process.poll() is None


_lock = threading.Lock()
_current: _Worker | None = None


def _worker() -> _Worker:
    global _current
    if _current is None or not _current.is_usable:
        _current = _Worker()
    return _current
