"""The bf16 product by AMX, on any processor: its tile instructions are emulated (emulated_tiles.cpp)."""

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
    for rows in (1, 16, 17, 32, 50, 100):
        a = torch.full((rows + 16, 2 * depth + 6), torch.nan, dtype=torch.bfloat16)
        a[:rows, : 2 * depth] = torch.randn(rows, 2 * depth)
        b = torch.full((depth + 16, 64, 2), torch.nan, dtype=torch.bfloat16)
        b[:depth] = torch.randn(depth, 64, 2)
        c = torch.randn(rows + 16, 70)
        want = c.double()
        product = a[:rows, : 2 * depth].double() @ b[:depth].transpose(1, 2).reshape(2 * depth, 64).double()
        want[:rows, :64] = product + (want[:rows, :64] if add else 0.0)
        if not add:
            c[:rows, :64] = torch.nan
        int64, pointer = ctypes.c_int64, ctypes.c_void_p
        refused = amx.multiply(
            int64(rows), int64(depth), pointer(a.data_ptr()), int64(depth + 3), pointer(b.data_ptr()),
            pointer(c.data_ptr()), int64(70), ctypes.c_bool(add),
        )  # fmt: skip
        assert refused == 0
        torch.testing.assert_close(c.double(), want, rtol=0.0, atol=1e-4)
