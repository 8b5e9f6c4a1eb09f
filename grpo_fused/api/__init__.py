"""The public functions: they document, validate and dispatch."""

from __future__ import annotations

from grpo_fused.api.custom_objective import fused_linear_objective
from grpo_fused.api.divergence import fused_linear_divergence
from grpo_fused.api.from_logits import grpo_loss, selective_logprobs
from grpo_fused.api.fused_linear import fused_linear_grpo_loss, fused_linear_logprobs

__all__ = [
    "fused_linear_divergence",
    "fused_linear_grpo_loss",
    "fused_linear_logprobs",
    "fused_linear_objective",
    "grpo_loss",
    "selective_logprobs",
]
