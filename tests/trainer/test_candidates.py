"""Rollouts by top-p, top-k or min-p record the tokens that could be sampled; the same distribution scores them."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from trainer.small_trainer import by_position, make_trainer, scores_of
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused import CandidateSets, importance_sampling_correction
from grpo_fused.api import autograd
from grpo_fused.call.validation import is_alone_with
from grpo_fused.rollouts.vllm_logprobs import sets_of_mask
from grpo_fused.rollouts.vllm_outputs import candidates_of
from grpo_fused.trainer import GRPOTrainerConfig, HuggingFaceEngine, Policy, Rollout, Sampling, policy, roll_out

TRUNCATED: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
]


def rollout_of(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_size: int | None = None, **options: Any
) -> Rollout:
    torch.manual_seed(0)
    sampling = Sampling(num_generations=8, max_completion_length=6, temperature=0.9, eos_token_ids=(1,),
                        pad_token_id=tokenizer.pad_token_id, **options)  # fmt: skip
    prompts = [tokenizer(text).input_ids for text in ("1+2=", "123+34=")]
    return roll_out(HuggingFaceEngine(model, tokenizer, batch_size=batch_size), prompts, sampling)


@torch.no_grad()
def logits_of(model: Qwen2ForCausalLM, rollout: Rollout) -> Tensor:
    """[B, T, V], in fp32: those that each completion token was sampled from."""
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], dim=1).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return logits[:, rollout.prompt_ids.shape[1] - 1 : -1]


@pytest.mark.parametrize("options", TRUNCATED, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("batch_size", [None, 5])
def test_the_sets_are_the_tokens_that_could_be_sampled(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_size: int | None, options: dict[str, Any]
) -> None:
    rollout = rollout_of(model, tokenizer, batch_size, **options)
    assert rollout.candidates is not None
    active = rollout.completion_mask.reshape(-1)
    want = CandidateSets.from_logits(logits_of(model, rollout), temperature=0.9, **options)
    V = model.config.vocab_size
    assert torch.equal(rollout.candidates.to_mask(V)[active], want.to_mask(V)[active])
    some = torch.tensor([3, 9, 1])
    part = rollout.rows(some)
    width = part.completion_ids.shape[1]
    masks = rollout.candidates.to_mask(V).view(*rollout.completion_ids.shape, V)
    assert part.candidates is not None
    assert torch.equal(part.candidates.to_mask(V).view(3, width, V), masks[some][:, :width])


def test_no_truncation_needs_no_sets(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert rollout_of(model, tokenizer).candidates is None
    assert rollout_of(model, tokenizer, top_p=0.5, greedy=True).candidates is None


def test_scores_equal_the_sampling_log_probs(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Importance ratios between sampler and policy are 1 with the sets, and not without."""
    rollout = rollout_of(model, tokenizer, top_p=0.7)
    z = logits_of(model, rollout).double() / 0.9
    assert rollout.candidates is not None
    kept = rollout.candidates.to_mask(z.shape[-1]).view(z.shape)
    sampled = z.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, rollout.completion_ids.unsqueeze(-1))[..., 0]
    policy = Policy(model, Accelerator(cpu=True), GRPOTrainerConfig(temperature=0.9))
    mask = rollout.completion_mask
    for given, is_exact in ((rollout, True), (rollout._replace(candidates=None), False)):
        scores = scores_of(policy, given)
        ratio = importance_sampling_correction(
            scores, sampled.float(), mask, mode="token_truncate", clip_max=10.0
        ).ratio
        assert bool(((ratio - 1).abs()[mask] < 1e-5).all()) == is_exact


@pytest.mark.parametrize("loss", [{}, {"beta": 0.1}, {"importance_sampling_level": "sequence"}], ids=str)
def test_a_run_learns_on_its_sets(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], loss: dict[str, Any]
) -> None:
    from grpo_fused import GRPOLossConfig

    options: Any = {"top_p": 0.8, "num_iterations": 2, "micro_batch_tokens": 40, "loss": GRPOLossConfig(**loss)}
    trainer = make_trainer(model, tokenizer, rows, [by_position], **options)
    before = model.lm_head.weight.detach().clone()
    history = trainer.train()
    assert len(history) == 2
    assert all(torch.isfinite(torch.tensor(step["grad_norm"])) for step in history)
    assert not torch.equal(before, model.lm_head.weight)


def test_one_process_adds_rows_to_the_gradient_that_is_there(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], monkeypatch: Any
) -> None:
    """From the second micro-batch of an optimizer step on; the weights are those of dense gradients."""
    found, own = [], autograd._grad_to_add_to

    def recorded(*arguments: Any) -> Any:
        found.append(own(*arguments))
        return found[-1]

    monkeypatch.setattr(autograd, "_grad_to_add_to", recorded)
    weights = []
    for alone in (True, False):
        monkeypatch.setattr(policy, "is_alone_with", lambda weight, alone=alone: alone)
        trained = copy.deepcopy(model)
        make_trainer(
            trained, tokenizer, rows, [by_position], top_p=0.8, num_iterations=2, micro_batch_tokens=16, impl="chunked"
        ).train()
        weights.append(trained.lm_head.weight.detach())
        assert found[0] is None
        assert any(x is not None for x in found) == alone
        found.clear()
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)
    assert is_alone_with(model.lm_head.weight)


def test_a_repetition_penalty_with_sets_is_refused() -> None:
    with pytest.raises(
        ValueError, match="top_p, top_k and min_p must be off with a repetition_penalty.*; got repetition"
    ):
        Sampling(num_generations=1, max_completion_length=4, top_p=0.9, repetition_penalty=1.1)


def test_a_rollout_with_sets_is_saved(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Any
) -> None:
    from safetensors.torch import save_file

    rollout = rollout_of(model, tokenizer, top_k=2)
    save_file(rollout.tensors(), tmp_path / "rollout.safetensors")
    found = load_file(tmp_path / "rollout.safetensors")
    assert rollout.candidates is not None
    assert torch.equal(found["candidate_ids"], rollout.candidates.ids)
    assert "sampling_logps" not in found


def completion(*positions: dict[int, float]) -> Any:
    return SimpleNamespace(
        token_ids=[next(iter(p)) for p in positions],
        logprobs=[{token: SimpleNamespace(logprob=x) for token, x in p.items()} for p in positions],
    )


def test_sets_of_vllm() -> None:
    half = torch.tensor(0.5).log().item()
    sets = candidates_of(completion({4: half, 7: half, 9: -torch.inf}, {3: 0.0}))
    assert sets.ids.tolist() == [4, 7, 3]
    assert sets.offsets.tolist() == [0, 2, 3]
    with pytest.raises(RuntimeError, match=r"probabilities of 1 at token 1 of a completion sum to 0\.5000\. Set top_k"):
        candidates_of(completion({3: 0.0}, {4: half}))
    for wrong, said in (({3: math.log(0.99)}, "0.9900"), ({3: 0.0, 4: half}, "1.5000"), ({3: math.nan}, "do not")):
        with pytest.raises(RuntimeError, match=f"the probabilities of .* at token 0 .* {said}"):
            candidates_of(completion(wrong))
    assert len(candidates_of(completion({3: math.log(0.9995)}))) == 1
    masked = SimpleNamespace(token_ids=[4, 3], sampling_mask=SimpleNamespace(token_ids=[[4, 7], [3]]))
    sets = candidates_of(masked)
    assert (sets.ids.tolist(), sets.offsets.tolist()) == ([4, 7, 3], [0, 2, 3])
    masked.token_ids = [4, 3, 1]
    with pytest.raises(RuntimeError, match="must return a mask for each of 3 tokens; got 2"):
        candidates_of(masked)


@pytest.mark.parametrize("width", [3, 6])
def test_sets_of_vllms_mask_tensors(width: int) -> None:
    """As its sampler leaves them: the first ids of each row, a bit for each token, and nothing for an unfinished prompt."""
    kept = torch.tensor(
        [[1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0]]
    )
    if width == 3:  # a set with more tokens: bits are read, and one of all tokens is empty
        kept = torch.cat([kept, torch.ones(1, 11, dtype=torch.int64)])
    counts = [*kept.sum(1).tolist(), 0]
    ids = torch.full((len(counts), width), 7, dtype=torch.int32)  # not written beyond the count
    bits = torch.zeros(len(counts), 2, dtype=torch.uint8)
    for row, tokens in enumerate(kept):
        found = tokens.nonzero().flatten()[:width]
        ids[row, : len(found)] = found.int()
        padded = torch.nn.functional.pad(tokens, (0, 5)).view(2, 8)
        bits[row] = (padded << torch.arange(8)).sum(1).to(torch.uint8)
    mask = SimpleNamespace(
        token_ids=ids, packed_mask=bits, counts=torch.tensor(counts, dtype=torch.int32), vocab_size=11
    )
    sets = sets_of_mask(mask)
    assert sets.sizes.tolist() == [count % 11 for count in counts]
    assert sets.ids.tolist() == kept[:3].nonzero()[:, 1].tolist()
