"""Corrections for the rollout engine, around any objective.

d = logp - sampling for each token, 0 where the engine has no log-prob. With `policy="old"` d = old - sampling, which an
update does not change; otherwise d changes with the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor

from grpo_fused.call.options import check_choice, check_number
from grpo_fused.objective.formulas import MAX_LOG_RATIO
from grpo_fused.objectives.base import (
    LossFunction,
    Objective,
    Reduction,
    Tokens,
    call_part,
    described,
    made_of,
    name_of,
)
from grpo_fused.objectives.token import check_band, gpg

RejectionLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
TruncationLevel = Literal["token", "sequence_sum", "sequence_mean"]
Estimator = Literal["k1", "k2", "k3"]
RolloutPolicy = Literal["current", "old"]


def rollout_rejection(
    objective: LossFunction,
    level: RejectionLevel = "token",
    estimator: Estimator = "k1",
    *,
    high: float,
    low: float | None = None,
    policy: RolloutPolicy = "current",
) -> Objective:
    """`objective` without the tokens or sequences whose divergence from the sampler is too large.

        k1 = -d, kept where log(low) <= K <= log(high);   k2 = d^2 / 2,   k3 = exp(d) - 1 - d, kept where K <= high

    K is the estimate of the token, or its sum, mean or maximum over the sequence. Scope: "sequence" for those, or that
    of `objective` if it is wider. Inputs: those of `objective`, `sampling_per_token_logps` (NaN: d = 0), with
    `policy="old"` `old_per_token_logps`. Weights are not changed: tokens that are left out count as 0 in the average.

    Args:
        objective: An objective.
        level: "token", "sequence_sum", "sequence_mean" or "sequence_max" (not with "k1").
        estimator: "k1", "k2" or "k3".
        high: k1: largest exp(K), the sampler's probability over the trainer's, > 0. k2, k3: largest K, nats, > 0.
        low: k1 only: smallest exp(K), > 0; default 1 / high.
        policy: "current" or "old".

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError: unknown options, bounds out of range or order, "sequence_max" with "k1", `low` without "k1".
        TypeError: not an objective.

    Source: checked against verl 0.9.1 `compute_rollout_rejection_mask` (its `seq_sum` is "sequence_sum", ...).
    """
    check_choice(level, "level", RejectionLevel)
    check_choice(estimator, "estimator", Estimator)
    smallest, largest = _rejection_bounds(level, estimator, low, high)

    def loss(tokens: Tokens) -> Tensor:
        d = _difference(tokens, policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        divergence = {"k1": -d, "k2": 0.5 * d.square(), "k3": d.exp() - 1.0 - d}[estimator]
        if level != "token":
            divergence = tokens.groups.reduce(divergence, _reduction(level))
        kept = (divergence >= smallest) & (divergence <= largest)
        return call_part(objective, tokens) * torch.where(divergence.isnan(), divergence, kept)

    options = {"level": level, "estimator": estimator, "low": low, "high": high, "policy": policy}
    name = described(f"rollout_rejection({name_of(objective)})", **options)
    return _around(name, loss, objective, level, policy)


def rollout_truncation(
    objective: LossFunction,
    level: TruncationLevel = "token",
    *,
    high: float = 2.0,
    low: float | None = None,
    policy: RolloutPolicy = "current",
) -> Objective:
    """`objective` times the bounded importance ratio to the sampler, without gradient.

        l = sg(w) l',   w = min(exp(D), high);   with `low`: w = exp(D) where low <= exp(D) <= high, else 0 (IcePop)

    D is d of the token, or its sum or mean over the sequence, at most 20 nats either way. Scope: "sequence" for those,
    or that of `objective` if it is wider. Inputs: those of `objective`, `sampling_per_token_logps` (NaN: d = 0), with
    `policy="old"` `old_per_token_logps`.

    Args:
        objective: An objective.
        level: "token", "sequence_sum" (the product of the ratios) or "sequence_mean" (their geometric mean).
        high: Largest ratio, > 0.
        low: Smallest ratio, > 0, or None.
        policy: "current" or "old".

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError: unknown options, bounds out of range or order.
        TypeError: not an objective.

    Source: truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training") and IcePop; "token" and "sequence_sum" checked against verl 0.9.1 `compute_rollout_correction_weights`.
    """
    check_choice(level, "level", TruncationLevel)
    check_number(high, "high", above=0.0)
    if low is not None:
        check_band(low, high)

    def loss(tokens: Tokens) -> Tensor:
        d = _difference(tokens, policy)
        if level != "token":
            d = tokens.groups.reduce(d, _reduction(level))
        ratio = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        ratio = ratio.clamp(max=high) if low is None else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
        return call_part(objective, tokens) * ratio

    name = described(f"rollout_truncation({name_of(objective)})", level=level, low=low, high=high, policy=policy)
    return _around(name, loss, objective, level, policy)


def reinforce(level: TruncationLevel = "token", *, high: float = 2.0, low: float | None = None) -> Objective:
    """REINFORCE with importance sampling: the policy gradient of tokens that another engine sampled.

        l = -sg(w) A logp,   w the bounded ratio to the sampler, see `rollout_truncation`

    Scope "token", or "sequence" at the levels "sequence_sum" and "sequence_mean". Inputs: `advantages`,
    `sampling_per_token_logps` (NaN: w = 1), optional `weights`.

    Args:
        level: see `rollout_truncation`.
        high: Largest ratio, > 0.
        low: Smallest ratio, > 0, or None.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: checked against verl 0.9.1 `bypass_mode` with `loss_type="reinforce"`.
    """
    made = rollout_truncation(gpg(), level, high=high, low=low)
    made.__name__ = described("reinforce", level=level, low=low, high=high)
    return made


def _difference(tokens: Tokens, policy: RolloutPolicy) -> Tensor:
    """[n] d, without gradient; 0 where there is no sampling log-prob."""
    current = tokens.logps.detach() if policy == "current" else tokens.inputs["old_per_token_logps"]
    sampling = tokens.inputs["sampling_per_token_logps"]
    return torch.where(sampling.isnan(), 0.0, current - sampling)


def _reduction(level: str) -> Reduction:
    return cast(Reduction, level.removeprefix("sequence_"))


def _rejection_bounds(level: str, estimator: str, low: float | None, high: float) -> tuple[float, float]:
    """Smallest and largest divergence."""
    check_number(high, "high", above=0.0)
    if estimator != "k1":
        if low is not None:
            raise ValueError(f"low is only used with estimator='k1'; got low={low} with {estimator!r}")
        return -math.inf, high
    if level == "sequence_max":
        raise ValueError("level='sequence_max' needs estimator 'k2' or 'k3', which are >= 0; got 'k1'")
    low = 1.0 / high if low is None else low
    check_band(low, high)
    return math.log(low), math.log(high)


def _around(
    name: str, loss: Callable[[Tokens], Tensor], objective: LossFunction, level: str, policy: RolloutPolicy
) -> Objective:
    check_choice(policy, "policy", RolloutPolicy)
    needs = ("sampling_per_token_logps", *(("old_per_token_logps",) if policy == "old" else ()))
    return made_of(name, loss, [objective], scope="token" if level == "token" else "sequence", needs=needs)
