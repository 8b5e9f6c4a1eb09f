"""Ctrl-C takes effect between two steps, not within one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Inside the block, the first SIGINT or SIGTERM only sets `requested` to its number; a second SIGINT
    interrupts as usual.

    Only the main thread of Python gets signals; in another one this sets no handler, and `requested` is set by
    `GRPOTrainer.stop`.
    """

    def __init__(self) -> None:
        self.requested, self._process = 0, os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # None: a handler that is not of Python, which nothing can put back
            self._before = {
                number: signal.signal(number, self._handle) or signal.SIG_DFL
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork, as a reward may use for a program that it runs
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = number
        with contextlib.suppress(OSError):  # Ctrl-C has ended the program that stderr goes to, such as tee
            # as handlers may
            os.write(2, b"\nstopping after this step or evaluation; press Ctrl-C again to stop now\n")
