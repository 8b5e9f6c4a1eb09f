"""One event loop for all async reward functions, in a thread of its own.

It lives as long as the process, because an HTTP client that a user makes once is bound to the loop of its first
request; and in a thread, because a notebook has a loop of its own running.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from grpo_fused.rewards.time_limit import TimeExceeded

T = TypeVar("T")

_lock = threading.Lock()
_current: tuple[int, asyncio.AbstractEventLoop] | None = None  # (process id, loop): threads do not survive a fork


def run_on_event_loop(coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
    """Runs a coroutine and waits for its result.

    Raises:
        TimeExceeded: No result in `seconds`; the loop is blocked then, and the next call starts another.
    """
    global _current
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        # Waiting first: `result` could not tell its own time limit from a TimeoutError of the coroutine.
        concurrent.futures.wait([future], timeout=seconds)
        if not future.done():
            with _lock:
                _current = None
            raise TimeExceeded
        return future.result()
    finally:
        future.cancel()  # after a KeyboardInterrupt; does nothing to a finished one


def _loop() -> asyncio.AbstractEventLoop:
    global _current
    with _lock:
        if _current is None or _current[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
            _current = os.getpid(), loop
        return _current[1]
