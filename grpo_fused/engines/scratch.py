"""How much temporary memory a call may take."""

from __future__ import annotations

import torch

DEFAULT_SCRATCH_BYTES = {"cpu": 128 * 2**20, "cuda": 2 * 2**30}
"""Scratch of a call where `max_scratch_bytes` is None, by device type (256 MiB on others).

A chunk of C tokens takes 4·C·V bytes of it in `chunked`, about 2·C·V in `triton` (in bf16); 128 MiB at V = 151936 are
C = 144 in `chunked`. Larger chunks pass over the weight and
the fp32 dW accumulator less often. Measured on the CPU (AVX512-BF16, 2 cores, bf16, N = 1024, H = 896, V = 151936,
forward + backward, bare GEMMs 2.3 s): 5.2 s at 64 MiB, 3.9 at 128, 3.9 at 256, 4.4 at 512, 3.8 at 1024. CUDA: not
measured yet.
"""


def scratch_budget(device: torch.device, max_scratch_bytes: int | None) -> int:
    """Bytes: the caller's number, or the device's default."""
    if max_scratch_bytes is not None:
        return max_scratch_bytes
    return DEFAULT_SCRATCH_BYTES.get(device.type, 256 * 2**20)
