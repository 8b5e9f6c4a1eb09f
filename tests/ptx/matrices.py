"""Matrix instructions: ldmatrix, stmatrix, mma and wgmma. Their fragment layouts are index arrays, made once.

A product is exact, added to its accumulator in f64, and rounded to f32 once; hardware rounds in its own ways.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import numbers
from .forms import Decoder, Execute, InFlight, form
from .memory import Space
from .moves import note
from .numbers import F32, F64, U16, U32, Array
from .text import PtxError
from .warps import LANES, Warps

if TYPE_CHECKING:
    from .block import Block

_LANE = np.arange(LANES)
_ROW, _PAIR = _LANE >> 2, 2 * (_LANE & 3)
ROW_BYTES = 16
"""Of an 8 x 8 matrix of 16-bit elements."""

SWIZZLES = {1: 128, 2: 64, 3: 32}
"""Bits 62 and 63 of a matrix descriptor to the bytes of the swizzle's pattern."""


def swizzled(addresses: Array, pattern: int) -> Array:
    """Addresses with the 16-byte units of each 128, 64 or 32 bytes exchanged; patterns start at multiples of them."""
    if pattern == 0:
        return addresses
    return addresses ^ ((addresses >> 3) & (pattern - 16))


class _Tile(NamedTuple):
    """What an ldmatrix or stmatrix of one or more 8 x 8 matrices touches."""

    warps: Array
    """[w] rows of [warps] that take part"""
    rows: Array
    """[w, matrices, 8] addresses of rows"""


def _tile(warps: Warps, addresses: Array, count: int, mask: Array | None, what: str) -> _Tile:
    whole = warps.all_of_warps(mask, what)
    chosen = np.arange(warps.count) if whole is None else np.flatnonzero(whole)
    rows = addresses.reshape(-1, LANES)[chosen, : 8 * count].reshape(-1, count, 8)
    warps.block.shared.check(rows, ROW_BYTES)
    return _Tile(chosen, rows)


def _note_tile(warps: Warps, tile: _Tile, *, write: bool, same: Array | None = None) -> None:
    by = np.repeat(tile.warps + warps.first, tile.rows[0].size) if tile.warps.size else tile.warps
    note(warps, warps.block.shared, tile.rows.ravel(), ROW_BYTES, by, write=write, same=same)


_MATRICES = r"\.sync\.aligned\.m8n8\.x(?P<count>1|2|4)(?P<trans>\.trans)?\.shared(?:::cta)?\.b16"


@form(rf"ldmatrix{_MATRICES}")
def load_matrices(d: Decoder, found: re.Match[str]) -> Execute:
    """Lane l gets two neighbours of row l / 4 of each matrix, or with .trans of its column."""
    count = int(found["count"])
    address, puts = d.address(d.operands[1]), [d.write(part) for part in d.vector(d.operands[0])]
    if len(puts) != count:
        raise PtxError(f"expected {count} registers; got {len(puts)}")

    def execute(warps: Warps, mask: Array | None) -> None:
        tile = _tile(warps, address(warps), count, mask, "ldmatrix")
        _note_tile(warps, tile, write=False)
        shared = warps.block.shared
        for number, put in enumerate(puts):
            rows = tile.rows[:, number]
            if found["trans"]:
                low = shared.load(rows[:, _PAIR] + 2 * _ROW, 2).astype(U32)
                value = low | shared.load(rows[:, _PAIR + 1] + 2 * _ROW, 2).astype(U32) << U32(16)
            else:
                value = shared.load(rows[:, _ROW] + 2 * _PAIR, 4)
            put(warps, _spread(warps, tile.warps, value), mask)

    return execute


@form(rf"stmatrix{_MATRICES}")
def store_matrices(d: Decoder, found: re.Match[str]) -> Execute:
    """The reverse of ldmatrix."""
    count = int(found["count"])
    address, reads = d.address(d.operands[0]), [d.read(part, "b32") for part in d.vector(d.operands[1])]
    if len(reads) != count:
        raise PtxError(f"expected {count} registers; got {len(reads)}")

    def execute(warps: Warps, mask: Array | None) -> None:
        whole = _tile(warps, address(warps), count, mask, "stmatrix")
        values = [np.broadcast_to(read(warps), warps.size).reshape(-1, LANES) for read in reads]
        shared = warps.block.shared
        for number in range(whole.warps.size):  # one by one, to see which writes change nothing
            tile = _Tile(whole.warps[number : number + 1], whole.rows[number : number + 1])
            words = tile.rows[..., None] + np.arange(0, ROW_BYTES, 4)
            before = shared.load(words, 4)
            for matrix, value in enumerate(values):
                _store_matrix(shared, tile.rows[:, matrix], value[tile.warps], bool(found["trans"]))
            same = (shared.load(words, 4) == before).all(-1).ravel()
            _note_tile(warps, tile, write=True, same=same)

    return execute


def _store_matrix(shared: Space, rows: Array, value: Array, trans: bool) -> None:
    if trans:
        shared.store(rows[:, _PAIR] + 2 * _ROW, (value & U32(0xFFFF)).astype(U16))
        shared.store(rows[:, _PAIR + 1] + 2 * _ROW, (value >> U32(16)).astype(U16))
    else:
        shared.store(rows[:, _ROW] + 2 * _PAIR, value)


def _spread(warps: Warps, chosen: Array, value: Array) -> Array:
    if chosen.size == warps.count:
        return value.reshape(-1)
    whole = np.zeros((warps.count, LANES), value.dtype)
    whole[chosen] = value
    return whole.reshape(-1)


# mma.m16n8k16. Element (i, lane, half) of a fragment's registers to its place in the matrix.
_HALF = np.arange(2)


def _places(rows: Array, columns: Array, width: int) -> Array:
    """Inverse of a fragment layout: for each element of the matrix its index among register x lane x half."""
    flat = (rows * width + columns).ravel()
    inverse = np.empty(flat.size, np.int64)
    inverse[flat] = np.arange(flat.size)
    return inverse


def _grid(registers: int) -> tuple[Array, Array, Array]:
    return np.meshgrid(np.arange(registers), _LANE, _HALF, indexing="ij")  # type: ignore[return-value]


_i, _l, _h = _grid(4)
A_PLACES = _places((_l >> 2) + 8 * (_i & 1), 2 * (_l & 3) + _h + 8 * (_i >> 1), 16).reshape(16, 16)
"""A [16, 16] in four registers: register 0 rows 0 to 7, columns 0 to 7; 1 rows 8 to 15; 2 and 3 columns 8 to 15."""
_i, _l, _h = _grid(2)
B_PLACES = _places(2 * (_l & 3) + _h + 8 * _i, _l >> 2, 8).reshape(16, 8)
"""B [16, 8] in two registers: rows 0 to 7 and 8 to 15 of column lane / 4."""
_i, _l = np.meshgrid(np.arange(4), _LANE, indexing="ij")
C_ROWS, C_COLUMNS = (_l >> 2) + 8 * (_i >> 1), 2 * (_l & 3) + (_i & 1)
"""C and D [16, 8] in four registers of f32: row and column of each (register, lane)."""


@form(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(?P<type>bf16|f16)\.(?P=type)\.f32")
def multiply(d: Decoder, found: re.Match[str]) -> Execute:
    puts = [d.write(part) for part in d.vector(d.operands[0])]
    sources = [[d.read(part, "b32") for part in d.vector(d.operands[i])] for i in (1, 2)]
    addends = [d.read(part, "f32") for part in d.vector(d.operands[3])]
    if [len(puts), len(sources[0]), len(sources[1]), len(addends)] != [4, 4, 2, 4]:
        raise PtxError("expected fragments of 4, 4, 2 and 4 registers")
    decode = numbers.DECODE[found["type"]]

    def operand(warps: Warps, reads: list[Any], places: Array) -> Array:
        registers = np.stack([np.broadcast_to(read(warps), warps.size) for read in reads])
        halves = registers.reshape(len(reads), warps.count, LANES).transpose(1, 0, 2).copy().view(U16)
        return decode(halves.reshape(warps.count, -1)[:, places]).astype(F64)

    def execute(warps: Warps, mask: Array | None) -> None:
        warps.all_of_warps(mask, "mma")
        total = np.matmul(operand(warps, sources[0], A_PLACES), operand(warps, sources[1], B_PLACES))
        for number, (put, read) in enumerate(zip(puts, [read(warps) for read in addends], strict=True)):
            sums = total[:, C_ROWS[number], C_COLUMNS[number]].reshape(-1) + read.astype(F64)
            put(warps, sums.astype(F32), mask)

    return execute


class _Product(NamedTuple):
    """A wgmma that was issued."""

    key: tuple[int, ...]
    """its accumulator registers"""
    a: Array
    """[warps] descriptors"""
    b: Array
    columns: int
    decode: Any
    pc: int
    operations: list[Any]
    """for the race detector, of each warp"""


class _Accumulator:
    """Registers of products in flight, as matrices [warps, 16, columns]."""

    def __init__(self, values: Array, source: str) -> None:
        self.values, self.source = values, source


class _State:
    """What warps have issued and not waited for."""

    def __init__(self) -> None:
        self.accumulators: dict[tuple[int, ...], _Accumulator] = {}
        self.open: list[_Product] = []
        self.groups: list[list[_Product]] = []
        self.fenced = False


def _state(warps: Warps) -> _State:
    return warps.state.setdefault("wgmma", _State())


def _layout(columns: int) -> tuple[Array, Array]:
    """Row and column in a warp's [16, columns] of each (register, lane)."""
    i, lane = np.meshgrid(np.arange(columns // 2), _LANE, indexing="ij")
    return (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)


@form(r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<type>bf16|f16)\.(?P=type)")
def multiply_warpgroup(d: Decoder, found: re.Match[str]) -> Execute:
    """D [64, n] += A [64, 16] B [n, 16]^T from shared memory; warp w of a warpgroup has rows 16 w to 16 w + 15."""
    columns = int(found["n"])
    registers = d.vector(d.operands[0])
    if len(registers) != columns // 2 or list(d.operands[4:]) != ["1", "1", "0", "0"]:
        raise PtxError(f"expected {columns // 2} registers and operands 1, 1, 0, 0; got {d.operands[4:]}")
    reads, key = [d.read(r, "f32") for r in registers], tuple(d.program.register(r) for r in registers)
    first, second, keeps = d.read(d.operands[1], "b64"), d.read(d.operands[2], "b64"), d.read(d.operands[3], "pred")
    decode, (rows, cols) = numbers.DECODE[found["type"]], _layout(columns)
    source = str(d.instruction)

    def execute(warps: Warps, mask: Array | None) -> None:
        if mask is not None:
            raise PtxError("wgmma in a part of the warps that run together")
        state, block = _state(warps), warps.block
        if key not in state.accumulators:
            if not state.fenced:
                raise PtxError("wgmma without a wgmma.fence after its registers were last used")
            values = np.empty((warps.count, 16, columns), F32)
            for number, read in enumerate(reads):
                values[:, rows[number], cols[number]] = np.broadcast_to(read(warps), warps.size).reshape(-1, LANES)
            state.accumulators[key] = _Accumulator(values, source)
            for number in key:
                warps.registers[number] = InFlight(source)
        keep = np.broadcast_to(keeps(warps), warps.size)
        if not keep.all():
            if keep.any() or any(p.key == key for group in [*state.groups, state.open] for p in group):
                raise PtxError("scale-d that differs between lanes, or with products in flight")
            state.accumulators[key].values[:] = 0
        operations = []
        if block.races is not None:
            operations = [block.races.start(w, "product") for w in warps.warps_of(None)]
        a, b = (np.broadcast_to(read(warps), warps.size)[::LANES].astype(np.int64) for read in (first, second))
        product = _Product(key, a, b, columns, decode, warps.pc, operations)
        state.open.append(product)
        if not block.options.late:
            _perform(warps, product)

    return execute


def operand_rows(block: Block, descriptor: int, rows: Array, decode: Any, operations: list[Any], pc: int) -> Array:
    """Rows [r, 16] of a K-major operand in shared memory, read by these operations, as f64."""
    pattern = SWIZZLES.get(descriptor >> 62 & 3)
    if pattern is None or descriptor >> 49 & 7 or descriptor >> 61 & 1:
        raise PtxError(f"matrix descriptor {descriptor:#x}: expected a swizzle and no base offset")
    start, group = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    places = start + (rows[:, None] // 8) * group + (rows[:, None] % 8) * pattern + 2 * np.arange(16)
    places = swizzled(places, pattern)
    for operation in operations:
        block.races.perform(operation, places, 2, pc, write=False)  # type: ignore[union-attr]
    return decode(block.shared.load(places, 2)).astype(F64)


def _perform(warps: Warps, product: _Product) -> None:
    values = warps.state["wgmma"].accumulators[product.key].values
    for start in range(0, warps.count, 4):
        some = range(start, min(start + 4, warps.count))
        a, b = int(product.a[start]) & 2**64 - 1, int(product.b[start]) & 2**64 - 1
        if (product.a[some] != product.a[start]).any() or (product.b[some] != product.b[start]).any():
            raise PtxError("warps of a warpgroup have different matrix descriptors")
        ranks = (warps.first + np.array(some)) % 4
        rows = (16 * ranks[:, None] + np.arange(16)).ravel()
        by = [product.operations[number] for number in some if product.operations]
        left = operand_rows(warps.block, a, rows, product.decode, by, product.pc)
        right = operand_rows(warps.block, b, np.arange(product.columns), product.decode, by, product.pc)
        sums = (left @ right.T).reshape(len(some), 16, -1)
        values[some] = (values[some].astype(F64) + sums).astype(F32)


@form(r"wgmma\.fence\.sync\.aligned")
def fence_products(d: Decoder, found: re.Match[str]) -> Execute:
    def execute(warps: Warps, mask: Array | None) -> None:
        _state(warps).fenced = True

    return execute


@form(r"wgmma\.commit_group\.sync\.aligned")
def commit_products(d: Decoder, found: re.Match[str]) -> Execute:
    def execute(warps: Warps, mask: Array | None) -> None:
        state = _state(warps)
        state.groups.append(state.open)
        state.open = []

    return execute


@form(r"wgmma\.wait_group\.sync\.aligned")
def wait_for_products(d: Decoder, found: re.Match[str]) -> Execute:
    pending = int(str(d.operands[0]), 0)
    layouts: dict[int, tuple[Array, Array]] = {}

    def execute(warps: Warps, mask: Array | None) -> None:
        state, block = _state(warps), warps.block
        while len(state.groups) > pending:
            for product in state.groups.pop(0):
                if block.options.late:
                    _perform(warps, product)
                for warp, operation in zip(warps.warps_of(None), product.operations, strict=False):
                    block.races.finish(warp, operation)  # type: ignore[union-attr]
        busy = {product.key for group in [*state.groups, state.open] for product in group}
        for key in [key for key in state.accumulators if key not in busy]:
            values = state.accumulators.pop(key).values
            rows, cols = layouts.setdefault(len(key), _layout(2 * len(key)))
            for number, register in enumerate(key):
                warps.registers[register] = values[:, rows[number], cols[number]].reshape(-1).view(U32)
            state.fenced = False

    return execute
