"""Kernels of candidate sets: products of hidden states with chosen rows of the weight, and weighted sums of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import device_of

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128
"""Rows x columns of a tile: 2048 numbers on 4 warps are 16 a thread. Not timed on a GPU yet."""


@triton.jit(do_not_specialize=["count"])
def pair_products_kernel(
    a, b, i, j, out, count, columns, a_stride, b_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[k] = a[i[k]] . b[j[k]]; a product does not depend on the others."""
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = k < count
    first = tl.load(i + k, mask=there, other=0) * a_stride
    second = tl.load(j + k, mask=there, other=0) * b_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        inside = there[:, None] & (c < columns)[None, :]
        x = tl.load(a + first[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(b + second[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total += x * y
    tl.store(out + k, tl.sum(total, axis=1), mask=there)


@triton.jit
def segment_sums_kernel(
    x, index, factor, offsets, out, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[s] = sum of factor[k] * x[index[k]] over the k of segment s, in a fixed order."""
    s = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(offsets + s), tl.load(offsets + s + 1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, ROWS):
        k = start + tl.arange(0, ROWS)
        there = k < end
        row = tl.load(index + k, mask=there, other=0) * stride
        weight = tl.load(factor + k, mask=there, other=0.0)
        inside = there[:, None] & (c < columns)[None, :]
        total += weight[:, None] * tl.load(x + row[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + s * columns + c, tl.sum(total, axis=0), mask=c < columns)


def pair_products(a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """[K] fp32: a[i[k]] . b[j[k]] for a [M, H], b [L, H], whose rows are contiguous; i, j [K] int64."""
    out = torch.empty(len(i), dtype=torch.float32, device=a.device)
    if len(i):
        with device_of(a):
            pair_products_kernel[(triton.cdiv(len(i), BLOCK_ROWS),)](
                a, b, i, j, out, len(i), a.shape[1], a.stride(0), b.stride(0), ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS,
                enable_fp_fusion=True,
            )  # fmt: skip
    return out


def segment_sums(x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> Tensor:
    """[S, H] fp32: the sum of factor[k] * x[index[k]] over offsets[s] <= k < offsets[s + 1]; factor [K] fp32."""
    count, columns = len(offsets) - 1, x.shape[1]
    out = torch.empty((count, columns), dtype=torch.float32, device=x.device)
    if count:
        with device_of(x):
            segment_sums_kernel[(count, triton.cdiv(columns, BLOCK_COLUMNS))](
                x, index, factor, offsets, out, columns, x.stride(0), ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS,
                enable_fp_fusion=True,
            )  # fmt: skip
    return out
