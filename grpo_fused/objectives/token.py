"""Objectives in which a token's loss depends on that token only (scope "token").

In the formulas A is the advantage, logp the log-prob, r = exp(logp - old) the ratio to the policy before the update,
and sg a stop-gradient. Log-ratios are clamped at +-20 nats. On-policy, without `old_per_token_logps`, r = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused.call.options import check_number
from grpo_fused.objectives.base import Objective, Tokens, check_bounds, check_clip, described

OLD = ("old_per_token_logps",)
SAMPLER = ("advantages", "sampling_per_token_logps")


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """[n]: -min(r A, clip(r, low, high) A), PPO's loss."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))


def vanilla(epsilon: float = 0.2, epsilon_high: float | None = None, dual_clip: float | None = 3.0) -> Objective:
    """PPO's clipped loss, with dual clip.

        l = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A),   where A < 0 at most -dual_clip A

    Scope "token". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        epsilon: Lower clip distance of the ratio, > 0.
        epsilon_high: Upper clip distance, > 0; default `epsilon`.
        dual_clip: Bound on the ratio where A < 0, > 1, or None for no bound.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: PPO (arXiv 1707.06347), dual clip (arXiv 1912.09729); checked against verl 0.9.1 `vanilla`.
    """
    low, high = check_clip(epsilon, epsilon_high)
    bound = None if dual_clip is None else check_number(dual_clip, "dual_clip", above=1.0)

    def loss(tokens: Tokens) -> Tensor:
        plain = clipped(tokens.log_ratio(tokens.old).exp(), tokens.advantages, low, high)
        if bound is None:
            return plain
        return torch.where(tokens.advantages < 0, torch.minimum(plain, -bound * tokens.advantages), plain)

    name = described("vanilla", epsilon=epsilon, epsilon_high=epsilon_high, dual_clip=dual_clip)
    return Objective(name, loss, may_have=OLD)


def dppo_tv(threshold: float = 0.2, threshold_high: float | None = None, max_ratio: float = 20.0) -> Objective:
    """DPPO with the total variation of "this token or another": tokens whose probability changed too much are left out.

        l = -sg(min(r, max_ratio)) A logp M,   M = p - p_old <= threshold_high where A > 0, else p - p_old >= -threshold

    Scope "token". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        threshold: Largest fall in probability where A <= 0, > 0.
        threshold_high: Largest rise in probability where A > 0, > 0; default `threshold`.
        max_ratio: Bound on the ratio, > 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: DPPO (arXiv 2602.04879); checked against verl 0.9.1 `dppo_tv`.
    """
    low, high = check_bounds("threshold", threshold, threshold_high)
    bound = check_number(max_ratio, "max_ratio", above=0.0)

    def loss(tokens: Tokens) -> Tensor:
        moved = tokens.logps.detach().exp() - tokens.old.exp()
        kept = torch.where(tokens.advantages > 0, moved <= high, moved >= -low)
        return _truncated_reinforce(tokens, kept, bound)

    name = described("dppo_tv", threshold=threshold, threshold_high=threshold_high, max_ratio=max_ratio)
    return Objective(name, loss, may_have=OLD)


def dppo_kl(threshold: float = 0.2, threshold_high: float | None = None, max_ratio: float = 20.0) -> Objective:
    """DPPO with the KL divergence of "this token or another" from before the update to now.

        l = -sg(min(r, max_ratio)) A logp M,   K = q log(q / p) + (1 - q) log((1 - q) / (1 - p)),   q = exp(old)
        M = K <= threshold_high or p <= q where A > 0, else K <= threshold or p >= q

    Scope "token". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        threshold: Largest divergence of a token whose probability fell, where A <= 0; nats, > 0.
        threshold_high: Largest divergence of a token whose probability rose, where A > 0; default `threshold`.
        max_ratio: Bound on the ratio, > 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: DPPO (arXiv 2602.04879); checked against verl 0.9.1 `dppo_kl`.
    """
    low, high = check_bounds("threshold", threshold, threshold_high)
    bound = check_number(max_ratio, "max_ratio", above=0.0)

    def loss(tokens: Tokens) -> Tensor:
        logp = tokens.logps.detach()
        p, q = logp.exp(), tokens.old.exp()
        kl = q * (tokens.old - logp) + (1.0 - q) * ((1.0 - q + 1e-8) / (1.0 - p + 1e-8)).log()
        kept = torch.where(tokens.advantages > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
        return _truncated_reinforce(tokens, kept, bound)

    name = described("dppo_kl", threshold=threshold, threshold_high=threshold_high, max_ratio=max_ratio)
    return Objective(name, loss, may_have=OLD)


def _truncated_reinforce(tokens: Tokens, kept: Tensor, bound: float) -> Tensor:
    ratio = tokens.log_ratio(tokens.old).detach().exp().clamp(max=bound)
    return -(tokens.advantages * ratio * kept) * tokens.logps


def sapo(temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> Objective:
    """SAPO: a sigmoid gate of the ratio instead of a clip.

        l = -4 / tau sigmoid(tau (r - 1)) A,   tau = temperature_pos where A > 0, else temperature_neg

    Scope "token". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        temperature_pos: Gate temperature where A > 0, > 0.
        temperature_neg: Gate temperature elsewhere, > 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: SAPO (arXiv 2511.20347); checked against verl 0.9.1 `sapo`.
    """
    pos = check_number(temperature_pos, "temperature_pos", above=0.0)
    neg = check_number(temperature_neg, "temperature_neg", above=0.0)

    def loss(tokens: Tokens) -> Tensor:
        tau = torch.full_like(tokens.advantages, neg).masked_fill_(tokens.advantages > 0, pos)
        ratio = tokens.log_ratio(tokens.old).exp()
        return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * tokens.advantages

    name = described("sapo", temperature_pos=temperature_pos, temperature_neg=temperature_neg)
    return Objective(name, loss, may_have=OLD)


def cispo(epsilon: float = 0.2, epsilon_high: float | None = None) -> Objective:
    """CISPO: REINFORCE with the clipped ratio as a weight.

        l = -sg(clip(r, 1 - epsilon, 1 + epsilon_high)) A logp

    Scope "token". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        epsilon: Lower clip distance of the ratio, > 0; 1 is no lower bound.
        epsilon_high: Upper clip distance, > 0; default `epsilon`. (`GRPOLossConfig` takes the bound itself.)

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: MiniMax-M1 (arXiv 2506.13585); checked against verl 0.9.1 `cispo`.
    """
    low, high = check_clip(epsilon, epsilon_high)

    def loss(tokens: Tokens) -> Tensor:
        ratio = tokens.log_ratio(tokens.old).detach().exp().clamp(low, high)
        return -ratio * tokens.advantages * tokens.logps

    return Objective(described("cispo", epsilon=epsilon, epsilon_high=epsilon_high), loss, may_have=OLD)


def ipo(threshold: float = 0.3, kl_coef: float = 1e-3) -> Objective:
    """INTELLECT's IPO: without tokens whose probability is too far from the sampler's, and with a penalty for all.

        l = -M rho A + kl_coef (log rho)^2,   rho = exp(logp - sampling),   M = |p - p_sampling| <= threshold

    Scope "token". Inputs: `advantages`, `sampling_per_token_logps` (NaN: rho = 1), optional `weights`.

    Args:
        threshold: Largest change in probability, > 0.
        kl_coef: Weight of the squared log-ratio, in 1/nats^2, >= 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: prime-rl's `ipo` loss; its squared log-ratio is Kimi-K2.5's (arXiv 2602.02276). Tested
    against the formula, compared once with prime-rl's code of August 2026.
    """
    bound, coef = check_number(threshold, "threshold", above=0.0), check_number(kl_coef, "kl_coef", least=0.0)

    def loss(tokens: Tokens) -> Tensor:
        moved = tokens.logps.detach().exp() - tokens.sampling.exp()
        return _held_near(tokens, tokens.advantages, moved.abs() <= bound, coef)

    return Objective(described("ipo", threshold=threshold, kl_coef=kl_coef), loss, needs=SAMPLER)


def ref_kl(threshold: float = 0.2, kl_coef: float = 1e-3) -> Objective:
    """The reverse KL towards a reference or teacher as a policy gradient (on-policy distillation).

        l = -M rho sg(ref - logp) + kl_coef (log rho)^2
        rho = exp(logp - sampling),   M = p - p_sampling >= -threshold

    Scope "token". Inputs: `ref_per_token_logps`, `sampling_per_token_logps` (NaN: rho = 1), optional `weights`.

    Args:
        threshold: Largest fall in probability, > 0.
        kl_coef: Weight of the squared log-ratio, in 1/nats^2, >= 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: prime-rl's `ref_kl` loss component. Tested against the formula, compared once with prime-rl's code of August
    2026.
    """
    bound, coef = check_number(threshold, "threshold", above=0.0), check_number(kl_coef, "kl_coef", least=0.0)

    def loss(tokens: Tokens) -> Tensor:
        advantages = tokens.inputs["ref_per_token_logps"] - tokens.logps.detach()
        moved = tokens.logps.detach().exp() - tokens.sampling.exp()
        return _held_near(tokens, advantages, moved >= -bound, coef)

    needs = ("ref_per_token_logps", "sampling_per_token_logps")
    return Objective(described("ref_kl", threshold=threshold, kl_coef=kl_coef), loss, needs=needs)


def _held_near(tokens: Tokens, advantages: Tensor, kept: Tensor, kl_coef: float) -> Tensor:
    log_ratio = tokens.log_ratio(tokens.sampling)
    return kl_coef * log_ratio.square() - kept * advantages * log_ratio.exp()


def icepop(low: float = 0.2, high: float = 5.0) -> Objective:
    """IcePop on the current policy: tokens whose ratio to the sampler is outside a band are left out.

        l = -rho A where low <= rho <= high, else 0,   rho = exp(logp - sampling)

    Scope "token". Inputs: `advantages`, `sampling_per_token_logps` (NaN: rho = 1), optional `weights`.

    Args:
        low: Smallest ratio that counts, > 0.
        high: Largest ratio that counts, >= `low`.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: IcePop, in the form of prime-rl's `icepop` loss. Tested against the formula.
    """
    check_band(low, high)

    def loss(tokens: Tokens) -> Tensor:
        ratio = tokens.log_ratio(tokens.sampling).exp()
        kept = (ratio >= low) & (ratio <= high)
        return -(kept * tokens.advantages) * ratio

    return Objective(described("icepop", low=low, high=high), loss, needs=SAMPLER)


def gpg() -> Objective:
    """The plain policy gradient, REINFORCE.

        l = -A logp

    Scope "token". Inputs: `advantages`, optional `weights`.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Source: GPG (arXiv 2504.02546); checked against verl 0.9.1 `gpg`.
    """
    return Objective("gpg()", lambda tokens: -tokens.advantages * tokens.logps)


def cross_entropy() -> Objective:
    """The negative log-likelihood, for supervised tokens in a mixture.

        l = -logp

    Scope "token". Inputs: optional `weights`.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Source: prime-rl's `ce` loss component. Tested against the formula, compared once with prime-rl's code of August
    2026.
    """
    return Objective("cross_entropy()", lambda tokens: -tokens.logps, needs=())


def dro(beta: float) -> Objective:
    """DRO: the policy gradient with a quadratic penalty on the log-ratio.

        l = -A logp + beta / 2 (logp - old)^2

    Scope "token". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        beta: Weight of the penalty, in units of reward per nat, > 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: DRO (arXiv 2405.19107); checked against verl 0.9.1 `dro`.
    """
    coef = check_number(beta, "beta", above=0.0)

    def loss(tokens: Tokens) -> Tensor:
        return 0.5 * coef * tokens.log_ratio(tokens.old).square() - tokens.advantages * tokens.logps

    return Objective(described("dro", beta=beta), loss, may_have=OLD)


def check_band(low: float, high: float) -> None:
    """0 < low <= high."""
    if not check_number(low, "low", above=0.0) <= check_number(high, "high"):
        raise ValueError(f"low must be at most high; got low={low} and high={high}")
