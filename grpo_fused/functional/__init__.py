"""The public functions: they document, validate and dispatch."""

from __future__ import annotations

from grpo_fused.functional.custom_objective import fused_linear_objective
from grpo_fused.functional.divergence import fused_linear_divergence
from grpo_fused.functional.from_logits import grpo_loss, selective_logprobs
from grpo_fused.functional.fused_linear import fused_linear_grpo_loss, fused_linear_logprobs

__all__ = [
    "fused_linear_divergence",
    "fused_linear_grpo_loss",
    "fused_linear_logprobs",
    "fused_linear_objective",
    "grpo_loss",
    "selective_logprobs",
]
