"""`patch_verl` against verl's own fused forwards, and against the models' own heads: `make verl`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (make verl)", allow_module_level=True)

from processes import torchrun
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from with_verl.ray_double import import_verl

import_verl()
from verl.models.transformers import dense_common, monkey_patch
from verl.utils.experimental import torch_functional
from verl.utils.kernel import linear_cross_entropy as kernels

from grpo_fused import fused_linear_logprobs
from grpo_fused.integrations import releases
from grpo_fused.integrations import verl as adapter

SIZES: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture
def patched():
    adapter.patch_verl()
    yield
    adapter.unpatch_verl()


def test_another_model_of_a_patched_class(patched):
    model = build()
    monkey_patch.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    other = type(model)(model.config).eval()
    got = other(input_ids=IDS, return_dict=True, use_cache=False).log_probs
    want = fused_linear_logprobs(other.model(IDS)[0][:, :-1], other.lm_head.weight, IDS[:, 1:]).logps
    torch.testing.assert_close(got[:, :-1], want, rtol=0, atol=1e-5)


def test_layers_that_need_a_gpu_are_not_run(patched):
    """verl puts Liger's into a model on the CPU, just before it is patched."""

    def forward(*_: Any) -> None:
        raise RuntimeError("0 active drivers")

    forward.__module__ = "liger_kernel.transformers.swiglu"
    model = build(Gemma2ForCausalLM, Gemma2Config)
    model.model.layers[0].mlp.forward = forward
    monkey_patch.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    assert model._grpo_fused_form.softcap == model.config.final_logit_softcapping


def build(base: Any = Qwen2ForCausalLM, config: Any = Qwen2Config, gain: float = 20.0, **options: Any) -> Any:
    """A model of a class of its own: verl puts its forwards into classes."""
    torch.manual_seed(0)
    model = type(base.__name__, (base,), {})(config(**{**SIZES, **options})).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(gain)
    return model


def scored(model: Any, backend: str, ids: torch.Tensor = IDS, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and all gradients of a loss of both, by what stands in verl now."""
    monkey_patch.patch_forward_with_backends(model, True, backend)
    out = model(input_ids=ids, return_dict=True, use_cache=False, **inputs)
    coefficients = torch.linspace(-1, 1, ids.numel())
    loss = (out.log_probs.flatten() * coefficients).sum() + (out.entropy.flatten() * coefficients.flip(0)).sum()
    model.zero_grad()
    loss.backward()
    return out.log_probs.detach(), out.entropy.detach(), *(p.grad.clone() for p in model.parameters())


INPUTS: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "padded": (IDS, {"attention_mask": (torch.arange(12) < torch.tensor([[12], [7]])).long()}),
    "packed": (IDS.view(1, 24), {"position_ids": torch.cat([torch.arange(12), torch.arange(12)]).unsqueeze(0)}),
    "slice": (IDS[:1], {"shift_labels": IDS[1:], "position_ids": torch.arange(5, 17).unsqueeze(0)}),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("backend", ["torch", "liger", "triton"])
def test_verls_own_values_and_gradients(backend, inputs, temperature, auto_takes):
    """Its triton kernel runs on a GPU only; it returns what its torch backend does, flat."""
    ids, further = INPUTS[inputs]
    want = scored(build(), "torch", ids, temperature=temperature, **further)
    adapter.patch_verl()
    try:
        got = scored(build(), backend, ids, temperature=temperature, **further)
    finally:
        adapter.unpatch_verl()
    shape = (ids.numel(),) if backend == "triton" else ids.shape
    assert got[0].shape == got[1].shape == shape
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        error = (mine.flatten() - theirs.flatten()).norm() / theirs.norm()
        assert error < 2e-6, error
        assert theirs.norm() > 1e-3


def test_bf16_is_closer_to_float64(patched, auto_takes):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 128, generator=g).bfloat16()
    weight = (torch.randn(3000, 128, generator=g) * (4.8 / 128**0.5)).bfloat16()
    ids = torch.randint(0, 3000, (64,), generator=g)
    log_p = (hidden.double() @ weight.double().T).log_softmax(1)
    exact = log_p.gather(1, ids.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(1)
    mine = torch_functional.FusedLinearForPPO(impl_backend="torch")(hidden, weight, ids)
    adapter.unpatch_verl()
    theirs = torch_functional.FusedLinearForPPO(impl_backend="torch")(hidden, weight, ids)
    for ours, own, true in zip(mine, theirs, exact, strict=True):
        assert (ours.double() - true).abs().max() < 1e-4
        assert (own.double() - true).abs().max() > 1e-2


TRANSFORMED = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 5.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_scale_and_softcap_that_verl_leaves_out(name, auto_takes):
    base, config, options = TRANSFORMED[name]
    with torch.no_grad():
        logits = build(base, config, **options)(IDS).logits[:, :-1]
    want = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    own = scored(build(base, config, **options), "torch")[0][:, :-1]
    assert (own - want).abs().max() > 0.5
    adapter.patch_verl()
    try:
        got = scored(build(base, config, **options), "torch")[0][:, :-1]
    finally:
        adapter.unpatch_verl()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_models_that_verl_misreads_are_refused(patched):
    with pytest.raises(ValueError, match="PhiForCausalLM must have this head, without a bias"):
        scored(build(PhiForCausalLM, PhiConfig), "torch")
    bert = build(
        ModernBertDecoderForCausalLM, ModernBertDecoderConfig, cls_token_id=1, sep_token_id=1, num_key_value_heads=4
    )
    with pytest.raises(ValueError, match="ModernBertDecoderForCausalLM must have this head"):
        scored(bert, "torch")
    bent = build()
    bent.lm_head.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    with pytest.raises(ValueError, match="does something to them before its head"):
        scored(bent, "torch")


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_lora(target, patched, auto_takes):
    """On the head too, which verl's own forwards would never train: the gradients are those of the unfused forward."""
    import peft

    model = build()
    config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    want = wrapped(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    monkey_patch.patch_forward_with_backends(model, True, "torch")
    got = wrapped(input_ids=IDS, return_dict=True).log_probs[:, :-1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    leaves = [p for p in wrapped.parameters() if p.requires_grad]
    assert len(leaves) >= 2
    for x, y in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_ranks_without_weights(patched):
    """FSDP: the first rank has the weights, the others a model on the meta device. Both take the same head."""
    base, config, options = TRANSFORMED["granite"]
    here = build(base, config, **options)
    with torch.device("meta"):
        elsewhere = type(here)(here.config)
    for model in (here, elsewhere, here):
        monkey_patch.patch_forward_with_backends(model, True, "triton")
        assert model._grpo_fused_form[:3] == (0.125, None, 83)


def test_patching_again_reads_the_head_again(auto_takes):
    base, config, options = TRANSFORMED["granite"]
    model = build(base, config, **options)
    scores = []
    for _ in range(2):
        adapter.patch_verl()
        try:
            scores.append(scored(model, "torch")[0])
        finally:
            adapter.unpatch_verl()
    assert torch.equal(*scores)


def test_a_class_that_was_refused_is_refused_again(patched):
    model = build(PhiForCausalLM, PhiConfig)
    for _ in range(2):
        with pytest.raises(ValueError, match="PhiForCausalLM must have this head, without a bias"):
            scored(model, "torch")


def test_a_class_that_verl_patched_first_is_refused():
    """Its own forward is gone, with which the head would be compared."""
    model = build()
    monkey_patch.patch_forward_with_backends(model, True, "torch")
    adapter.patch_verl()
    try:
        for backend in ("torch", "triton"):
            with pytest.raises(RuntimeError, match="Qwen2ForCausalLM before patch_verl"):
                monkey_patch.patch_forward_with_backends(model, True, backend)
    finally:
        adapter.unpatch_verl()


def test_reductions_are_refused(patched):
    arguments = torch.randn(4, 8), torch.randn(9, 8), torch.arange(4)
    with pytest.raises(ValueError, match='reduction must be "none"'):
        kernels.linear_cross_entropy(*arguments, 1.0, "mean")


def test_a_backend_that_the_release_lacks():
    """verl 0.9.0 leaves the forward of the model as it is for Liger's."""
    model = build()
    before = type(model).forward
    adapter._checking(lambda *arguments: None)(model, True, "liger")
    assert type(model).forward is before


def test_patch_and_unpatch():
    def places() -> tuple[Any, ...]:
        return (
            torch_functional.FusedLinearForPPO,
            kernels.linear_cross_entropy,
            monkey_patch.patch_forward_with_backends,
        )

    before = places()
    adapter.patch_verl()
    adapter.patch_verl()
    assert not any(new is old for new, old in zip(places(), before, strict=True))
    model = build()
    for enabled, backend in ((True, "torch"), (True, "triton"), (False, "torch")):
        monkey_patch.patch_forward_with_backends(model, enabled, backend)
    adapter.unpatch_verl()
    adapter.unpatch_verl()
    assert all(new is old for new, old in zip(places(), before, strict=True))
    assert type(model).forward is dense_common.forward_with_triton_backend


def test_unknown_versions_are_refused(monkeypatch):
    monkeypatch.setattr(releases, "version", lambda _: "0.8.2")
    with pytest.raises(ImportError, match=r"knows verl 0.9.\*; found verl 0.8.2"):
        adapter.patch_verl()


def test_training_step_of_the_fsdp2_engine(tmp_path):
    """verl's own engine on two processes: sharded weights, a rank without weights at first, packed and padded, LoRA."""
    done = torchrun(Path(__file__).with_name("engine_runs.py"), tmp_path, timeout=900)
    assert done.stdout.count("the same") == 2, (done.stdout + done.stderr)[-6000:]
