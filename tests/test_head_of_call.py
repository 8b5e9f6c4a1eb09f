"""The head of a call: which keywords it takes, how autocast rounds it, what masked rows hold."""

from __future__ import annotations

import pytest
import torch
from helpers import ENGINES

from grpo_fused import (
    FusedLinearGRPOLoss,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
)
from grpo_fused.call.calls import LMHead
from grpo_fused.engines import products
from grpo_fused.engines.base import Tokens

HIDDEN, WEIGHT, IDS = torch.randn(2, 3, 8), torch.randn(20, 8), torch.randint(0, 20, (2, 3))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda **o: fused_linear_grpo_loss(HIDDEN, WEIGHT, IDS, torch.ones(2), **o), "temprature"),
        (lambda **o: fused_linear_logprobs(HIDDEN, WEIGHT, IDS, **o), "temprature"),
        (lambda **o: fused_linear_objective(HIDDEN, WEIGHT, IDS, lambda logps, _: -logps, **o), "temprature"),
        (lambda **o: fused_linear_divergence(HIDDEN, WEIGHT, HIDDEN, WEIGHT, **o), "candidates"),
    ],
    ids=["loss", "logprobs", "objective", "divergence-sets"],
)
def test_a_keyword_that_a_function_does_not_have_is_refused(call, name):
    with pytest.raises(TypeError, match=rf"fused_linear_\w+\(\) got an unexpected keyword argument '{name}'"):
        call(**{name: None})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("old_logps", "; did you mean 'old_per_token_logps'?"),
        ("adapter", "; did you mean 'lm_head_adapter'?"),
        ("head", ""),
        ("x", ""),
    ],
)
def test_the_nearest_keyword_is_named(name, near):
    with pytest.raises(TypeError) as refused:
        fused_linear_grpo_loss(HIDDEN, WEIGHT, IDS, torch.ones(2), **{name: None})
    assert str(refused.value).endswith(f"unexpected keyword argument {name!r}{near}")


def test_a_keyword_that_is_refused_is_not_the_nearest():
    with pytest.raises(TypeError, match="'candidate'$"):
        fused_linear_divergence(HIDDEN, WEIGHT, HIDDEN, WEIGHT, candidate=None)


def test_the_catch_all_of_keywords_is_not_the_nearest():
    with pytest.raises(TypeError, match="'options'$"):
        FusedLinearGRPOLoss(options=None)


def test_an_exported_call_takes_any_vocabulary():
    class Scores(torch.nn.Module):
        def forward(self, hidden, weight):
            return fused_linear_logprobs(hidden, weight, IDS).logps

    size = torch.export.Dim("V", min=2, max=100)  # V = H among them
    with torch.no_grad():
        torch.export.export(Scores(), (HIDDEN, WEIGHT), dynamic_shapes={"hidden": None, "weight": {0: size}})


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_the_bias_too(impl, dtype):
    """As `F.linear` does, also beside a head that is in its dtype; the reference has code of its own for it. 1 + 2^-9 is
    no bf16 number."""
    bias, (hidden, weight) = torch.linspace(1.0, 9.0, 20) + 2.0**-9, (x.to(dtype) for x in (HIDDEN, WEIGHT))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (fused_linear_logprobs(hidden, weight, IDS, lm_head_bias=bias, impl=i) for i in (impl, "reference"))
        exact = fused_linear_logprobs(hidden, weight, IDS, lm_head_bias=bias.bfloat16(), impl=impl)
    torch.testing.assert_close(got.logps, want.logps, atol=2e-5, rtol=0)
    assert torch.equal(got.logps, exact.logps)
    unrounded = fused_linear_logprobs(HIDDEN.bfloat16(), WEIGHT.bfloat16(), IDS, lm_head_bias=bias, impl=impl)
    assert (unrounded.logps - got.logps).abs().max() > 1e-3


def test_the_weight_is_rounded_once_where_products_take_it_whole(monkeypatch):
    head = LMHead(WEIGHT, compute_dtype=torch.bfloat16)
    assert products.rounded_weight(head) is head
    monkeypatch.setattr(products, "has_fp32_output", lambda head: True)
    rounded = products.rounded_weight(head)
    assert rounded.weight.dtype == torch.bfloat16
    assert rounded.operand(rounded.weight) is rounded.weight


def test_masked_rows_are_zero_and_the_callers_tensor_is_kept():
    hidden, mask = HIDDEN.reshape(-1, 8).clone(), torch.tensor([1, 0, 1, 0, 1, 1], dtype=torch.bool)
    hidden[~mask] = torch.nan
    before = hidden.clone()
    rows = Tokens(hidden, IDS.reshape(-1), mask, 1.0).hidden_rows(torch.tensor([0, 1, 5]))
    assert torch.equal(rows, torch.stack([hidden[0], torch.zeros(8), hidden[5]]))
    assert torch.equal(hidden.nan_to_num(7.0), before.nan_to_num(7.0))
