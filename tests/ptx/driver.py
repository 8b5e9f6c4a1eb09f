"""A Triton driver that compiles for an NVIDIA GPU and interprets the PTX, on CPU tensors.

A launch `kernel[grid](...)` goes through Triton's own binder, specialisation and compiler. This file does what the CUDA
runtime does after that: it lays out parameters, makes tensor maps, and runs the blocks of the grid one by one.

    with driver_of("sm_90").active(Options(late=False)):
        kernel[grid](...)
"""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .block import Block, Launch, Options, TensorMap, run
from .forms import Program
from .memory import Space
from .profile import Profile
from .text import Kernel, PtxError, parse

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
_FORMATS = {"i1": "<B", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f"}
_SWIZZLES = (0, 32, 64, 128)
"""Bytes of a pattern, by the number that the CUDA driver has for it."""


@functools.lru_cache(maxsize=200)
def _program(text: str, edit: Callable[[Kernel], None] | None) -> Program:
    kernel = parse(text)
    if edit is not None:
        edit(kernel)
    program = Program(kernel)
    gc.freeze()  # of 50,000 objects each; every collection would look through them
    return program


def tensor_bytes(storage: torch.UntypedStorage) -> np.ndarray[Any, Any]:
    """The memory of a storage as bytes; not a copy."""
    return np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)


def memory_of(tensors: list[torch.Tensor]) -> Space:
    """Global memory that consists of these tensors, each with its whole storage."""
    space = Space("global")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()}
    for start, storage in storages.items():
        space.add(start, tensor_bytes(storage))
    return space


class Driver:
    """What Triton asks of a driver, and how to run what it launches."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.options = Options()
        self.profiles: dict[str, Profile] | None = None
        """profiles of kernels by name, if they are wanted"""
        self.edit: Callable[[Kernel], None] | None = None
        """changes a kernel before it runs, for tests of what must be noticed"""
        self.only: Callable[[int, int], bool] | None = None
        """which blocks run, of (number, blocks of the grid); all by default"""
        self.launched: list[tuple[str, Kernel]] = []
        """name and PTX of every launch"""
        driver = self

        class BoundLauncher(Launcher):
            def __init__(self, source: Any, metadata: Any) -> None:
                super().__init__(driver, source, metadata)

        self.launcher_cls = BoundLauncher
        properties = {"max_shared_mem": SHARED_LIMIT[architecture]}
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (None, binary.decode(), 0, 0, 1024),
            get_device_properties=lambda device: properties,
        )

    def get_current_target(self) -> Any:
        """The GPU."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.architecture[3:]), 32)

    def get_current_device(self) -> int:
        """A number for each architecture: Triton keeps compiled kernels by the device's number."""
        return int(self.architecture[3:])

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0

    @contextmanager
    def active(self, options: Options = Options(), **settings: Any) -> Iterator[Driver]:  # noqa: B008  immutable
        """Triton uses this driver, with these options and settings (`profiles`, `edit`, `only`)."""
        import triton

        unused = {"profiles": None, "edit": None, "only": None}
        before, old = triton.runtime.driver._active, {name: getattr(self, name) for name in ("options", *unused)}
        triton.runtime.driver.set_active(self)
        for name, value in {"options": options, **unused, **settings}.items():
            setattr(self, name, value)
        self.launched = []
        try:
            with _without_ptxas():
                yield self
        finally:
            triton.runtime.driver._active = before
            for name, value in old.items():
                setattr(self, name, value)


@functools.cache
def driver_of(architecture: str) -> Driver:
    """The driver for `sm_80`, `sm_90` or `sm_100`: one each, since compiled kernels keep theirs."""
    return Driver(architecture)


class Launcher:
    """Runs a compiled kernel on a grid."""

    def __init__(self, driver: Driver, source: Any, metadata: Any) -> None:
        self.driver, self.metadata = driver, metadata
        self.types = list(source.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, text: str, *rest: Any) -> None:
        """Run PTX; `rest` is Triton's metadata (two), its hooks (two), and the kernel's arguments."""
        program, name = _program(text, self.driver.edit), self.metadata.name
        packed, maps, tensors = self._arguments(program.kernel, rest[4:])
        profile = None if self.driver.profiles is None else self.driver.profiles.setdefault(name, Profile())
        self.driver.launched.append((name, program.kernel))
        launch = Launch(
            program, memory_of(tensors), packed, maps, 32 * self.metadata.num_warps, self.metadata.shared,
            self.driver.options, profile,
        )  # fmt: skip
        if program.kernel.threads != launch.threads:
            raise PtxError(f"{name} wants {program.kernel.threads} threads; its launch has {launch.threads}")
        for number in range(x * y * z):
            if self.driver.only is None or self.driver.only(number, x * y * z):
                place = {"ctaid.x": number % x, "ctaid.y": number // x % y, "ctaid.z": number // (x * y)}
                run(Block(launch, place | {"nctaid.x": x, "nctaid.y": y, "nctaid.z": z}))

    def _arguments(self, kernel: Kernel, given: Any) -> tuple[bytes, dict[int, TensorMap], list[torch.Tensor]]:
        """The kernel's parameters as bytes; its tensor maps, by their place among them; all tensors."""
        values: list[tuple[str, Any]] = []
        tensors: list[torch.Tensor] = []
        descriptors = iter(getattr(self.metadata, "tensordesc_meta", None) or ())
        for kind, value in zip(self.types, given, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                tensors.append(value.base)
                values.append(("map", _tensor_map(value, next(descriptors))))
                values += [("i32", n) for n in value.shape] + [("i64", n) for n in value.strides]
            elif kind[0] == "*":
                tensors += [] if value is None else [value]
                values.append(("u64", 0 if value is None else value.data_ptr()))
            else:
                values.append((kind, value))
        values += [("u64", 0)] * 2  # Triton's scratch memory, of which our kernels need none
        packed, maps = bytearray(kernel.parameter_bytes), {}
        for (kind, value), variable in zip(values, kernel.parameters.values(), strict=True):
            if kind == "map":
                maps[variable.offset] = value
            elif struct.calcsize(_FORMATS[kind]) != variable.size:
                raise PtxError(f"an argument of type {kind} for a parameter of {variable.size} bytes")
            else:
                struct.pack_into(_FORMATS[kind], packed, variable.offset, value)
        return bytes(packed), maps, tensors


@contextmanager
def _without_ptxas() -> Iterator[None]:
    """PTX in place of the machine code that ptxas would make of it; under its own keys in Triton's cache."""
    from triton.backends.nvidia.compiler import CUDABackend

    before = CUDABackend.make_cubin, CUDABackend.hash
    CUDABackend.make_cubin = lambda self, source, metadata, options, capability: source.encode()
    CUDABackend.hash = lambda self: f"ptx-for-the-interpreter-{self.target.arch}"
    try:
        yield
    finally:
        CUDABackend.make_cubin, CUDABackend.hash = before


def _tensor_map(descriptor: Any, about: dict[str, Any]) -> TensorMap:
    base, size = descriptor.base, descriptor.base.element_size()
    if len(descriptor.shape) != 2 or about["elem_size"] != size:
        raise PtxError(f"expected a descriptor of 2 dimensions and {size} bytes; got {about}")
    rows, columns = descriptor.shape
    stride = int(descriptor.strides[0]) * size
    if base.data_ptr() % 16 or stride % 16:
        raise PtxError(f"a tensor map at {base.data_ptr():#x} with rows of {stride} bytes: expected multiples of 16")
    return TensorMap(
        base.data_ptr(),
        (int(rows), int(columns)),
        stride,
        tuple(about["block_size"]),
        size,
        _SWIZZLES[about["swizzle"]],
    )
