"""Integer and floating-point instructions, comparisons, selections, conversions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import numbers
from .forms import TYPES, Decoder, Execute, form
from .numbers import F32, F64, NAN_F32, U16, U32, U64, Array
from .warps import Warps

INTEGER = r"(?P<type>[su](?:16|32|64))"
ANY = r"(?P<type>[bsu](?:16|32|64)|f32|f64)"


def _canonical(x: Array) -> Array:
    nan = np.isnan(x)
    return np.where(nan, NAN_F32.view(F32), x) if nan.any() else x


def _flushing(fn: Callable[..., Array], found: re.Match[str]) -> Callable[..., Array]:
    """f32 with NaN as NVIDIA returns it; .ftz: subnormal arguments and results are zeros."""
    if found["ftz"]:
        return lambda *sources: _canonical(numbers.flush(fn(*map(numbers.flush, sources))))
    return lambda *sources: _canonical(fn(*sources))


_BINARY: dict[str, Callable[[Array, Array], Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@form(rf"(?P<op>add|sub)\.{INTEGER}")
def add_integers(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_BINARY[found["op"]], found["type"])


@form(r"(?P<op>add|sub|mul)(?:\.rn)?(?P<ftz>\.ftz)?\.f32")
def add_floats(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_flushing(_BINARY[found["op"]], found), "f32")


@form(r"(?P<op>add|sub)\.rn\.f32\.(?P<type>bf16|f16)")
def add_mixed(d: Decoder, found: re.Match[str]) -> Execute:
    """The first source is of 16 bits."""
    decode, fn = numbers.DECODE[found["type"]], _BINARY[found["op"]]
    return d.elementwise(lambda a, c: _canonical(fn(decode(a), c)), (found["type"], "f32"))


@form(r"(?P<op>add|sub|mul)(?:\.rn)?\.f64")
def add_doubles(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_BINARY[found["op"]], "f64")


@form(rf"mul\.(?P<part>lo|hi|wide)\.{INTEGER}")
def multiply(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_products(found), found["type"])


@form(rf"mad\.(?P<part>lo|hi|wide)\.{INTEGER}")
def multiply_add(d: Decoder, found: re.Match[str]) -> Execute:
    kind, product = found["type"], _products(found)
    third = f"{kind[0]}{2 * int(kind[1:])}" if found["part"] == "wide" else kind
    return d.elementwise(lambda a, b, c: product(a, b) + c, (kind, kind, third))


def _products(found: re.Match[str]) -> Callable[[Array, Array], Array]:
    kind = found["type"]
    if found["part"] == "lo":
        return np.multiply
    if kind[1:] == "64":
        raise ValueError("no product of 64-bit numbers to 128 bits")
    wide = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
    if found["part"] == "wide":
        return lambda a, b: a.astype(wide) * b.astype(wide)
    shift, narrow = wide(int(kind[1:])), TYPES[kind]
    return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> shift).astype(narrow)


@form(r"fma\.rn(?P<ftz>\.ftz)?\.f32")
def fused(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_flushing(numbers.fma, found), "f32")


@form(r"fma\.rm(?P<ftz>\.ftz)?\.f32")
def fused_down(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_flushing(numbers.fma_down, found), "f32")


@form(r"add\.rz(?P<ftz>\.ftz)?\.f32")
def add_toward_zero(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_flushing(numbers.add_toward_zero, found), "f32")


@form(r"copysign\.f32")
def copy_sign(d: Decoder, found: re.Match[str]) -> Execute:
    """The second source with the sign of the first."""
    return d.elementwise(lambda sign, size: np.copysign(size, sign), "f32")


@form(r"cvt\.sat\.f32\.f32")
def saturate(d: Decoder, found: re.Match[str]) -> Execute:
    """Clamped to [0, 1]; NaN gives 0."""
    return d.elementwise(lambda x: np.where(np.isnan(x), F32(0), np.clip(x, F32(0), F32(1))), "f32")


_PAIRS: dict[str, Callable[..., Array]] = {**_BINARY, "fma": numbers.fma}


@form(r"(?P<op>add|sub|mul|fma)(?:\.rn)?(?P<ftz>\.ftz)?\.f32x2")
def pairs(d: Decoder, found: re.Match[str]) -> Execute:
    """Two f32 numbers in each 64-bit register."""
    fn = _flushing(_PAIRS[found["op"]], found)

    def apply(*sources: Array) -> Array:
        halves = [np.ascontiguousarray(s).view(F32) for s in np.broadcast_arrays(*sources)]
        return np.ascontiguousarray(fn(*halves), F32).view(U64)

    return d.elementwise(apply, "f32x2")


@form(r"(?P<op>add|sub|mul)(?:\.rn)?\.(?P<type>bf16|f16)x2")
def narrow_pairs(d: Decoder, found: re.Match[str]) -> Execute:
    """Two 16-bit numbers in each 32-bit register, rounded once."""
    decode, encode, fn = numbers.DECODE[found["type"]], numbers.ENCODE[found["type"]], _BINARY[found["op"]]

    def apply(*sources: Array) -> Array:
        halves = [np.ascontiguousarray(s).view(U16) for s in np.broadcast_arrays(*sources)]
        return np.ascontiguousarray(encode(fn(*map(decode, halves)))).view(U32)

    return d.elementwise(apply, f"{found['type']}x2")


_ROUNDED: dict[str, Callable[..., Array]] = {"div": np.divide, "rcp": lambda x: F32(1) / x, "sqrt": np.sqrt}


@form(r"(?P<fn>div|rcp|sqrt)\.rn(?P<ftz>\.ftz)?\.f32")
def rounded_functions(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_flushing(_ROUNDED[found["fn"]], found), "f32")


@form(r"(?P<fn>(?:ex2|lg2|rcp|sqrt|tanh|div)\.approx|div\.full)(?P<ftz>\.ftz)?\.f32")
def approximate_functions(d: Decoder, found: re.Match[str]) -> Execute:
    put, reads = d.write(d.operands[0]), [d.read(operand, "f32") for operand in d.operands[1:]]

    def execute(warps: Warps, mask: Array | None) -> None:
        fn = functools.partial(numbers.approximate, found["fn"], warps.block.options.error)
        put(warps, _flushing(fn, found)(*(read(warps) for read in reads)), mask)

    return execute


@form(rf"(?P<op>div|rem)\.{INTEGER}")
def divide_integers(d: Decoder, found: re.Match[str]) -> Execute:
    def apply(a: Array, b: Array) -> Array:
        rest = np.fmod(a, b)  # what a division by 0 gives is not specified; numpy gives 0
        return rest if found["op"] == "rem" else (a - rest) // b

    return d.elementwise(apply, found["type"])


@form(rf"(?P<op>min|max)\.{INTEGER}")
def extreme_integers(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(np.minimum if found["op"] == "min" else np.maximum, found["type"])


@form(r"(?P<op>min|max)(?P<ftz>\.ftz)?(?P<nan>\.NaN)?\.f32")
def extreme_floats(d: Decoder, found: re.Match[str]) -> Execute:
    """Of two or three."""
    plain = numbers.smaller if found["op"] == "min" else numbers.larger

    def strict(a: Array, b: Array) -> Array:
        return np.where(np.isnan(a) | np.isnan(b), F32(np.nan), plain(a, b))

    of_two = strict if found["nan"] else plain
    return d.elementwise(_flushing(lambda *sources: functools.reduce(of_two, sources), found), "f32")


@form(r"(?P<op>abs|neg)(?P<ftz>\.ftz)?\.(?P<type>f32|s16|s32|s64)")
def signs(d: Decoder, found: re.Match[str]) -> Execute:
    fn: Any = np.abs if found["op"] == "abs" else np.negative
    if found["type"] == "f32" and found["ftz"]:
        return d.elementwise(lambda x: fn(numbers.flush(x)), "f32")
    return d.elementwise(fn, found["type"])


@form(r"(?P<op>and|or|xor)\.(?P<type>pred|b16|b32|b64)")
def bits(d: Decoder, found: re.Match[str]) -> Execute:
    fn: Any = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[found["op"]]
    return d.elementwise(fn, found["type"])


@form(r"not\.(?P<type>pred|b16|b32|b64)")
def invert(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(np.invert, found["type"])


@form(r"(?P<op>shl|shr)\.(?P<type>[bsu](?:16|32|64))")
def shifts(d: Decoder, found: re.Match[str]) -> Execute:
    """By more than its width: all bits leave."""
    width, dtype = int(found["type"][1:]), TYPES[found["type"]]
    left, signed = found["op"] == "shl", found["type"][0] == "s"

    def apply(a: Array, by: Array) -> Array:
        amount = np.minimum(by, U32(width - 1)).astype(dtype)
        result = a << amount if left else a >> amount
        gone = by >= width
        return result if signed or not gone.any() else np.where(gone, dtype(0), result)

    return d.elementwise(apply, (found["type"], "u32"))


@form(r"bfe\.(?P<type>[su]32)")
def extract(d: Decoder, found: re.Match[str]) -> Execute:
    """`length` bits from `start` on; bits past the end are the sign, or 0."""

    def apply(a: Array, start: Array, length: Array) -> Array:
        start, length = (start & U32(255)).astype(np.int64), (length & U32(255)).astype(np.int64)
        moved = a.astype(np.int64) >> np.minimum(start, 63)
        unused = 64 - np.minimum(length, 32)
        kept = np.where(length == 0, 0, moved << np.minimum(unused, 63))
        if found["type"] == "u32":
            return np.where(length == 0, 0, kept.view(U64) >> unused.astype(U64)).astype(U32)
        return (kept >> unused).astype(np.int32)

    return d.elementwise(apply, (found["type"], "u32", "u32"))


@form(r"(?P<op>popc|clz)\.b32")
def count_bits(d: Decoder, found: re.Match[str]) -> Execute:
    def apply(a: Array) -> Array:
        spread = (a[:, None] >> np.arange(32, dtype=U32)) & U32(1)
        if found["op"] == "popc":
            return spread.sum(1).astype(U32)
        return np.where(a == 0, 32, np.argmax(spread[:, ::-1], 1)).astype(U32)

    return d.elementwise(apply, "b32")


@form(r"prmt\.b32")
def permute_bytes(d: Decoder, found: re.Match[str]) -> Execute:
    """Four bytes of eight; the high bit of a selector repeats that byte's sign."""

    def apply(a: Array, b: Array, selectors: Array) -> Array:
        both = a.astype(U64) | b.astype(U64) << U64(32)
        result = np.zeros(np.broadcast(a, b, selectors).shape, U32)
        for place in range(4):
            selector = (selectors >> U32(4 * place)) & U32(15)
            byte = ((both >> (U64(8) * (selector & U32(7)).astype(U64))) & U64(255)).astype(U32)
            sign = np.where(byte & U32(128), U32(255), U32(0))
            result |= np.where(selector & U32(8), sign, byte) << U32(8 * place)
        return result

    return d.elementwise(apply, "b32")


@form(rf"selp\.{ANY}")
def select(d: Decoder, found: re.Match[str]) -> Execute:
    kind = found["type"]
    return d.elementwise(lambda a, b, chosen: np.where(chosen, a, b), (kind, kind, "pred"))


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_JOIN: dict[str, Callable[[Array, Array], Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@form(
    r"setp\.(?P<compare>eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(?P<join>and|or|xor))?"
    r"(?P<ftz>\.ftz)?\.(?P<type>[bsu](?:16|32|64)|f32|f64|bf16|f16)"
)
def compare(d: Decoder, found: re.Match[str]) -> Execute:
    """Ordered comparisons are false for NaN, those that end in u true."""
    kind, name = found["type"], found["compare"]
    outputs = d.vector(d.operands[0])
    put, put_other = d.write(outputs[0]), d.write(outputs[1]) if len(outputs) > 1 else None
    first, second = (d.read(operand, kind) for operand in d.operands[1:3])
    third = d.read(d.operands[3], "pred") if found["join"] else None
    decode = numbers.DECODE.get(kind, numbers.flush if found["ftz"] else lambda x: x)
    floats = kind in ("f32", "f64", "bf16", "f16")

    def execute(warps: Any, mask: Array | None) -> None:
        a, b = decode(first(warps)), decode(second(warps))
        unordered = np.isnan(a) | np.isnan(b) if floats else None
        if name in ("num", "nan"):
            result = unordered if name == "nan" else ~unordered  # type: ignore[operator]
        else:
            result = _COMPARISONS[name[:2]](a, b)
            if floats and len(name) == 3:
                result = result | unordered
            elif floats and name == "ne":
                result = result & ~unordered  # type: ignore[operator]
        other = ~result  # type: ignore[operator]
        if third is not None:
            join = _JOIN[found["join"]]
            result, other = join(result, third(warps)), join(other, third(warps))
        put(warps, result, mask)
        if put_other is not None:
            put_other(warps, other, mask)

    return execute


@form(r"cvt(?P<saturate>\.sat)?\.(?P<to>[su](?:8|16|32|64))\.(?P<from>[su](?:8|16|32|64))")
def convert_integers(d: Decoder, found: re.Match[str]) -> Execute:
    to = TYPES[found["to"]]
    if found["saturate"]:
        low, high = np.iinfo(to).min, np.iinfo(to).max
        return d.elementwise(lambda x: np.clip(x, low, high).astype(to), found["from"])
    return d.elementwise(lambda x: x.astype(to), found["from"])


@form(r"cvt\.rn\.(?P<to>f32|f64)\.(?P<from>[su](?:8|16|32|64))")
def float_of_integer(d: Decoder, found: re.Match[str]) -> Execute:
    to = TYPES[found["to"]]
    return d.elementwise(lambda x: x.astype(to), found["from"])


_ROUND: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@form(r"cvt\.(?P<round>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?\.(?P<to>[su](?:16|32|64))\.f32")
def integer_of_float(d: Decoder, found: re.Match[str]) -> Execute:
    """Clamped to the integers there are; NaN gives 0."""
    to, bits_ = TYPES[found["to"]], int(found["to"][1:])
    signed = found["to"][0] == "s"
    low, high = (-(2 ** (bits_ - 1)), 2 ** (bits_ - 1)) if signed else (0, 2**bits_)

    def apply(x: Array) -> Array:
        whole = _ROUND[found["round"]]((numbers.flush(x) if found["ftz"] else x).astype(F64))
        inside = np.where(np.isnan(whole) | (whole >= high) | (whole < low), 0.0, whole).astype(to)
        return np.where(whole >= high, to(high - 1), np.where(whole < low, to(low), inside))

    return d.elementwise(apply, "f32")


@form(r"cvt\.(?P<round>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?\.f32\.f32")
def whole_float(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(_flushing(_ROUND[found["round"]], found), "f32")


@form(r"cvt(?P<ftz>\.ftz)?\.f32\.(?P<from>bf16|f16)")
def widen(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(numbers.DECODE[found["from"]], found["from"])


@form(r"cvt\.f64\.f32")
def double_of_float(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(lambda x: x.astype(F64), "f32")


@form(r"cvt\.rn\.f32\.f64")
def float_of_double(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(lambda x: x.astype(F32), "f64")


@form(r"cvt\.rn\.(?P<to>bf16|f16)\.f32")
def narrow(d: Decoder, found: re.Match[str]) -> Execute:
    return d.elementwise(numbers.ENCODE[found["to"]], "f32")


@form(r"cvt\.rn\.(?P<to>bf16|f16)x2\.f32")
def narrow_pair(d: Decoder, found: re.Match[str]) -> Execute:
    """The first source goes to the upper half."""
    encode = numbers.ENCODE[found["to"]]
    return d.elementwise(lambda high, low: encode(high).astype(U32) << U32(16) | encode(low).astype(U32), "f32")
