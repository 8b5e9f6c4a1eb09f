"""Some warps of a block that run in step: their registers, and their way through the program.

Lanes that took different branches are fragments: the one that is behind runs first, and where two meet they are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .numbers import U32, Array
from .text import PtxError

if TYPE_CHECKING:
    from .block import Block

LANES = 32
POISON = {"pred": False, "b16": 0x7FFF, "b32": 0x7FFF7FFF, "b64": 0x7FFF7FFF7FFF7FFF, "b128": 0}
"""Of a register's lanes that were not written when others were: NaN in bf16, fp16, fp32 and fp64, and no address."""

YIELD, AGAIN, EXIT = "yield", "again", "exit"
"""What an instruction may return instead of None: let others run; the same, and do it again then; the end of a thread.
Anything else is what the lanes wait for, until `release`."""


class Fragment:
    """Lanes at one place of the program; `mask` is None for all."""

    __slots__ = ("mask", "pc", "waits_for")

    def __init__(self, pc: int, mask: Array | None) -> None:
        self.pc, self.mask = pc, mask
        self.waits_for: Any = None


class Warps:
    """Warps `first` to `first + count` of a block."""

    def __init__(self, block: Block, first: int, count: int) -> None:
        self.block, self.first, self.count = block, first, count
        self.size = count * LANES
        self.registers: list[Any] = [None] * block.program.num_registers
        self.lane = np.arange(self.size, dtype=U32) % U32(LANES)
        self.warp = first + np.arange(self.size) // LANES
        tid = np.arange(self.size, dtype=U32) + U32(first * LANES)
        everywhere = {f"%{name}": np.full(self.size, value, U32) for name, value in block.special.items()}
        self.special = {"%tid.x": tid, "%laneid": self.lane, "%warpid": self.warp.astype(U32), **everywhere}
        zero = np.zeros(self.size, U32)
        self.special |= {f"%{name}": zero for name in ("tid.y", "tid.z")}
        self.fragments = [Fragment(0, None)]
        self.state: dict[str, Any] = {}
        """of asynchronous instructions, by kind"""
        self.pc = 0

    def warps_of(self, mask: Array | None) -> range | list[int]:
        """The numbers, in the block, of warps with a lane in the mask."""
        if mask is None:
            return range(self.first, self.first + self.count)
        return [self.first + int(w) for w in np.flatnonzero(mask.reshape(-1, LANES).any(1))]

    def all_of_warps(self, mask: Array | None, what: str) -> Array | None:
        """The mask as [warps] bool for an instruction that all lanes of a warp must take together; None for all."""
        if mask is None:
            return None
        by_warp = mask.reshape(-1, LANES)
        whole = by_warp.all(1)
        if (whole != by_warp.any(1)).any():
            raise PtxError(f"{what} is taken by a part of a warp")
        return whole

    @property
    def done(self) -> bool:
        """Whether all lanes have left the kernel."""
        return not self.fragments

    def run(self) -> None:
        """Until every fragment waits or yields, or left."""
        yielded: list[Fragment] = []
        while True:
            ready = [f for f in self.fragments if f.waits_for is None and f not in yielded]
            if not ready:
                return
            fragment = min(ready, key=lambda f: f.pc)
            self.fragments.remove(fragment)
            limit = min((f.pc for f in ready if f is not fragment), default=len(self.block.program.steps) + 1)
            if self._run(fragment, limit) == YIELD:
                yielded.append(fragment)

    def _run(self, fragment: Fragment, limit: int) -> str | None:
        """Until the fragment comes to `limit`, where another one is, waits, yields, splits or ends."""
        steps, counts, block = self.block.program.steps, self.block.counts, self.block
        pc, mask = fragment.pc, fragment.mask
        warps = self.count if mask is None else len(self.warps_of(mask))
        while pc < limit:
            self.pc = pc
            guard, negated, target, execute = steps[pc]
            counts[pc] += warps
            chosen = mask
            if guard is not None:
                chosen = self.registers[guard]
                if chosen is None:
                    raise PtxError("its guard was never written")
                if negated:
                    chosen = ~chosen
                if mask is not None:
                    chosen = chosen & mask
                elif chosen.all():
                    chosen = None
            pc += 1
            if target is None:
                outcome = execute(self, chosen)
                if outcome is None:
                    continue
                if outcome == EXIT:
                    rest = None if chosen is None else (~chosen if mask is None else mask & ~chosen)
                    if rest is not None and rest.any():
                        self._add(Fragment(pc, rest))
                    block.events += 1
                    return None
                fragment.pc = pc - 1 if outcome == AGAIN else pc
                if outcome in (YIELD, AGAIN):
                    self._add(fragment)
                    return YIELD
                fragment.waits_for = outcome
                self.fragments.append(fragment)
                return None
            if chosen is None:
                pc = target
            elif chosen.any():
                stay = ~chosen if mask is None else mask & ~chosen
                if not stay.any():
                    pc = target
                    continue
                self._add(Fragment(target, chosen))
                self._add(Fragment(pc, stay))
                return None
        fragment.pc = pc
        self._add(fragment)
        return None

    def _add(self, fragment: Fragment) -> None:
        """Merge with the fragment at the same place, if there is one."""
        for other in self.fragments:
            if other.pc == fragment.pc and other.waits_for is None:
                assert other.mask is not None
                assert fragment.mask is not None
                merged = other.mask | fragment.mask
                other.mask = None if merged.all() else merged
                return
        self.fragments.append(fragment)

    def release(self, what: Any) -> None:
        """Let fragments that wait for `what` go on."""
        for fragment in [f for f in self.fragments if f.waits_for == what]:
            self.fragments.remove(fragment)
            fragment.waits_for = None
            self._add(fragment)
