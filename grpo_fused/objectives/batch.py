"""Objectives in which a token's loss depends on all active tokens of the call (scope "batch").

The tokens are those of the call on this process; nothing is exchanged between processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused.call.options import check_number
from grpo_fused.objectives.base import Objective, Tokens, check_clip, described
from grpo_fused.objectives.token import OLD, check_band, clipped


def clip_cov(
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Objective:
    """Clip-Cov: PPO's clipped loss without a few random tokens whose log-prob and advantage are large together.

        l = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) K
        K = 0 for max(1, share n) random ones of the tokens with low < (A - mean(A)) (logp - mean(logp)) < high
            that are not clipped, else 1

    Scope "batch". Inputs: `advantages`, optional `old_per_token_logps`, `weights`. Each call draws new ones.

    Args:
        share: Share of the tokens that are left out, in (0, 1].
        low: Covariances above this are candidates, > 0.
        high: Covariances below this are candidates, >= `low`.
        epsilon: Lower clip distance of the ratio, > 0.
        epsilon_high: Upper clip distance, > 0; default `epsilon`.
        generator: A CPU generator that draws the tokens; default PyTorch's. Ranks with slices of one vocabulary must
            have it in the same state: each evaluates the same tokens.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: The Entropy Mechanism of RL (arXiv 2505.22617); checked against verl 0.9.1 `clip_cov`.
    """
    check_number(share, "share", above=0.0, most=1.0)
    check_band(low, high)
    bottom, top = check_clip(epsilon, epsilon_high)

    def loss(tokens: Tokens) -> Tensor:
        ratio, advantages = tokens.log_ratio(tokens.old).exp(), tokens.advantages
        cov = _covariance(tokens)
        bound = -advantages * ratio.detach().clamp(bottom, top) > -advantages * ratio.detach()
        chosen = ((cov > low) & (cov < high) & ~bound).nonzero().squeeze(1)
        drawn = torch.randperm(len(chosen), generator=generator, device="cpu")[: max(int(share * len(cov)), 1)]
        kept = torch.ones_like(cov).index_fill_(0, chosen[drawn.to(chosen.device)], 0.0)
        return clipped(ratio, advantages, bottom, top) * kept

    name = described("clip_cov", share=share, low=low, high=high, epsilon=epsilon, epsilon_high=epsilon_high)
    return Objective(name, loss, scope="batch", may_have=OLD)


def kl_cov(share: float = 2e-4, kl_coef: float = 1.0) -> Objective:
    """KL-Cov: the policy gradient with a penalty on the tokens whose log-prob and advantage are largest together.

        l = -r A + kl_coef |logp - old| on the max(1, share n) tokens of largest (A - mean(A)) (logp - mean(logp))

    Scope "batch". Inputs: `advantages`, optional `old_per_token_logps`, `weights`.

    Args:
        share: Share of the tokens that are penalised, in (0, 1].
        kl_coef: Weight of the penalty, in units of reward per nat, > 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: The Entropy Mechanism of RL (arXiv 2505.22617); checked against verl 0.9.1 `kl_cov`.
    """
    check_number(share, "share", above=0.0, most=1.0)
    coef = check_number(kl_coef, "kl_coef", above=0.0)

    def loss(tokens: Tokens) -> Tensor:
        log_ratio, cov = tokens.log_ratio(tokens.old), _covariance(tokens)
        largest = cov.topk(min(max(1, int(len(cov) * share)), len(cov))).indices
        penalised = torch.zeros_like(cov).index_fill_(0, largest, coef)
        return penalised * log_ratio.abs() - tokens.advantages * log_ratio.exp()

    return Objective(described("kl_cov", share=share, kl_coef=kl_coef), loss, scope="batch", may_have=OLD)


def _covariance(tokens: Tokens) -> Tensor:
    logps = tokens.logps.detach()
    return (tokens.advantages - tokens.advantages.mean()) * (logps - logps.mean())
