"""Rollouts: what is padded where, what counts as completion, and which states predict it."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused.trainer import decode_completions, generate_rollout
from grpo_fused.trainer.policy import completion_hidden_states, score_rollout
from grpo_fused.trainer.rollout import encode_prompts, mask_after_eos

EOS = 1


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        pytest.param([5, 6, EOS, 0, 0], [1, 1, 1, 0, 0], id="eos-is-active"),
        pytest.param([5, EOS, EOS, EOS, EOS], [1, 1, 0, 0, 0], id="pad-is-eos"),
        pytest.param([EOS, EOS, EOS, EOS, EOS], [1, 0, 0, 0, 0], id="eos-at-once"),
        pytest.param([5, 6, 7, 8, 9], [1, 1, 1, 1, 1], id="never-eos"),
        pytest.param([5, 0, 0, 6, EOS], [1, 1, 1, 1, 1], id="sampled-pad-token"),
        pytest.param([5, 6, 7, 8, EOS], [1, 1, 1, 1, 1], id="eos-last"),
        pytest.param([5, EOS, 7, EOS, 0], [1, 1, 0, 0, 0], id="first-eos-counts"),
    ],
)
def test_mask_after_eos(ids: list[int], mask: list[int]) -> None:
    assert mask_after_eos(torch.tensor([ids]), EOS).tolist() == [[bool(m) for m in mask]]


def bias_towards_eos(model: Qwen2ForCausalLM, token: int) -> None:
    """Makes the EOS the likely next token about half of the time, so that lengths differ."""
    bias = torch.zeros(model.config.vocab_size)
    bias[token] = 3.0
    model.lm_head.bias = torch.nn.Parameter(bias)


@pytest.mark.parametrize("pad_is_eos", [False, True], ids=["own-pad", "pad-is-eos"])
def test_sampled_masks(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, pad_is_eos: bool) -> None:
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    bias_towards_eos(model, tokenizer.eos_token_id)
    torch.manual_seed(0)
    rollout = generate_rollout(model, tokenizer, ["1+2=", "123+34="], num_generations=16, max_completion_length=6)
    lengths = rollout.completion_mask.sum(1)
    assert {1, rollout.completion_ids.shape[1]} <= set(lengths.tolist())  # both ends occur
    for ids, mask, length in zip(rollout.completion_ids, rollout.completion_mask, lengths, strict=True):
        assert mask.tolist() == [True] * int(length) + [False] * int(len(ids) - length)
        assert EOS not in ids[: length - 1]
        assert ids[length - 1] == EOS or length == 6
    assert all(tokenizer.eos_token not in text for text in decode_completions(tokenizer, rollout))


def test_prompts_are_padded_left_in_contiguous_groups(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.padding_side = "right"  # the trainer must not depend on it
    rollout = generate_rollout(model, tokenizer, ["1+2=", "123+34="], num_generations=2, max_completion_length=3)
    short, long = tokenizer("1+2=").input_ids, tokenizer("123+34=").input_ids
    padded = [tokenizer.pad_token_id] * (len(long) - len(short)) + short
    assert rollout.prompt_ids.tolist() == [padded, padded, long, long]
    assert rollout.prompt_mask.sum(1).tolist() == [len(short)] * 2 + [len(long)] * 2
    assert rollout.prompt_mask[:, -1].all()


def test_an_empty_prompt_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="at least one token; got none from ''"):
        encode_prompts(tokenizer, ["1+2=", ""], 0)


def test_hidden_states_predict_the_completion(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Scores of a left-padded batch are those of each sequence alone, with the model's own head."""
    torch.manual_seed(0)
    temperature = 0.7
    rollout = generate_rollout(
        model, tokenizer, ["1+2=", "123+34="], num_generations=3, max_completion_length=5, temperature=temperature
    )
    scores = score_rollout(model, rollout, temperature=temperature, micro_batch_size=4)
    for row in range(6):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        completion = rollout.completion_ids[row][rollout.completion_mask[row]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        # Both are fp32 runs of the same model in other batch shapes: rounding of two layers, log-probs below 10.
        torch.testing.assert_close(scores[row][rollout.completion_mask[row]], expected, rtol=0, atol=1e-4)
    assert (scores[~rollout.completion_mask] == 0).all()


def test_states_have_the_shape_of_the_completion(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rollout = generate_rollout(model, tokenizer, ["1+2="], num_generations=2, max_completion_length=4)
    states = completion_hidden_states(model, rollout)
    assert states.shape == (*rollout.completion_ids.shape, model.config.hidden_size)


def test_greedy_is_the_most_likely_token(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rollout = generate_rollout(model, tokenizer, ["12+3="], max_completion_length=1, greedy=True)
    logits = model(torch.tensor([tokenizer("12+3=").input_ids])).logits[0, -1]
    assert rollout.completion_ids.item() == logits.argmax().item()
