"""The first runs on a GPU in three parts, each below eight minutes: for a machine that is there for half an hour.

    python -m benchmarks.gpu first --out runs/first.json     # are the kernels right; are they faster than the library
    python -m benchmarks.gpu second --out runs/second.json   # small batches in graphs; the GPU tests; training
    python -m benchmarks.gpu third --out runs/third.json     # all shapes and patterns, and memory; row kernels

It needs torch, triton and numpy; setuptools for the extension, pytest and pytest-xdist for the tests; for those of
training what `.[train,peers]` installs. The tests of the engines took 140 s beside an H100 by 6 processes on 16 cores,
mostly of triton's compiler; the check of every option takes minutes for the same reason. `--wheels FOLDER` first
installs what lies there, and asks no index. Each step is a process with a limit, writes its results as it goes, and
does not start if less time is left than it needs at least; a step that fails does not stop the next. `--rehearse` runs
the same steps on small problems with the CPU double of CUDA (tests/rehearsal.py).
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
    rehearsed: tuple[str, ...] | None = None
    """after `python tests/rehearsal.py` in a rehearsal: a smaller problem; None: the same as without"""


_SWEEP = ("-m", "benchmarks.sweep")
_TINY = ("--small", "--rounds", "1")
_CASES = ("--cases", "bf16-80-64-2048", "--patterns", "half-inactive", "--peers")

_ONE_OF_EACH = (
    "fp32 and dapo-chunked or dapo-triton or 903 or options or depend_on or bitwise or stream or sync or graph"
)
"""Of the GPU tests; those whose size is their purpose need a GPU."""

EXTENSION = Step("extension", ("setup.py", "-q", "build_ext", "--inplace"), 80)
"""55 s on 2 cores with nvcc 13.0; at once if it is up to date."""

PARTS: dict[str, tuple[Step, ...]] = {
    "first": (
        EXTENSION,
        Step("doctor", ("-m", "grpo_fused", "doctor"), 20, ("grpo_fused", "doctor", "--no-measure")),
        Step(
            "check", ("-m", "grpo_fused", "check", "--quick", "--engines", "triton"), 60,
            ("grpo_fused", "check", "--quick", "--engines", "chunked"),
        ),
        Step(
            "head kernel", ("-m", "benchmarks.tune", "--no-candidates", "--rounds", "5"), 110,
            ("benchmarks.tune", *_TINY),
        ),
        Step(
            "speed",
            (*_SWEEP, "--rounds", "5", "--seconds", "140", "--no-memory", "--patterns", "dense", "--peers",
             "liger-scaled", "torch.compile"),
            170,
            ("benchmarks.sweep", *_TINY, "--no-memory", *_CASES, "liger-scaled", "torch.compile"),
        ),
        Step("counters", ("-m", "benchmarks.counters"), 40, ("benchmarks.counters",)),
    ),
    "second": (
        EXTENSION,
        Step("graphs", ("-m", "benchmarks.graphs"), 50, ("benchmarks.graphs", *_TINY)),
        Step(
            "tests", ("-m", "pytest", "-q", "-m", "gpu", "-n", "6", "--maxfail", "20", "tests/gpu"), 180,
            ("pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_engines.py", "-k",
             _ONE_OF_EACH),
        ),
        Step(
            "training",
            ("-m", "pytest", "-q", "-n", "6", "--maxfail", "20", "tests/trainer/test_trainer.py",
             "tests/trainer/test_tiny.py", "tests/integrations/test_trl.py"),
            130,
            ("pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/trainer/test_tiny.py", "-k",
             "not saved and not score"),
        ),
    ),
    "third": (
        EXTENSION,
        Step("speed", (*_SWEEP, "--seconds", "290"), 330, ("benchmarks.sweep", *_TINY, *_CASES, "eager")),
        Step("rows", ("-m", "benchmarks.rows"), 70, ("benchmarks.rows", *_TINY)),
    ),
}  # fmt: skip


def run(
    part: Literal["first", "second", "third"],
    out: Annotated[str | None, "file of the results (.json), or its folder; default a new file of this machine"] = None,
    limit: Annotated[float, "seconds of the part"] = LIMIT,
    wheels: Annotated[str | None, "folder of wheels that are installed first"] = None,
    rehearse: Annotated[bool, "small problems, on the CPU double of CUDA"] = False,
) -> None:
    """Run the steps of a part, and print what became of each."""
    path = Path(out).resolve() if out is not None else new_path("cuda")
    path = path if path.suffix == ".json" else path / f"{part}.json"
    start, failed = time.monotonic(), []
    for step in (*_installation(wheels), *PARTS[part]):
        began = time.monotonic()
        left = start + limit - began
        if left < min(step.seconds, 20.0):
            print(f"-- {step.name}: not started, {left:.0f} s are left", flush=True)
            failed.append(step.name)
            continue
        print(f"-- {step.name}", flush=True)
        seconds = left if rehearse else min(step.seconds, left)
        outcome = _outcome(_command(step, path, rehearse), seconds, rehearse)
        print(f"-- {step.name}: {outcome} after {time.monotonic() - began:.0f} s", flush=True)
        if outcome != "done":
            failed.append(step.name)
    results = f"results: {path}" if path.exists() else "no results"
    print(f"{results}; {part} took {time.monotonic() - start:.0f} of {limit:.0f} s", flush=True)
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


def _installation(folder: str | None) -> list[Step]:
    if folder is None:
        return []
    found = sorted(str(wheel.resolve()) for wheel in Path(folder).glob("*.whl"))
    if not found:
        sys.exit(f"--wheels must be a folder with wheels; got {folder}")
    return [Step("wheels", ("-m", "pip", "install", "-q", "--no-index", "--no-deps", *found), 60)]


def _command(step: Step, out: Path, rehearse: bool) -> list[str]:
    rehearsed = step.rehearsed if rehearse else None
    words = step.arguments if rehearsed is None else ("tests/rehearsal.py", *rehearsed)
    writes = words[1].startswith("benchmarks.")
    return [sys.executable, *words, *(("--out", str(out)) if writes else ())]


def _outcome(command: list[str], seconds: float, rehearse: bool) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment["TRITON_INTERPRET"] = "1" if rehearse else "0"
    if shutil.which("nvcc") and not rehearse:  # the row kernels in CUDA C++ must compile, too
        environment["GRPO_FUSED_BUILD"] = "cuda"
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"stopped at its limit of {seconds:.0f} s"
    finally:
        if process.returncode is None:  # also at an interrupt, of which it is not told
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
    return "done" if status == 0 else f"failed with status {status}"


if __name__ == "__main__":
    call(run)
