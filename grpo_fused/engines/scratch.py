"""The temporary memory that a call may use."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2**21

DEFAULT_SCRATCH_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
"""Scratch of a call where `max_scratch_bytes` is None, by device type (256 MiB on others).

A chunk of C tokens takes 4·C·V bytes of it in `chunked`, about 2·C·V in `triton` (in bf16). Larger chunks read the
weight and the fp32 accumulator of dW less often, and a call of one chunk (C = 400 at V = 151936 in 256 MiB) has no such
accumulator. Measured on the CPU (AMX, 2 cores, bf16, H = 896, V = 151936, forward + backward) at 128, 256 and 384 MiB:
1.65, 1.11 and 1.09 s for 256 tokens, 4.31, 4.02 and 3.72 s for 1024.
CUDA: with 2 GiB, N = 8192 is one chunk (H100).
"""


def check_fits_a_token(max_scratch_bytes: int | None, available: int, token_bytes: int, vocab_size: int) -> None:
    """Raise if the caller's budget leaves no room for one token."""
    if available < 1 and max_scratch_bytes is not None:
        raise ValueError(
            f"max_scratch_bytes={max_scratch_bytes} is too small: one token of a vocabulary of {vocab_size} takes "
            f"{token_bytes} bytes of scratch"
        )


def scratch_budget(device: torch.device, max_scratch_bytes: int | None) -> int:
    """Bytes: the caller's number, or the device's default."""
    if max_scratch_bytes is not None:
        return max_scratch_bytes
    return DEFAULT_SCRATCH_BYTES.get(device.type, 256 * 2**20)


def sparse_zeros_like(weight: Tensor) -> Tensor:
    """Zeros of the shape and dtype of `weight`, contiguous, of which few rows will be written.

    On a CPU large ones are in huge pages, which the system clears when they are first written to. docs/findings.md has
    the times, also of an optimizer that reads or writes all of it.
    """
    size = weight.numel() * weight.element_size()
    if weight.device.type != "cpu" or size < 16 * _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros_like(weight, memory_format=torch.contiguous_format)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)
