"""Held-out accuracy: greedy answers to questions that were not trained on."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused.rewards import exact_answer_reward
from grpo_fused.trainer import HuggingFaceEngine, Sampling


class Evaluation(NamedTuple):
    """The answers of the policy, and the share of right ones."""

    accuracy: float
    completions: list[str]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, str]],
    *,
    max_completion_length: int,
) -> Evaluation:
    """Answers every row greedily and compares with its "answer"."""
    sampling = Sampling(
        num_generations=1,
        max_completion_length=max_completion_length,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        greedy=True,
    )
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    ids, mask, *_ = HuggingFaceEngine(model, tokenizer).generate(prompts, sampling)
    completions = [
        str(tokenizer.decode(row[kept], skip_special_tokens=True)) for row, kept in zip(ids, mask, strict=True)
    ]
    rewards = exact_answer_reward(completions=completions, answer=[row["answer"] for row in rows])
    return Evaluation(sum(reward or 0.0 for reward in rewards) / len(rows), completions)
