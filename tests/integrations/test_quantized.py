"""Heads that torchao has quantised, with its own layers as oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
quantization = pytest.importorskip("torchao.quantization")
from integrations.tiny import build, log_probs, token_ids

from grpo_fused import QuantizedWeight, fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.testing import frobenius_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def by_torchao(model: Any, name: str) -> None:
    config = {"int8": quantization.Int8WeightOnlyConfig, "fp8": quantization.Float8WeightOnlyConfig}[name](version=2)
    quantization.quantize_(model, config, filter_fn=lambda _, path: path == "lm_head")


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_log_probs_of_the_library(name):
    """The check itself compares with the library's own layer in fp32; the weight stays in one byte a number."""
    model, ids = build("qwen2", tie_word_embeddings=False).eval(), token_ids()
    by_torchao(model, name)
    inputs = lm_head_inputs(model)
    weight = inputs["lm_head_weight"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.values.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]
    with torch.no_grad():
        want = log_probs(model(input_ids=ids, use_cache=False).logits, ids)
        states = head_hidden_states(model, ids)
    states.requires_grad_()
    got = fused_linear_logprobs(states[:, :-1], token_ids=ids[:, 1:], **inputs).logps
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    (gradient,) = torch.autograd.grad(got.sum(), states)
    dense = fused_linear_logprobs(
        states[:, :-1].double(), weight.dequantize(torch.float64), ids[:, 1:], impl="reference"
    )
    assert frobenius_error(gradient, torch.autograd.grad(dense.logps.sum(), states)[0]) < 1e-5


def test_lora_on_a_quantised_head():
    peft = pytest.importorskip("peft")
    model, ids = build("qwen2", tie_word_embeddings=False), token_ids()
    by_torchao(model, "int8")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)).eval()
    want = log_probs(model(input_ids=ids, use_cache=False).logits, ids)
    got = fused_linear_logprobs(
        head_hidden_states(model, ids)[:, :-1], token_ids=ids[:, 1:], **lm_head_inputs(model)
    ).logps
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    leaves = [p for p in model.parameters() if p.requires_grad]
    assert len(leaves) == 2
    for x, y in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        assert frobenius_error(x, y) < 1e-4


@pytest.mark.parametrize("how", ["dynamic", "group"])
def test_other_quantisations_are_refused(how):
    """int8 with hidden states in int8 too is no linear head, and groups have several scales a row."""
    model = build("qwen2", tie_word_embeddings=False)
    if how == "dynamic":
        config = quantization.Int8DynamicActivationInt8WeightConfig(version=2)
    else:
        config = quantization.Int8WeightOnlyConfig(version=2, granularity=quantization.PerGroup(16))
    quantization.quantize_(model, config, filter_fn=lambda _, path: path == "lm_head")
    with pytest.raises(TypeError, match="dequantise a quantised or packed one first"):
        lm_head_inputs(model)
