"""The loss to be timed (dapo, token level, beta 0): its shapes, its data, and its formula in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


@dataclass
class Problem:
    """One set of tensors, shared by all providers of a run."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    ids: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    advantages: Tensor  # [B]
    old: Tensor  # [B, T]

    def clear(self) -> None:
        self.hidden.grad = None
        self.weight.grad = None

    def shares(self) -> dict[str, float]:
        """Parts of all tokens: those that count, and those of them with a gradient."""
        with_gradient = self.mask & (self.advantages != 0).unsqueeze(1)
        return {"active": float(self.mask.float().mean()), "gradient": float(with_gradient.float().mean())}


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
        """For people and as a key: bf16-1024-896-151936-half-inactive."""
        name = f"{self.dtype}-{self.N}-{self.H}-{self.V}"
        return name if self.pattern == "dense" else f"{name}-{self.pattern}"

    def __str__(self) -> str:
        return f"{self.B}x{self.T}x{self.H}x{self.V}:{self.dtype}:{self.pattern}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of `str`."""
        shape, dtype, pattern = text.split(":")
        B, T, H, V = map(int, shape.split("x"))
        return cls(B, T, H, V, dtype, pattern)

    def describe(self) -> dict[str, Any]:
        """For a result's file."""
        return {"N": self.N} | self.__dict__

    def problem(self, device: str) -> Problem:
        """Its tensors."""
        return make_problem(self.B, self.T, self.H, self.V, DTYPES[self.dtype], device, **PATTERNS[self.pattern])


def make_problem(
    B: int,
    T: int,
    H: int,
    V: int,
    dtype: torch.dtype,
    device: str,
    *,
    masked: float = 0.0,
    zero_advantages: float = 0.0,
) -> Problem:
    """Random data (never zeros: they cost less power, hence time). Logits have standard deviation 2, old log-probs are
    those of the policy plus noise of 0.05, so that few ratios are clipped."""
    from grpo_fused import fused_linear_logprobs

    g = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(B, T, H, generator=g, device=device, dtype=torch.float32).to(dtype)
    weight = (torch.randn(V, H, generator=g, device=device, dtype=torch.float32) * (2.0 / H**0.5)).to(dtype)
    ids = torch.randint(0, V, (B, T), generator=g, device=device)
    lengths = torch.full((B, 1), round(T * (1 - masked)), device=device)
    mask = torch.arange(T, device=device) < lengths
    advantages = torch.randn(B, generator=g, device=device)
    advantages[: round(B * zero_advantages)] = 0.0
    logps = fused_linear_logprobs(hidden, weight, ids).logps
    old = logps + 0.05 * torch.randn(B, T, generator=g, device=device)
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), ids, mask, advantages, old)


def per_token_loss(logps: Tensor, p: Problem) -> Tensor:
    """The clipped objective of each token."""
    ratio = (logps - p.old).exp()
    advantages = p.advantages.unsqueeze(1)
    return -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)


def loss_from_logps(logps: Tensor, p: Problem) -> Tensor:
    """The loss formula in plain torch."""
    per_token = per_token_loss(logps, p)
    mask = p.mask.to(per_token.dtype)
    return (per_token * mask).sum() / mask.sum().clamp(min=1)
