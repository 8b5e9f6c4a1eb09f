"""What a launch did: warp instructions by class, sectors of global memory, bank conflicts, bytes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .numbers import Array

if TYPE_CHECKING:
    from .block import Block

SECTOR = 32
"""Bytes that global memory moves at a time."""
BANKS = 32
"""Of shared memory, each 4 bytes wide."""

_CLASSES = {
    "product": ("mma", "wgmma", "tcgen05", "ldmatrix", "stmatrix"),
    "function": ("ex2", "lg2", "rcp", "sqrt", "tanh", "div"),
    "copy": ("cp", "mbarrier"),
    "memory": ("ld", "st"),
    "order": ("bar", "barrier", "fence", "elect", "bra", "ret", "shfl", "redux", "vote"),
    "move": ("mov", "cvta", "selp"),
}
"""Class of an instruction to first parts of its opcode; the rest is float (f32 and narrower) or integer."""
CLASSES = ("float", "function", "integer", "move", "memory", "copy", "product", "order")


def class_of(opcode: str) -> str:
    """One of `CLASSES`."""
    parts = opcode.split(".")
    for name, first in _CLASSES.items():
        if parts[0] in first and not (parts[0] == "div" and parts[-1] != "f32"):
            return name
    return "float" if {"f32", "f32x2", "f64", "bf16x2", "f16x2", "bf16", "f16"} & set(parts) else "integer"


class Profile:
    """Counts of all blocks that ran with it."""

    def __init__(self) -> None:
        self.instructions: Counter[str] = Counter()
        """by class: instructions of a warp; multiplied by 32 these are of threads"""
        self.counts: Counter[str] = Counter()

    def add(self, block: Block) -> None:
        """A block has ended."""
        for instruction, times in zip(block.program.kernel.instructions, block.counts, strict=True):
            self.instructions[class_of(instruction.opcode)] += times

    def global_access(self, addresses: Array, width: int, warps: Array, *, write: bool) -> None:
        """Sectors of the accesses of each warp, and the fewest that could have moved as many bytes."""
        kind = "stored" if write else "loaded"
        for warp in np.unique(warps):
            mine = addresses[warps == warp]
            first, last = mine // SECTOR, (mine + width - 1) // SECTOR
            self.counts[f"{kind}_sectors"] += np.union1d(first, last).size
            self.counts[f"{kind}_least"] += -(-np.unique(mine).size * width // SECTOR)
            self.counts[f"{kind}_bytes"] += np.unique(mine).size * width

    def tensor_copy(self, size: int, *, write: bool) -> None:
        """Bytes between global and shared memory by a tensor copy."""
        kind = "stored" if write else "loaded"
        self.counts[f"{kind}_bytes"] += size

    def shared_access(self, addresses: Array, width: int, warps: Array) -> None:
        """Passes through the banks that the accesses of each warp take, and the fewest that could serve their words.

        Accesses of 8 and 16 bytes take two and four passes at least: half a warp, a quarter of it, at a time.
        """
        lanes = min(LANES_AT_A_TIME // max(width // 4, 1), 32)
        for warp in np.unique(warps):
            mine = addresses[warps == warp]
            for start in range(0, mine.size, lanes):
                part = mine[start : start + lanes]
                words = np.unique((part[:, None] + np.arange(0, max(width, 4), 4)) // 4)
                self.counts["shared_passes"] += int(np.bincount(words % BANKS).max())
                self.counts["shared_least"] += -(-words.size // BANKS)

    def result(self) -> dict[str, Any]:
        """All counts, as numbers."""
        return {"instructions": dict(self.instructions), **{k: int(v) for k, v in self.counts.items()}}


LANES_AT_A_TIME = 32
