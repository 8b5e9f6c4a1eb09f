"""The chunked engine with Triton row work, interpreted: from hidden states to gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, config_id, make_case, make_config, pack

pytest.importorskip("triton")

from grpo_fused.kernels.launch import TritonRows

from grpo_fused import engines
from grpo_fused.engines.chunked import ChunkedEngine

CONFIGS = [
    make_config("dapo"),
    make_config("dapo", beta=0.1, entropy_coef=0.05),
    make_config("cispo", beta=0.1),
    make_config("sapo"),
    make_config("grpo", delta=1.3),
    make_config("grpo", importance_sampling_level="sequence", beta=0.1),
    make_config("dapo", top_entropy_quantile=0.5, entropy_coef=0.1),
    make_config("vespo"),
]


@pytest.fixture(autouse=True)
def _triton_rows(monkeypatch):
    monkeypatch.setitem(engines._ENGINES, "chunked", ChunkedEngine(lambda device, dtype: TritonRows()))


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_matches_reference(config, layout):
    case = make_case(0, dtype=torch.float32, per_token_advantages=layout == "padded" and config.loss_type != "gmpo")
    case = pack(case) if layout == "packed" else case
    want = case.to(torch.float64).run(config, impl="reference")
    assert_same(case.run(config), want, tol=2e-5)
    assert_same(case.run(config, compact=False), want, tol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_options_in_low_precision(dtype):
    case = make_case(1, dtype=dtype, softcap=3.0, logit_scale=0.8, lm_head_bias=torch.linspace(-1, 1, 29).to(dtype))
    case.options["temperature"] = torch.linspace(0.5, 2, 4)
    config = make_config("dapo", beta=0.1, entropy_coef=0.05)
    want = case.to(torch.float64).run(config, impl="reference")
    got = case.run(config)
    assert (got.out.per_token_logps.double() - want.out.per_token_logps).abs().max() <= 1e-4
    assert_same(got, want, tol=1e-4, scale=200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask_some", [False, True], ids=["all", "masked"])
def test_selective_reads_logits_in_place(monkeypatch, dtype, mask_some):
    """bf16 and fp16 logits are read without a copy in fp32, and not changed."""
    from grpo_fused import selective_logprobs
    from grpo_fused.api import logits as engine

    monkeypatch.setattr(engine, "row_work", lambda device, dtype: TritonRows())
    values = (torch.randn(3, 5, 77) * 3).to(dtype)
    ids = torch.randint(0, 77, (3, 5))
    mask = torch.rand(3, 5) > 0.4 if mask_some else None
    grads = []
    for impl in ("auto", "reference"):
        x = values.clone().requires_grad_()
        out = selective_logprobs(x, ids, mask, temperature=0.7, with_entropy=True, impl=impl)
        (out.logps.sum() + 0.3 * out.entropies.sum()).backward()
        grads.append((out.logps.detach(), out.entropies.detach(), x.grad.float()))
        assert torch.equal(x.detach(), values)
    eps = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps  # the interpreter truncates
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0][2], grads[1][2], rtol=eps, atol=2e-6 if dtype == torch.float32 else 1e-3)


def test_whole_numbers_reach_the_kernel_as_floats():
    """Triton would compile an int in, and 1 as another constant."""
    from grpo_fused import GRPOLossConfig
    from grpo_fused.engines.token_kernels import objective_numbers

    numbers = objective_numbers(GRPOLossConfig(beta=1, epsilon=1, epsilon_high=2, delta=4))
    assert {type(getattr(numbers, name)) for name in ("beta", "epsilon", "epsilon_high", "delta")} == {float}
