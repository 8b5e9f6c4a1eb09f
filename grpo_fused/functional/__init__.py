"""The public functions: they document, validate and dispatch."""

from __future__ import annotations

from grpo_fused.functional.head import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.functional.without_head import grpo_loss, selective_logprobs

__all__ = ["fused_linear_grpo_loss", "fused_linear_logprobs", "grpo_loss", "selective_logprobs"]
