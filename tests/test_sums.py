"""Gradients summed over chunks whose dlogits are scaled by a power of two, as in fp16 on a GPU."""

from __future__ import annotations

import pytest
import torch

from grpo_fused.call.calls import LMHead, Needs
from grpo_fused.engines.base import Tokens
from grpo_fused.engines.gradients import GradientSums, _weighted_sum, fp16_scale


def head(logit_scale=1.0):
    return LMHead(torch.randn(29, 12), logit_scale=logit_scale)


def test_scaled_dlogits_give_the_gradients_of_plain_ones():
    some, hidden, dlogits = head(), torch.randn(20, 12), torch.randn(20, 29)
    tokens = Tokens(hidden, torch.zeros(20, dtype=torch.int64), torch.ones(20, dtype=torch.bool), 1.0)
    sums = GradientSums(some, tokens, Needs(True, True, True), torch.float32)
    for rows, scale in zip(torch.arange(20).split(7), (None, 2.0**20, 2.0**-3), strict=True):
        lifted = dlogits[rows] if scale is None else dlogits[rows] * scale
        sums.add(rows, tokens.hidden_rows(rows), lifted, None if scale is None else torch.tensor(scale))
    got = sums.result()
    torch.testing.assert_close(got.hidden, dlogits @ some.weight)
    torch.testing.assert_close(got.weight, dlogits.T @ hidden)
    torch.testing.assert_close(got.bias, dlogits.sum(0))
    assert got.tokens == 20


@pytest.mark.parametrize(
    ("dentropy", "scale"),
    [(None, 2.0**5), (torch.tensor([0.0, 1.0]), 2.0**3)],  # from bounds of 6 and (1 + 32) * 3 / 4 = 24.75 to below 2^8
    ids=["logp", "entropy"],
)
def test_fp16_scale_brings_the_largest_bound_below_256(dentropy, scale):
    """|dlogits| <= (|g| + 32 |g_H|) |logit_scale| / T, of each token with its own temperature."""
    temperature = torch.tensor([0.25, 4.0])
    assert fp16_scale(head(-3.0), temperature, torch.tensor([-0.5, 1.0]), dentropy) == scale


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e38, torch.inf])
def test_fp16_scale_is_finite(size):
    scale = fp16_scale(head(), 1.0, torch.tensor([size]), None)
    assert 2.0**-120 <= scale <= 2.0**120


def test_the_bias_gets_the_digits_of_the_factors():
    """As bf16 they would have three of them."""
    pytest.importorskip("triton")
    from cuda_double import cuda_double

    g = torch.Generator().manual_seed(0)
    dlogits, factor = torch.randn(40, 29, generator=g).bfloat16(), torch.randn(40, generator=g)
    with cuda_double():
        got = _weighted_sum(dlogits.to("cuda"), factor.to("cuda")).cpu()
    torch.testing.assert_close(got.double(), factor.double() @ dlogits.double(), rtol=0, atol=2e-4)
