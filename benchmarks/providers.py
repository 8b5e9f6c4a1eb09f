"""Implementations of one and the same GRPO loss (dapo, token level, beta 0), ours and the peers', behind one interface.

A provider takes a `Problem` and returns the loss; gradients go to `hidden` and `weight`. Peers that give log-probs only
are completed by the loss formula in plain torch, which is what their users do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss, fused_linear_logprobs

EPSILON = 0.2
TEMPERATURE = 1.0


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


def loss_from_logps(logps: Tensor, p: Problem) -> Tensor:
    """The loss formula in plain torch."""
    ratio = (logps - p.old).exp()
    advantages = p.advantages.unsqueeze(1)
    per_token = -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    mask = p.mask.to(per_token.dtype)
    return (per_token * mask).sum() / mask.sum().clamp(min=1)


def eager_logps(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """All logits in the head's dtype, then fp32: what a model's forward gives."""
    logits = (hidden @ weight.T).float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def eager(p: Problem) -> Tensor:
    return loss_from_logps(eager_logps(p.hidden, p.weight, p.ids), p)


_compiled_logps: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


def compiled(p: Problem) -> Tensor:
    global _compiled_logps
    if _compiled_logps is None:
        _compiled_logps = torch.compile(eager_logps)
    return loss_from_logps(_compiled_logps(p.hidden, p.weight, p.ids), p)


def ours(p: Problem, impl: str = "auto", with_metrics: bool = True) -> Tensor:
    return fused_linear_grpo_loss(
        p.hidden, p.weight, p.ids, p.advantages, p.mask, old_per_token_logps=p.old, temperature=TEMPERATURE, impl=impl,
        with_metrics=with_metrics, config=GRPOLossConfig(epsilon=EPSILON),
    ).loss  # fmt: skip


def ours_lean(p: Problem) -> Tensor:
    """Without metrics: rows of zero advantage are not even scored."""
    return ours(p, with_metrics=False)


def triton_cannot_run() -> str | None:
    """Why our Triton engine cannot, or None."""
    from grpo_fused.engines.triton import unavailable

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return unavailable(device, torch.bfloat16)


def ours_triton(p: Problem) -> Tensor:
    """The head product as our kernel, whichever `auto` takes."""
    return ours(p, impl="triton")


def trl_logps(p: Problem) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    per_token = ChunkedLogProbFunction.apply(
        p.hidden[p.mask], p.weight, None, p.ids[p.mask], TEMPERATURE, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
        ("entropy",),
    )[0]  # fmt: skip
    return per_token.new_zeros(p.mask.shape).masked_scatter(p.mask, per_token)


def trl(p: Problem) -> Tensor:
    return loss_from_logps(trl_logps(p), p)


def liger(p: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    module = LigerFusedLinearGRPOLoss(
        beta=0.0, epsilon_low=EPSILON, epsilon_high=EPSILON, loss_type="dapo", use_ref_model=False,
        temperature=TEMPERATURE, compiled=p.hidden.is_cuda,
    )  # fmt: skip
    return module(
        p.hidden, p.weight, p.ids, p.mask.to(torch.float32), p.advantages, old_per_token_logps=p.old
    )[0]  # fmt: skip


PROVIDERS: dict[str, tuple[Callable[[Problem], Tensor], str | None]] = {
    "ours": (ours, None),
    "ours-lean": (ours_lean, None),
    "ours-triton": (ours_triton, "triton"),
    "eager": (eager, None),
    "torch.compile": (compiled, None),
    "trl": (trl, "trl"),
    "liger": (liger, "liger_kernel"),
}
"""Name to (function, package that it needs)."""


def score_ours(p: Problem, impl: str = "auto") -> Tensor:
    with torch.no_grad():
        return fused_linear_logprobs(p.hidden, p.weight, p.ids, p.mask, temperature=TEMPERATURE, impl=impl).logps


def score_ours_triton(p: Problem) -> Tensor:
    return score_ours(p, impl="triton")


def score_eager(p: Problem) -> Tensor:
    with torch.no_grad():
        return eager_logps(p.hidden, p.weight, p.ids)


def score_trl(p: Problem) -> Tensor:
    with torch.no_grad():
        return trl_logps(p)


SCORERS: dict[str, tuple[Callable[[Problem], Tensor], str | None]] = {
    "ours": (score_ours, None),
    "ours-triton": (score_ours_triton, "triton"),
    "eager": (score_eager, None),
    "trl": (score_trl, "trl"),
}


def installed(package: str | None) -> bool:
    if package == "triton":
        return triton_cannot_run() is None
    return package is None or importlib.util.find_spec(package) is not None
