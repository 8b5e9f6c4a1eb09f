"""The timed loss (dapo, token level, beta 0): its shapes, its data, and its formula in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_fused.testing import Problem, make_problem

EPSILON = 0.2
TEMPERATURE = 1.0
"""1, since kernels for cross-entropy have none."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PATTERNS: dict[str, dict[str, float]] = {
    "dense": {},
    "half-inactive": {"masked": 0.5},
    "zero-advantage-40": {"zero_advantages": 0.4},
}
"""Which tokens have no gradient: none; the second half of every sequence (masked); 40 % of the sequences."""


@dataclass(frozen=True)
class Case:
    """A problem by its shape, dtype and pattern."""

    B: int
    T: int
    H: int
    V: int
    dtype: str = "bf16"
    pattern: str = "dense"

    @property
    def N(self) -> int:
        """Tokens, masked ones included."""
        return self.B * self.T

    @property
    def name(self) -> str:
        """A readable key: bf16-1024-896-151936-half-inactive."""
        name = f"{self.dtype}-{self.N}-{self.H}-{self.V}"
        return name if self.pattern == "dense" else f"{name}-{self.pattern}"

    def describe(self) -> dict[str, Any]:
        """The fields of a result file."""
        return {"N": self.N} | self.__dict__

    def problem(self, device: str) -> Problem:
        """Its tensors."""
        pattern = PATTERNS[self.pattern]
        return loss_problem(self.B, self.T, self.H, self.V, DTYPES[self.dtype], device, **pattern)


def loss_problem(
    B: int, T: int, H: int, V: int, dtype: torch.dtype, device: str, *, masked: float = 0.0,
    zero_advantages: float = 0.0,
) -> Problem:  # fmt: skip
    """Random data (never zeros, which take less power and time), hidden states and weight as leaves of autograd.

    Logits have standard deviation 2, old log-probs are those of the policy plus noise of 0.05, so that few ratios are
    clipped.
    """
    p = make_problem(
        0, B=B, T=T, H=H, V=V, dtype=dtype, device=device, logit_std=2.0, drift=0.05, extras=False, scored_by="auto"
    )
    lengths = torch.full((B, 1), round(T * (1 - masked)), device=device)
    p.completion_mask = torch.arange(T, device=device) < lengths
    p.advantages[: round(B * zero_advantages)] = 0.0
    return trainable(p)


def trainable(p: Problem) -> Problem:
    """With hidden states and weight as leaves of autograd, and per-token numbers in fp32 as a trainer has them."""
    p = p.map(lambda name, x: x.float() if name in ("advantages", "old_per_token_logps") else x.detach())
    p.hidden_states.requires_grad_()
    p.lm_head_weight.requires_grad_()
    return p


def clear(p: Problem) -> None:
    """Forget the gradients."""
    p.hidden_states.grad = None
    p.lm_head_weight.grad = None


def train(p: Problem, loss: Callable[[Problem], Tensor]) -> Tensor:
    """The loss, after forward and backward; gradients of an earlier call are forgotten."""
    clear(p)
    value = loss(p)
    value.backward()
    return value.detach()


def shares(p: Problem) -> dict[str, float]:
    """Shares of the tokens: active ones, and those with a gradient."""
    with_gradient = p.completion_mask & (p.advantages != 0).unsqueeze(1)
    return {"active": float(p.completion_mask.float().mean()), "gradient": float(with_gradient.float().mean())}


def old_of(p: Problem) -> Tensor:
    """[B, T] log-probs of the policy that sampled the tokens."""
    return p.options["old_per_token_logps"]


def per_token_loss(logps: Tensor, p: Problem) -> Tensor:
    """The clipped objective of each token."""
    ratio = (logps - old_of(p)).exp()
    advantages = p.advantages.unsqueeze(1)
    return -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)


def cross_entropy(logps: Tensor, p: Problem) -> Tensor:
    """Of each token: the loss of heads that have no other."""
    return -logps


PerToken = Callable[[Tensor, Problem], Tensor]
"""The loss of each token from its log-prob."""


def loss_from_logps(logps: Tensor, p: Problem, per_token: PerToken = per_token_loss) -> Tensor:
    """The loss formula in plain torch: the mean over active tokens."""
    losses = per_token(logps, p)
    mask = p.completion_mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)
