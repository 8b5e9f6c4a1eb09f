"""Objectives in which a token's loss depends on its sequence (scope "sequence").

If a formula gives one loss for a sequence, each of its tokens has that loss, and the weights average: with
`token_weights(mask, "grpo")` the total is the mean over sequences. s is the sum of a sequence's n log-ratios.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_fused.call.options import check_choice, check_number
from grpo_fused.objective.formulas import MAX_LOG_RATIO
from grpo_fused.objectives.base import Objective, Tokens, check_bounds, check_clip, described
from grpo_fused.objectives.token import OLD, clipped

Level = Literal["token", "sequence"]


def gspo(epsilon: float = 3e-4, epsilon_high: float | None = 4e-4) -> Objective:
    """GSPO: PPO's clipped loss with the geometric mean of a sequence's ratios.

        l = -min(c A, clip(c, 1 - epsilon, 1 + epsilon_high) A),   c = sg(exp(s / n)) exp(logp - sg(logp))

    Each token has the sequence's ratio and its own gradient (GSPO-token), which for equal advantages and weights sums
    to the sequence's gradient. Scope "sequence". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        epsilon: Lower clip distance of the ratio, > 0.
        epsilon_high: Upper clip distance, > 0; None is `epsilon`.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: GSPO (arXiv 2507.18071), its clip range; checked against verl 0.9.1 `gspo` (which clamps log c at 10).
    """
    low, high = check_clip(epsilon, epsilon_high)

    def loss(tokens: Tokens) -> Tensor:
        mean = tokens.groups.reduce(tokens.log_ratio(tokens.old).detach(), "mean")
        ratio = (tokens.logps - tokens.logps.detach() + mean).exp()
        return clipped(ratio, tokens.advantages, low, high)

    name = described("gspo", epsilon=epsilon, epsilon_high=epsilon_high)
    return Objective(name, loss, scope="sequence", may_have=OLD)


def gmpo(epsilon: float = 0.4, epsilon_high: float | None = None) -> Objective:
    """GMPO: the geometric mean of a sequence's clipped ratios.

        l = -A exp(1/n sum_t d_t),   d_t = min(logp - old, epsilon_high) where A > 0, else max(logp - old, -epsilon)

    A is the mean of the sequence's advantages. Scope "sequence". Inputs: `advantages`, optional
    `old_per_token_logps`, `weights`.

    Args:
        epsilon: Lower clip distance of the log-ratio, nats, > 0.
        epsilon_high: Upper clip distance, nats, > 0; default `epsilon`.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: GMPO (arXiv 2507.20673); checked against verl 0.9.1 `geo_mean`.
    """
    low, high = check_bounds("epsilon", epsilon, epsilon_high)

    def loss(tokens: Tokens) -> Tensor:
        log_ratio = tokens.log_ratio(tokens.old)
        bounded = torch.where(tokens.advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
        return -tokens.groups.reduce(tokens.advantages, "mean") * tokens.groups.reduce(bounded, "mean").exp()

    name = described("gmpo", epsilon=epsilon, epsilon_high=epsilon_high)
    return Objective(name, loss, scope="sequence", may_have=OLD)


def topr(level: Level = "sequence") -> Objective:
    """TOPR: REINFORCE off-policy; good tokens count in full, bad ones by their ratio, at most 1.

        l = -w A logp,   w = 1 where A > 0, else sg(min(exp(s), 1)); at level "token" r in place of exp(s)

    Scope "sequence", or "token" at that level. Inputs: `advantages`, optional `old_per_token_logps`, `weights`. The
    paper sums over a sequence's tokens: `token_weights(mask, "luspo")`.

    Args:
        level: "sequence" (the paper's) or "token" (that of Trinity-RFT and ROLL).

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: TOPR (arXiv 2503.14286), its equation. Tested against the formula; level "token" compared once with
    Trinity-RFT 0.6.0.
    """
    check_choice(level, "level", Level)

    def loss(tokens: Tokens) -> Tensor:
        log_ratio = (tokens.logps - tokens.old).detach()
        if level == "sequence":
            log_ratio = tokens.groups.reduce(log_ratio, "sum")
        weight = log_ratio.clamp(max=0.0).exp().masked_fill(tokens.advantages > 0, 1.0)
        return -weight * tokens.advantages * tokens.logps

    return Objective(described("topr", level=level), loss, scope=level, may_have=OLD)


def kimi(tau: float = 0.1, level: Level = "sequence") -> Objective:
    """Kimi k1.5's squared distance between advantage and log-ratio.

        l = ((A - tau s)^2 - A^2) / (2 tau) = -A s + tau / 2 s^2;   at level "token" logp - old in place of s

    The gradient is the paper's, -A grad(log pi) + tau / 2 grad(s^2). Scope "sequence", or "token" at that level.
    Inputs: `advantages`, `old_per_token_logps`, optional `weights`.

    Args:
        tau: Strength of the penalty, in units of reward per nat, > 0.
        level: "sequence" (the paper's) or "token" (ROLL's).

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: Kimi k1.5 (arXiv 2501.12599, section 2.3.2). Tested against the formula; the gradient at level "token"
    compared once with ROLL's `kimi15`.
    """
    check_choice(level, "level", Level)
    coef = check_number(tau, "tau", above=0.0)

    def loss(tokens: Tokens) -> Tensor:
        s = tokens.log_ratio(tokens.old)
        if level == "sequence":
            s = tokens.groups.reduce(s, "sum")
        return 0.5 * coef * s.square() - tokens.advantages * s

    needs = ("advantages", "old_per_token_logps")
    return Objective(described("kimi", tau=tau, level=level), loss, scope=level, needs=needs)


def fipo(
    epsilon: float = 0.2,
    epsilon_high: float | None = 0.28,
    delta: float | None = 10.0,
    *,
    half_life: float = 32.0,
    clip_range: float | None = 0.2,
    clip_high_only: bool = True,
    safety_threshold: float | None = 4.0,
) -> Objective:
    """FIPO: PPO's clipped loss, weighted by the change of the tokens that follow.

        l = -f min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
        f = sg(clip(exp(F_t), 1 or 1 - clip_range, 1 + clip_range)),   F_t = sum_{k >= t} 2^(-(k - t) / half_life) d_k
        d = logp - old where r <= delta, else 0;   where A < 0 and r > safety_threshold f is clipped to [0.8, 1]

    Distances k - t count active tokens. Scope "sequence". Inputs: `advantages`, `old_per_token_logps`, optional
    `weights`.

    Args:
        epsilon: Lower clip distance of the ratio, > 0.
        epsilon_high: Upper clip distance, > 0; None is `epsilon`.
        delta: Upper bound on the ratio, > 0, or None.
        half_life: Active tokens after which a token's influence has halved, > 0.
        clip_range: Clip distance of f, > 0, or None for no clip.
        clip_high_only: Whether f is at least 1.
        safety_threshold: Ratio above which a bad token is not amplified, > 0, or None.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: FIPO (arXiv 2603.19835), in the form of ms-swift 4.6.0 (`loss_type="fipo"`). Tested against the formula,
    compared once with ms-swift's code.
    """
    low, high = check_clip(epsilon, epsilon_high)
    discount = 2.0 ** (-1.0 / check_number(half_life, "half_life", above=0.0))
    bounds = {"delta": delta, "clip_range": clip_range, "safety_threshold": safety_threshold}
    for name, value in bounds.items():
        if value is not None:
            check_number(value, name, above=0.0)

    def influence(tokens: Tokens, log_ratio: Tensor, ratio: Tensor) -> Tensor:
        moved = log_ratio if delta is None else log_ratio.masked_fill(ratio > delta, 0.0)
        factor = tokens.groups.discounted_future(moved, discount).clamp(max=MAX_LOG_RATIO).exp()
        if clip_range is not None:
            factor = factor.clamp(1.0 if clip_high_only else 1.0 - clip_range, 1.0 + clip_range)
        if safety_threshold is None:
            return factor
        unsafe = (tokens.advantages < 0) & (ratio > safety_threshold)
        return torch.where(unsafe, factor.clamp(0.8, 1.0), factor)

    def loss(tokens: Tokens) -> Tensor:
        log_ratio = tokens.log_ratio(tokens.old)
        ratio, advantages = log_ratio.exp(), tokens.advantages
        capped = ratio if delta is None else ratio.clamp(max=delta)
        plain = -torch.minimum(capped * advantages, ratio.clamp(low, high) * advantages)
        return plain * influence(tokens, log_ratio.detach(), ratio.detach())

    options = {"epsilon": epsilon, "epsilon_high": epsilon_high, "half_life": half_life}
    name = described("fipo", **options, clip_high_only=clip_high_only, **bounds)
    return Objective(name, loss, scope="sequence", needs=("advantages", "old_per_token_logps"))
