"""Time limits and async functions: interrupted, named, concurrent, with clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
import time
from typing import Any

import pytest
from guards import hang_guard

from grpo_fused.rewards import RewardError
from grpo_fused.trainer.scoring import score_completions

ROWS = [{"prompt": "p0"}, {"prompt": "p1"}]


def score(timeout: float | None = None, **functions: Any) -> list[list[float]]:
    return score_completions(functions, ROWS, ["a", "b"], timeout=timeout).tolist()


RAN_TO_ITS_END: list[str] = []


def forever(**_: Any) -> list[float]:
    for _ in range(6000):
        with contextlib.suppress(Exception):  # as SymPy does; the limit must not be an Exception
            time.sleep(0.01)
    RAN_TO_ITS_END.append("forever")
    return [0.0, 0.0]


async def sleeper(**_: Any) -> list[float]:
    await asyncio.sleep(60)
    RAN_TO_ITS_END.append("sleeper")
    return [0.0, 0.0]


def test_a_slow_function_is_interrupted_and_named() -> None:
    with pytest.raises(RewardError, match="reward function 'slow' took longer than its 0.2 s"):
        score(0.2, fast=lambda **_: [0.0, 0.0], slow=forever)
    assert "forever" not in RAN_TO_ITS_END


def test_timers_and_handlers_are_restored() -> None:
    rung: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 500.0, 7.0)
        with pytest.raises(RewardError):
            score(0.1, slow=forever)
        assert score(5.0, fast=lambda **_: [1.0, 2.0]) == [[1.0], [2.0]]
        delay, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 400 < delay <= 499.9, "without the time that the function took"
        assert interval == 7.0
        signal.raise_signal(signal.SIGALRM)
        assert rung == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_an_earlier_alarm_that_was_due_fires_afterwards() -> None:
    rung: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        score(5.0, slow=lambda **_: time.sleep(0.2) or [0.0, 0.0])
        assert rung == []
        time.sleep(0.1)
        assert rung == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_function_that_replaces_the_alarm_is_reported_when_it_returns() -> None:
    """As math-verify does."""

    def thief(**_: Any) -> list[float]:
        signal.alarm(0)
        time.sleep(0.3)
        return [0.0, 0.0]

    with pytest.raises(RewardError, match="'thief' took longer than its 0.1 s"):
        score(0.1, thief=thief)


def test_a_function_that_catches_everything_is_reported_when_it_returns() -> None:
    def stubborn(**_: Any) -> list[float]:
        with contextlib.suppress(BaseException):
            time.sleep(1)
        return [0.0, 0.0]

    with pytest.raises(RewardError, match="'stubborn' took longer than its 0.1 s"):
        score(0.1, stubborn=stubborn)


def test_other_threads_check_the_time_afterwards() -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            score(0.1, slow=lambda **_: time.sleep(0.2) or [0.0, 0.0])
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert str(caught[0]) == "reward function 'slow' took longer than its 0.1 s"


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
def test_wrong_limits(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout must be .*; got"):
        score(timeout)


def test_async_functions_run_concurrently_and_with_sync_ones() -> None:
    """Each waits until all three have started: one after the other they would wait forever."""
    started: list[str] = []

    def make(name: str, reward: float) -> Any:
        async def function(completions: list[str]) -> list[float]:
            started.append(name)
            while len(started) < 3:
                await asyncio.sleep(0.001)
            return [reward] * len(completions)

        return function

    class Judge:
        async def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return await make("c", 3.0)(completions)

    rewards = score(30, a=make("a", 1.0), sync=lambda **_: [0.0, None], b=make("b", 2.0), c=Judge())
    assert rewards[0] == [1.0, 0.0, 2.0, 3.0]
    assert started == ["a", "b", "c"]


def test_async_functions_keep_their_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client made in one step is used in the next; a process that was forked has no thread of its parent."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def function(**_: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0, 0.0]

    score(f=function)
    score(f=function)
    assert loops[0] is loops[1]
    monkeypatch.setattr("os.getpid", lambda: -1)
    score(f=function)
    assert loops[1] is not loops[2]


def test_async_functions_inside_a_running_loop() -> None:
    """As in a notebook."""

    async def function(**_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0, 2.0]

    async def notebook() -> list[list[float]]:
        return score(f=function)

    assert asyncio.run(notebook()) == [[1.0], [2.0]]


def test_slow_async_functions_are_named() -> None:
    with pytest.raises(RewardError, match="reward function 'sleeper' took longer than its 0.1 s"):
        score(0.1, sleeper=sleeper)
    assert "sleeper" not in RAN_TO_ITS_END


def test_async_functions_that_raise_are_named_and_their_error_kept() -> None:
    async def broken(**_: Any) -> list[float]:
        raise TimeoutError("the judge's server")  # its own, not our limit

    ended = threading.Event()

    async def waits(**_: Any) -> list[float]:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return [0.0, 0.0]

    started = time.monotonic()
    with pytest.raises(RewardError, match="'broken' raised TimeoutError: the judge's server") as caught:
        score(30, waits=waits, broken=broken)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert ended.wait(5)  # the other one is cancelled
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "error",
    [SystemExit("no key"), KeyboardInterrupt("no key"), asyncio.CancelledError("gone")],
    ids=["exit", "interrupt", "cancelled"],
)
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_an_async_function_that_ends_in_what_is_no_exception(error: BaseException, timeout: float | None) -> None:
    async def leaves(**_: Any) -> list[float]:
        raise error

    async def fine(**_: Any) -> list[float]:
        return [1.0, 1.0]

    text = "" if type(error) is asyncio.CancelledError else error.args[0]
    with hang_guard(), pytest.raises(RewardError, match=f"'leaves' raised .*{text}"):
        score(timeout, leaves=leaves)
    assert score(5.0, fine=fine) == [[1.0], [1.0]]


def test_an_async_function_that_blocks_the_loop_is_abandoned() -> None:
    async def blocker(**_: Any) -> list[float]:
        time.sleep(3)
        return [0.0, 0.0]

    async def fine(**_: Any) -> list[float]:
        return [1.0, 1.0]

    with pytest.raises(RewardError, match="'blocker' took longer than its 0.1 s and blocks the event loop"):
        score(0.1, blocker=blocker)
    assert score(0.5, fine=fine) == [[1.0], [1.0]]  # it does not wait for the one that blocks


def test_an_abandoned_loop_ends_when_it_is_free_again() -> None:
    """Else each one would keep a thread and three open files."""
    blocks, loops, threads, cancelled = threading.Event(), [], [], threading.Event()

    async def waits(**_: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        threads.append(threading.current_thread())
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return [0.0, 0.0]

    async def blocker(**_: Any) -> list[float]:
        blocks.wait(60)
        return [0.0, 0.0]

    with pytest.raises(RewardError, match="blocks the event loop"):
        score(0.1, waits=waits, blocker=blocker)
    blocks.set()
    threads[0].join(5)
    assert not threads[0].is_alive()
    assert loops[0].is_closed()
    assert cancelled.is_set()


def test_each_async_function_may_block_the_loop_for_its_own_limit() -> None:
    async def blocker(**_: Any) -> list[float]:
        time.sleep(0.2)
        return [1.0, 1.0]

    assert score(0.3, a=blocker, b=blocker) == [[1.0, 1.0]] * 2


def test_an_interrupt_cancels_async_functions() -> None:
    ended = threading.Event()

    async def waits(**_: Any) -> list[float]:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            await asyncio.sleep(30)
        finally:
            ended.set()
        return [0.0, 0.0]

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            score(waits=waits)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert ended.wait(5)


def test_an_interrupt_before_there_is_a_future_cancels_async_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, start = threading.Event(), threading.Event(), asyncio.run_coroutine_threadsafe

    def interrupted(*arguments: Any) -> None:
        start(*arguments)
        assert begun.wait(5)
        raise KeyboardInterrupt

    async def waits(**_: Any) -> list[float]:
        try:
            begun.set()
            await asyncio.sleep(30)
        finally:
            ended.set()
        return [0.0, 0.0]

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score(waits=waits)
    assert ended.wait(5)


def test_a_failure_leaves_no_coroutine_waiting() -> None:
    """One that was never awaited would warn when it is collected."""
    made: list[Any] = []

    def keeps(**_: Any) -> Any:
        made.append(sleeper())
        return made[0]

    def broken(**_: Any) -> list[float]:
        raise ValueError

    with pytest.raises(RewardError, match="'broken' raised ValueError"):
        score(keeps=keeps, broken=broken)
    assert inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED


def test_async_returns_are_checked() -> None:
    async def short(**_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="'short' must return one reward for each of 2 completions; got 1"):
        score(short=short)
