"""The float64 results of a problem, and whether a provider's result is right: wrong results are not timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.problem import PerToken, loss_from_logps, per_token_loss
from grpo_fused.testing import LOGP_BOUND, Problem, frobenius_error

GRADIENT_TOLERANCE = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error of loss and gradients above which a peer's result counts as wrong, not as rounded: a missing mask
or factor gives 1e-1. Heads of bf16 reach 5e-3, and 3e-2 where log-probs are rounded to bf16 as well,
as by PyTorch's linear_cross_entropy; TF32 products reach 1e-3."""
OUR_LOGP_TOLERANCE = 2 * LOGP_BOUND
"""Above this a result is wrong, not inexact: tensor cores truncate partial sums, by 1.01e-4 in all at H = 8192."""
OUR_GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}


class Exact(NamedTuple):
    """The loss, all log-probs, and parts of the gradients, in float64."""

    loss: Tensor  # []
    loss_scale: Tensor  # [] mean magnitude of a token's loss: the loss itself may cancel to 0
    logps: Tensor  # [B, T], 0 where masked
    rows: Tensor  # tokens whose dH is known
    dhidden: Tensor
    words: Tensor  # vocabulary rows whose dW is known
    dweight: Tensor

    @classmethod
    def of(cls, problem: Problem, per_token: PerToken = per_token_loss) -> Exact:
        """64 tokens at a time (1024 on a GPU), never all logits."""
        hidden = problem.hidden_states.detach().double().flatten(0, 1)
        weight = problem.lm_head_weight.detach().double()
        ids, N, device = problem.completion_ids.flatten(), problem.completion_ids.numel(), hidden.device
        active = problem.completion_mask.flatten().nonzero().squeeze(1)
        log_sums, logps = hidden.new_zeros(N), hidden.new_zeros(N)
        for part in active.split(1024 if hidden.is_cuda else 64):
            z = hidden[part] @ weight.T
            log_sums[part] = z.logsumexp(1)
            logps[part] = z.gather(1, ids[part].unsqueeze(1)).squeeze(1) - log_sums[part]
        logps = logps.view(problem.completion_ids.shape).requires_grad_()
        inputs = ("advantages", "old_per_token_logps")
        in_double = problem.map(lambda name, x: x.double() if name in inputs else x)
        loss = loss_from_logps(logps, in_double, per_token)
        (g,) = torch.autograd.grad(loss, logps)
        g = g.flatten()
        rows = torch.arange(0, N, max(N // 128, 1), device=device)
        dz = -g[rows, None] * (hidden[rows] @ weight.T - log_sums[rows, None]).exp()
        dz[torch.arange(rows.shape[0], device=device), ids[rows]] += g[rows]
        dz[g[rows] == 0] = 0.0  # masked: their sums were not computed, and 0 x inf is NaN
        every = torch.arange(0, weight.shape[0], max(weight.shape[0] // 512, 1), device=device)
        words = torch.cat([ids[::7], every]).unique()
        live, g = hidden[active], g[active, None]
        dz_words = -g * (live @ weight[words].T - log_sums[active, None]).exp() + g * (ids[active, None] == words)
        with torch.no_grad():
            scale = per_token(logps, in_double)[problem.completion_mask].abs().mean()
        return cls(loss.detach(), scale, logps.detach(), rows, dz @ weight, words, dz_words.T @ live)

    def loss_error(self, loss: Tensor) -> float:
        """The error of the loss, relative to a token's."""
        return float((loss.detach().double() - self.loss).abs() / self.loss_scale)

    def gradient_errors(self, problem: Problem) -> dict[str, float]:
        """Relative Frobenius errors of the gradients that a call has written to the problem."""
        return {
            "dhidden": frobenius_error(problem.hidden_states.grad.flatten(0, 1)[self.rows], self.dhidden),
            "dweight": frobenius_error(problem.lm_head_weight.grad[self.words], self.dweight),
        }

    def logp_error(self, logps: Tensor, problem: Problem) -> float:
        """The largest error over active tokens, in nats."""
        return float((logps.double() - self.logps)[problem.completion_mask].abs().max())


def worst(*errors: float) -> float:
    """The largest, NaN if one of them is: Python's `max` may pass over it."""
    return float(np.max(errors))


def wrong(errors: dict[str, float], dtype: torch.dtype, *, ours: bool) -> str | None:
    """Why a result with these errors is wrong, or None."""
    for name, error in errors.items():
        if name == "logp":
            allowed = OUR_LOGP_TOLERANCE if ours else math.inf  # peers, in bf16: 1e-2 to 1e-1, which is reported
        else:
            allowed = (OUR_GRADIENT_TOLERANCE if ours else GRADIENT_TOLERANCE)[dtype]
        if not error <= allowed:  # NaN is wrong, too
            return f"{name} is off by {error:.3g}, allowed is {allowed:.3g}"
    return None


def judged(check: Callable[[], dict[str, float]], dtype: torch.dtype, *, ours: bool) -> dict[str, Any]:
    """The errors that a check finds; and why the result is not timed, if it is wrong or the check fails."""
    row: dict[str, Any] = {}
    try:
        row["errors"] = check()
        reason = wrong(row["errors"], dtype, ours=ours)
    except Exception as error:  # a peer may fail in any way; the others are still measured
        reason = in_a_line(error)
    return row if reason is None else row | {"not_timed": reason}


def in_a_line(error: Exception) -> str:
    """Its type, and the beginning of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
