"""The kernel that multiplies a gradient by the upstream gradient, interpreted on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from helpers import make_case, make_config

pytest.importorskip("triton")

import kernel_cases as cases
from grpo_fused.kernels import scale

from grpo_fused.api import autograd

BLOCK = scale.BLOCK
TRUNCATED = 2**-7
"""The interpreter truncates to bf16."""


@pytest.mark.parametrize("count", [0, 1, BLOCK, 3 * scale.PROGRAMS * BLOCK + 5], ids=str)
@pytest.mark.parametrize("factor", [1.0, -0.3, 0.0, float("nan")], ids=str)
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32], ids=str)
def test_scaling(dtype, factor, count):
    cases.scaling(dtype, torch.tensor(factor), count, rtol=TRUNCATED if dtype == cases.BF16 and factor != 1 else 0.0)


@pytest.mark.parametrize("factor_dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_factor_of_another_dtype(factor_dtype):
    cases.scaling(cases.FP16, torch.tensor(0.3, dtype=factor_dtype), 100)


def test_a_loss_scales_its_gradient_by_it(monkeypatch):
    """As a GPU does; bf16, whose dW is made in the dtype of the weight."""
    case, taken = make_case(0, dtype=torch.bfloat16), []
    want = case.run(make_config("dapo"), impl="chunked", upstream=0.3)
    monkeypatch.setattr(autograd, "_takes_kernels", lambda x: taken.append(x.dtype) or True)
    got = case.run(make_config("dapo"), impl="chunked", upstream=0.3)
    assert taken == [torch.bfloat16]
    torch.testing.assert_close(got.dweight, want.dweight, rtol=TRUNCATED, atol=0)


def test_where_kernels_are_taken():
    x = torch.zeros(2, 3)
    assert not autograd._takes_kernels(x)  # on a CPU
    assert not autograd._takes_kernels(torch.zeros(2, 3, device="meta"))
