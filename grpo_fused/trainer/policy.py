"""The policy's side of a rollout: hidden states that predict the completion, and their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_fused import fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.engines import Impl
from grpo_fused.trainer.rollout import Rollout


def completion_hidden_states(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """[B, T, H]: position t holds the state that predicts `completion_ids[:, t]`.

    Runs the model up to its head, so that no logits are made. The state of the last prompt token predicts the first
    completion token, hence the shift by one. Positions count real tokens, as in `generate`: left padding moves nothing.
    """
    input_ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)  # [B, P + T]
    attention_mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], dim=1).long()
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    hidden_states = head_hidden_states(model, input_ids, attention_mask, position_ids=position_ids)
    prompt_length = rollout.prompt_ids.shape[1]
    return hidden_states[:, prompt_length - 1 : -1]


@torch.no_grad()
def score_rollout(
    model: PreTrainedModel, rollout: Rollout, *, temperature: float, micro_batch_size: int, impl: Impl = "auto"
) -> Tensor:
    """Log-probabilities [B, T] of the completions under `model`, without gradient; 0 where masked."""
    head = lm_head_inputs(model)
    logps = []
    for start in range(0, len(rollout.completion_ids), micro_batch_size):
        rows = rollout.rows(start, start + micro_batch_size)
        scores = fused_linear_logprobs(
            completion_hidden_states(model, rows),
            token_ids=rows.completion_ids,
            mask=rows.completion_mask,
            **head,
            temperature=temperature,
            impl=impl,
        )
        logps.append(scores.logps)
    return torch.cat(logps)
