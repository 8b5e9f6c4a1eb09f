"""Signals while a step runs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from grpo_fused.trainer.interrupt import StopRequest


def _wait(ready) -> None:
    ready.set()
    time.sleep(60)


def test_a_fork_ends_when_it_is_terminated(capfd) -> None:
    """A reward may run a program in a fork, and terminate it; the trainer's own handler only asks for a stop."""
    with StopRequest() as request:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        fork = context.Process(target=_wait, args=(ready,), daemon=True)
        fork.start()
        assert ready.wait(20)  # Python drops a signal that comes while a fork starts
        fork.terminate()
        fork.join(20)
        assert fork.exitcode == -signal.SIGTERM
        assert request.requested == 0
        assert "stopping" not in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested == signal.SIGTERM
    assert "stopping after this step" in capfd.readouterr().err


def test_a_second_sigterm_does_not_interrupt_the_step() -> None:
    """A scheduler may send it to a process and to its parent, which passes it on."""
    with StopRequest() as request:
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                pytest.fail("it interrupts")
        assert request.requested == signal.SIGTERM


def test_a_closed_stderr_does_not_interrupt_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `train 2>&1 | tee log` Ctrl-C ends tee, too."""

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", closed)
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.requested == signal.SIGINT


def test_a_handler_that_is_not_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """`signal.signal` returns None for it, and does not take None."""
    real = signal.signal
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", lambda *arguments: real(*arguments) and None)
            request = StopRequest().__enter__()
        request.__exit__()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_fork_has_the_handler_of_before() -> None:
    """One that was set before the run, as for a program that cleans up."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    try:
        with StopRequest():
            context = multiprocessing.get_context("fork")
            ready = context.Event()
            fork = context.Process(target=_wait, args=(ready,), daemon=True)
            fork.start()
            assert ready.wait(20)
            fork.terminate()
            fork.join(20)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert fork.exitcode == 7
