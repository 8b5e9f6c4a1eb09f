"""What the tests change in Triton's interpreter is still what Triton does."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl


@triton.jit
def _applied(x, y, KIND: tl.constexpr):
    if KIND == "sum":
        return x + y
    if KIND == "difference":
        return x - y
    return x * y


@triton.jit
def integers_kernel(x_ptr, y_ptr, out_ptr, KIND: tl.constexpr):
    at = tl.arange(0, 2)
    tl.store(out_ptr + at, _applied(tl.load(x_ptr + at), tl.load(y_ptr + at), KIND))


@pytest.mark.parametrize(("kind", "x", "y", "want"), [
    ("sum", 2**31 - 2, 1, 2**31 - 1), ("difference", -(2**31) + 1, 1, -(2**31)), ("product", 2**15, 2**15, 2**30),
])  # fmt: skip
def test_integers_overflow_only_beyond_their_range(kind, x, y, want):
    def run(*values: int) -> int:
        x, y = (torch.tensor([0, v], dtype=torch.int32) for v in values)
        out = torch.empty(2, dtype=torch.int32)
        integers_kernel[(1,)](x, y, out, kind)
        return int(out[1])

    assert run(x, y) == want
    with pytest.raises(Exception, match=r"int32 overflow in (add|sub|mul)"):
        run(x, y + (2**16 if kind == "product" else 1))


@triton.jit
def product_kernel(x_ptr, y_ptr, out_ptr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = rows * 16 + columns
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at), input_precision="ieee"))


def test_a_product_is_rounded_once():
    x, y, out = torch.randn(16, 16), torch.randn(16, 16), torch.empty(16, 16)
    product_kernel[(1,)](x, y, out)
    assert torch.equal(out, (x.double() @ y.double()).float())


@triton.jit
def operands_kernel(x_ptr, y_ptr, out_ptr, WIDTH: tl.constexpr):
    at = tl.arange(0, 16)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, (x * 2.5 - x * 1.5) / (y / x + 6.0) + tl.zeros([WIDTH], tl.float32))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float32),
                                    (torch.float16, torch.float16), (torch.int32, torch.float32)], ids=str)  # fmt: skip
def test_operands_become_of_one_dtype_and_shape(dtypes):
    x, y = (torch.arange(1, 17).to(dtype) for dtype in dtypes)
    out = torch.empty(16)
    for width in (16, 1):
        operands_kernel[(1,)](x, y, out, width)
        torch.testing.assert_close(out, torch.arange(1, 17) / 7)
    for width, refused in ((8, "incompatible dimensions"), (3, "power of 2"), (3, "power of 2")):  # each time
        with pytest.raises(Exception, match=refused):
            operands_kernel[(1,)](x, y, out, width)
