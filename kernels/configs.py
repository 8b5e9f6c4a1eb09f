"""Launch configurations as data, by architecture, with reasons. Nothing is tuned at a user's first call."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class RowConfig(NamedTuple):
    """How a row kernel is launched: one program a row, BLOCK logits at a time."""

    block: int
    num_warps: int
    in_place: bool
    """Whether a narrower gradient may be written over the logits that it comes from."""


# 4096 fp32 logits on 8 warps are 16 a thread: 16-byte loads and stores. `python -m benchmarks.aot` prints registers:
# 30 to 96 a thread with options off and on, which leaves room for 8 to 2 programs an SM.
ROW_CONFIGS = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_90", "sm_100"), RowConfig(4096, 8, True)),
    # a wave is 64 lanes: 8 logits each. Loads may still be in flight at a barrier, so the gradient gets its own buffer.
    "gfx942": RowConfig(4096, 8, False),
    "interpreter": RowConfig(256, 1, True),
}

PAD = 32
"""Rows of logits are padded to a multiple of this, so that every access stays 16 bytes wide at any vocabulary size.
oneDNN's AMX products also multiply the elements after a row of bf16 dlogits by 0, up to a multiple of 32: they must be
0, not the bits of a logit, which may be those of a NaN."""


def padded(vocab_size: int) -> int:
    """Columns of a row of logits, exponentials or dlogits."""
    return -(-vocab_size // PAD) * PAD


def architecture(device: torch.device) -> str:
    """The key of `device` in the tables: its own, or that of the nearest older architecture."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    return _nearest(*torch.cuda.get_device_capability(device))


@functools.cache
def _nearest(major: int, minor: int) -> str:
    if major == 12:  # consumer Blackwell: Ada's shared memory, not that of sm_100
        return "sm_89"
    known = sorted((key for key in ROW_CONFIGS if key.startswith("sm_")), key=lambda key: int(key[3:]))
    at_most = [key for key in known if int(key[3:]) <= 10 * major + minor]
    return at_most[-1] if at_most else known[0]


def row_config(device: torch.device, vocab_size: int) -> RowConfig:
    """The configuration for rows of `vocab_size` logits; it depends only on device and vocabulary, never on N."""
    config = ROW_CONFIGS[architecture(device)]
    block = 16
    while block < min(config.block, vocab_size):
        block *= 2
    return config._replace(block=block, num_warps=max(1, min(config.num_warps, block // 128)))
