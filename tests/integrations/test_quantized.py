"""Heads that torchao, bitsandbytes, compressed-tensors and llama.cpp have quantised, with their own functions as oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from integrations.tiny import build, log_probs, token_ids

from grpo_fused import QuantizedWeight, fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.testing import frobenius_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def by_torchao(model: Any, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = {"int8": quantization.Int8WeightOnlyConfig, "fp8": quantization.Float8WeightOnlyConfig}[name](version=2)
    quantization.quantize_(model, config, filter_fn=lambda _, path: path == "lm_head")


def by_bitsandbytes(model: Any, name: str) -> None:
    """`nf4` or `fp4`, with `-nested` scales that are quantised too."""
    layers = pytest.importorskip("bitsandbytes").nn
    head, (kind, _, nested) = model.lm_head, name.partition("-")
    dtype = torch.bfloat16 if kind == "nf4" else None  # then the first input decides
    made = layers.Linear4bit(head.in_features, head.out_features, bias=False, compute_dtype=dtype)
    storage = torch.bfloat16 if name == "nf4-nested" else torch.uint8  # as for FSDP
    options = {
        "quant_type": kind,
        "compress_statistics": bool(nested),
        "requires_grad": False,
        "quant_storage": storage,
    }
    made.weight = layers.Params4bit(head.weight.detach(), **options)
    model.lm_head = made.to("cpu")


QUANTIZED = {
    "int8": (by_torchao, torch.int8),
    "fp8": (by_torchao, torch.float8_e4m3fn),
    **dict.fromkeys(("nf4", "nf4-nested", "fp4", "fp4-nested"), (by_bitsandbytes, torch.uint8)),
}


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(QUANTIZED))
def test_the_log_probs_of_the_library(name, of):
    """The check itself compares with the library's own layer in fp32; the weight stays as it is stored."""
    model, ids = build("qwen2", tie_word_embeddings=False, hidden_size=64).to(of).eval(), token_ids()
    quantize, dtype = QUANTIZED[name]
    quantize(model, name)
    before = {key: value for key, value in vars(model.lm_head).items() if not isinstance(value, dict)}
    inputs = lm_head_inputs(model)
    assert before == {key: value for key, value in vars(model.lm_head).items() if not isinstance(value, dict)}
    weight = inputs["lm_head_weight"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.values.dtype == dtype
    with pytest.raises(
        TypeError, match="must be a plain floating-point tensor .* got a quantised, packed or sparse one"
    ):
        fused_linear_logprobs(torch.zeros(*ids.shape, 64), model.lm_head.weight, ids)
    if of == torch.bfloat16:  # the library's own layer rounds logits
        if quantize is by_bitsandbytes:
            own = model.lm_head.weight
            dequantize = pytest.importorskip("bitsandbytes").functional.dequantize_4bit
            assert torch.equal(weight.dequantize(of), dequantize(own.data, own.quant_state))
        return
    if quantize is by_bitsandbytes:
        model.lm_head.compute_dtype, model.lm_head.support_avx512bf16_for_cpu = of, False
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


def by_compressed_tensors(model: Any, kind: str, activations: bool = False) -> None:
    """The head in 8 bits with one scale a row, compressed."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    scheme = quantization.QuantizationScheme(
        targets=["re:.*lm_head"],
        weights=quantization.QuantizationArgs(strategy="channel", **numbers),
        input_activations=quantization.QuantizationArgs(strategy="token", dynamic=True, **numbers)
        if activations
        else None,
        format="naive-quantized",
    )
    config = quantization.QuantizationConfig(config_groups={"head": scheme}, quantization_status="initialized")
    quantization.apply_quantization_config(model, config)
    largest = model.lm_head.weight.detach().abs().amax(1, keepdim=True)
    model.lm_head.weight_scale.data.copy_(largest / {"int": 127, "float": 448}[kind])
    compressors = pytest.importorskip("compressed_tensors.compressors")
    compressors.ModelCompressor.from_pretrained_model(model).compress_model(model)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_compressed_tensors_weights_as_stored_and_as_widened(kind):
    """transformers widens them before the first forward; what is stored is a `QuantizedWeight`."""
    model, ids = build("qwen2", tie_word_embeddings=False, hidden_size=64).eval(), token_ids()
    by_compressed_tensors(model, kind)
    stored = QuantizedWeight(model.lm_head.weight.detach(), model.lm_head.weight_scale.detach())
    with pytest.raises(TypeError, match=r"weight_scale of this lm head, and widens it .*dequantize=True"):
        lm_head_inputs(model)
    with torch.no_grad():
        want = log_probs(model(input_ids=ids, use_cache=False).logits, ids)
        states = head_hidden_states(model, ids)[:, :-1]
        inputs = lm_head_inputs(model)
        assert torch.equal(inputs["lm_head_weight"], stored.dequantize())
        for weight in (inputs["lm_head_weight"], stored):
            got = fused_linear_logprobs(states, weight, ids[:, 1:]).logps
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_compressed_tensors_with_other_parameters_is_refused():
    """Quantised activations are not linear; before compression, the weight is rounded in each forward."""
    model, ids = build("qwen2", tie_word_embeddings=False, hidden_size=64).eval(), token_ids()
    by_compressed_tensors(model, "float", activations=True)
    model(input_ids=ids, use_cache=False)
    with pytest.raises(ValueError, match="is not softcap"):
        lm_head_inputs(model)
    model.lm_head.register_parameter("input_scale", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="also has weight_scale, input_scale"):
        lm_head_inputs(model)
    del model.lm_head.input_scale
    model.lm_head.quantization_status = type(model.lm_head.quantization_status)("frozen")
    with pytest.raises(ValueError, match="also has weight_scale, which W and b do not express"):
        lm_head_inputs(model)


def test_q8_0_is_read_as_the_package_gguf_does():
    gguf = pytest.importorskip("gguf")
    rows = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).numpy()
    blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    weight = QuantizedWeight.from_q8_0(torch.from_numpy(blocks))
    want = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    assert weight.shape == want.shape
    assert torch.equal(weight.dequantize(), want)
    for wrong in (torch.from_numpy(blocks)[:, :-1], torch.from_numpy(rows), torch.from_numpy(blocks)[0]):
        with pytest.raises(ValueError, match="data of Q8_0 must be uint8"):
            QuantizedWeight.from_q8_0(wrong)


@pytest.mark.parametrize("name", ["int8", "nf4-nested"])
def test_lora_on_a_quantised_head(name):
    peft = pytest.importorskip("peft")
    model, ids = build("qwen2", tie_word_embeddings=False, hidden_size=64), token_ids()
    QUANTIZED[name][0](model, name)
    if name != "int8":
        model.lm_head.compute_dtype, model.lm_head.support_avx512bf16_for_cpu = torch.float32, False
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


@pytest.mark.parametrize("how", ["dynamic", "group", "bitsandbytes", "packed", "straddling"])
def test_other_quantisations_are_refused(how):
    """int8 with hidden states in int8 too is no linear head; a layout for inference on a CPU is not known."""
    model = build("qwen2", tie_word_embeddings=False, hidden_size=64)
    if how in ("dynamic", "group"):
        quantization = pytest.importorskip("torchao.quantization")
        config = quantization.Int8DynamicActivationInt8WeightConfig(version=2)
        if how == "group":
            config = quantization.Int8WeightOnlyConfig(version=2, granularity=quantization.PerGroup(16))
        quantization.quantize_(model, config, filter_fn=lambda _, path: path == "lm_head")
    elif how == "straddling":
        model = build("qwen2", tie_word_embeddings=False, hidden_size=32)  # two rows have one scale
        by_bitsandbytes(model, "nf4")
    elif how == "packed":
        by_bitsandbytes(model, "nf4")
        model.lm_head.weight.quant_state.packing_format_for_cpu = True
    else:
        layers = pytest.importorskip("bitsandbytes").nn
        head = model.lm_head
        made = layers.Linear8bitLt(head.in_features, head.out_features, bias=False, has_fp16_weights=False)
        made.weight = layers.Int8Params(head.weight.detach(), requires_grad=False, has_fp16_weights=False)
        model.lm_head = made.to("cpu")
    with pytest.raises(TypeError, match="dequantise a quantised or packed one first"):
        lm_head_inputs(model)
