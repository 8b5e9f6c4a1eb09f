"""Peak memory of one forward and backward of one provider; on a CPU in its own process.

    python -m benchmarks.child benchmarks.memory:attempt '[{"B": 4, "T": 256, "H": 896, "V": 151936}, "trl", "cpu"]'

The figure is in MiB, beyond the memory before the call and the two gradients that it returns (below 0 if the peak came
before the gradients). On a CPU it is `resident`: the process's resident set at its peak, with the memory of all
libraries; freed blocks from 1 MiB on are returned at once; null if the kernel does not allow a reset of the peak. On a
GPU it is `allocator`, `max_memory_allocated`.

Kernels' own set-up is left out: a small problem runs first on a CPU; on a GPU, and for a provider that compiles, the
problem itself.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import ChildError, in_child
from benchmarks.exact import in_a_line
from benchmarks.problem import Case, clear
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.timing import MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def of_call(case: Case, provider: str, device: str, *, timeout_s: float = 300.0) -> dict[str, Any]:
    """The figure, or {"failed": reason}. A GPU's allocator counts in any process, a CPU's case takes a fresh one."""
    if device == "cuda":
        return attempt(asdict(case), provider, device)
    try:
        return in_child("benchmarks.memory:attempt", asdict(case), provider, device, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {timeout_s:.0f} s"}
    except ChildError as error:
        if error.status > 0:
            return {"failed": str(error).strip().splitlines()[-1][:200]}
        reason = ": out of memory?" if error.status == -9 else ""
        return {"failed": f"killed by signal {-error.status}{reason}"}


def attempt(case: dict[str, Any], provider: str, device: str) -> dict[str, Any]:
    """`peak` of this process, or why it has none; `case` are a `Case`'s fields."""
    try:
        with blocks_given_back():
            return peak(Case(**case), PROVIDERS[provider], device)
    except Exception as error:  # a peer may fail in any way; out of memory is one of them
        return {"failed": in_a_line(error)}


def peak(case: Case, provider: Provider, device: str) -> dict[str, float | None]:
    """The figure, of this process: it should have done nothing else."""
    if device == "cpu":
        small = Case(1, 8, case.H, min(case.V, 512), case.dtype).problem(device)
        provider.loss(small).backward()
    problem = case.problem(device)

    def call() -> None:
        provider.loss(problem).backward()

    if device == "cuda" or provider.compiles:
        call()
    clear(problem)
    gradients = problem.hidden_states.nbytes + problem.lm_head_weight.nbytes
    mib = (peak_of_call(call, device) - gradients) / MIB
    return {"allocator" if device == "cuda" else "resident": None if math.isnan(mib) else mib}


def release(device: str) -> None:
    """Free cached memory, so that a provider starts as in a fresh process."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def blocks_given_back() -> Iterator[None]:
    """In the block, freed memory blocks from 1 MiB on are returned to the system at once (glibc).

    Usually glibc keeps blocks below 32 MiB, in a heap with gaps: the peak of the same call varied by 150 MiB. So enter
    it early in a process. Afterwards the limits are the highest that glibc sets by itself.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    adjust(_M_MMAP_THRESHOLD, MIB)
    try:
        yield
    finally:
        adjust(_M_MMAP_THRESHOLD, 32 * MIB)
        adjust(_M_TRIM_THRESHOLD, 64 * MIB)


def peak_bytes(call: Callable[[], object], device: str) -> float:
    """As `peak_of_call`, of the second of two calls: the first one takes the libraries' own memory."""
    call()
    return peak_of_call(call, device)


def peak_of_call(call: Callable[[], object], device: str) -> float:
    """Peak memory of a call beyond the memory before it: resident memory on the CPU (best within
    `blocks_given_back`), the allocator's on CUDA; nan if it cannot be read."""
    release(device)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    forgotten = _forget_peak()
    call()
    return math.nan if forgotten is None else peak_of_process() - forgotten


def _forget_peak() -> int | None:
    """Resets the peak of the resident set; returns its bytes now, None if that is not possible."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return peak_of_process()
    except (AttributeError, OSError):
        return None


def peak_of_process() -> int:
    """Bytes of this process's resident set at its peak. (`getrusage` may give that of the process which started it.)"""
    line = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    if line is None:
        raise OSError("no VmHWM in /proc/self/status")
    return 1024 * int(line[1])
