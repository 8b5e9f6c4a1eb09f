"""Number formats of PTX as numpy arrays: conversions, exact fused multiply-add, approximate functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
U16, U32, U64, F32, F64 = np.uint16, np.uint32, np.uint64, np.float32, np.float64

NAN_F32 = U32(0x7FFFFFFF)
NAN_16 = U16(0x7FFF)
"""The NaN that instructions return, in f32, and in f16 and bf16."""


def f32_of_bf16(bits: Array) -> Array:
    """bf16 bits (uint16) to f32, exact."""
    return (bits.astype(U32) << U32(16)).view(F32)


def bf16_of_f32(x: Array) -> Array:
    """f32 to bf16 bits, to nearest, ties to even; NaN to 0x7FFF."""
    bits = np.ascontiguousarray(x, F32).view(U32)
    rounded = (bits + (U32(0x7FFF) + ((bits >> U32(16)) & U32(1)))) >> U32(16)
    return np.where(np.isnan(x), NAN_16, rounded.astype(U16))


def f32_of_f16(bits: Array) -> Array:
    """fp16 bits (uint16) to f32, exact."""
    return np.ascontiguousarray(bits).view(np.float16).astype(F32)


def f16_of_f32(x: Array) -> Array:
    """f32 to fp16 bits, to nearest, ties to even; NaN to 0x7FFF."""
    return np.where(np.isnan(x), NAN_16, np.ascontiguousarray(x, F32).astype(np.float16).view(U16))


DECODE = {"bf16": f32_of_bf16, "f16": f32_of_f16}
ENCODE = {"bf16": bf16_of_f32, "f16": f16_of_f32}


def flush(x: Array) -> Array:
    """Subnormal f32 numbers to zeros of their sign."""
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in f32, rounded once."""
    product = a.astype(F64) * b.astype(F64)  # exact
    addend = c.astype(F64)
    total = product + addend
    # what the f64 sum lost (two-sum); an inexact sum is made odd, so that rounding to f32 sees on which side it was
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(U64)
    inexact = (error != 0) & ((bits & U64(1)) == 0) & np.isfinite(total)
    if inexact.any():
        toward = np.where((error > 0) == (total > 0), U64(1), U64(2**64 - 1))
        total = np.where(inexact, bits + toward, bits).view(F64)
    return total.astype(F32)


def fma_down(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in f32, rounded toward minus infinity."""
    return _directed(a, b, c, lambda total: np.full(total.shape, -np.inf, F32))


def add_toward_zero(a: Array, b: Array) -> Array:
    """a + b in f32, rounded toward zero."""
    return _directed(a, np.ones_like(a), b, lambda total: np.zeros(total.shape, F32))


def _directed(a: Array, b: Array, c: Array, end: Callable[[Array], Array]) -> Array:
    product, addend = a.astype(F64) * b.astype(F64), c.astype(F64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    rounded, limit = total.astype(F32), end(total)
    beyond = np.where((rounded - total) != 0, rounded - total, -error)  # of the exact sum
    down = np.where(np.isneginf(limit), beyond > 0, beyond * np.sign(total) > 0)
    return np.where(down & np.isfinite(rounded), np.nextafter(rounded, limit), rounded)


def larger(a: Array, b: Array) -> Array:
    """max of f32: the other one if one is NaN; +0 is above -0."""
    return _signed_zero(np.fmax(a, b), a, b, negative=False)


def smaller(a: Array, b: Array) -> Array:
    """min of f32: the other one if one is NaN; -0 is below +0."""
    return _signed_zero(np.fmin(a, b), a, b, negative=True)


def _signed_zero(result: Array, a: Array, b: Array, *, negative: bool) -> Array:
    zeros = (a == 0) & (b == 0)
    if not zeros.any():
        return result
    signs = np.signbit(a) | np.signbit(b) if negative else np.signbit(a) & np.signbit(b)
    return np.where(zeros, np.where(signs, F32(-0.0), F32(0.0)), result)


# Approximate functions are wrong on purpose, within the bounds of the PTX manual (ISA 9.1): so a kernel that needs more
# fails. `error` says how wrong, from -1 to 1 of the bound, for arguments; the same ones always have the same result.


def scattered(*sources: Array) -> Array:
    """A number in [-1, 1] from the bits of the arguments."""
    mixed = U32(0)
    for source in sources:
        mixed = (mixed ^ np.ascontiguousarray(source, F32).view(U32)) * U32(2654435769)
        mixed = (mixed ^ (mixed >> U32(15))) * U32(2246822519)
    return (mixed ^ (mixed >> U32(13))).astype(F64) / (2**31 - 0.5) - 1.0


def either(*sources: Array) -> Array:
    """-1 or 1, as the bits of the arguments choose."""
    return np.copysign(1.0, scattered(*sources))


def up(*sources: Array) -> Array:
    """1: the largest result there may be."""
    return np.ones(np.broadcast_shapes(*(source.shape for source in sources)))


def down(*sources: Array) -> Array:
    """-1: the smallest one."""
    return -up(*sources)


class Approximate(NamedTuple):
    """A function in f64 of its arguments, and how far from it the manual lets the result be: of result and arguments."""

    exact: Callable[..., Array]
    bound: Callable[..., Array]


def ulp(x: Array) -> Array:
    """Unit in the last place of f32 numbers of this size."""
    return np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 24, -149))


def _divided_by_reciprocal(a: Array, b: Array) -> Array:
    gone = np.where(np.isinf(a), np.nan, np.copysign(0.0, a) * np.copysign(1.0, b))
    return np.where((np.abs(b) > 2.0**126) & np.isfinite(b), gone, a / b)


APPROXIMATE = {
    "ex2.approx": Approximate(  # two units from the correctly rounded result; 1 at 0
        lambda x: np.exp2(x).astype(F32).astype(F64), lambda y, x: np.where(x == 0, 0, 2 * ulp(y))
    ),
    "lg2.approx": Approximate(
        np.log2, lambda y, x: np.where((x > 0.5) & (x < 2), 1, np.abs(y)) * 2.0**-22
    ),
    "rcp.approx": Approximate(lambda x: 1 / x, lambda y, x: ulp(y)),
    "sqrt.approx": Approximate(np.sqrt, lambda y, x: y * 2.0**-23),
    "tanh.approx": Approximate(np.tanh, lambda y, x: np.where(np.isinf(x), 0, np.abs(y) * 2.0**-11)),
    "div.full": Approximate(np.divide, lambda y, a, b: 2 * ulp(y)),
    "div.approx": Approximate(_divided_by_reciprocal, lambda y, a, b: 2 * ulp(y)),
}  # fmt: skip


def approximate(name: str, error: Callable[..., Array], *sources: Array) -> Array:
    """A function of f32 arguments, off by `error` of its bound; infinity, NaN and 0 are exact."""
    fn, wide = APPROXIMATE[name], [source.astype(F64) for source in sources]
    exact = fn.exact(*wide)
    bound = fn.bound(exact, *wide)
    result = (exact + error(*sources) * bound).astype(F32)
    beyond = np.abs(result - exact) > bound  # by its rounding
    result = np.where(beyond, np.nextafter(result, exact.astype(F32)), result)
    return np.where(np.isfinite(exact) & (exact != 0), result, exact.astype(F32))
