"""Asking math-verify from a safe distance.

SymPy computes what it is given: `9^{9^{9}}` would take hours and gigabytes, with gmpy2 inside one call of C that no
signal handler interrupts. So math-verify lives in a process of its own (`math_worker.py`), which has a limit on its
memory and ends at its time limit; the next question meets a new one. This also leaves SIGALRM, which math-verify would
use, to the caller, and works from any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

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
    question = json.dumps([reference, answer, seconds]) + "\n"
    with _lock:
        return _worker().exchange(question, seconds + _GRACE_SECONDS, ("equal", "different")) == "equal"


class _Worker:
    """One process, asked one question at a time."""

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
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A thread, because Windows cannot wait for a pipe with a time limit.
        threading.Thread(target=_read_lines, args=(self.process.stdout, self.lines), daemon=True).start()
        line = self.exchange("", _START_SECONDS, ("ready",))
        if line != "ready":
            raise RuntimeError(f"math-verify could not be started: {line or 'its process ended or gave no sign'}")

    def exchange(self, question: str, seconds: float, expected: tuple[str, ...]) -> str:
        """The process's next line, "" if none comes in time. It ends where that is none of the expected ones."""
        line = ""
        try:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError, queue.Empty):
                self.process.stdin.write(question)
                self.process.stdin.flush()
                line = self.lines.get(timeout=seconds)
            return line
        finally:
            if line not in expected:  # also after an interruption: its late verdict is another's answer
                self.kill()

    def kill(self) -> None:
        """Ends the process and closes its pipes."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # what was left in the buffer has no reader any more
                self.process.stdin.close()


_lock = threading.Lock()
_current: _Worker | None = None


def _usable() -> _Worker | None:
    """The worker, if it is alive and this process's own."""
    ours = _current is not None and _current.pid == os.getpid() and _current.process.poll() is None
    return _current if ours else None


def _worker() -> _Worker:
    global _current
    _current = _usable() or _Worker()
    return _current


def _read_lines(pipe: IO[str], lines: queue.SimpleQueue[str]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line.strip())
    lines.put("")  # the end


@atexit.register
def _stop() -> None:
    worker = _usable()
    if worker is not None:
        worker.kill()
