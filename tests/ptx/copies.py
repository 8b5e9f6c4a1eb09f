"""Asynchronous copies: cp.async, bulk and tensor copies, and the mbarriers and groups that they are waited for by."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .forms import PARAMETER_GENERIC, PARAMETER_START, Decoder, Execute, form
from .matrices import swizzled
from .moves import CACHE, note
from .numbers import U32, Array
from .text import Address, PtxError
from .warps import YIELD, Warps

Finish = Callable[[], None]


class _Groups:
    """Copies of some warps, in the groups that they committed."""

    def __init__(self) -> None:
        self.open: list[Finish] = []
        self.committed: list[list[Finish]] = []

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def finish(self) -> None:
        self.commit()
        self.wait(0)

    @property
    def unfinished(self) -> bool:
        """Whether there are copies that nobody has waited for."""
        return bool(self.open or any(self.committed))

    def wait(self, pending: int) -> None:
        while len(self.committed) > pending:
            for finish in self.committed.pop(0):
                finish()


def _groups(warps: Warps, kind: str) -> _Groups:
    return warps.state.setdefault(kind, _Groups())


# cp.async: each lane copies 4, 8 or 16 bytes


@form(rf"cp\.async\.(?:ca|cg)\.shared(?:::cta)?\.global{CACHE}")
def copy(d: Decoder, found: re.Match[str]) -> Execute:
    """Bytes past the source size are zeros."""
    into, source = d.address(d.operands[0]), d.address(d.operands[1])
    size = int(str(d.operands[2]), 0)
    given = d.read(d.operands[3], "u32") if len(d.operands) > 3 else None

    def execute(warps: Warps, mask: Array | None) -> None:
        block, pc = warps.block, warps.pc
        lanes = np.arange(warps.size) if mask is None else np.flatnonzero(mask)
        to, start, by = into(warps)[lanes], source(warps)[lanes], warps.warp[lanes]
        sizes = np.full(lanes.size, size) if given is None else np.broadcast_to(given(warps), warps.size)[lanes]
        block.shared.check(to, size)
        read = sizes > 0
        block.memory.check(start[read], size)
        note(warps, block.memory, start[read], size, by[read], write=False)
        if block.profile is not None:
            block.profile.shared_access(to, size, by)
        operations = {}
        if block.races is not None:
            operations = {int(w): block.races.start(int(w), "cp.async") for w in np.unique(by)}

        def move() -> None:
            for warp, operation in operations.items():
                block.races.perform(operation, to[by == warp], size, pc, write=True)  # type: ignore[union-attr]
            for word in range(0, size, 4):
                inside = sizes > word
                value = np.zeros(lanes.size, U32)
                value[inside] = block.memory.load(start[inside] + word, 4)
                block.shared.store(to + word, value)

        def finish() -> None:
            if block.options.late:
                move()
            for warp, operation in operations.items():
                block.races.finish(warp, operation)  # type: ignore[union-attr]

        if not block.options.late:
            move()
        _groups(warps, "cp.async").open.append(finish)

    return execute


@form(r"cp\.async(?P<bulk>\.bulk)?\.commit_group")
def commit(d: Decoder, found: re.Match[str]) -> Execute:
    kind = "bulk" if found["bulk"] else "cp.async"

    return lambda warps, mask: _groups(warps, kind).commit()  # type: ignore[func-returns-value]


@form(r"cp\.async(?P<bulk>\.bulk)?\.wait_group(?:\.read)?")
def wait(d: Decoder, found: re.Match[str]) -> Execute:
    kind, pending = "bulk" if found["bulk"] else "cp.async", int(str(d.operands[0]), 0)
    return lambda warps, mask: _groups(warps, kind).wait(pending)  # type: ignore[func-returns-value]


@form(r"cp\.async\.wait_all")
def wait_all(d: Decoder, found: re.Match[str]) -> Execute:
    return lambda warps, mask: _groups(warps, "cp.async").finish()  # type: ignore[func-returns-value]


# mbarriers


class Mbarrier:
    """Arrivals and bytes that its phase still waits for."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.bytes = self.phase = 0
        self.handed: list[Any] = []
        """clocks of those who arrived in this phase"""
        self.visible: list[Any] = []
        """of the last complete phase"""
        self.operations: list[Any] = []
        self.finished: list[Any] = []
        """copies that came in this phase, and in the last complete one"""

    def settle(self) -> None:
        """Complete the phase if nothing is missing."""
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count
            self.visible, self.handed = self.handed, []
            self.finished, self.operations = self.operations, []


def _mbarrier(warps: Warps, place: int) -> Mbarrier:
    found = warps.block.mbarriers.get(place)
    if found is None:
        raise PtxError(f"no mbarrier was initialised at shared byte {place}")
    return found


def _each_lane(warps: Warps, mask: Array | None) -> Array:
    return np.arange(warps.size) if mask is None else np.flatnonzero(mask)


_SHARED = r"(?:\.shared(?:::cta)?)"


@form(rf"mbarrier\.(?P<op>init|inval){_SHARED}\.b64")
def init_mbarrier(d: Decoder, found: re.Match[str]) -> Execute:
    place = d.address(d.operands[0])
    count = d.read(d.operands[1], "u32") if found["op"] == "init" else None

    def execute(warps: Warps, mask: Array | None) -> None:
        lanes, places = _each_lane(warps, mask), place(warps)
        note(warps, warps.block.shared, places[lanes], 8, warps.warp[lanes], write=True)
        for lane in lanes:
            at = int(places[lane])
            if count is not None:
                warps.block.mbarriers[at] = Mbarrier(int(np.broadcast_to(count(warps), warps.size)[lane]))
            else:
                if _mbarrier(warps, at).bytes:
                    raise PtxError(f"the mbarrier at shared byte {at} is invalidated while copies are on their way")
                del warps.block.mbarriers[at]

    return execute


@form(rf"mbarrier\.arrive(?P<expect>\.expect_tx)?(?:\.release\.cta)?{_SHARED}\.b64")
def arrive(d: Decoder, found: re.Match[str]) -> Execute:
    if d.operands[0] != "_":
        raise PtxError("the state of an arrival is not kept here")
    place = d.address(d.operands[1])
    number = d.read(d.operands[2], "u32") if len(d.operands) > 2 else None

    def execute(warps: Warps, mask: Array | None) -> None:
        lanes, places, block = _each_lane(warps, mask), place(warps), warps.block
        note(warps, block.shared, places[lanes], 8, warps.warp[lanes], write=False)
        given = np.ones(warps.size, U32) if number is None else np.broadcast_to(number(warps), warps.size)
        for lane in lanes:
            barrier = _mbarrier(warps, int(places[lane]))
            if found["expect"]:
                barrier.bytes += int(given[lane])
            barrier.left -= 1 if found["expect"] else int(given[lane])
            if barrier.left < 0:
                raise PtxError(f"more arrivals than the {barrier.count} of the mbarrier")
            if block.races is not None:
                barrier.handed.append(block.races.release(int(warps.warp[lane])))
            barrier.settle()
        block.events += 1

    return execute


@form(rf"mbarrier\.(?:try_wait|test_wait)\.parity(?:\.acquire\.cta)?{_SHARED}\.b64")
def try_wait(d: Decoder, found: re.Match[str]) -> Execute:
    put, place, parity = d.write(d.operands[0]), d.address(d.operands[1]), d.read(d.operands[2], "u32")

    def execute(warps: Warps, mask: Array | None) -> str | None:
        lanes, places, block = _each_lane(warps, mask), place(warps), warps.block
        note(warps, block.shared, places[lanes], 8, warps.warp[lanes], write=False)
        result = np.zeros(warps.size, bool)
        parities = np.broadcast_to(parity(warps), warps.size)
        for at in np.unique(places[lanes]):
            barrier = _mbarrier(warps, int(at))
            mine = lanes[places[lanes] == at]
            done = (barrier.phase & 1) != (parities[mine] & 1)
            result[mine] = done
            if block.races is not None:
                for warp in np.unique(warps.warp[mine[done]]):
                    for clocks in barrier.visible:
                        block.races.acquire(int(warp), clocks)
                    for operation in barrier.finished:
                        block.races.finish(int(warp), operation)
        put(warps, result, mask)
        return None if result[lanes].all() else YIELD

    return execute


# bulk and tensor copies


def _later(warps: Warps, barrier: Mbarrier, size: int, move: Finish, operation: Any) -> None:
    """A copy that an mbarrier waits for: moves at once, or when nothing else can go on."""

    def arrive() -> None:
        if warps.block.options.late:
            move()
        barrier.bytes -= size
        if operation is not None:
            barrier.operations.append(operation)
        barrier.settle()

    if not warps.block.options.late:
        move()
    warps.block.pending.append(arrive)


def commit_to(warps: Warps, place: int, finish: Finish, operations: list[Any]) -> None:
    """One arrival at the mbarrier there, after `finish`, when nothing else can go on."""
    barrier = _mbarrier(warps, place)

    def arrive() -> None:
        finish()
        if warps.block.mbarriers.get(place) is not barrier:
            raise PtxError(f"the mbarrier at shared byte {place} was invalidated while products were on their way")
        barrier.left -= 1
        barrier.operations += operations
        barrier.settle()

    warps.block.pending.append(arrive)


def _box(warps: Warps, map_address: int, coordinates: list[int], place: int) -> tuple[Array, Array, Array, int]:
    """(addresses in shared memory, addresses in global memory, which of these are inside, bytes of an element)."""
    found = warps.block.launch.maps.get(map_address - PARAMETER_GENERIC - PARAMETER_START)
    if found is None:
        raise PtxError(f"no tensor map at {map_address:#x}")
    rows, columns = found.box
    width = columns * found.itemsize
    if found.swizzle and width != found.swizzle:
        raise PtxError(f"a box of {width} bytes in a row with a swizzle of {found.swizzle}")
    if place % max(128, 8 * found.swizzle):
        raise PtxError(f"a box at shared byte {place}: expected a multiple of {max(128, 8 * found.swizzle)}")
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    there = swizzled(place + row * width + column * found.itemsize, found.swizzle)
    row, column = row + coordinates[1], column + coordinates[0]
    inside = (row >= 0) & (row < found.shape[0]) & (column >= 0) & (column < found.shape[1])
    return there, found.address + row * found.stride + column * found.itemsize, inside, found.itemsize


def _tensor(d: Decoder, operand: Any) -> Callable[[Warps, int], tuple[int, list[int]]]:
    if not isinstance(operand, Address) or len(operand.coordinates) != 2:
        raise PtxError(f"expected [map, {{x, y}}]; got {operand}")
    address = d.address(Address(operand.base, operand.offset))
    reads = [d.read(part, "s32") for part in operand.coordinates]

    def get(warps: Warps, lane: int) -> tuple[int, list[int]]:
        return int(address(warps)[lane]), [int(np.broadcast_to(r(warps), warps.size)[lane]) for r in reads]

    return get


@form(r"cp\.async\.bulk\.tensor\.2d\.shared::(?:cta|cluster)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes")
def tensor_load(d: Decoder, found: re.Match[str]) -> Execute:
    """What is outside of the tensor is 0."""
    into, tensor, place = d.address(d.operands[0]), _tensor(d, d.operands[1]), d.address(d.operands[2])

    def execute(warps: Warps, mask: Array | None) -> None:
        for lane in _each_lane(warps, mask):
            block = warps.block
            there, addresses, inside, size = _box(warps, *tensor(warps, lane), int(into(warps)[lane]))
            block.memory.check(addresses[inside], size)
            block.shared.check(there, size)
            operation = block.races.start(int(warps.warp[lane]), "tensor load") if block.races is not None else None
            if block.profile is not None:
                block.profile.tensor_copy(int(inside.sum()) * size, write=False)

            def move(
                there: Array = there, addresses: Array = addresses, inside: Array = inside, size: int = size,
                op: Any = operation, pc: int = warps.pc,
            ) -> None:  # fmt: skip
                if op is not None:
                    warps.block.races.perform(op, there, size, pc, write=True)  # type: ignore[union-attr]
                values = np.zeros(there.shape, f"u{size}")
                values[inside] = warps.block.memory.load(addresses[inside], size)
                warps.block.shared.store(there, values)

            _later(warps, _mbarrier(warps, int(place(warps)[lane])), there.size * size, move, operation)

    return execute


@form(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta(?:\.tile)?\.bulk_group")
def tensor_store(d: Decoder, found: re.Match[str]) -> Execute:
    """What is outside of the tensor is not written."""
    tensor, source = _tensor(d, d.operands[0]), d.address(d.operands[1])

    def execute(warps: Warps, mask: Array | None) -> None:
        for lane in _each_lane(warps, mask):
            block, warp = warps.block, int(warps.warp[lane])
            there, addresses, inside, size = _box(warps, *tensor(warps, lane), int(source(warps)[lane]))
            block.memory.check(addresses[inside], size)
            block.shared.check(there, size)
            operation = block.races.start(warp, "tensor store") if block.races is not None else None
            if block.profile is not None:
                block.profile.tensor_copy(int(inside.sum()) * size, write=True)

            def move(
                there: Array = there, addresses: Array = addresses, inside: Array = inside, size: int = size,
                op: Any = operation, pc: int = warps.pc,
            ) -> None:  # fmt: skip
                if op is not None:
                    warps.block.races.perform(op, there, size, pc, write=False)  # type: ignore[union-attr]
                warps.block.memory.store(addresses[inside], warps.block.shared.load(there, size)[inside])

            def finish(move: Finish = move, op: Any = operation, warp: int = warp) -> None:
                if warps.block.options.late:
                    move()
                if op is not None:
                    warps.block.races.finish(warp, op)  # type: ignore[union-attr]

            if not block.options.late:
                move()
            _groups(warps, "bulk").open.append(finish)

    return execute


@form(r"fence\.proxy\.async(?:\.shared::cta)?")
def fence_proxy(d: Decoder, found: re.Match[str]) -> Execute:
    def execute(warps: Warps, mask: Array | None) -> None:
        if warps.block.races is not None:
            for warp in warps.warps_of(mask):
                warps.block.races.fence(warp)

    return execute


@form(r"fence\.(?:mbarrier_init|acq_rel|sc)\S*|membar\.\w+")
def other_fences(d: Decoder, found: re.Match[str]) -> Execute:
    return lambda warps, mask: None
