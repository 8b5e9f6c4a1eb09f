"""Instructions that are done here in place of the emulator, against AMD's manual of the CDNA 3 instruction set."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

emu = pytest.importorskip("test.mockgpu.amd.emu", reason="needs a checkout of tinygrad: see make emulate")

from with_emulator import instructions

EXEC, PC = instructions.EXEC, instructions.PC


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr(emu, "_get_runner", emu._get_runner)
    monkeypatch.setattr(emu, "_MXCSRContext", emu._MXCSRContext)
    monkeypatch.setattr(emu, "WaveState", emu.WaveState)
    instructions.install()


def vop1(opcode: int, into: int, source: int) -> bytes:
    """VOP1: 0111111, VDST [24:17], OP [16:9], SRC0 [8:0], which is 256 + n for vn."""
    return (0x3F << 25 | into << 17 | opcode << 9 | 256 + source).to_bytes(4, "little")


@pytest.mark.parametrize(("into", "source"), [(4, 4), (5, 200), (127, 128), (140, 50), (255, 254)])
@pytest.mark.parametrize("opcode", [10, 11], ids=["v_cvt_f16_f32", "v_cvt_f32_f16"])
def test_conversions(opcode, into, source):
    """VDST is a register, also from v128 on; a 16-bit result zeroes the upper half; lanes that are off keep theirs."""
    scalars, vectors, accumulators = (np.zeros(shape, np.uint32) for shape in ((260,), (256, 64), (256, 64)))
    scalars[EXEC : EXEC + 2] = 0xFFFFFFFF, 0x7FFFFFFF
    vectors[:] = np.random.default_rng(0).integers(0, 2**32, (256, 64))
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    narrow = x.astype(np.float16)
    bits = narrow.view(np.uint16).astype(np.uint32)
    vectors[source] = x.view(np.uint32) if opcode == 10 else bits | 0x12340000
    want = vectors.copy()
    want[into, :63] = (bits if opcode == 10 else narrow.astype(np.float32).view(np.uint32))[:63]
    code = np.frombuffer(vop1(opcode, into, source) + bytes(12), np.uint8)
    counter = scalars[PC : PC + 2].view(np.uint64)
    counter[0] = start = code.ctypes.data
    program, runtime = emu._get_runner(code.tobytes(), "cdna")
    starts = {0: scalars.ctypes.data, 1: vectors.ctypes.data, 2: 0, 5: accumulators.ctypes.data}  # 2: memory, from 0 on
    runtime.fxn(*(ctypes.c_uint64(starts[number]) for number in program.arg.globals))
    assert np.array_equal(vectors, want)
    assert counter[0] == start + 4
