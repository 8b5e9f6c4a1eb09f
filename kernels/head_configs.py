"""Launch configurations of the head kernels as data, by architecture, each with its compiled reason.

A configuration depends on the head (V, H, dtype, whether it has a bias or a softcap) and the device, never on the
number of tokens: that is what makes a token's score the same in any batch. SCORE and EXPONENTIALS share theirs.
`python -m benchmarks.aot` prints the compiled resources of each, `python -m benchmarks.tune` times these and
`CANDIDATES` on a GPU. On an H100 the shipped ones are the fastest of those tried (docs/findings.md); those of other
GPUs are not timed.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import torch
from torch import Tensor

from .configs import architecture
from .row_types import Transform

MAX_SPLITS = 128
"""Work items of a token panel: a single panel fills 128 of an H200's 132 multiprocessors. The partial statistics of a
token take 12 bytes each, 1.5 KB in all."""

STEPS_PER_SPLIT = 128
"""k steps that a work item should have at least: filling and draining its pipeline of 3 to 4 stages costs 3 %."""


COLUMN_MULTIPLE = 16
"""Columns of an operand: only then are all loads 16 bytes wide, and a tensor descriptor's strides allowed."""

FP32_COLUMN_MULTIPLE = 32
"""In fp32 a k step of all GPUs: no load is masked then, and ptxas spills no register (one did with triton 3.8)."""


def aligned_width(width: int, dtype: torch.dtype) -> int:
    """Columns of operands for hidden states of this width."""
    multiple = FP32_COLUMN_MULTIPLE if dtype == torch.float32 else COLUMN_MULTIPLE
    return -(-width // multiple) * multiple


class HeadConfig(NamedTuple):
    """How a head kernel is launched: tiles of [block_n tokens, block_v vocabulary rows], block_k of H at a time."""

    block_n: int
    block_v: int
    block_k: int
    num_warps: int
    num_stages: int
    store_stages: int
    """stages where the epilogue stores a tile, which takes shared memory too"""
    tma: bool = False
    persistent: bool = False
    """whether a program takes one work item after another"""
    max_splits: int = MAX_SPLITS
    steps_per_split: int = STEPS_PER_SPLIT

    def tiles(self, vocab_size: int) -> int:
        """Vocabulary tiles of a head."""
        return -(-vocab_size // self.block_v)

    def splits(self, vocab_size: int, width: int) -> tuple[int, int]:
        """(vocabulary splits, tiles in each) of a head [V, H]."""
        tiles = self.tiles(vocab_size)
        steps = -(-width // self.block_k)
        each = min(max(-(-tiles // self.max_splits), -(-self.steps_per_split // steps)), tiles)
        return -(-tiles // each), each

    def programs(self, items: int, device: torch.device) -> int:
        """Size of the grid."""
        return min(items, multiprocessors(device)) if self.persistent else items


def multiprocessors(device: torch.device) -> int:
    """Programs of one configuration that run at a time, at least; the interpreter has 3, so that each takes several."""
    return 3 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


class HeadTable(NamedTuple):
    """The configurations of an architecture and a dtype."""

    plain: HeadConfig
    """scores of a head without bias and softcap"""
    capped: HeadConfig
    """scores of a head with either: their epilogue takes more registers"""
    gradient: HeadConfig
    """dlogits; its registers are full only with all options on"""


def _same(config: HeadConfig) -> HeadTable:
    return HeadTable(config, config, config)


_AMPERE = HeadTable(
    # up to 255 registers and 96 KiB; two thirds of the loads that 128 x 64 takes for a product
    plain=HeadConfig(128, 128, 64, num_warps=8, num_stages=3, store_stages=3),
    # with a bias or all options 128 x 128 spills 8 to 144 bytes
    capped=HeadConfig(128, 64, 64, num_warps=8, num_stages=3, store_stages=3),
    gradient=HeadConfig(128, 64, 64, num_warps=8, num_stages=3, store_stages=3),
)
# 128 x 128 spills 8 bytes under triton 3.8 and 3.9
_ADA = _same(HeadConfig(128, 64, 64, num_warps=8, num_stages=3, store_stages=3))
_HOPPER = HeadTable(
    # 128 x 256 moves 8 TB/s from L2 at 700 TFLOP/s where 128 x 128 would move 11: up to 255 registers, 192 and 209 KiB
    plain=HeadConfig(128, 256, 64, num_warps=8, num_stages=4, store_stages=3, tma=True),
    # with softcap 128 x 256 spills 4 KB
    capped=HeadConfig(128, 128, 64, num_warps=8, num_stages=4, store_stages=3, tma=True),
    gradient=HeadConfig(128, 128, 64, num_warps=8, num_stages=3, store_stages=3, tma=True),
)

HEAD_CONFIGS: dict[str, HeadTable] = {
    "sm_80": _AMPERE,
    "sm_86": _ADA,
    "sm_89": _ADA,
    "sm_90": _HOPPER,
    "sm_100": HeadTable(
        # accumulators live in tensor memory; 128 x 256 crashes the compiler when it stores
        plain=HeadConfig(128, 128, 64, num_warps=8, num_stages=4, store_stages=4, tma=True),
        capped=HeadConfig(128, 128, 64, num_warps=8, num_stages=4, store_stages=4, tma=True),
        gradient=HeadConfig(128, 64, 64, num_warps=8, num_stages=4, store_stages=4, tma=True),
    ),
    "gfx942": _same(HeadConfig(128, 128, 64, num_warps=8, num_stages=2, store_stages=2)),
    "interpreter": _same(HeadConfig(32, 128, 64, 1, 1, 1, max_splits=8, steps_per_split=2)),
}
"""bf16 and fp16, by architecture."""

# IEEE products run on the fp32 units, not on tensor cores; larger tiles spill there. Stages and warps are those with
# which triton 3.6 to 3.9 take no stack where a k step is whole, as `head_launch.aligned` makes it; with others, or a
# mask in the loop, it is 8 to 24 bytes in one of the modes
_FP32 = HeadTable(
    plain=HeadConfig(64, 32, 32, num_warps=4, num_stages=3, store_stages=3),
    capped=HeadConfig(64, 32, 32, num_warps=4, num_stages=2, store_stages=2),
    gradient=HeadConfig(64, 32, 32, num_warps=8, num_stages=2, store_stages=2),
)

FP32_CONFIGS: dict[str, HeadTable] = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_90"), _FP32),
    "sm_100": _FP32._replace(capped=_FP32.capped._replace(store_stages=3)),
    "gfx942": _same(HeadConfig(64, 64, 32, num_warps=4, num_stages=2, store_stages=2)),
    "interpreter": HEAD_CONFIGS["interpreter"],
}

# Widened numbers and an adapter's products take registers. With these tiles, and adapters of up to 192 columns (rank 64
# in bf16), triton 3.7 takes no stack; with the tiles of plain heads up to 232 bytes
_EXTRAS = _same(HeadConfig(128, 64, 32, num_warps=8, num_stages=3, store_stages=3))

EXTRAS_CONFIGS: dict[str, HeadTable] = {
    "sm_80": _EXTRAS._replace(gradient=HeadConfig(64, 64, 32, num_warps=4, num_stages=3, store_stages=3)),
    "sm_86": _EXTRAS,
    "sm_89": _EXTRAS,
    "sm_90": _same(_HOPPER.capped)._replace(
        gradient=HeadConfig(128, 64, 64, num_warps=8, num_stages=4, store_stages=3, tma=True)
    ),
    "sm_100": _same(HeadConfig(128, 64, 32, num_warps=8, num_stages=3, store_stages=3, tma=True)),
    "gfx942": _same(HeadConfig(128, 64, 64, num_warps=8, num_stages=2, store_stages=2)),
    "interpreter": _same(HeadConfig(32, 64, 64, 1, 1, 1, max_splits=8, steps_per_split=2)),
}
"""bf16 and fp16 with `Extras`; in fp32 `FP32_CONFIGS`. There an adapter takes a stack of 8 to 16 bytes in some modes,
above 128 columns (its rank, in fp32) up to 160, at 256 up to 424: slower, not wrong."""

CANDIDATES: dict[str, tuple[HeadConfig, ...]] = {
    "sm_90": (
        HeadConfig(128, 256, 64, 8, 4, 3, tma=True, persistent=True),
        HeadConfig(128, 128, 64, 8, 3, 3, tma=True),  # scores: two programs a multiprocessor
    ),
    "sm_100": (HeadConfig(128, 128, 64, 8, 4, 4, tma=True, persistent=True),),
}
"""Further configurations that the tuner times (scores of a plain head); each is compiled in the tests."""


def head_config(
    operand: Tensor, transform: Transform, *, has_extras: bool = False, gradient: bool = False
) -> HeadConfig:
    """The configuration for products in the dtype of an operand: scores, or dlogits (`gradient`)."""
    narrow = EXTRAS_CONFIGS if has_extras else HEAD_CONFIGS
    table = (FP32_CONFIGS if operand.dtype == torch.float32 else narrow)[architecture(operand.device)]
    if gradient:
        return table.gradient
    return table.plain if transform.bias is None and transform.softcap is None else table.capped


class FinishConfig(NamedTuple):
    """How partial statistics are merged: block_n tokens a program, whose targets' products it makes."""

    block_n: int
    num_warps: int
    pipelined: bool = True
    """whether operands are copied some steps before the product that takes them"""

    @property
    def options(self) -> dict[str, int | bool]:
        """For the launch."""
        stages = {} if self.pipelined else {"num_stages": 1}
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, **stages}


def finish_config(device: torch.device, dtype: torch.dtype) -> FinishConfig:
    """64 tokens a program, the smallest tile of a Hopper product: 128 programs for 8192 tokens; fp32 would spill, and
    32 on 4 warps spill 8 bytes with triton 3.6."""
    if device.type == "cpu":
        return FinishConfig(16, 1)
    return FinishConfig(32, 8) if dtype == torch.float32 else FinishConfig(64, 8, pipelined=fences_copies())


@functools.cache
def fences_copies() -> bool:
    """Whether triton puts a fence between `cp.async` and a product of tensor cores that reads what it copied: since
    3.7.1 (its pull request 10537). Without, a product of Hopper or later may read what was there before."""
    import triton

    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:3])) >= (3, 7, 1)


class PassConfig(NamedTuple):
    """How exponentials are turned into dlogits: one program a row, `tiles` vocabulary tiles at a time."""

    tiles: int
    num_warps: int


def pass_config(device: torch.device, block_v: int) -> PassConfig:
    """4096 elements on 8 warps: 16 a thread, two 16-byte accesses in bf16."""
    return PassConfig(2, 1) if device.type == "cpu" else PassConfig(max(4096 // block_v, 1), 8)
