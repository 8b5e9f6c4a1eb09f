"""tcgen05, the tensor cores of Blackwell: tensor memory, products into it, and its way to and from registers.

Tensor memory has 128 lanes of 512 columns, each of 32 bits; an address has the lane in its upper half, the column in its
lower. A warp reads and writes the 32 lanes of its rank among four. A product of M = 128 rows has row r in lane r; one of
M = 64 has it in lane 32 (r / 16) + r % 16, or in the 16 lanes after these.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import numbers
from .copies import commit_to
from .forms import Decoder, Execute, InFlight, form
from .matrices import operand_rows
from .moves import note
from .numbers import F32, F64, U32, Array
from .races import Operation
from .text import PtxError
from .warps import LANES, POISON, Warps

TENSOR_LANES, TENSOR_COLUMNS = 128, 512
Finish = Callable[[], None]


class TensorMemory:
    """That of a block; what nobody wrote is NaN."""

    def __init__(self, races: Any, first_byte: int) -> None:
        self.cells = np.full((TENSOR_LANES, TENSOR_COLUMNS), POISON["b32"], U32)
        self.allocated: dict[int, int] = {}
        """first column to number of columns"""
        self.may_allocate = True
        self.races, self.first_byte = races, first_byte
        """the race detector, and where in its memory tensor memory begins, two bytes for each cell"""

    def allocate(self, count: int) -> int:
        """First column of a new range: from the end, so that it is not 0."""
        if not self.may_allocate:
            raise PtxError("an allocation of tensor memory after relinquish_alloc_permit")
        if count not in (32, 64, 128, 256, 512):
            raise PtxError(f"{count} columns of tensor memory: expected a power of 2 from 32 to 512")
        start = min(self.allocated, default=TENSOR_COLUMNS) - count
        if start < 0:
            raise PtxError(f"no {count} columns of tensor memory are left")
        self.allocated[start] = count
        return start

    def free(self, start: int, count: int) -> None:
        """Give back a range."""
        if self.allocated.pop(start, None) != count:
            raise PtxError(f"{count} columns of tensor memory from {start} on were not allocated so")

    def check(self, columns: Array) -> None:
        """Raise unless all columns are of one range."""
        low, high = int(columns.min()), int(columns.max())
        if not any(start <= low and high < start + count for start, count in self.allocated.items()):
            raise PtxError(f"columns {low} to {high} of tensor memory are not allocated")

    def addresses(self, lanes: Array, columns: Array) -> Array:
        """For the race detector."""
        return self.first_byte + 2 * (lanes * TENSOR_COLUMNS + columns)


def _whole_warps(warps: Warps, mask: Array | None, what: str) -> Array:
    whole = warps.all_of_warps(mask, what)
    return np.arange(warps.count) if whole is None else np.flatnonzero(whole)


def _uniform(warps: Warps, value: Array, chosen: Array) -> Array:
    """One number for each chosen warp, which all of its lanes have."""
    by_warp = np.broadcast_to(value, warps.size).reshape(-1, LANES)[chosen]
    if (by_warp != by_warp[:, :1]).any():
        raise PtxError("lanes of a warp have different addresses in tensor memory")
    return by_warp[:, 0].astype(np.int64)


@form(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32")
def allocate(d: Decoder, found: re.Match[str]) -> Execute:
    into, count = d.address(d.operands[0]), d.read(d.operands[1], "u32")

    def execute(warps: Warps, mask: Array | None) -> None:
        for warp in _whole_warps(warps, mask, "tcgen05.alloc"):
            place = _uniform(warps, into(warps), np.array([warp]))
            warps.block.shared.check(place, 4)
            if warps.block.races is not None:  # later asynchronous writes there need no fence, as the manual says
                operation = warps.block.races.start(warps.first + int(warp), "tensor load")
                warps.block.races.perform(operation, place, 4, warps.pc, write=True)
                warps.block.races.finish(warps.first + int(warp), operation)
            start = warps.block.tensor.allocate(int(count(warps)[0]))
            warps.block.shared.store(place, np.array([start], U32))

    return execute


@form(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32")
def free(d: Decoder, found: re.Match[str]) -> Execute:
    start, count = d.read(d.operands[0], "u32"), d.read(d.operands[1], "u32")

    def execute(warps: Warps, mask: Array | None) -> None:
        chosen = _whole_warps(warps, mask, "tcgen05.dealloc")
        tensor = warps.block.tensor
        for warp, column in zip(warps.first + chosen, _uniform(warps, start(warps), chosen), strict=True):
            columns = column + np.arange(int(count(warps)[0]))
            tensor.free(int(column), columns.size)
            if tensor.races is not None:  # another block may write there now
                places = tensor.addresses(np.arange(TENSOR_LANES)[:, None], columns).ravel()
                tensor.races.access(places, 2, np.full(places.size, warp), warps.pc, write=True)

    return execute


@form(r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned")
def relinquish(d: Decoder, found: re.Match[str]) -> Execute:
    def execute(warps: Warps, mask: Array | None) -> None:
        if _whole_warps(warps, mask, "tcgen05.relinquish_alloc_permit").size:
            warps.block.tensor.may_allocate = False

    return execute


_ACCESS = r"\.sync\.aligned\.(?P<shape>32x32b|16x32bx2)\.x(?P<count>1|2|4|8|16|32|64|128)\.b32"


class _Cells(NamedTuple):
    """What a load or a store touches, [warps that take part, lanes] and [.., .., registers]."""

    chosen: Array
    lanes: Array
    columns: Array


def _cells(warps: Warps, found: re.Match[str], address: Array, split: int, mask: Array | None) -> _Cells:
    chosen = _whole_warps(warps, mask, "an access of tensor memory")
    base = _uniform(warps, address, chosen)
    lane, rank = base >> 16, (warps.first + chosen) % 4
    first, thread = lane - 32 * rank, np.arange(LANES)
    if found["shape"] == "32x32b":
        allowed, row, shift = first == 0, thread, 0 * thread
    else:  # threads 16 to 31 have the same lanes as 0 to 15, `split` columns further
        allowed, row, shift = (first == 0) | (first == 16), thread % 16, thread // 16 * split
    if not allowed.all():
        raise PtxError(f"warps of rank {rank} access tensor memory from lane {lane} on")
    columns = (base & 0xFFFF)[:, None, None] + shift[:, None] + np.arange(int(found["count"]))
    if chosen.size:
        warps.block.tensor.check(columns)
    return _Cells(chosen, lane[:, None] + row, columns)


def _note(warps: Warps, cells: _Cells, pc: int) -> None:
    """The warps read these cells now."""
    tensor = warps.block.tensor
    if tensor.races is not None and cells.chosen.size:
        places = tensor.addresses(cells.lanes[..., None], cells.columns)
        by = np.repeat(warps.first + cells.chosen, places[0].size)
        tensor.races.access(places.ravel(), 2, by, pc, write=False)


@form(rf"tcgen05\.st{_ACCESS}")
def store(d: Decoder, found: re.Match[str]) -> Execute:
    place, split = d.address(d.operands[0]), _split(d, 1)
    reads = [d.read(part, "b32") for part in d.vector(d.operands[-1])]
    _check_registers(found, len(reads))

    def execute(warps: Warps, mask: Array | None) -> None:
        cells, pc = _cells(warps, found, place(warps), split, mask), warps.pc
        values = np.stack([np.broadcast_to(read(warps), warps.size).reshape(-1, LANES) for read in reads], -1)
        operations = _start_stores(warps, cells, pc)

        def move() -> None:
            warps.block.tensor.cells[cells.lanes[..., None], cells.columns] = values[cells.chosen]

        def finish() -> None:
            if warps.block.options.late:
                move()
            for warp, operation in operations:
                warps.block.tensor.races.finish(warp, operation)

        if not warps.block.options.late:
            move()
        warps.state.setdefault("tensor stores", []).append(finish)

    return execute


def _start_stores(warps: Warps, cells: _Cells, pc: int) -> list[tuple[int, Operation]]:
    """For the race detector: until their wait, stores are in order with nothing, whenever they are done."""
    tensor, started = warps.block.tensor, []
    if tensor.races is not None:
        for number, warp in enumerate(warps.first + cells.chosen):
            operation = tensor.races.start(int(warp), "store to tensor memory")
            tensor.races.perform(
                operation, tensor.addresses(cells.lanes[number][:, None], cells.columns[number]), 2, pc, write=True
            )
            started.append((int(warp), operation))
    return started


@form(rf"tcgen05\.ld{_ACCESS}")
def load(d: Decoder, found: re.Match[str]) -> Execute:
    """Instructions that read its registers wait for them; what follows in other ways waits by `tcgen05.wait::ld`."""
    place, split = d.address(d.operands[1]), _split(d, 2)
    registers = [d.program.register(part) for part in d.vector(d.operands[0])]
    _check_registers(found, len(registers))
    source = str(d.instruction)

    def execute(warps: Warps, mask: Array | None) -> None:
        cells, pc = _cells(warps, found, place(warps), split, mask), warps.pc
        if cells.chosen.size != warps.count:
            raise PtxError("tcgen05.ld in a part of the warps that run together")

        def finish() -> None:
            if warps.registers[registers[0]] is not there:
                return
            _note(warps, cells, pc)
            values = warps.block.tensor.cells[cells.lanes[..., None], cells.columns].reshape(warps.size, -1)
            for number, register in enumerate(registers):
                warps.registers[register] = np.ascontiguousarray(values[:, number])

        there = InFlight(source, finish)
        for register in registers:
            warps.registers[register] = there
        if warps.block.options.late:
            warps.state.setdefault("tensor loads", []).append(finish)
        else:
            finish()

    return execute


def _split(d: Decoder, at: int) -> int:
    return int(str(d.operands[at]), 0) if len(d.operands) > 2 else 0


def _check_registers(found: re.Match[str], given: int) -> None:
    if given != int(found["count"]):
        raise PtxError(f"expected {found['count']} registers; got {given}")


@form(r"tcgen05\.wait::(?P<kind>ld|st)\.sync\.aligned")
def wait(d: Decoder, found: re.Match[str]) -> Execute:
    kind = {"ld": "tensor loads", "st": "tensor stores"}[found["kind"]]

    def execute(warps: Warps, mask: Array | None) -> None:
        _whole_warps(warps, mask, "tcgen05.wait")
        for finish in warps.state.pop(kind, []):
            finish()

    return execute


@form(r"tcgen05\.fence::(?:before|after)_thread_sync")
def fence(d: Decoder, found: re.Match[str]) -> Execute:
    """Waits and barriers are what orders accesses here."""
    return lambda warps, mask: None


class _Shape(NamedTuple):
    """An instruction descriptor: fp16 or bf16 operands, both K-major, to f32."""

    rows: int
    columns: int
    kind: str

    @classmethod
    def of(cls, descriptor: int) -> _Shape:
        kinds = {0: "f16", 1: "bf16"}
        a, b = descriptor >> 7 & 7, descriptor >> 10 & 7
        rows, columns = (descriptor >> 24 & 31) << 4, (descriptor >> 17 & 63) << 3
        rest = descriptor & ~(63 << 17 | 31 << 24 | 7 << 7 | 7 << 10)
        fits = (rows == 64 and columns % 8 == 0) or (rows == 128 and columns % 16 == 0)
        if a != b or a not in kinds or rest != 1 << 4 or not fits or not 8 <= columns <= 256:
            raise PtxError(
                f"instruction descriptor {descriptor:#x}: expected fp16 or bf16 to f32, K-major, M 64 or 128"
            )
        return cls(rows, columns, kinds[a])


@form(r"tcgen05\.mma\.cta_group::1\.kind::f16")
def multiply(d: Decoder, found: re.Match[str]) -> Execute:
    """D [M, N] (+)= A [M, 16] B [N, 16]^T, by each lane that takes part; its products run in order."""
    into, keeps = d.address(d.operands[0]), d.read(d.operands[4], "pred")
    first, second = d.read(d.operands[1], "b64"), d.read(d.operands[2], "b64")
    descriptor = d.read(d.operands[3], "u32")

    def execute(warps: Warps, mask: Array | None) -> None:
        block, pc = warps.block, warps.pc
        for lane in np.arange(warps.size) if mask is None else np.flatnonzero(mask):
            a, b, shape, keep, place = (
                int(np.broadcast_to(read(warps), warps.size)[lane]) for read in (first, second, descriptor, keeps, into)
            )
            operation = block.races.start(int(warps.warp[lane]), "product") if block.races is not None else None
            finish = functools.partial(_multiply, block, _Shape.of(shape), a, b, place, keep, operation, pc)
            issued = warps.state.setdefault("tensor products", {}).setdefault(int(lane), [])
            issued.append((finish, operation))
            if not block.options.late:
                finish()

    return execute


def _multiply(block: Any, shape: _Shape, a: int, b: int, place: int, keep: int, operation: Any, pc: int) -> None:
    row = np.arange(shape.rows)
    lane = place >> 16
    if lane not in ((0,) if shape.rows == 128 else (0, 16)):
        raise PtxError(f"a product of {shape.rows} rows in tensor memory from lane {lane} on")
    lanes = lane + (row if shape.rows == 128 else row // 16 * 32 + row % 16)
    columns = (place & 0xFFFF) + np.arange(shape.columns)
    tensor = block.tensor
    tensor.check(columns)
    operations = [] if operation is None else [operation]
    left, right = (
        operand_rows(block, each, np.arange(size), numbers.DECODE[shape.kind], operations, pc)
        for each, size in ((a, shape.rows), (b, shape.columns))
    )
    cells = (lanes[:, None], columns)
    if operation is not None:
        tensor.races.perform(operation, tensor.addresses(*cells), 2, pc, write=True)
    total = left @ right.T
    if keep:
        total = total + tensor.cells[cells].view(F32).astype(F64)
    tensor.cells[cells] = total.astype(F32).view(U32)


@form(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(?:\.shared::cluster)?\.b64")
def commit(d: Decoder, found: re.Match[str]) -> Execute:
    """One arrival when all products that the lane has issued are complete."""
    place = d.address(d.operands[0])

    def execute(warps: Warps, mask: Array | None) -> None:
        for lane in np.arange(warps.size) if mask is None else np.flatnonzero(mask):
            issued = warps.state.get("tensor products", {}).pop(int(lane), [])
            at, warp = place(warps)[[lane]], warps.warp[[lane]]
            note(warps, warps.block.shared, at, 8, warp, write=False)

            def finish(issued: list[Any] = issued) -> None:
                if warps.block.options.late:
                    for multiply, _ in issued:
                        multiply()

            commit_to(warps, int(at[0]), finish, [operation for _, operation in issued if operation is not None])

    return execute
