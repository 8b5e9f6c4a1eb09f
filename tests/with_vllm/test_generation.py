"""What vLLM samples: seeds, ends, and the tokens that could be sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from with_vllm.models import build_policy

from grpo_fused.trainer import HuggingFaceEngine, Sampling, VLLMEngine, roll_out
from grpo_fused.trainer.prompts import PromptError
from grpo_fused.trainer.tiny import tiny_tokenizer

PROMPTS = [[72, 101, 108], [3, 4, 5, 6, 7, 8], [72, 101, 108]]
SAMPLING = Sampling(num_generations=4, max_completion_length=12, seed=21)


@pytest.fixture(autouse=True)
def _policy(engine: VLLMEngine) -> None:
    engine.sync_weights(build_policy(9))


def test_the_same_seed_gives_the_same_rollout(engine: VLLMEngine) -> None:
    first, again = (roll_out(engine, PROMPTS, SAMPLING) for _ in range(2))
    other = roll_out(engine, PROMPTS, replace(SAMPLING, seed=1000))
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert not torch.equal(first.completion_ids, other.completion_ids)
    assert len(set(map(tuple, first.completions()))) == 12  # no two completions share a seed, nor do like prompts


@pytest.mark.parametrize("name", ["step", "forward"])
def test_an_interrupted_rollout_leaves_nothing_to_the_next(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (model,) = engine.llm.apply_model(lambda model: model)
    place = {"step": engine.llm.llm_engine, "forward": model}[name]
    whole, calls = getattr(place, name), []

    def stopped(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    first = roll_out(engine, PROMPTS, SAMPLING)
    monkeypatch.setattr(place, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        roll_out(engine, PROMPTS, SAMPLING)
    monkeypatch.undo()
    engine.sync_weights(build_policy(9))
    assert torch.equal(roll_out(engine, PROMPTS, SAMPLING).completion_ids, first.completion_ids)


def test_greedy_completions_are_the_policys(engine: VLLMEngine) -> None:
    model, greedy = build_policy(9), replace(SAMPLING, num_generations=1, greedy=True)
    assert (
        roll_out(engine, PROMPTS, greedy).completions()
        == roll_out(HuggingFaceEngine(model, tiny_tokenizer()), PROMPTS, greedy).completions()
    )


def test_completions_end_at_an_eos_or_a_stop_string(engine: VLLMEngine) -> None:
    tokenizer = tiny_tokenizer()
    free = roll_out(engine, PROMPTS, SAMPLING).completions()
    end = free[0][5]
    ended = roll_out(engine, PROMPTS, replace(SAMPLING, eos_token_ids=(end,))).completions()
    assert ended[0] == free[0][: free[0].index(end) + 1]
    character = tokenizer.decode([next(token for token in free[0] if token < 94)])  # a printable byte of ASCII
    stopped = roll_out(engine, PROMPTS, replace(SAMPLING, stop_strings=(character,))).completions()
    assert stopped[0] == free[0][: [tokenizer.decode([token]) for token in free[0]].index(character) + 1]
    assert len(stopped[0]) < len(free[0])


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "temperature": 0.7}], ids=str
)
def test_candidates_are_the_tokens_that_could_be_sampled(engine: VLLMEngine, options: dict[str, float]) -> None:
    """Those of transformers, on the same tokens: its warpers, applied to the policy's logits."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    sampling = replace(SAMPLING, **options)
    rollout, model = roll_out(engine, PROMPTS[:2], sampling), build_policy(9)
    assert rollout.candidates is not None
    assert rollout.sampling_logps is not None
    width = rollout.completion_ids.shape[1]
    for row, (prompt, ids) in enumerate(zip([PROMPTS[0]] * 4 + [PROMPTS[1]] * 4, rollout.completions(), strict=True)):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        for warper in (
            TemperatureLogitsWarper(sampling.temperature),
            *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
            *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
            *([MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []),
        ):
            scores = warper(None, scores)
        for position, token in enumerate(ids):
            own = rollout.candidates.select(torch.tensor([row * width + position])).ids
            assert set(own.tolist()) == set((scores[position] > -torch.inf).nonzero().flatten().tolist())
            expected = scores[position].log_softmax(-1)[token]
            assert abs(rollout.sampling_logps[row, position] - expected) < 1e-4


def test_a_prompt_without_room_for_its_completion_is_refused(engine: VLLMEngine) -> None:
    prompt, sampling = list(range(60)), replace(SAMPLING, max_completion_length=4)
    assert roll_out(engine, [prompt], sampling).completion_ids.shape[1] == 4
    for wrong, length in ((prompt, 16), ([*prompt, 1, 2, 3, 4, 5], 4)):
        with pytest.raises(PromptError, match="at most 64 tokens in vLLM .max_model_len.; got a prompt of 6[05] and"):
            roll_out(engine, [wrong], replace(SAMPLING, max_completion_length=length))
