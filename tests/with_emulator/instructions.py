"""Instructions that tinygrad's emulator does otherwise than the hardware, done here in numpy.

- 32x32 matrix products: it writes row 16 * (lane // 32) + register where the hardware has
  8 * (register // 4) + 4 * (lane // 32) + register % 4 (AMD's matrix instruction calculator; Triton relies on it).
- Operands from other lanes (DPP): it reads lane after lane from the register that it writes, takes `row_bcast` for
  something else, and writes to lanes that have no source.
- `ds_bpermute_b32`: it does not take the lane modulo 64, so that all waves but the first read 0.
- `ds_swizzle_b32`: it does not have it.
- `buffer_load_ushort`, `buffer_store_short`: it loads and stores 4 bytes, at a multiple of 4.
- 16-bit numbers in v128 to v255: in short encodings it takes these for the upper halves of v0 to v127, as on RDNA 3. On
  CDNA they are the registers of their numbers, and a 16-bit result zeroes the upper half of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from test.mockgpu.amd import emu
from tinygrad.renderer.amd import decode_inst

LANES = np.arange(64)
EXEC, PC = 126, 256
"""Of the emulator's scalar registers: the lanes that take part, and its program counter."""

Registers = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Scalar [260], vector [256, 64] and accumulation registers [256, 64], uint32."""


def product(inst: Any, registers: Registers) -> None:
    """`v_mfma_f32_32x32x<k>_<type>`: D = A B^T + C for A, B [32, k]. Half a wave has half of the k."""
    scalars, vectors, accumulators = registers
    name = inst.op.name.split("_")
    width = int(name[3].split("X")[2])
    count = width // 2 * (4 if name[4] == "F32" else 2) // 4  # registers of an operand

    def operand(source: Any) -> np.ndarray:
        assert source.offset >= 256
        raw = np.ascontiguousarray(vectors[source.offset - 256 :][:count].T)  # [64, count]
        if name[4] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view({"F16": np.float16, "F32": np.float32}[name[4]]).astype(np.float32)
        return np.concatenate([values[:32], values[32:]], axis=1)  # [32, width]

    assert inst.acc == 0, "operands in accumulation registers"
    rows = 8 * (np.arange(16)[:, None] // 4) + 4 * (LANES // 32) + np.arange(16)[:, None] % 4
    into = accumulators if inst.acc_cd else vectors
    if inst.src2.offset >= 256:
        c = into[inst.src2.offset - 256 :][:16].view(np.float32)
    else:
        c = scalars[inst.src2.offset : inst.src2.offset + 1].view(np.float32)
    d = (operand(inst.src0) @ operand(inst.src1).T)[rows, LANES % 32] + c
    into[inst.vdst.offset - 256 :][:16] = d.view(np.uint32)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "V_MOV_B32": lambda x: x,
    "V_ADD_F32": np.add,
    "V_MUL_F32": np.multiply,
    "V_MAX_F32": np.fmax,
}
"""Of which an operand may come from another lane."""


def across_lanes(inst: Any, registers: Registers) -> None:
    """An operation whose first operand is another lane's; lanes that have no source take 0 or keep their result."""
    scalars, vectors, _ = registers
    control, row = inst.dpp, LANES // 16
    there = np.ones(64, bool)
    if control < 0x100:  # quad_perm
        source = LANES // 4 * 4 + (control >> 2 * (LANES % 4) & 3)
    elif 0x100 < control < 0x110:  # row_shl
        source = LANES + control % 16
        there = source // 16 == row
    elif 0x110 < control < 0x120:  # row_shr
        source = LANES - control % 16
        there = source // 16 == row
    elif 0x120 < control < 0x130:  # row_ror
        source = 16 * row + (LANES - control % 16) % 16
    elif control == 0x140:  # row_mirror
        source = 16 * row + 15 - LANES % 16
    elif control == 0x141:  # row_half_mirror
        source = LANES // 8 * 8 + 7 - LANES % 8
    elif control == 0x142:  # row_bcast:15
        source, there = 16 * row - 1, LANES >= 16
    elif control == 0x143:  # row_bcast:31
        source, there = np.full(64, 31), LANES >= 32
    else:
        raise NotImplementedError(f"DPP control {control:#x}")
    chosen = (inst.row_mask >> row & 1) & (inst.bank_mask >> LANES % 16 // 4 & 1) & active(scalars)
    values = vectors[inst.vsrc0.offset - 256][source % 64]
    if inst.bc:
        values = np.where(there, values, 0).astype(np.uint32)
    else:
        chosen = chosen & there
    operands = [values, vectors[inst.vsrc1.offset - 256]] if hasattr(inst, "vsrc1") else [values]
    assert inst.src0_neg == inst.src0_abs == inst.src1_neg == inst.src1_abs == 0
    result = OPERATIONS[inst.op.name.removesuffix("_E32")](*(x.view(np.float32) for x in operands))
    into = vectors[inst.vdst.offset - 256]
    into[:] = np.where(chosen.astype(bool), result.view(np.uint32), into)


def permute(inst: Any, registers: Registers) -> None:
    """`ds_bpermute_b32`: from the lane that each lane names in bytes, modulo 64; 0 from a lane that does not take part."""
    scalars, vectors, _ = registers
    source = (vectors[inst.addr.offset - 256].astype(np.int64) + (inst.offset1 << 8 | inst.offset0)) // 4 % 64
    values = np.where(active(scalars), vectors[inst.data0.offset - 256], 0)[source]
    into = vectors[inst.vdst.offset - 256]
    into[:] = np.where(active(scalars), values, into)


def swizzle(inst: Any, registers: Registers) -> None:
    """`ds_swizzle_b32`: within each half of a wave from lane ((lane & and) | or) ^ xor, or within groups of four."""
    scalars, vectors, _ = registers
    pattern, lane = inst.offset1 << 8 | inst.offset0, LANES % 32
    if pattern >> 15:
        source = LANES // 4 * 4 + (pattern >> 2 * (LANES % 4) & 3)
    else:
        source = LANES // 32 * 32 + ((lane & pattern & 31 | pattern >> 5 & 31) ^ pattern >> 10 & 31)
    into = vectors[inst.vdst.offset - 256]
    into[:] = np.where(active(scalars), vectors[inst.addr.offset - 256][source], into)


CONVERSIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "V_CVT_F16_F32_E32": lambda x: x.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32),
    "V_CVT_F32_F16_E32": lambda x: x.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
}


def convert(inst: Any, registers: Registers) -> None:
    """Between fp16 and fp32, to nearest; fp16 is in the lower half of a register."""
    scalars, vectors, _ = registers
    assert inst.src0.offset >= 256
    into = vectors[inst.vdst.offset - 256]
    with np.errstate(over="ignore"):
        result = CONVERSIONS[inst.op.name](vectors[inst.src0.offset - 256])
    into[:] = np.where(active(scalars), result, into)


def has_high_half(inst: Any) -> bool:
    """Whether the emulator would take a 16-bit operand in v128 to v255 for half of another register."""
    if not inst.op.name.endswith("_E32") or 16 not in inst.canonical_op_bits.values():
        return False
    operands = (getattr(inst, name, None) for name in ("src0", "vsrc1", "vdst"))
    return any(getattr(operand, "offset", 0) >= 256 + 128 for operand in operands)


def access_short(inst: Any, registers: Registers) -> None:
    """`buffer_load_ushort`, `buffer_store_short`: lanes outside of the buffer load 0 and store nothing."""
    scalars, vectors, _ = registers
    assert inst.idxen == inst.lds == inst.acc == 0
    low, high, size, _ = (int(x) for x in scalars[inst.srsrc.offset :][:4])
    offsets = np.full(64, inst.offset, np.int64)
    if inst.offen:
        offsets += vectors[inst.vaddr.offset - 256]
    there = active(scalars) & (offsets % 2**32 + 2 <= size)
    base = low + ((high & 0xFFFF) << 32) + int(scalars[inst.soffset.offset])
    data = vectors[inst.vdata.offset - 256]
    memory = {lane: ctypes.c_uint16.from_address(base + int(offsets[lane]) % 2**32) for lane in np.flatnonzero(there)}
    if "STORE" in inst.op.name:
        for lane, word in memory.items():
            word.value = int(data[lane]) & 0xFFFF
    else:
        data[active(scalars)] = 0
        for lane, word in memory.items():
            data[lane] = word.value


def active(scalars: np.ndarray) -> np.ndarray:
    """[64] bool: which lanes take part."""
    return (scalars[EXEC + LANES // 32] >> (LANES % 32).astype(np.uint32) & 1).astype(bool)


def replacement(inst: Any) -> Callable[[Any, Registers], None] | None:
    """What does an instruction here, or None."""
    name = inst.op.name
    if name.startswith("V_MFMA_F32_32X32X"):
        return product
    if has_high_half(inst):
        assert name in CONVERSIONS, f"{name} of 16-bit numbers in v128 to v255"
        return convert
    if hasattr(type(inst), "dpp"):
        assert name.removesuffix("_E32") in OPERATIONS, f"{name} with DPP"
        return across_lanes
    if name in ("BUFFER_LOAD_USHORT", "BUFFER_STORE_SHORT"):
        return access_short
    assert not name.startswith("BUFFER") or "DWORD" in name, f"{name} is not in the emulator"
    return {"DS_BPERMUTE_B32": permute, "DS_SWIZZLE_B32": swizzle}.get(name)


def _array(pointer: ctypes.c_uint64, *shape: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint32 * int(np.prod(shape))).from_address(pointer.value)).reshape(shape)


def _runner(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def runner(code: bytes, arch: str) -> Any:
        inst = decode_inst(code, arch)
        do = replacement(inst)
        if do is None:
            return original(code, arch)

        def run(scalar: ctypes.c_uint64, vector: ctypes.c_uint64, accumulation: ctypes.c_uint64) -> None:
            scalars = _array(scalar, 260)
            do(inst, (scalars, _array(vector, 256, 64), _array(accumulation, 256, 64)))
            scalars[PC : PC + 2].view(np.uint64)[0] += np.uint64(inst.size())

        # which buffers the emulator passes: scalar, vector and accumulation registers
        return SimpleNamespace(arg=SimpleNamespace(globals=[0, 1, 5])), SimpleNamespace(fxn=run)

    return runner


class Wave(emu.WaveState):
    """A wave whose vector registers hold NaN at first, where the emulator's hold 0."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for registers in (self.vgpr_buf, self.accvgpr_buf):
            _array(ctypes.c_uint64(registers._buf.va_addr), 256 * 64)[:] = 0x7FC00000


def install() -> None:
    """Put these instructions into the emulator; and subnormal numbers count, as kernel descriptors of Triton say."""
    emu._get_runner = _runner(emu._get_runner)
    emu._MXCSRContext = contextlib.nullcontext
    emu.WaveState = Wave
