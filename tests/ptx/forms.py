"""The table of instruction forms, and a program: instructions decoded once, to functions of warps and a mask.

    @form(r"add\\.(?P<type>[su](16|32|64))")
    def add(d, found): ...

A form is a regular expression for the whole opcode. `d` is a `Decoder`: it reads and writes operands as arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .memory import UNSIGNED
from .numbers import F32, F64, U16, U32, U64, Array
from .text import Address, Instruction, Kernel, Operand, PtxError
from .warps import POISON, Warps

Execute = Callable[[Warps, "Array | None"], "str | None"]
Read = Callable[[Warps], Array]
Write = Callable[[Warps, Array, "Array | None"], None]

TYPES: dict[str, Any] = {
    "pred": np.bool_, "f32": F32, "f64": F64, "bf16": U16, "f16": U16, "b16": U16, "b32": U32, "b64": U64,
    "bf16x2": U32, "f16x2": U32, "f32x2": U64, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    **{f"u{bits}": UNSIGNED[bits // 8] for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}").type for bits in (16, 32, 64)},
}  # fmt: skip
"""bf16 and fp16 numbers are arrays of their bits."""

KINDS = {"pred": np.bool_, "b16": U16, "b32": U32, "b64": U64}

GLOBAL, SHARED, PARAMETER = "global", "shared", "param"
PARAMETER_START = 1 << 12
"""Address of the first parameter in their space."""
PARAMETER_GENERIC = 1 << 60
"""What a generic address of a parameter has in addition; tensor maps are named by it."""

_FORMS: list[tuple[re.Pattern[str], Callable[[Decoder, re.Match[str]], Execute]]] = []
_FOUND: dict[str, tuple[Callable[[Decoder, re.Match[str]], Execute], re.Match[str]]] = {}


class InFlight(NamedTuple):
    """What a register holds while an asynchronous instruction writes to it."""

    source: str
    arrive: Callable[[], None] | None = None
    """puts its value there for an instruction that reads it; None: reading it is an error"""


def form(pattern: str) -> Callable[[Any], Any]:
    """Enter a decoder into the table."""

    def enter(decode: Any) -> Any:
        _FORMS.append((re.compile(pattern), decode))
        return decode

    return enter


def find(opcode: str) -> tuple[Any, re.Match[str]] | None:
    """The decoder of an opcode and its match, or None."""
    if opcode not in _FOUND:
        matches = [(decode, found) for pattern, decode in _FORMS if (found := pattern.fullmatch(opcode))]
        assert len(matches) < 2, f"two forms for {opcode}"
        if not matches:
            return None
        _FOUND[opcode] = matches[0]
    return _FOUND[opcode]


class Step(NamedTuple):
    """A decoded instruction: guard register, place to branch to, what it does."""

    guard: int | None
    negated: bool
    target: int | None
    execute: Execute | None


class Program:
    """A kernel, decoded."""

    def __init__(self, kernel: Kernel) -> None:
        from . import arithmetic, copies, matrices, moves, tensor_memory  # noqa: F401  fill the table

        self.kernel = kernel
        self.numbers: dict[str, int] = {}
        self.steps = [self._step(each) for each in kernel.instructions]

    @property
    def has_tensor_memory(self) -> bool:
        """Whether it uses tensor memory."""
        return any(each.opcode.startswith("tcgen05") for each in self.kernel.instructions)

    @property
    def num_registers(self) -> int:
        """Registers that the program names."""
        return len(self.numbers)

    def register(self, name: str) -> int:
        """Its number."""
        return self.numbers.setdefault(name, len(self.numbers))

    def _step(self, instruction: Instruction) -> Step:
        guard = self.register(instruction.guard) if instruction.guard else None
        if instruction.opcode in ("bra", "bra.uni"):
            label = str(instruction.operands[0])
            if label not in self.kernel.labels:
                raise PtxError(f"no label {label}: {instruction}")
            return Step(guard, instruction.negated, self.kernel.labels[label], None)
        found = find(instruction.opcode)
        if found is None:
            raise PtxError(f"unknown instruction: {instruction}")
        decode, match = found
        try:
            return Step(guard, instruction.negated, None, decode(Decoder(self, instruction), match))
        except (PtxError, KeyError, ValueError, IndexError) as error:
            raise PtxError(f"{error!r}: {instruction}") from error


class Decoder:
    """Operands of an instruction as functions of warps."""

    def __init__(self, program: Program, instruction: Instruction) -> None:
        self.program, self.instruction = program, instruction
        self.operands = instruction.operands

    def read(self, operand: Operand, kind: str, *, poisoned: bool = False) -> Read:
        """A register, number or name as an array of `TYPES[kind]`: [lanes], or [1] if it is the same in all.

        A register that was never written is an error, or, with `poisoned`, NaN.
        """
        dtype = np.dtype(TYPES[kind])
        if not isinstance(operand, str):
            raise PtxError(f"expected a register or a number; got {operand}")
        known = self.program.kernel.kind(operand)
        if known is not None:
            return self._read_register(operand, known, dtype, poisoned)
        if operand.startswith("%"):
            return lambda warps: _special(warps, operand).astype(dtype)
        constant = self._constant(operand, dtype)
        return lambda warps: constant

    def _read_register(self, name: str, kind: str, dtype: np.dtype[Any], poisoned: bool) -> Read:
        number, held = self.program.register(name), np.dtype(KINDS[kind])

        def get(warps: Warps) -> Array:
            value = warps.registers[number]
            if value is None and poisoned:
                return np.array([POISON[kind]], held)
            if type(value) is InFlight and value.arrive is not None:
                value.arrive()
                value = warps.registers[number]
            if type(value) is not np.ndarray:
                raise PtxError(
                    f"{name} was never written" if value is None else f"{name} is read during {value.source}"
                )
            return value

        if dtype == held:
            return get
        if dtype.itemsize == held.itemsize and np.bool_ not in (dtype, held):
            return lambda warps: get(warps).view(dtype)
        if np.bool_ in (dtype, held):
            raise PtxError(f"{name} is {kind}, expected {dtype}")
        narrow = np.dtype(UNSIGNED[dtype.itemsize])
        return lambda warps: get(warps).astype(narrow).view(dtype)

    def _constant(self, text: str, dtype: np.dtype[Any]) -> Array:
        kernel = self.program.kernel
        if text in kernel.shared:
            return np.array([kernel.shared[text].offset], dtype)
        if text in kernel.parameters:
            return np.array([PARAMETER_START + kernel.parameters[text].offset], dtype)
        if text[:2].lower() == "0f":
            return np.array([int(text[2:], 16)], U32).view(dtype)
        if text[:2].lower() == "0d":
            return np.array([int(text[2:], 16)], U64).view(dtype)
        number = int(text.rstrip("U"), 0)
        if dtype == np.bool_:
            return np.array([number != 0])
        return np.array([number & (2 ** (8 * dtype.itemsize) - 1)], UNSIGNED[dtype.itemsize]).view(dtype)

    def write(self, operand: Operand) -> Write:
        """Into a register: an array of its size, or, where that differs, widened or cut like an integer; `_` drops."""
        if operand == "_":
            return lambda warps, value, mask: None
        kind = self.program.kernel.kind(operand) if isinstance(operand, str) else None
        if kind is None or not isinstance(operand, str):
            raise PtxError(f"expected a register; got {operand}")
        number, held, poison = self.program.register(operand), np.dtype(KINDS[kind]), POISON[kind]

        def put(warps: Warps, value: Array, mask: Array | None) -> None:
            if value.dtype != held:
                same = value.dtype.itemsize == held.itemsize and held != np.bool_
                value = np.ascontiguousarray(value).view(held) if same else value.astype(held)
            registers = warps.registers
            if mask is not None:
                old = registers[number]
                if type(old) is not np.ndarray:
                    if old is not None:
                        raise PtxError(f"{operand} is written during {old.source}")
                    old = np.full(warps.size, poison, held)
                value = np.where(mask, value, old)
            elif value.shape[0] != warps.size:
                value = np.full(warps.size, value[0], held)
            registers[number] = value

        return put

    def elementwise(self, fn: Callable[..., Array], kinds: str | tuple[str, ...]) -> Execute:
        """What puts fn(sources) into the first operand; `kinds` of the sources, one name for all alike."""
        put, sources = self.write(self.operands[0]), self.operands[1:]
        each = (kinds,) * len(sources) if isinstance(kinds, str) else kinds
        if len(each) != len(sources):
            raise PtxError(f"expected {len(each)} sources; got {len(sources)}")
        reads = [self.read(source, kind) for source, kind in zip(sources, each, strict=True)]
        if len(reads) == 1:
            (first,) = reads
            return lambda warps, mask: put(warps, fn(first(warps)), mask)  # type: ignore[func-returns-value]
        if len(reads) == 2:
            a, b = reads
            return lambda warps, mask: put(warps, fn(a(warps), b(warps)), mask)  # type: ignore[func-returns-value]
        return lambda warps, mask: put(warps, fn(*(read(warps) for read in reads)), mask)  # type: ignore[func-returns-value]

    def address(self, operand: Operand) -> Read:
        """Addresses [lanes] int64 of an operand [base + offset]."""
        if not isinstance(operand, Address):
            raise PtxError(f"expected an address; got {operand}")
        base, offset = operand.base, operand.offset
        kind = self.program.kernel.kind(base)
        if kind is None:
            constant = int(self._constant(base, np.dtype(np.int64))[0]) + offset
            return lambda warps: np.full(warps.size, constant, np.int64)
        read = self.read(base, kind)
        if offset == 0:
            return lambda warps: read(warps).astype(np.int64)
        return lambda warps: read(warps).astype(np.int64) + offset

    def vector(self, operand: Operand) -> tuple[str, ...]:
        """The parts of {a, b}, or of a alone."""
        if isinstance(operand, Address):
            raise PtxError(f"expected registers; got {operand}")
        return (operand,) if isinstance(operand, str) else operand


def _special(warps: Warps, name: str) -> Array:
    if name not in warps.special:
        raise PtxError(f"special register {name} is not known here")
    return warps.special[name]
