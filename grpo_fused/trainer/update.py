"""The policy update: one recorded rollout and its advantages in, `num_iterations` optimizer steps out."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from grpo_fused import fused_linear_grpo_loss, lm_head_inputs
from grpo_fused.config import TOKEN_NORMALIZED
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.metrics import Metrics
from grpo_fused.trainer.policy import completion_hidden_states, score_rollout
from grpo_fused.trainer.rollout import Rollout

AVERAGED = ("kl", "entropy", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean")
"""Loss metrics that are means over tokens, so that micro-batches combine by their numbers of tokens."""


def update_policy(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    rollout: Rollout,
    advantages: Tensor,
    config: GRPOTrainerConfig,
) -> list[Metrics]:
    """Takes `config.num_iterations` optimizer steps on one rollout.

    Args:
        model: The policy that sampled the rollout, dropout off; trained in place.
        reference: The frozen reference, or None if `config.loss.beta` is 0.
        optimizer: Over the parameters of `model`.
        scheduler: Its learning rate, stepped once for each optimizer step.
        rollout: B sequences.
        advantages: [B] float.
        config: The options of the run.

    Returns:
        One dictionary for each optimizer step: loss, grad_norm, learning_rate and the metrics of the loss.
    """
    score = partial(
        score_rollout,
        rollout=rollout,
        temperature=config.temperature,
        micro_batch_size=config.micro_batch_size,
        impl=config.impl,
    )
    # With one step on each rollout the policy still is the one that sampled: None says so, and saves a scoring pass.
    old_logps = None if config.num_iterations == 1 else score(model)
    ref_logps = None if reference is None else score(reference)
    history = []
    for _ in range(config.num_iterations):
        metrics = accumulate_gradients(model, rollout, advantages, old_logps, ref_logps, config)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        history.append(metrics | {"grad_norm": grad_norm.item(), "learning_rate": learning_rate})
    return history


def accumulate_gradients(
    model: PreTrainedModel,
    rollout: Rollout,
    advantages: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    config: GRPOTrainerConfig,
) -> Metrics:
    """Backward through all micro-batches of a rollout, weighted so that their number does not change the gradient."""
    num_sequences = len(rollout.completion_ids)
    num_tokens = max(int(rollout.completion_mask.sum()), 1)
    token_normalized = config.loss.loss_type in TOKEN_NORMALIZED
    metrics: Metrics = {"loss": 0.0}
    for start in range(0, num_sequences, config.micro_batch_size):
        rows = slice(start, start + config.micro_batch_size)
        micro = rollout.rows(rows.start, rows.stop)
        out = fused_linear_grpo_loss(
            completion_hidden_states(model, micro),
            completion_ids=micro.completion_ids,
            advantages=advantages[rows],
            completion_mask=micro.completion_mask,
            **lm_head_inputs(model),  # each time: a folded adapter's graph lives for one backward
            old_per_token_logps=None if old_logps is None else old_logps[rows],
            ref_per_token_logps=None if ref_logps is None else ref_logps[rows],
            num_items_in_batch=float(num_tokens) if token_normalized else None,
            temperature=config.temperature,
            config=config.loss,
            impl=config.impl,
        )
        token_share = int(micro.completion_mask.sum()) / num_tokens
        sequence_share = len(micro.completion_ids) / num_sequences
        if token_normalized:  # num_items_in_batch already is that of the whole rollout
            share = 1.0
        else:  # the others are means over the call: over its tokens or over its sequences
            share = token_share if config.loss.loss_type == "bnpo" else sequence_share
        loss = out.loss * share
        loss.backward()
        metrics["loss"] += loss.item()
        for name in AVERAGED:
            if name in out.metrics:
                metrics[name] = metrics.get(name, 0.0) + token_share * out.metrics[name].item()
    return metrics
