"""Running math-verify in a subprocess with limits on its time and memory.

SymPy evaluates any formula: `9^{9^{9}}` would take hours and gigabytes, with gmpy2 inside one C call that no signal
handler interrupts. So math-verify runs in its own process (`math_worker.py`), which has a memory limit and ends at its
time limit; the next question starts a new one. The caller can then use SIGALRM, which math-verify would use, and any
thread.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

_MAX_CHARACTERS = 300  # of an answer; formulas are shorter
_START_SECONDS = 120.0  # importing SymPy takes one, many on a loaded machine with a cold disk
_GRACE_SECONDS = 2.0
# A worker on a busy machine has at least this much of a core; its own limit is of processor time and acts first.
_SHARE_OF_A_CORE = 0.1 if hasattr(signal, "setitimer") else 1.0
# A number to the power of a number to the power of a number: never an answer, and it would end the worker.
_TOWER = re.compile(r"[0-9)}]\s*(?:\^|\*\*)\s*[{(]*\s*[0-9]+\s*(?:\^|\*\*)")


def equal(reference: str, answer: str, seconds: float) -> bool:
    """Whether math-verify finds the two equal; False if it cannot parse them or decide in `seconds` of work."""
    if max(len(reference), len(answer)) > _MAX_CHARACTERS or _TOWER.search(answer):
        return False
    return _ask(reference, answer, seconds)


@functools.lru_cache(maxsize=4096)  # samples of a group often have the same answer, also a wrong one
def _ask(reference: str, answer: str, seconds: float) -> bool:
    with _lock:
        return _worker().ask(reference, answer, seconds, seconds / _SHARE_OF_A_CORE + _GRACE_SECONDS) == "equal"


class _Worker:
    """A process that answers one question at a time. It ends with its parent process, which closes its stdin."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # a fork must not use its parent's pipes
        source = (Path(__file__).parent / "math_worker.py").read_text(encoding="utf-8")
        self.process = subprocess.Popen(
            # The source as -c: run as a file, it would put this folder in front of the standard library; with this
            # process's own path, or -c would put the working folder there.
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{source}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C ends training after its step, which still asks
        )
        # waits for the imports, which must not count as a user's time
        answer = self.ask("1", "2", _START_SECONDS, _START_SECONDS)
        if answer != "different":
            raise RuntimeError(f"math-verify could not be started: {answer or 'its process ended or gave no sign'}")

    def ask(self, reference: str, answer: str, seconds: float, wait: float) -> str:
        """Its answer, "equal" or "different", of at most `seconds` of work, in `wait` seconds.

        After anything else, or "" if none came in time, the process is ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        limit = threading.Timer(wait, self.process.kill)  # Windows has no timeout for a pipe
        try:
            limit.start()
            with contextlib.suppress(OSError):
                self.process.stdin.write(json.dumps([reference, answer, seconds]) + "\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline().strip()
            return line
        finally:
            limit.cancel()
            if line not in ("equal", "different"):  # or its late answer would be the next question's
                self.process.kill()
                with contextlib.suppress(OSError):  # the buffer may hold data that nothing reads any more
                    self.process.communicate()


_lock = threading.Lock()
_current: _Worker | None = None


def _worker() -> _Worker:
    global _current
    if _current is None or _current.pid != os.getpid() or _current.process.poll() is not None:
        _current = _Worker()
    return _current
