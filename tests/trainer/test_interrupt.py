"""Signals while a step runs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

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
