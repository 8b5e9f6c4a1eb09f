"""Which accesses of shared memory are in order: vector clocks, the method of race detectors.

Agents are the warps, and for each warp the units that work for it: asynchronous copies, tensor copies in and out,
products, and stores to tensor memory. Of these only products of one warp are in order among themselves. `clock[w]` says
up to which tick of each agent everything happened before warp w's next instruction. Barriers and waits join clocks. An
access that may happen at the same time as another one, of which one is a write, is an error, in whatever order the
interpreter runs them.

Tensor copies and warpgroup products use the async proxy: of what other instructions wrote they see what came before
`fence.proxy.async`; `fenced[w]` is the clock of that. Memory is watched in units of two bytes.
"""

from __future__ import annotations

import numpy as np

from .numbers import Array
from .text import PtxError

UNIT = 2
UNITS = ("warp", "cp.async", "tensor load", "tensor store", "product", "store to tensor memory")
"""Kinds of agents. A wait for one is a wait for what the same agent began before it."""
ASYNC_PROXY = ("tensor load", "tensor store", "product")


class Operation:
    """An asynchronous operation: its agent, its tick, and what happened before it."""

    def __init__(self, agent: int, tick: int, clock: Array, fenced: Array | None) -> None:
        self.agent, self.tick, self.clock, self.fenced = agent, tick, clock, fenced


class Races:
    """The clocks of a block with `warps` warps and `size` bytes of shared memory."""

    def __init__(self, warps: int, size: int) -> None:
        self.warps = warps
        agents, units = warps * len(UNITS), -(-size // UNIT)
        self.clock = np.zeros((warps, agents), np.int32)
        self.clock[np.arange(warps), np.arange(warps)] = 1
        self.fenced = np.zeros((warps, agents), np.int32)
        self.ticks = np.zeros(agents, np.int32)
        self.write_agent = np.zeros(units, np.int32)
        self.write_tick = np.zeros(units, np.int32)
        self.write_pc = np.zeros(units, np.int32)
        self.older_agent = np.zeros(units, np.int32)
        self.older_tick = np.zeros(units, np.int32)
        """of the last write that was not the same one by other warps"""
        self.read_tick = np.zeros((agents, units), np.int32)
        self.sources: list[str] = []
        """of the program's instructions"""

    def access(
        self, addresses: Array, width: int, warps: Array, pc: int, *, write: bool, same: Array | None = None
    ) -> None:
        """Accesses of `width` bytes at addresses [n] by lanes of warps [n] at an instruction of the program.

        Several warps may write one value by one instruction: `same` [n] says which writes change nothing.
        """
        units = (addresses[:, None] + np.arange(0, max(width, UNIT), UNIT)) // UNIT
        for warp in np.unique(warps):
            mine = warps == warp
            repeats = None if same is None else np.repeat(same[mine], units.shape[1])
            self._check(units[mine].ravel(), int(warp), self.clock[warp], None, pc, write=write, repeats=repeats)

    def start(self, warp: int, kind: str) -> Operation:
        """An asynchronous operation of a warp begins."""
        agent = UNITS.index(kind) * self.warps + warp
        self.ticks[agent] += 1
        clock = self.clock[warp].copy()
        fenced = self.fenced[warp].copy() if kind in ASYNC_PROXY else None
        self._next(warp)
        return Operation(agent, int(self.ticks[agent]), clock, fenced)

    def perform(self, operation: Operation, addresses: Array, width: int, pc: int, *, write: bool) -> None:
        """It accesses `width` bytes at each address."""
        units = ((addresses.ravel()[:, None] + np.arange(0, width, UNIT)) // UNIT).ravel()
        clock = operation.clock.copy()
        in_order = operation.agent // self.warps == UNITS.index("product")
        clock[operation.agent] = np.iinfo(np.int32).max if in_order else operation.clock[operation.agent]
        self._check(units, operation.agent, clock, operation, pc, write=write)

    def finish(self, warp: int, operation: Operation) -> None:
        """The warp has waited for it."""
        self.clock[warp, operation.agent] = max(self.clock[warp, operation.agent], operation.tick)

    def fence(self, warp: int) -> None:
        """What happened before is seen by the async proxy."""
        np.maximum(self.fenced[warp], self.clock[warp], out=self.fenced[warp])
        self._next(warp)

    def barrier(self, warps: list[int]) -> None:
        """They have met."""
        self.clock[warps] = self.clock[warps].max(0)
        self.fenced[warps] = self.fenced[warps].max(0)
        for warp in warps:
            self._next(warp)

    def release(self, warp: int) -> tuple[Array, Array]:
        """What a warp that arrives at an mbarrier hands to those who wait there."""
        handed = self.clock[warp].copy(), self.fenced[warp].copy()
        self._next(warp)
        return handed

    def acquire(self, warp: int, handed: tuple[Array, Array]) -> None:
        """A warp has waited at an mbarrier."""
        np.maximum(self.clock[warp], handed[0], out=self.clock[warp])
        np.maximum(self.fenced[warp], handed[1], out=self.fenced[warp])

    def _next(self, warp: int) -> None:
        self.clock[warp, warp] += 1

    def _check(
        self, units: Array, agent: int, clock: Array, operation: Operation | None, pc: int, *, write: bool,
        repeats: Array | None = None,
    ) -> None:  # fmt: skip
        writers, ticks = self.write_agent[units], self.write_tick[units]
        seen = clock[writers]
        if operation is not None and operation.fenced is not None:  # the generic proxy's writes must be fenced
            generic = writers < 2 * self.warps
            seen = np.where(generic, operation.fenced[writers], seen)
        late = ticks > seen
        if operation is not None:
            late &= (writers != agent) | (ticks != operation.tick)
        older = self.older_agent[units], self.older_tick[units]
        if repeats is not None:
            repeats = late & repeats & (self.write_pc[units] == pc)
            late = np.where(repeats, older[1] > clock[older[0]], late)
        if late.any():
            unit = int(np.flatnonzero(late)[0])
            raise PtxError(
                f"race on shared byte {UNIT * int(units[unit])}: {self._name(agent)} {'writes' if write else 'reads'} "
                f"at {self.sources[pc]} what {self._name(int(writers[unit]))} writes at "
                f"{self.sources[self.write_pc[units[unit]]]}, and nothing puts them in order"
            )
        if not write:
            self.read_tick[agent, units] = self._now(agent, clock, operation)
            return
        read = self.read_tick[:, units].max(1, initial=0) > clock
        if operation is None:
            read[agent] = False
        if read.any():
            reader = int(np.flatnonzero(read)[0])
            unit = int(units[np.argmax(self.read_tick[reader, units])])
            raise PtxError(
                f"race on shared byte {UNIT * unit}: {self._name(agent)} writes at {self.sources[pc]} what "
                f"{self._name(reader)} reads, and nothing puts them in order"
            )
        for array, old, new in ((self.older_agent, older[0], writers), (self.older_tick, older[1], ticks)):
            array[units] = new if repeats is None else np.where(repeats, old, new)
        self.write_agent[units] = agent
        self.write_tick[units] = self._now(agent, clock, operation)
        self.write_pc[units] = pc

    def _now(self, agent: int, clock: Array, operation: Operation | None) -> int:
        return int(clock[agent]) if operation is None else operation.tick

    def _name(self, agent: int) -> str:
        kind, warp = divmod(agent, self.warps)
        return f"warp {warp}" if kind == 0 else f"the {UNITS[kind]} of warp {warp}"
