"""Asking math-verify from a safe distance.

SymPy computes what it is given: `9^{9^{9}}` would take hours and gigabytes, with gmpy2 inside one call of C that no
signal handler interrupts. So math-verify lives in a process of its own (`math_worker.py`), which limits its time and
memory itself and is killed if that was not enough. This also leaves SIGALRM, which math-verify would use, to the
caller, and works from any thread.
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
_GRACE_SECONDS = 2.0  # the worker's own limits act first
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
        return _worker().ask(reference, answer, seconds)


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
        assert self.process.stdout is not None
        # A thread, because Windows cannot wait for a pipe with a time limit.
        threading.Thread(target=_read_lines, args=(self.process.stdout, self.lines), daemon=True).start()
        started = None
        try:
            started = self._next_line(_START_SECONDS)
        finally:
            if started != "ready":  # also after an interruption
                self.kill()
        if started != "ready":
            raise RuntimeError(f"math-verify could not be started: {started or 'its process ended or gave no sign'}")

    @property
    def usable(self) -> bool:
        return self.pid == os.getpid() and self.process.poll() is None

    def ask(self, reference: str, answer: str, seconds: float) -> bool:
        verdict = None
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([reference, answer, seconds]) + "\n")
            self.process.stdin.flush()
            verdict = self._next_line(seconds + _GRACE_SECONDS)
        except (BrokenPipeError, OSError):
            pass  # it has died; what it was asked is not equal
        finally:
            if verdict not in ("equal", "different"):  # also after an exception: its late verdict is another's answer
                self.kill()
        return verdict == "equal"

    def kill(self) -> None:
        """Ends the process and closes its pipes."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # what was left in the buffer has no reader any more
                self.process.stdin.close()

    def _next_line(self, seconds: float) -> str:
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            return ""


_lock = threading.Lock()
_current: _Worker | None = None


def _worker() -> _Worker:
    global _current
    if _current is None or not _current.usable:
        _current = _Worker()
    return _current


def _read_lines(pipe: IO[str], lines: queue.SimpleQueue[str]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line.strip())
    lines.put("")  # the end


@atexit.register
def _stop() -> None:
    if _current is not None and _current.usable:
        _current.kill()
