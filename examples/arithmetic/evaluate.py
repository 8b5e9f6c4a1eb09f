"""Held-out accuracy: greedy answers to questions that no training step saw."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused.rewards import exact_answer_reward
from grpo_fused.trainer import decode_completions, generate_rollout


class Evaluation(NamedTuple):
    """What the policy answered, and the share of right answers."""

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
    rollout = generate_rollout(
        model,
        tokenizer,
        [row["prompt"] for row in rows],
        max_completion_length=max_completion_length,
        greedy=True,
    )
    completions = decode_completions(tokenizer, rollout)
    rewards = exact_answer_reward(completions=completions, answer=[row["answer"] for row in rows])
    return Evaluation(sum(reward or 0.0 for reward in rewards) / len(rows), completions)
