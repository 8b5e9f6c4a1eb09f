"""A trainer of the small policy, and a reward that it can increase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, Rollout
from grpo_fused.trainer.policy import Policy

SMALL = {
    "steps": 2,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 4,
    "learning_rate": 1e-3,
}


def count_ones(completions: list[str], **columns: object) -> list[float]:
    """A reward that an untrained model can increase."""
    return [float(text.count("1")) for text in completions]


def by_position(completions: list[str], **columns: object) -> list[float]:
    """A reward that differs within each group, whatever is sampled."""
    return [float(position) for position in range(len(completions))]


def two_rows() -> list[dict[str, str]]:
    """The function of a data set."""
    return [{"prompt": "1+1="}, {"prompt": "2+2="}]


def scores_of(policy: Policy, rollout: Rollout) -> Tensor:
    """The log-probs of all sequences."""
    return policy.score(rollout, policy.micro_batches(rollout, torch.arange(len(rollout.completion_ids))))


def make_trainer(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    rewards: list[Any] | None = None,
    *,
    reward_weights: list[float] | None = None,
    output_dir: Path | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    eval_dataset: list[dict[str, str]] | None = None,
    overwrite: bool = False,
    reference_model: Qwen2ForCausalLM | None = None,
    **options: Any,
) -> GRPOTrainer:
    return GRPOTrainer(
        model,
        tokenizer,
        [count_ones] if rewards is None else rewards,
        rows,
        GRPOTrainerConfig(**(SMALL | options)),
        reward_weights=reward_weights,
        output_dir=output_dir,
        evaluate=evaluate,
        eval_dataset=eval_dataset,
        overwrite=overwrite,
        reference_model=reference_model,
    )
