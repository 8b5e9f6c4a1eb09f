"""The policy's side of a rollout: hidden states that predict the completion, and their log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_fused import fused_linear_logprobs
from grpo_fused.engines import Impl
from grpo_fused.trainer.rollout import Rollout


def completion_hidden_states(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """[B, T, H]: position t holds the state that predicts `completion_ids[:, t]`.

    Runs the decoder without its head, so that no logits are made. The state of the last prompt token predicts the first
    completion token, hence the shift by one. Positions count real tokens, as in `generate`: left padding moves nothing.
    """
    input_ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)  # [B, P + T]
    attention_mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], dim=1).long()
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    outputs = model.get_decoder()(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    )
    prompt_length = rollout.prompt_ids.shape[1]
    return outputs.last_hidden_state[:, prompt_length - 1 : -1]


def head_parameters(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] (or None) of the model's LM head."""
    head = model.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


@torch.no_grad()
def score_rollout(
    model: PreTrainedModel, rollout: Rollout, *, temperature: float, micro_batch_size: int, impl: Impl = "auto"
) -> Tensor:
    """Log-probabilities [B, T] of the completions under `model`, without gradient; 0 where masked."""
    weight, bias = head_parameters(model)
    logps = []
    for start in range(0, len(rollout.completion_ids), micro_batch_size):
        rows = rollout.rows(start, start + micro_batch_size)
        scores = fused_linear_logprobs(
            completion_hidden_states(model, rows),
            weight,
            rows.completion_ids,
            rows.completion_mask,
            lm_head_bias=bias,
            temperature=temperature,
            impl=impl,
        )
        logps.append(scores.logps)
    return torch.cat(logps)
