"""The chunked engine with Triton row work, interpreted: the whole way from hidden states to gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, config_id, make_case, make_config, pack

pytest.importorskip("triton")

from grpo_fused import engines
from grpo_fused.engines.chunked import ChunkedEngine
from grpo_fused.engines.triton_rows import TritonRows

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
