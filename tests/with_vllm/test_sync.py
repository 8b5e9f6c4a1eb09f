"""The policy's weights in vLLM: log-probs are the policy's after a sync, and weights that did not arrive are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from with_vllm.models import build_policy

from grpo_fused.rollouts import vllm as integration
from grpo_fused.trainer import Sampling, VLLMEngine, roll_out

PROMPTS = [[72, 101, 108], [3, 4, 5, 6, 7, 8]]
EVERY_TOKEN = Sampling(num_generations=4, max_completion_length=16, seed=11)


@torch.no_grad()
def largest_difference(engine: VLLMEngine, model: Any, sampling: Sampling = EVERY_TOKEN) -> float:
    """Nats between vLLM's log-probs of a rollout and those of the model's own forward."""
    rollout = roll_out(engine, PROMPTS, sampling)
    assert rollout.sampling_logps is not None
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], 1)
    mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], 1).long()
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logps = (logits[:, rollout.prompt_ids.shape[1] - 1 : -1].float() / sampling.temperature).log_softmax(-1)
    expected = logps.gather(2, rollout.completion_ids.unsqueeze(2)).squeeze(2)
    return (rollout.sampling_logps - expected)[rollout.completion_mask].abs().max().item()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    # bf16 has 8 bits: two forward passes of a small model that round at other places were 0.1 apart at most
    [("float32", 1e-4), ("bfloat16", 0.3)],
)
def test_log_probs_are_the_policys(engine_of: Callable[..., VLLMEngine], tied: bool, dtype: str, bound: float) -> None:
    engine = engine_of(dtype, tied)
    for seed in (1, 2):  # a second sync starts from weights that vLLM has packed
        model = build_policy(seed, tied=tied, dtype=getattr(torch, dtype))
        engine.sync_weights(model)
        assert largest_difference(engine, model) < bound


def test_log_probs_are_those_after_the_temperature(engine: VLLMEngine) -> None:
    model = build_policy(3)
    engine.sync_weights(model)
    sampling = Sampling(num_generations=4, max_completion_length=16, temperature=0.6, seed=11)
    assert largest_difference(engine, model, sampling) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},  # those of a padded vocabulary are read last
        {"target_modules": ["v_proj"], "use_dora": True},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["linear", "vocabulary", "dora", "whole-head"],
)
def test_adapters_are_merged(engine: VLLMEngine, options: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    base = build_policy(4)
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:  # as if it were trained
                parameter += torch.randn_like(parameter) / 5
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine.sync_weights(model)
    assert largest_difference(engine, model) < 1e-4
    with model.disable_adapter():
        assert largest_difference(engine, model) > 0.1  # it is the adapter that was compared
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_adapter_that_is_disabled_is_not_merged(engine: VLLMEngine) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        build_policy(4),
        LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear", modules_to_save=["lm_head"]),
    ).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.1)
    with model.disable_adapter():
        engine.sync_weights(model)
        assert largest_difference(engine, model) < 1e-4
    assert largest_difference(engine, model) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_under_autocast_is_not_refused(engine_of: Callable[..., VLLMEngine], dtype: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    for seed in range(5):
        engine_of(dtype).sync_weights(accelerator.prepare_model(build_policy(seed), evaluation_mode=True))


STALE = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight",
         "model.layers.0.self_attn.v_proj.weight"]  # fmt: skip


@pytest.mark.parametrize("missing", STALE)
def test_a_weight_that_does_not_arrive_is_noticed(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    every, before = integration.named_weights, build_policy(5)
    before.model.norm.weight.data *= 3  # a fresh model's are all 1
    engine.sync_weights(before)
    with monkeypatch.context() as patch:
        patch.setattr(integration, "named_weights", lambda model: (pair for pair in every(model) if pair[0] != missing))
        with pytest.raises(
            RuntimeError, match=r"log-probs of 128 tokens differ by .* nats on average \(at most 0.0005"
        ):
            engine.sync_weights(build_policy(6))
    engine.sync_weights(build_policy(6))


def test_a_tied_head_that_stays_packed_is_noticed(
    engine_of: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tied=True)
    engine.sync_weights(build_policy(7, tied=True))
    with monkeypatch.context() as patch:
        patch.setattr(integration, "_pack_tied_head", lambda model: None)
        with pytest.raises(RuntimeError, match="differ by"):
            engine.sync_weights(build_policy(8, tied=True))
