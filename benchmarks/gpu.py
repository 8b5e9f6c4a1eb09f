"""The first runs on a GPU in three parts, each below eight minutes: for a machine that is there for half an hour.

    python -m benchmarks.gpu first --out runs/first.json     # are the kernels right; are they faster than the library
    python -m benchmarks.gpu second --out runs/second.json   # the GPU tests; all configurations of the head kernel
    python -m benchmarks.gpu third --out runs/third.json     # all shapes and patterns, and memory; row kernels

It needs torch, triton and numpy; pytest for the tests of the second part. Each step is a process with a limit, writes
its results as it goes, and does not start if less time is left than it needs at least; a step that fails does not stop
the next. `--rehearse` runs the same steps on small problems with the CPU double of CUDA (tests/rehearsal.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from benchmarks.command import call
from benchmarks.results import ROOT, new_path

LIMIT = 480.0
"""Seconds of a part."""


class Step(NamedTuple):
    """A program of a part."""

    name: str
    arguments: tuple[str, ...]
    """after `python`; those that start with `-m benchmarks` also get the file of the results"""
    seconds: float
    """it is stopped after this, or when the part ends"""
    small: tuple[str, ...] | None = None
    """further arguments in a rehearsal; None: it is left out there"""


_DENSE = [f"bf16-8192-{H}-151936-dense" for H in (4096, 2048, 896)]
_SWEEP, _TUNE, _ROWS = ("-m", "benchmarks.sweep"), ("-m", "benchmarks.tune"), ("-m", "benchmarks.rows")
_TINY = ("--small", "--rounds", "1")
_CASE = (*_TINY, "--no-peers", "--no-memory", "--cases", "bf16-80-64-2048-half")

PARTS: dict[str, tuple[Step, ...]] = {
    "first": (
        Step("doctor", ("-m", "grpo_fused", "doctor"), 30),
        Step("check", ("-m", "grpo_fused", "check"), 100),
        Step("head kernel", (*_TUNE, "--no-candidates", "--rounds", "5"), 120, _TINY),
        Step(
            "speed",
            (*_SWEEP, "--rounds", "5", "--seconds", "150", "--no-memory", "--cases", *_DENSE),
            200,
            _CASE,
        ),
        Step("counters", ("ncu",), 60),
    ),
    "second": (
        Step("tests", ("-m", "pytest", "-q", "-m", "gpu", "-x", "tests/gpu"), 240),
        Step("head kernel", (*_TUNE,), 230, _TINY),
    ),
    "third": (
        Step("speed", (*_SWEEP, "--seconds", "330"), 380, _CASE),
        Step("rows", _ROWS, 90, _TINY),
    ),
}


def run(
    part: Literal["first", "second", "third"],
    out: Annotated[str | None, "file of the results, or its folder; default a new file of this machine"] = None,
    limit: Annotated[float, "seconds of the part"] = LIMIT,
    rehearse: Annotated[bool, "small problems, on the CPU double of CUDA"] = False,
) -> None:
    """Run the steps of a part, and print what became of each."""
    path = new_path("cuda") if out is None else Path(out)
    if path.is_dir():
        path = path / f"{part}.json"
    end, failed = time.monotonic() + limit, []
    for step in PARTS[part]:
        command = _command(step, path, rehearse)
        left = end - time.monotonic()
        if command is None:
            print(f"-- {step.name}: left out", flush=True)
            continue
        if left < min(step.seconds, 20.0):
            print(f"-- {step.name}: not started, {left:.0f} s are left", flush=True)
            failed.append(step.name)
            continue
        print(f"-- {step.name}", flush=True)
        start = time.monotonic()
        outcome = _outcome(command, min(step.seconds, left), rehearse)
        print(f"-- {step.name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
        if outcome != "done":
            failed.append(step.name)
    print(f"results: {path}" if path.exists() else "no results", flush=True)
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


def _command(step: Step, out: Path, rehearse: bool) -> list[str] | None:
    """None if the step cannot run here."""
    flag, *arguments = step.arguments
    if flag == "ncu":  # one launch of the head kernel
        ncu = None if rehearse else shutil.which("ncu")
        kernel = ["--kernel-name", "regex:head_fwd", "--launch-count", "1", "--clock-control", "none"]
        return None if ncu is None else [ncu, *kernel, sys.executable, *_TUNE, "--no-candidates", "--rounds", "1"]
    if rehearse and step.small is None:
        return None
    if arguments[0].startswith("benchmarks."):
        arguments += ["--out", str(out)]
    if rehearse:
        return [sys.executable, "tests/rehearsal.py", arguments[0], *(step.small or ()), "--out", str(out)]
    return [sys.executable, flag, *arguments]


def _outcome(command: list[str], seconds: float, rehearse: bool) -> str:
    interpreted = {"TRITON_INTERPRET": "1"} if rehearse else {"TRITON_INTERPRET": "0"}
    environment = {**os.environ, **interpreted, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.wait()
        return f"stopped at its limit of {seconds:.0f} s"
    return "done" if status == 0 else f"failed with status {status}"


if __name__ == "__main__":
    call(run)
