"""The products by AMX, on any processor: its tile instructions are emulated (emulated_tiles.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from native.building import shared_library


@pytest.fixture(scope="module")
def amx(tmp_path_factory):
    source = Path(__file__).parent / "emulated_tiles.cpp"
    return ctypes.CDLL(str(shared_library(tmp_path_factory.mktemp("amx") / "tiles.so", source)))


@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
@pytest.mark.parametrize("depth", [1, 6, 15, 16, 17, 40, 133, 261])
def test_products_are_those_of_float64(amx, depth, add):
    """c [rows, 64] = or += a [rows, 2 depth] @ b [2 depth, 64], two bf16 numbers a word; what lies around is NaN.

    A strip is 112 words deep: one, two and three of them, and what is left.
    """
    for rows, lanes in ((1, 64), (16, 64), (17, 16), (32, 64), (32, 33), (50, 32), (100, 1)):
        a = torch.full((rows + 16, 2 * depth + 6), torch.nan, dtype=torch.bfloat16)
        a[:rows, : 2 * depth] = torch.randn(rows, 2 * depth)
        b = torch.full((depth + 16, 64, 2), torch.nan, dtype=torch.bfloat16)
        b[:depth] = torch.randn(depth, 64, 2)
        c = torch.randn(rows + 16, 64)
        want = c.double()
        product = a[:rows, : 2 * depth].double() @ b[:depth].transpose(1, 2).reshape(2 * depth, 64).double()
        want[:rows, :64] = product + (want[:rows, :64] if add else 0.0)
        if not add:
            c[:rows, :64] = torch.nan
        multiply(amx, rows, depth, a, b, lanes, c, add)
        torch.testing.assert_close(c[:rows, :lanes].double(), want[:rows, :lanes], rtol=0.0, atol=1e-4)
        torch.testing.assert_close(c[rows:].double(), want[rows:])


@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
@pytest.mark.parametrize("depth", [1, 6, 15, 16, 17, 32, 40, 133, 261])
def test_products_of_pieces(amx, depth, add):
    """c = or += a @ b of fp32, whose bf16 pieces lie one after the other: the result is exact but for fp32's rounding.

    Numbers of all exponents between 2^-20 and 2^20; a slice is 32 words deep. Without any of the six products an error
    is 2^-18 or more of what is summed.
    """
    for rows, lanes in ((1, 64), (16, 64), (17, 16), (32, 64), (32, 33), (50, 32), (100, 1)):
        a32 = torch.randn(rows, 2 * depth) * 2.0 ** torch.randint(-20, 21, (rows, 1))
        b32 = torch.randn(2 * depth, 64) * 2.0 ** torch.randint(-20, 21, (64,))
        a = torch.full((rows + 16, 3, 2 * depth + 6), torch.nan, dtype=torch.bfloat16)
        a[:rows, :, : 2 * depth] = torch.stack(pieces_of(a32), 1)
        b = torch.full((3, depth + 16, 64, 2), torch.nan, dtype=torch.bfloat16)
        b[:, :depth] = torch.stack(pieces_of(b32)).unflatten(1, (depth, 2)).transpose(2, 3)
        scale = a32.double().abs() @ b32.double().abs()
        c = torch.full((rows + 16, 64), 7.0)
        before = torch.randn(rows, 64) * scale.float()
        want = a32.double() @ b32.double() + (before.double() if add else 0.0)
        c[:rows, :64] = before if add else torch.nan
        multiply(amx, rows, depth, a, b, lanes, c, add)
        error = (c[:rows].double() - want).abs() / (scale + before.double().abs())
        assert error[:, :lanes].max() < 2**-21
        assert (c[rows:] == 7).all()


def multiply(amx, rows, depth, a, b, lanes, c, add):
    """a [rows, (pieces,) numbers], b [(pieces,) words, 64, 2]. The process ends at an instruction that AMX would refuse."""
    int64, pointer = ctypes.c_int64, ctypes.c_void_p
    amx.multiply.restype = ctypes.c_bool
    released = amx.multiply(
        ctypes.c_bool(a.dim() == 3), int64(rows), int64(depth), pointer(a.data_ptr()), int64(a.stride(0) // 2),
        int64(a.stride(-2) // 2), pointer(b.data_ptr()), int64(b.stride(0) // 2), int64(lanes),
        pointer(c.data_ptr()), ctypes.c_bool(add),
    )  # fmt: skip
    assert released


def pieces_of(x):
    """Three bf16 tensors that sum to x."""
    pieces = []
    for _ in range(3):
        pieces.append(x.bfloat16())
        x = x - pieces[-1]
    assert not x.any()
    return pieces
