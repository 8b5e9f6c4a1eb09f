"""Vectors of the CPU engine end with the memory of their source: behind it is a page that nobody may read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("cpu_extension")

PROGRAM = """
import ctypes, mmap
import torch
from grpo_fused import HeadAdapter, QuantizedWeight, fused_linear_logprobs

libc, page, kept = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, []
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

def at_end(x):
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    moved = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes).view(x.shape).copy_(x)
    assert libc.mprotect(start + size, page, 0) == 0
    return moved

V = 300

def run(dtype, width, weight, rank=0):
    print(dtype, width, type(weight).__name__, rank, flush=True)
    hidden = torch.randn(70, width).to(dtype)
    adapter = (HeadAdapter(torch.randn(rank, width), at_end(torch.randn(V, rank)).requires_grad_()),) if rank else ()
    moved = at_end(hidden).requires_grad_()
    ids = torch.randint(V, (70,))
    fused_linear_logprobs(moved, weight, ids, lm_head_adapter=adapter, impl="native").logps.sum().backward()

for dtype in (torch.bfloat16, torch.float32, torch.float16):
    for width in (1, 15, 33, 40, 48, 72):
        run(dtype, width, at_end(torch.randn(V, width).to(dtype)).requires_grad_())
    for rank in (1, 5, 17, 40, 70):
        run(dtype, 32, torch.randn(V, 32).to(dtype), rank)
    for width in (32, 96):
        numbers, scale = at_end(torch.randint(-9, 9, (V, width), dtype=torch.int8)), torch.full((V, 1), 0.01)
        run(dtype, width, QuantizedWeight(numbers, scale))
        halves = at_end(torch.randint(256, (V, width // 2), dtype=torch.uint8))
        scale = scale.expand(-1, width // 32).contiguous()
        run(dtype, width, QuantizedWeight(halves, scale, torch.linspace(-1, 1, 16)))
"""


def test_nothing_is_read_behind_a_tensor(tmp_path):
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the package under test, not that of the folder
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=here)
    assert done.returncode == 0, f"exit status {done.returncode}, {done.stdout.splitlines()[-1:]}: {done.stderr}"
