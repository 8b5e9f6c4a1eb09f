"""Each arithmetic form against its definition."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx import numbers
from tests.ptx.block import Options
from tests.ptx.running import apply

F32, U32, I32, U64, I64, U16 = np.float32, np.uint32, np.int32, np.uint64, np.int64, np.uint16
RANDOM = np.random.default_rng(0)
INTS = np.array(
    [0, 1, 2, 3, 7, 31, 32, 33, 255, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32 - 7, 12345678, 3 * 10**9], U32
)
SPECIAL = np.array([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 2.0**-140, -(2.0**-149), 3.4e38, 0.1, -7.25], F32)


def pairs(values):
    a, b = np.meshgrid(values, values)
    return a.ravel().copy(), b.ravel().copy()


def signed(x, bits=32):
    return int(x) - (1 << bits) if int(x) >> (bits - 1) else int(x)


def c_divide(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


DEFINITIONS = {
    "add.s32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: signed(a) * signed(b),
    "mul.hi.u32": lambda a, b: (a * b) >> 32,
    "mul.hi.s32": lambda a, b: (signed(a) * signed(b)) >> 32,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": max,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "div.u32": lambda a, b: a // b if b else None,
    "div.s32": lambda a, b: c_divide(signed(a), signed(b)) if b else None,
    "rem.s32": lambda a, b: signed(a) - signed(b) * c_divide(signed(a), signed(b)) if b else None,
    "rem.u32": lambda a, b: a % b if b else None,
}


@pytest.mark.parametrize("opcode", DEFINITIONS)
def test_integers(opcode):
    a, b = pairs(INTS)
    got = apply(opcode + " {d}, {0}, {1}", a, b)
    for x, y, mine in zip(map(int, a), map(int, b), got, strict=True):
        want = DEFINITIONS[opcode](x, y)
        assert want is None or int(mine) == want & 0xFFFFFFFF, (opcode, x, y)


def test_wide_products():
    a, b = pairs(INTS)
    c = np.arange(len(a)).astype(U64) << U64(40)
    got = apply("mad.wide.s32 {d}, {0}, {1}, {2}", a, b, c, out=U64)
    for x, y, z, mine in zip(a, b, c, got, strict=True):
        assert int(mine) == (signed(x) * signed(y) + int(z)) % 2**64
    got = apply("mul.wide.u32 {d}, {0}, {1}", a, b, out=U64)
    assert [int(x) for x in got] == [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    got = apply("mul.lo.s64 {d}, {0}, {1}", a.astype(U64) << U64(20), c, out=U64)
    assert [int(x) for x in got] == [(int(x) << 20) * int(y) % 2**64 for x, y in zip(a, c, strict=True)]


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_bit_fields(kind):
    starts, lengths = pairs(np.array([0, 1, 5, 16, 31, 32], U32))
    for value in (0xDEADBEEF, 0x7FFF0001):
        got = apply(f"bfe.{kind} {{d}}, {{0}}, {{1}}, {{2}}", np.full(len(starts), value, U32), starts, lengths)
        for start, length, mine in zip(map(int, starts), map(int, lengths), got, strict=True):
            sign = value >> min(start + length - 1, 31) & 1 if kind == "s32" and length else 0
            want = 0
            for bit in range(32):
                inside = bit < length and start + bit < 32
                want |= (value >> (start + bit) & 1 if inside else sign) << bit
            assert int(mine) == want, (value, start, length)


def test_bytes_and_counts():
    a, b = pairs(INTS)
    selectors = RANDOM.integers(0, 2**16, len(a)).astype(U32)
    got = apply("prmt.b32 {d}, {0}, {1}, {2}", a, b, selectors)
    for x, y, s, mine in zip(a, b, map(int, selectors), got, strict=True):
        eight = struct.pack("<II", x, y)
        want = [eight[s >> 4 * i & 7] if not s >> 4 * i & 8 else 255 * (eight[s >> 4 * i & 7] >> 7) for i in range(4)]
        assert int(mine) == int.from_bytes(bytes(want), "little")
    assert list(apply("popc.b32 {d}, {0}", INTS)) == [int(x).bit_count() for x in INTS]
    assert list(apply("clz.b32 {d}, {0}", INTS)) == [32 - int(x).bit_length() for x in INTS]


def test_pairs_of_floats():
    a, b, c = (RANDOM.standard_normal(64).astype(F32) for _ in range(3))
    got = apply("fma.rn.f32x2 {d}, {0}, {1}, {2}", a.view(U64), b.view(U64), c.view(U64), out=U64).view(F32)
    assert (got == numbers.fma(a, b, c)).all()


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_pairs_of_16_bits(kind, dtype):
    a, b = (torch.from_numpy(RANDOM.standard_normal(64).astype(F32)).to(dtype) for _ in range(2))
    for op, fn in (("add", torch.add), ("sub", torch.sub), ("mul.rn", torch.mul)):
        words = [x.view(torch.int16).numpy().view(U32) for x in (a, b)]
        got = apply(f"{op}.{kind}x2 {{d}}, {{0}}, {{1}}", *words).view(U16)
        assert (got == fn(a, b).view(torch.int16).numpy().view(U16)).all()


def exactly_rounded(value: Fraction) -> np.float32:
    """To nearest, ties to even, by trying neighbours."""
    guess = F32(float(value))
    around = [np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(U32)) & 1))


def test_fma_rounds_once():
    a = RANDOM.standard_normal(3000).astype(F32)
    b = RANDOM.standard_normal(3000).astype(F32)
    c = (-a.astype(np.float64) * b * (1 + RANDOM.choice([0, 1e-7, 1e-16], 3000))).astype(F32)
    c[:1000] *= F32(2.0**-30)  # where a sum in f64 is rounded, and then again
    # a product that ends in a tie of f32, and an addend that decides it, too small for f64
    a[-1], b[-1], c[-1] = F32(1 + 2**-12), F32(1 + 2**-12), F32(2.0**-80)
    got = apply("fma.rn.f32 {d}, {0}, {1}, {2}", a, b, c, out=F32)
    for x, y, z, mine in zip(a, b, c, got, strict=True):
        assert mine == exactly_rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))), (x, y, z)
    tie = Fraction(float(a[-1])) * Fraction(float(b[-1]))
    assert got[-1] != exactly_rounded(tie), "the addend decides"


def test_minimum_and_maximum():
    a, b = pairs(SPECIAL)
    for opcode, strict in (("max.f32", False), ("min.f32", False), ("max.NaN.f32", True), ("min.NaN.f32", True)):
        got = apply(opcode + " {d}, {0}, {1}", a, b, out=F32)
        for x, y, mine in zip(a, b, got, strict=True):
            if np.isnan(x) or np.isnan(y):
                want = F32(np.nan) if strict or (np.isnan(x) and np.isnan(y)) else (y if np.isnan(x) else x)
            else:
                order = sorted((x, y), key=lambda v: (v, not np.signbit(v)))
                want = order["max" in opcode]
            assert mine.tobytes() == want.tobytes() or (np.isnan(mine) and np.isnan(want)), (opcode, x, y, mine)
    assert apply("max.f32 {d}, {0}, {1}", SPECIAL[6:7], SPECIAL[6:7])[0] == 0x7FFFFFFF, "the one NaN"


def test_signs():
    for opcode, fn in (("abs", abs), ("neg", lambda x: -x)):
        assert [signed(x) for x in apply(f"{opcode}.s32 {{d}}, {{0}}", INTS)] == [
            signed(fn(signed(x)) & 0xFFFFFFFF) for x in INTS
        ]
        for flushed in (False, True):
            got = apply(f"{opcode}{'.ftz' * flushed}.f32 {{d}}, {{0}}", SPECIAL, out=F32)
            small = (np.abs(SPECIAL) < 2.0**-126) & flushed
            want = np.where(small, F32(0), np.abs(SPECIAL))
            assert np.array_equal(np.abs(got), want, equal_nan=True)
            negative = np.signbit(SPECIAL) ^ True if opcode == "neg" else np.zeros(len(SPECIAL), bool)
            assert (np.signbit(got) == negative)[~np.isnan(SPECIAL)].all()


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("name", [*COMPARE, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"])
def test_comparisons(name):
    a, b = pairs(SPECIAL)
    got = apply(f"setp.{name}.f32 %p1, {{0}}, {{1}};\nselp.b32 {{d}}, 1, 0, %p1", a, b)
    for x, y, mine in zip(a, b, got, strict=True):
        unordered = bool(np.isnan(x) or np.isnan(y))
        if name in ("num", "nan"):
            want = unordered == (name == "nan")
        elif unordered:
            want = len(name) == 3
        else:
            want = eval(f"{float(x)!r} {COMPARE[name[:2]]} {float(y)!r}", {"inf": np.inf})
        assert bool(mine) == want, (name, x, y)


def test_comparisons_of_integers_and_joins():
    a, b = pairs(INTS)
    got = apply("setp.lt.s32 %p1, {0}, {1};\nsetp.gt.or.u32 %p2|%p3, {0}, {1}, %p1;\n"
                "selp.b32 %r40, 1, 0, %p2;\nselp.b32 %r41, 2, 0, %p3;\nor.b32 {d}, %r40, %r41", a, b)  # fmt: skip
    for x, y, mine in zip(a, b, got, strict=True):
        less, greater = signed(x) < signed(y), x > y
        assert int(mine) == (greater or less) + 2 * (not greater or less)


def test_flushing():
    x = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1.0], F32)
    assert list(apply("add.ftz.f32 {d}, {0}, 0f00000000", x, out=F32)) == [0, 0, 2.0**-126, 1]
    assert list(apply("add.f32 {d}, {0}, 0f00000000", x, out=F32)) == list(x)
    assert list(apply("mul.ftz.f32 {d}, {0}, 0f3F000000", x, out=F32)) == [0, 0, 0, 0.5]
    assert list(apply("ex2.approx.ftz.f32 {d}, {0}", np.array([-127.0, 1.0], F32), out=F32)) == [0, F32(2) * (apply("ex2.approx.ftz.f32 {d}, {0}", np.array([1.0], F32), out=F32)[0] / 2)]  # fmt: skip


def nearest_16(value: float, decode) -> set[int]:
    """Bits of the nearest 16-bit numbers, by looking at all; of two the even one."""
    bits = np.arange(2**16, dtype=U16)
    there = decode(bits).astype(np.float64)
    finite = np.isfinite(there)
    distance = np.where(finite, np.abs(there - value), np.inf)
    nearest = bits[distance == distance.min()]
    even = [b for b in nearest if not b & 1]
    return {int(b) for b in (nearest if len(even) in (0, len(nearest)) else even)}


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_narrowing(kind):
    decode = numbers.DECODE[kind]
    step = {"bf16": 2.0**-7, "f16": 2.0**-10}[kind]
    x = np.concatenate([
        1 + step * np.array([0, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 0.5 + 1e-4, 0.5 - 1e-4]),  # ties and near them
        RANDOM.standard_normal(50) * 10.0 ** RANDOM.integers(-9, 4, 50),
    ]).astype(F32)  # fmt: skip
    got = apply(f"cvt.rn.{kind}.f32 {{d}}, {{0}}", x, out=U16)
    for value, mine in zip(x, got, strict=True):
        wanted = nearest_16(float(value), decode)
        assert int(mine) in wanted or float(decode(np.array([mine], U16))[0]) == value == 0, value
    special = np.array([np.nan, np.inf, -np.inf, 3.4e38, -0.0], F32)
    got = apply(f"cvt.rn.{kind}.f32 {{d}}, {{0}}", special, out=U16)
    infinity = {"bf16": 0x7F80, "f16": 0x7C00}[kind]
    assert list(got) == [0x7FFF, infinity, infinity | 0x8000, infinity, 0x8000], "above the range: infinity"
    high, low = x[:20], x[20:40]
    both = apply(f"cvt.rn.{kind}x2.f32 {{d}}, {{0}}, {{1}}", high, low)
    one = [apply(f"cvt.rn.{kind}.f32 {{d}}, {{0}}", half, out=U16).astype(U32) for half in (high, low)]
    assert (both == one[0] << 16 | one[1]).all(), "the first source is the upper half"
    back = apply(f"cvt.f32.{kind} {{d}}, {{0}}", np.arange(0, 2**16, 7, dtype=U16)[:2048], out=F32)
    formats = {
        "bf16": lambda b: struct.unpack("<f", struct.pack("<HH", 0, b))[0],
        "f16": lambda b: struct.unpack("<e", struct.pack("<H", b))[0],
    }
    assert np.array_equal(
        back, np.array([formats[kind](int(b)) for b in np.arange(0, 2**16, 7)[:2048]], F32), equal_nan=True
    )


def test_conversions_between_integers_and_floats():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.7, 3e9, 5e9, -3e9, np.nan, np.inf, -np.inf, 2.0**31], F32)
    rounds = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for name, fn in rounds.items():
        for kind, low, high in (("s32", -(2**31), 2**31 - 1), ("u32", 0, 2**32 - 1)):
            got = apply(f"cvt.{name}.{kind}.f32 {{d}}, {{0}}", x)
            want = [0 if np.isnan(v) else int(min(max(fn(np.float64(v)), low), high)) for v in x]
            assert [signed(g) if kind == "s32" else int(g) for g in got] == want, (name, kind)
    small = np.array([2.0**-130, -(2.0**-130)], F32)
    assert [signed(x) for x in apply("cvt.rpi.s32.f32 {d}, {0}", small)] == [1, 0]
    assert [signed(x) for x in apply("cvt.rmi.ftz.s32.f32 {d}, {0}", small)] == [0, 0]
    assert list(apply("cvt.rn.f32.s32 {d}, {0}", INTS, out=F32)) == [F32(signed(v)) for v in INTS]
    assert list(apply("cvt.s64.s32 {d}, {0}", INTS, out=I64)) == [signed(v) for v in INTS]
    assert list(apply("cvt.u64.u32 {d}, {0}", INTS, out=U64)) == [int(v) for v in INTS]
    assert list(apply("cvt.u32.u64 {d}, {0}", INTS.astype(U64) << U64(7))) == [int(v) << 7 & 0xFFFFFFFF for v in INTS]


def units(exact):
    """Units in the last place of f32 numbers."""
    below = np.abs(exact).astype(F32)
    below = np.where(below > np.abs(exact), np.nextafter(below, F32(0)), below)
    return np.spacing(below).astype(np.float64)


POSITIVE = np.exp2(RANDOM.choice([-1, 1], 2000) * RANDOM.uniform(1, 100, 2000)).astype(F32)
NEAR_ONE = RANDOM.uniform(0.5, 2, 2000).astype(F32)
BOTH = RANDOM.standard_normal((2, 2000)).astype(F32)
MANUAL = {
    "ex2.approx": (RANDOM.uniform(-120, 120, (1, 2000)), np.exp2, lambda y: 2 * units(y)),
    "lg2.approx": (POSITIVE[None], np.log2, lambda y: 2.0**-22 * np.abs(y)),
    "lg2.approx near 1": (NEAR_ONE[None], np.log2, lambda y: 2.0**-22),
    "rcp.approx": (BOTH[:1], lambda x: 1 / x, units),
    "sqrt.approx": (POSITIVE[None], np.sqrt, lambda y: 2.0**-23 * y),
    "tanh.approx": (BOTH[:1], np.tanh, lambda y: 2.0**-11 * np.abs(y)),
    "div.full": (BOTH, np.divide, lambda y: 2 * units(y)),
    "div.approx": (BOTH, np.divide, lambda y: 2 * units(y)),
}
"""Arguments, function, and bound of the result, as the manual has them."""


@pytest.mark.parametrize("name", MANUAL)
def test_bounds_of_approximate_functions(name):
    """Never beyond the bound of the manual, and close to it on the side that was asked for, or on both."""
    arguments, fn, bound = MANUAL[name]
    arguments = [x.astype(F32) for x in arguments]
    exact = fn(*(x.astype(np.float64) for x in arguments))
    if name == "ex2.approx":
        exact = exact.astype(F32).astype(np.float64)  # its bound is from the rounded result
    text = f"{name.split()[0]}.f32 {{d}}, " + ", ".join(f"{{{i}}}" for i in range(len(arguments)))
    for error in (numbers.up, numbers.down, numbers.either, numbers.scattered):
        share = (apply(text, *arguments, out=F32, options=Options(error=error)) - exact) / bound(exact)
        assert np.abs(share).max() <= 1
        sides = [error is not numbers.up, error is not numbers.down]
        assert [share.min() < 0, share.max() > 0] == sides
        assert np.abs(share).mean() > (0.4 if error is numbers.scattered else 0.45)
        assert not all(sides) or abs(share.mean()) < 0.1


SPECIALS = {
    "ex2.approx": [(0, 1), (-0.0, 1), (np.inf, np.inf), (-np.inf, 0), (np.nan, np.nan)],
    "lg2.approx": [(0, -np.inf), (-0.0, -np.inf), (np.inf, np.inf), (-1, np.nan), (-np.inf, np.nan), (np.nan, np.nan)],
    "rcp.approx": [(-np.inf, -0.0), (-0.0, -np.inf), (0, np.inf), (np.inf, 0), (np.nan, np.nan)],
    "sqrt.approx": [(-np.inf, np.nan), (-1, np.nan), (-0.0, -0.0), (0, 0), (np.inf, np.inf), (np.nan, np.nan)],
    "tanh.approx": [(-np.inf, -1), (-0.0, -0.0), (0, 0), (np.inf, 1), (np.nan, np.nan)],
}
"""Exact results in the tables of the manual."""


@pytest.mark.parametrize("name", SPECIALS)
def test_special_values(name):
    x, want = (np.array(values, F32) for values in zip(*SPECIALS[name], strict=True))
    for error in (numbers.up, numbers.down):
        got = apply(f"{name}.f32 {{d}}, {{0}}", x, out=F32, options=Options(error=error))
        assert np.array_equal(got, want, equal_nan=True)
        assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


def test_divisions_by_large_numbers():
    """div.approx takes a reciprocal, which is 0 above 2^126."""
    a, b = np.array([1, -1, np.inf, 3, 1], F32), np.array([2.0**127, 2.0**127, 2.0**127, 1, 0], F32)
    got = apply("div.approx.f32 {d}, {0}, {1}", a, b, out=F32, options=Options(error=numbers.up))
    assert np.array_equal(got[[0, 1, 2, 4]], np.array([0, -0.0, np.nan, np.inf], F32), equal_nan=True)
    assert np.signbit(got[1])
    full = apply("div.full.f32 {d}, {0}, {1}", a, b, out=F32, options=Options(error=numbers.up))
    assert 0 < full[0] < 2.0**-126
    assert np.isinf(full[2])
    assert got[3] == full[3] == np.nextafter(np.nextafter(F32(3), F32(4)), F32(4)), "an exact quotient is off, too"
    rounded = apply("div.rn.f32 {d}, {0}, {1}", a, b, out=F32, options=Options(error=numbers.up))
    assert rounded[3] == 3


def test_directed_rounding():
    """The nearest f32 number that is not above the exact result, or not further from zero."""
    a, b, c = (RANDOM.standard_normal(2000).astype(F32) for _ in range(3))
    c[:1000] *= F32(2.0**-40)
    down = apply("fma.rm.f32 {d}, {0}, {1}, {2}", a, b, c, out=F32)
    zero = apply("add.rz.f32 {d}, {0}, {1}", a, c, out=F32)
    for x, y, z, fused, added in zip(a, b, c, down, zero, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(fused)) <= exact < Fraction(float(np.nextafter(fused, F32(np.inf))))
        total = Fraction(float(x)) + Fraction(float(z))
        outward = np.nextafter(added, F32(np.copysign(np.inf, float(total))))
        assert abs(Fraction(float(added))) <= abs(total) < abs(Fraction(float(outward)))
    assert list(apply("cvt.sat.f32.f32 {d}, {0}", np.array([-1, 0.25, 7, np.nan], F32), out=F32)) == [0, 0.25, 1, 0]
    assert list(
        apply("copysign.f32 {d}, {0}, {1}", np.array([-1.0, 2.0], F32), np.array([3.0, -4.0], F32), out=F32)
    ) == [-3, 4]
