"""Thread blocks: barriers, the order in which warps run, and when asynchronous operations complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .forms import PARAMETER_START, Program
from .memory import Space
from .numbers import Array, scattered
from .profile import Profile
from .races import Races
from .tensor_memory import TENSOR_COLUMNS, TENSOR_LANES, TensorMemory
from .text import PtxError
from .warps import LANES, Warps


class Options(NamedTuple):
    """How to run a block: every choice is one that a GPU may take."""

    together: bool = True
    """all warps in step; else one after another, each until it must wait"""
    backwards: bool = False
    """the last warp first"""
    late: bool = True
    """asynchronous operations happen when they are waited for; else when they are issued"""
    error: Callable[..., Array] = scattered
    """how far approximate functions are off, from -1 to 1 of their bounds, for their arguments"""
    races: bool = False
    """unordered accesses of shared memory are errors"""


class TensorMap(NamedTuple):
    """A 2-D tensor map: what a copy moves between global memory and a box in shared memory."""

    address: int
    shape: tuple[int, int]
    stride: int
    """bytes of a row"""
    box: tuple[int, int]
    itemsize: int
    swizzle: int
    """bytes of the swizzle's pattern: 0, 32, 64 or 128"""


class Launch(NamedTuple):
    """What the blocks of a grid share."""

    program: Program
    memory: Space
    """global memory"""
    parameters: bytes
    maps: dict[int, TensorMap]
    """by their offset among the parameters"""
    threads: int
    shared_bytes: int
    options: Options = Options()
    profile: Profile | None = None


class Block:
    """One block of a grid; `special` has ctaid.x and so on."""

    def __init__(self, launch: Launch, special: dict[str, int]) -> None:
        if launch.threads % LANES:
            raise PtxError(f"a block of {launch.threads} threads: expected whole warps")
        self.launch, self.program, self.options = launch, launch.program, launch.options
        self.special = special | {"ntid.x": launch.threads, "ntid.y": 1, "ntid.z": 1}
        self.memory, self.profile = launch.memory, launch.profile
        self.num_warps = launch.threads // LANES
        size = -(-max(launch.program.kernel.static_shared + launch.shared_bytes, 16) // 8) * 8
        self.shared = Space("shared").poisoned(0, size)
        padded = np.zeros(-(-len(launch.parameters) // 8) * 8 + 8, np.uint8)
        padded[: len(launch.parameters)] = np.frombuffer(launch.parameters, np.uint8)
        self.parameters = Space("parameter")
        self.parameters.add(PARAMETER_START, padded)
        self.counts = [0] * len(launch.program.steps)
        self.events = 0
        """changes that others may wait for"""
        self.barriers: dict[int, list[tuple[Warps, Array | None]]] = {}
        self.mbarriers: dict[int, Any] = {}
        self.pending: list[Callable[[], None]] = []
        """asynchronous operations that complete by themselves, oldest first"""
        self.races = None
        has_tensor = launch.program.has_tensor_memory
        if self.options.races:
            self.races = Races(self.num_warps, size + 2 * TENSOR_LANES * TENSOR_COLUMNS * has_tensor)
            self.races.sources = [each.source or str(each) for each in launch.program.kernel.instructions]
        self.tensor = TensorMemory(self.races, size) if has_tensor else None
        width = self.num_warps if self.options.together else 1
        self.groups = [Warps(self, first, width) for first in range(0, self.num_warps, width)]
        if self.options.backwards:
            self.groups.reverse()

    @property
    def done(self) -> bool:
        """Whether all warps have left."""
        return all(group.done for group in self.groups)

    def advance(self) -> None:
        """Run each group of warps until it waits."""
        for group in self.groups:
            try:
                group.run()
            except PtxError as error:
                at = self.program.kernel.instructions[group.pc]
                raise PtxError(
                    f"{error}\n  at {at}\n  warps {group.first} to {group.first + group.count - 1}"
                ) from None

    def meet(self, number: int, threads: int, warps: Warps, mask: Array | None) -> Any:
        """Some lanes arrive at barrier `number` of so many threads: what they wait for, or None if all are there."""
        here = self.barriers.setdefault(number, [])
        here.append((warps, mask))
        arrived = sum(w.size if m is None else int(m.sum()) for w, m in here)
        self.events += 1
        if arrived < threads:
            return "barrier", number
        if arrived > threads:
            raise PtxError(f"{arrived} threads at barrier {number}, which {threads} take")
        del self.barriers[number]
        if self.races is not None:
            self.races.barrier(sorted({number for w, m in here for number in w.warps_of(m)}))
        for group in self.groups:
            group.release(("barrier", number))
        return None

    def check_end(self) -> None:
        """Raise if something still uses the memory of the block, which is another one's soon."""
        copies = [group.state[kind] for group in self.groups for kind in ("cp.async", "bulk") if kind in group.state]
        if self.pending or any(each.unfinished for each in copies):
            raise PtxError("the block ends while copies or products are on their way")
        if self.tensor is not None and self.tensor.allocated:
            raise PtxError(f"columns of tensor memory are not freed: {self.tensor.allocated}")

    def where(self) -> str:
        """Where its warps are, for an error."""
        lines = []
        for group in self.groups:
            for fragment in group.fragments:
                at = self.program.kernel.instructions[max(fragment.pc - 1, 0)]
                lines.append(f"warp {group.first}: {at}")
        return "\n  ".join(lines)


def run(block: Block, *, rounds: int = 10**7) -> None:
    """Run a block to its end."""
    with np.errstate(all="ignore"):
        for _ in range(rounds):
            before = block.events
            block.advance()
            if block.done:
                break
            if before == block.events:
                if not block.pending:
                    raise PtxError(f"all warps wait:\n  {block.where()}")
                block.pending.pop(0)()
                block.events += 1
        block.check_end()
        if block.profile is not None:
            block.profile.add(block)
        block.groups.clear()  # they hold the block: without a cycle its memory is free at once
