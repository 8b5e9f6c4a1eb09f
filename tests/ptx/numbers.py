"""Number formats of PTX as numpy arrays: conversions, exact fused multiply-add, approximate functions.

Approximate functions are wrong on purpose: by any amount up to a bound, as the bits of the argument choose. So a kernel
that needs more fails. The same argument always has the same result. The bounds are to be checked with the PTX manual.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
U16, U32, U64, F32, F64 = np.uint16, np.uint32, np.uint64, np.float32, np.float64

NAN_F32 = U32(0x7FFFFFFF)
NAN_16 = U16(0x7FFF)
"""The NaN that instructions return, in f32, and in f16 and bf16."""

EX2_ERROR = 2.0**-22
"""ex2.approx: relative."""
LG2_ERROR = 2.0**-22
"""lg2.approx: absolute for arguments from 0.5 to 2, else relative."""
DIVISION_ULPS = 2
"""div.full and div.approx."""
RECIPROCAL_ULPS = 1
SQUARE_ROOT_ERROR = 2.0**-23
TANH_ERROR = 2.0**-11


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


def noise(x: Array) -> Array:
    """A number in [-1, 1] from the bits of each f32: the same for the same bits."""
    mixed = np.ascontiguousarray(x, F32).view(U32) * U32(2654435769)
    mixed = (mixed ^ (mixed >> U32(15))) * U32(2246822519)
    return (mixed ^ (mixed >> U32(13))).astype(F64) / (2**31 - 0.5) - 1.0


def ex2(x: Array) -> Array:
    """2^x, with the error of ex2.approx; exact at 0 and infinity."""
    exact = np.exp2(x.astype(F64))
    return np.where(x == 0, F32(1), _within(exact * (1 + EX2_ERROR * noise(x)), exact, EX2_ERROR))


def lg2(x: Array) -> Array:
    """log2(x), with the error of lg2.approx; exact at 0, 1 and infinity."""
    exact = np.log2(x.astype(F64))
    size = np.where((x > 0.5) & (x < 2), 1.0, np.abs(exact))
    moved = np.where(np.isfinite(exact), exact + LG2_ERROR * size * noise(x), exact)
    return np.where(x == 1, F32(0), moved.astype(F32))


def divide_full(a: Array, b: Array) -> Array:
    """a / b, off by up to two units in the last place where the quotient is not an f32 number."""
    return _ulps(a.astype(F64) / b.astype(F64), DIVISION_ULPS, noise(a) * noise(b))


def reciprocal(x: Array) -> Array:
    """1 / x, off by up to one unit in the last place where that is not an f32 number."""
    return _ulps(1.0 / x.astype(F64), RECIPROCAL_ULPS, noise(x))


def square_root(x: Array) -> Array:
    """sqrt(x) with the error of sqrt.approx where it is not an f32 number."""
    exact = np.sqrt(x.astype(F64))
    rounded = exact.astype(F32)
    moved = _within(exact * (1 + SQUARE_ROOT_ERROR * noise(x)), exact, SQUARE_ROOT_ERROR)
    return np.where(rounded == exact, rounded, moved)


def tanh(x: Array) -> Array:
    """tanh(x) with the error of tanh.approx."""
    exact = np.tanh(x.astype(F64))
    return _within(exact * (1 + TANH_ERROR * noise(x)), exact, TANH_ERROR)


def _within(moved: Array, exact: Array, bound: float) -> Array:
    """`moved` in f32; where rounding took it out of the bound, the exact number rounded."""
    result = moved.astype(F32)
    with np.errstate(all="ignore"):
        outside = np.abs(result.astype(F64) - exact) > bound * np.abs(exact)
    return np.where(outside, exact.astype(F32), result)


def _ulps(exact: Array, ulps: int, share: Array) -> Array:
    rounded = exact.astype(F32)
    whole = np.rint(share * (ulps - 0.5)).astype(np.int64)  # rounding itself is half a unit
    plain = (rounded == exact) | ~np.isfinite(rounded) | (np.abs(rounded) < F32(2.0**-100))
    moved = (np.ascontiguousarray(rounded).view(np.int32) + whole.astype(np.int32)).view(F32)
    return np.where(plain, rounded, moved)
