"""The `torch.library` operators behind the public functions.

They are opaque to `torch.compile`: what happens inside depends on data (which rows are active), what comes out does
not. Gradients leave an operator as results, since they are made in the forward pass; `autograd.py` hands them on.
"""

from __future__ import annotations

from grpo_fused._ops.head import linear_grpo_loss, linear_logprobs, linear_logprobs_backward
from grpo_fused._ops.without_head import grpo_objective, selective_logprobs, selective_logprobs_backward

__all__ = [
    "grpo_objective",
    "linear_grpo_loss",
    "linear_logprobs",
    "linear_logprobs_backward",
    "selective_logprobs",
    "selective_logprobs_backward",
]
