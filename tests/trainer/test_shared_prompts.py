"""A prompt that is computed once for all of its completions: the same states, gradients and updates."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from trainer.test_replay import make_trainer, record, replay
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from grpo_fused import GRPOLossConfig, head_hidden_states
from grpo_fused.rollouts.engine import first_of_prompts, length_mask
from grpo_fused.trainer.recipe import LoRA, with_adapter
from grpo_fused.trainer.rollout import Rollout, micro_batches
from grpo_fused.trainer.shared_prompts import check_shared_prompts, shared_prompt_states

VOCAB = 97


def model_of(name: str, **options: Any) -> PreTrainedModel:
    from transformers import AutoConfig

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, **options,
    }  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).eval()


def rollout_of(sizes: list[tuple[int, list[int]]]) -> Rollout:
    """Prompts of those lengths with completions of those lengths; masked positions hold anything."""
    g = torch.Generator().manual_seed(1)
    count = [len(completions) for _, completions in sizes]
    lengths = torch.tensor([length for _, completions in sizes for length in completions])
    prompt_lengths = torch.tensor([length for length, _ in sizes])
    width = int(prompt_lengths.max())
    each = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(count))
    return Rollout(
        torch.randint(0, VOCAB, (len(sizes), width), generator=g)[each],
        length_mask(prompt_lengths, width).flip(1)[each],
        torch.randint(0, VOCAB, (len(lengths), int(lengths.max())), generator=g),
        length_mask(lengths, int(lengths.max())),
    )


def separate(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    input_ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], dim=1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return head_hidden_states(model, input_ids, mask, position_ids=positions)[:, rollout.prompt_ids.shape[1] - 1 : -1]


SIZES = [(7, [5, 1, 9]), (3, [2]), (1, [4, 4]), (7, [0, 3])]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3", "cohere"])
def test_states_and_gradients_are_those_of_separate_sequences(name, attention):
    model, rollout = model_of(name), rollout_of(SIZES)
    model.set_attn_implementation(attention)
    found = []
    for states in (
        separate(model, rollout),
        shared_prompt_states(model, rollout),
    ):
        model.zero_grad()
        states = states[rollout.completion_mask]
        (states * torch.linspace(-1, 1, states.numel()).view(states.shape)).sum().backward()
        found.append((states.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)))
    assert len(found[0]) > 10
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    check_shared_prompts(model, lambda rollout: separate(model, rollout))


@pytest.mark.parametrize("trained", ["lora", "lm_head", "model.norm|lm_head"])
def test_part_of_a_model_is_trained(trained: str) -> None:
    """The first gradient of a new adapter is 0, and that of the head does not come from the states."""
    model = with_adapter(model_of("qwen2"), LoRA(r=2)) if trained == "lora" else model_of("qwen2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(trained, name) is not None)
    check_shared_prompts(model, lambda rollout: separate(model, rollout))


@pytest.mark.parametrize("attention", ["sdpa", {"": "sdpa", "text_config": "eager"}], ids=str)
def test_a_model_of_images_and_text(attention: Any) -> None:
    """Its first parameters are of images, and each of its parts has an attention of its own."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    few = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, **few)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **few)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=VOCAB - 1))
    model.set_attn_implementation(attention)
    check_shared_prompts(model, lambda rollout: separate(model, rollout))


def test_fewer_tokens_pass_through_the_model():
    model, rollout, seen = model_of("qwen2"), rollout_of([(50, [5] * 8)]), []
    model.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    shared_prompt_states(model, rollout)
    assert seen == [(1, 50 + 8 * 5)]
    assert rollout.prompt_ids.numel() + rollout.completion_ids.numel() == 8 * 55


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mistral", {"sliding_window": 4}, "full attention in every layer; got sliding_attention"),
        ("gemma2", {}, "got sliding_attention in Gemma2ForCausalLM"),
        ("mamba", {}, "got linear_attention in MambaForCausalLM"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "mask of four dimensions; BloomForCausalLM raises"),
    ],
)
def test_other_layers_are_refused(name, options, message):
    model = model_of(name, **options)
    with pytest.raises(ValueError, match=message):
        check_shared_prompts(model, lambda rollout: separate(model, rollout))


def test_groups_are_rows_with_the_same_prompt():
    rollout = rollout_of(SIZES)
    assert first_of_prompts(rollout.prompt_ids, rollout.prompt_mask).nonzero().flatten().tolist() == [0, 3, 4, 6]


def test_micro_batches_keep_prompts_together_and_the_budget():
    rollout = rollout_of([(10, [4, 4, 4]), (10, [4, 4, 4]), (2, [3, 3, 3])])
    whole = [batch.tolist() for batch in micro_batches(rollout, torch.arange(9), 44, share_prompts=True)]
    assert whole == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    cut = [batch.tolist() for batch in micro_batches(rollout, torch.arange(9), 18, share_prompts=True)]
    assert sorted(row for batch in cut for row in batch) == list(range(9))
    for batch in cut:
        rows = rollout.rows(torch.tensor(batch))
        assert len(set(map(tuple, rows.prompt_ids.tolist()))) == 1
        assert int(rows.prompt_mask[0].sum()) + int(rows.completion_mask.sum()) <= 18
    assert len(cut) == 5


@pytest.mark.parametrize("micro_batch_tokens", [16384, 30])
def test_an_update_is_the_same(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], micro_batch_tokens: int):
    recordings = record(tokenizer, rows, 2)
    loss = GRPOLossConfig(beta=0.05)
    names = ("loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean")
    shared = make_trainer(tokenizer, rows, loss=loss, share_prompts=True, micro_batch_tokens=micro_batch_tokens)
    want = replay(make_trainer(tokenizer, rows, loss=loss), recordings, *names)
    torch.testing.assert_close(replay(shared, recordings, *names), want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"mixed_precision": "bf16"}], ids=str)
def test_it_runs_with(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], options: dict[str, Any]):
    recordings = record(tokenizer, rows, 1)
    AcceleratorState._reset_state(reset_partial_state=True)
    want = replay(make_trainer(tokenizer, rows, **options), recordings, "grad_norm")
    got = replay(make_trainer(tokenizer, rows, share_prompts=True, **options), recordings, "grad_norm")
    torch.testing.assert_close(got[0], want[0], rtol=3e-2, atol=0)


def test_the_trainer_checks_its_model(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], monkeypatch):
    def refuse(model: PreTrainedModel, separate: Any) -> None:
        raise ValueError(f"refused: {type(model).__name__}")

    monkeypatch.setattr("grpo_fused.trainer.policy.check_shared_prompts", refuse)
    make_trainer(tokenizer, rows)
    with pytest.raises(ValueError, match="refused: Qwen2ForCausalLM"):
        make_trainer(tokenizer, rows, share_prompts=True)


def test_a_model_that_ignores_the_mask_is_refused():
    model, other = model_of("qwen2"), model_of("qwen2")
    forward = model.model.forward
    model.model.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(
        ValueError, match="share_prompts must not change the states of Qwen2ForCausalLM; they differ by"
    ):
        check_shared_prompts(model.requires_grad_(False), lambda rollout: separate(other, rollout))
