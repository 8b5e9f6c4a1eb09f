"""A Triton driver that compiles for gfx942 and runs the machine code in tinygrad's CDNA emulator, on CPU tensors.

A launch `kernel[grid](...)` goes through Triton's own binder, specialisation and compiler; this file does what the
HIP runtime does after that: it maps the code object, reads its kernel descriptor, and fills kernel arguments, registers
and LDS. The emulator reads and writes the tensors' memory.
"""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

from test.mockgpu.amd.emu import run_asm  # of tinygrad's repository
from tinygrad.runtime.support.elf import elf_loader
from triton.backends.compiler import GPUTarget

WAVE = 64
C_TYPES = {"i1": ctypes.c_int32, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
KERNARG_POINTER = 1 << 3
"""Among the properties in a kernel descriptor: the address of its arguments comes in registers."""


class Function(NamedTuple):
    """A kernel in memory."""

    code: Any
    """the mapped code object"""
    start: int
    end: int
    scratch: int
    """bytes of a lane"""
    lds: int
    """bytes of a workgroup"""
    kernarg_size: int
    rsrc2: int


def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Function, int, int, int]:
    """Map a code object; (module, function, registers, spills, threads at most) as Triton wants them."""
    image, sections, relocations = elf_loader(binary)
    assert not relocations, f"{name} has relocations"
    code = ctypes.create_string_buffer(bytes(image), len(image))
    at = {section.name: section.header for section in sections}
    descriptor = at[".rodata"].sh_addr
    fixed_lds, scratch, kernarg_size = struct.unpack_from("<III", image, descriptor)
    (entry,) = struct.unpack_from("<q", image, descriptor + 16)
    _, _, rsrc2, properties = struct.unpack_from("<IIIH", image, descriptor + 44)
    assert properties & 0x7F == KERNARG_POINTER, f"{name} takes other registers: {properties:#x}"
    base = ctypes.addressof(code)
    end = base + at[".text"].sh_addr + at[".text"].sh_size
    lds = fixed_lds + shared
    function = Function(code, base + descriptor + entry, end, scratch, lds, kernarg_size, rsrc2 | -(-lds // 512) << 15)
    return code, function, 0, 0, 1024


class Launcher:
    """Runs a compiled kernel on a grid."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.types = list(source.signature.values())
        self.threads = metadata.num_warps * WAVE

    def __call__(self, x: int, y: int, z: int, stream: int, function: Function, *rest: Any) -> None:
        """`rest` is Triton's metadata (two), its hooks (two), and the kernel's arguments."""
        arguments = rest[4:]
        values = [
            (C_TYPES[kind], value) if kind[0] != "*" else (ctypes.c_void_p, None if value is None else value.data_ptr())
            for kind, value in zip(self.types, arguments, strict=True)
            if kind != "constexpr"
        ]
        values += [(ctypes.c_void_p, None)] * 2  # Triton's scratch memory, of which our kernels need none
        # what the runtime adds: blocks of the grid, threads of a block, threads of an incomplete last block
        values += [(ctypes.c_uint32, n) for n in (x, y, z)]
        values += [(ctypes.c_uint16, n) for n in (self.threads, 1, 1, 0, 0, 0)]
        layout = type("Arguments", (ctypes.Structure,), {"_fields_": [(f"a{i}", t) for i, (t, _) in enumerate(values)]})
        given = layout(*(value for _, value in values))
        size = max(function.kernarg_size, ctypes.sizeof(given))
        memory = ctypes.create_string_buffer(bytes(given), size)
        run_asm(
            function.start, function.end - function.start, x, y, z, self.threads, 1, 1, ctypes.addressof(memory),
            function.rsrc2, function.scratch, "cdna",
        )  # fmt: skip


class Driver:
    """What Triton asks of a driver."""

    launcher_cls = Launcher
    utils = SimpleNamespace(load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 64 * 1024})

    def get_current_target(self) -> GPUTarget:
        """An MI300."""
        return GPUTarget("hip", "gfx942", WAVE)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0
