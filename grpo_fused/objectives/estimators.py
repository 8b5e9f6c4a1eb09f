"""Further advantage estimators, besides `group_advantages`.

Rewards are those of `group_advantages`: `[N]`, or `[N, F]` for F reward functions that are summed with `weights`;
groups of `num_generations` are contiguous; None or NaN marks a sample that was not judged. It has advantage 0 and
is left out of baselines. Results are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fused.call import validation as check
from grpo_fused.call.options import check_integer, check_number
from grpo_fused.objectives.advantages import as_table, check_groups, nan_std, weighted_sum, z_score

Rewards = Tensor | Sequence[float | None] | Sequence[Sequence[float | None]]
Weights = Tensor | Sequence[float] | None


def rloo(rewards: Rewards, num_generations: int, *, weights: Weights = None) -> Tensor:
    """RLOO: how much better a sample is than the mean of the others in its group.

        A_i = r_i - mean_{j != i} r_j

    Args:
        rewards: `[N]` or `[N, F]`.
        num_generations: Samples per group, >= 2; divides N.
        weights: `[F]`, default all 1.

    Returns:
        `[N]`; 0 if fewer than two samples of a group are judged.

    Raises:
        ValueError: wrong shapes or group size, infinite rewards.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2402.14740; checked against verl 0.9.1 `rloo`.
    """
    groups = _groups(rewards, num_generations, weights)
    count = (~groups.isnan()).sum(dim=1, keepdim=True)
    others = (groups.nansum(dim=1, keepdim=True) - groups) / (count - 1)
    return _judged(torch.where(count > 1, groups - others, 0.0))


def opo(rewards: Rewards, num_generations: int, lengths: Tensor, *, weights: Weights = None) -> Tensor:
    """OPO: the group's mean, weighted by length, as the baseline.

        A_i = r_i - sum_j n_j r_j / sum_j n_j

    Args:
        rewards: `[N]` or `[N, F]`.
        num_generations: Samples per group, >= 2; divides N.
        lengths: `[N]` active tokens of each sample, >= 0.
        weights: `[F]`, default all 1.

    Returns:
        `[N]`; A = r if no token is judged.

    Raises:
        ValueError: wrong shapes or group size, infinite rewards.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2505.23585; checked against verl 0.9.1 `opo`.
    """
    groups = _groups(rewards, num_generations, weights)
    tokens = _lengths(lengths, groups)
    baseline = (groups * tokens).nansum(dim=1, keepdim=True) / tokens.sum(dim=1, keepdim=True)
    return _judged(groups - baseline.nan_to_num(nan=0.0))


def maxrl(rewards: Rewards, num_generations: int, *, weights: Weights = None) -> Tensor:
    """MaxRL: the centred reward over the group's mean, so that hard prompts weigh more.

        A_i = (r_i - mean(r)) / mean(r),   0 where the mean is 0

    Args:
        rewards: `[N]` or `[N, F]`, >= 0 (the paper's are 0 or 1).
        num_generations: Samples per group, >= 2; divides N.
        weights: `[F]`, default all 1.

    Returns:
        `[N]`

    Raises:
        ValueError: wrong shapes or group size, infinite or negative rewards.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2602.02710, in the form of prime-rl's `max_rl`. Tested against the formula.
    """
    groups = _groups(rewards, num_generations, weights)
    if (groups < 0).any():
        raise ValueError(f"rewards must be >= 0 for maxrl, which divides by their mean; got {groups[groups < 0][0]:g}")
    mean = groups.nanmean(dim=1, keepdim=True)
    return _judged(torch.where(mean > 0, (groups - mean) / mean, 0.0))


def remax(rewards: Rewards, baselines: Tensor, *, weights: Weights = None) -> Tensor:
    """ReMax: how much better a sample is than the greedy completion of its prompt.

        A_i = r_i - b_i

    Args:
        rewards: `[N]` or `[N, F]`.
        baselines: `[N]` the reward of the greedy completion of each sample's prompt, finite.
        weights: `[F]`, default all 1.

    Returns:
        `[N]`

    Raises:
        ValueError: wrong shapes, infinite rewards or baselines.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2310.10505; checked against verl 0.9.1 `remax`.
    """
    summed = weighted_sum(as_table(rewards), weights)
    check.check_tensor(baselines, "baselines", check.FLOAT, tuple(summed.shape))
    if not baselines.isfinite().all():
        raise ValueError("baselines must be finite; got others")
    return _judged(summed - baselines.detach().to(summed))


def best_of_group(rewards: Rewards, num_generations: int, *, scale: bool = True, weights: Weights = None) -> Tensor:
    """Pass@k of a group: only its best sample has an advantage, by how much it beats the second.

        A_best = (r_best - r_second) / (std(r) + 1e-6),   0 for the others

    Args:
        rewards: `[N]` or `[N, F]`.
        num_generations: Samples per group, k, >= 2; divides N.
        scale: Whether to divide by the standard deviation.
        weights: `[F]`, default all 1.

    Returns:
        `[N]`; 0 if fewer than two samples of a group are judged.

    Raises:
        ValueError: wrong shapes or group size, infinite rewards.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2503.19595; checked against verl 0.9.1 `grpo_passk`.
    """
    groups = _groups(rewards, num_generations, weights)
    best, at = groups.nan_to_num(nan=-math.inf).topk(2, dim=1)
    lead = (best[:, :1] - best[:, 1:]).nan_to_num(nan=0.0, posinf=0.0)
    if scale:
        lead = lead / (nan_std(groups, dim=1).nan_to_num(nan=1.0) + 1e-6)
    return _judged(torch.zeros_like(groups).scatter(1, at[:, :1], lead))


def pass_at_k(rewards: Rewards, num_generations: int, k: int, *, weights: Weights = None) -> Tensor:
    """Pass@k training: the mean advantage of all groups of k with this sample; a group is right if one of it is.

        R = 1 - C(wrong, k) / C(n, k),   sigma = sqrt(R (1 - R))
        A_right = (1 - R) / sigma,   A_wrong = (1 - R - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / sigma

    n counts the judged samples of the group, `wrong` those with a reward of 0.

    Args:
        rewards: `[N]` or `[N, F]`, 0 or 1.
        num_generations: Samples per group, >= 2; divides N.
        k: Size of a group, one of which must be right, in [1, num_generations].
        weights: `[F]`, default all 1.

    Returns:
        `[N]`; 0 if R is 0 or 1, or fewer than k samples are judged.

    Raises:
        ValueError: wrong shapes, group size or k, rewards that are not 0 or 1.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2508.10751, its analytical form. Tested against the mean over all subsets.
    """
    check_integer(k, "k", least=1)
    groups = _groups(rewards, num_generations, weights)
    if k > num_generations:
        raise ValueError(f"k must be at most num_generations={num_generations}; got {k}")
    if not (groups.isnan() | (groups == 0) | (groups == 1)).all():
        raise ValueError("rewards must be 0 or 1 for pass_at_k; got others")
    rows = []
    for group in groups:
        n, wrong = int((~group.isnan()).sum()), int((group == 0).sum())
        mean = 1.0 - math.comb(wrong, k) / math.comb(n, k) if n >= k else 0.0
        sigma = math.sqrt(mean * (1.0 - mean))
        if sigma == 0.0:
            rows.append(torch.zeros_like(group))
            continue
        bad = 1.0 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
        rows.append(torch.where(group == 1, (1.0 - mean) / sigma, bad / sigma).masked_fill(group.isnan(), 0.0))
    return _judged(torch.cat(rows) if rows else groups)


def gdpo(rewards: Rewards, num_generations: int, lengths: Tensor, *, weights: Weights = None) -> Tensor:
    """GDPO over tokens: z-scores of each reward function within the group, summed, and whitened over all tokens.

        A = whiten(sum_f weight_f (r_f - mean_group(r_f)) / (std_group(r_f) + 1e-6))

    `group_advantages(aggregation="normalize_then_sum")` is TRL's form: it whitens over samples.

    Args:
        rewards: `[N, F]`.
        num_generations: Samples per group, >= 2; divides N.
        lengths: `[N]` active tokens of each sample, >= 0.
        weights: `[F]`, default all 1.

    Returns:
        `[N]`, 0 for a sample without tokens

    Raises:
        ValueError: wrong shapes or group size, infinite rewards.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2601.05242; checked against verl 0.9.1 `gdpo`.
    """
    table = as_table(rewards)
    check_groups(len(table), num_generations)
    scores = z_score(table.view(-1, num_generations, table.shape[1]), dim=1, eps=1e-6)
    summed = weighted_sum(scores.view_as(table), weights)
    return _judged(_whitened(summed, _lengths(lengths, summed)))


def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """REINFORCE++: discounted returns, whitened over all active tokens.

        G_t = r_t + gamma G_{t + 1},   A = (G - mean(G)) / std(G)

    Args:
        token_rewards: `[B, T]`: rewards of tokens, KL penalties included; `at_last_token` makes them from `[B]`.
        mask: `[B, T]` bool or 0/1: active tokens. A reward on a masked token does not count.
        gamma: Discount of a step from an active token to the one before, in (0, 1].

    Returns:
        `[B, T]`, 0 where masked.

    Raises:
        ValueError: wrong shapes, rewards that are not finite, gamma out of range.
        TypeError: a wrong type or dtype.

    Source: arXiv 2501.03262; checked against verl 0.9.1 `reinforce_plus_plus`.
    """
    rewards, active = _tokens(token_rewards, mask)
    check_number(gamma, "gamma", above=0.0, most=1.0)
    following, returns = rewards.new_zeros(len(rewards)), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        returns[:, t] = rewards[:, t] + gamma * following
        following = torch.where(active[:, t], returns[:, t], following)
    return _judged(_whitened(returns, active.to(returns.dtype)), active)


def reinforce_plus_plus_baseline(
    rewards: Rewards, num_generations: int, lengths: Tensor, *, weights: Weights = None
) -> Tensor:
    """REINFORCE++ with the group's mean as the baseline, whitened over all tokens.

        A = whiten(r - mean_group(r))

    Args:
        rewards: `[N]` or `[N, F]`.
        num_generations: Samples per group, >= 2; divides N.
        lengths: `[N]` active tokens of each sample, >= 0.
        weights: `[F]`, default all 1.

    Returns:
        `[N]`, 0 for a sample without tokens

    Raises:
        ValueError: wrong shapes or group size, infinite rewards.
        TypeError: rewards or weights that are not numbers.

    Source: arXiv 2501.03262; checked against verl 0.9.1 `reinforce_plus_plus_baseline`.
    """
    groups = _groups(rewards, num_generations, weights)
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    return _judged(_whitened(centred, _lengths(lengths, centred)))


def optimal_token_baseline(
    token_rewards: Tensor,
    mask: Tensor,
    num_generations: int,
    old_per_token_logps: Tensor,
    sum_squared_probs: Tensor,
    *,
    importance_sampling_ratio: Tensor | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """The baseline of each time step that gives a group's policy gradient the least variance.

        A_t = G_t - sum_i G_it W_it / sum_i W_it,   G_t = sum_{k >= t} r_k,   W_t = sum_{k <= t} rho_k^2 w_k
        w = 1 - 2 p + sum_v p_v^2,   the squared length of the gradient of logp in the logits

    Args:
        token_rewards: `[B, T]`; `at_last_token` makes them from `[B]`.
        mask: `[B, T]` bool or 0/1: active tokens; only these count.
        num_generations: Samples per group, >= 2; divides B.
        old_per_token_logps: `[B, T]` nats: log-probs of the tokens, p = exp of it.
        sum_squared_probs: `[B, T]`: the sum over the vocabulary of squared probabilities.
        importance_sampling_ratio: `[B, T]` truncated ratios rho to the sampler; default 1.
        zero_tail: Whether the longest sample of a group has no baseline beyond the second longest.

    Returns:
        `[B, T]`, 0 where masked.

    Raises:
        ValueError: wrong shapes or group size, values that are not finite on active tokens.
        TypeError: a wrong type or dtype.

    Source: checked against verl 0.9.1 `optimal_token_baseline`.
    """
    rewards, active = _tokens(token_rewards, mask)
    check_groups(len(rewards), num_generations)
    logps = _like(old_per_token_logps, "old_per_token_logps", rewards, active)
    energy = 1.0 - 2.0 * logps.exp() + _like(sum_squared_probs, "sum_squared_probs", rewards, active)
    if importance_sampling_ratio is not None:
        energy = energy * _like(importance_sampling_ratio, "importance_sampling_ratio", rewards, active).square()
    groups = (len(rewards) // num_generations, num_generations, rewards.shape[1])
    kept = active.view(groups)
    returns = torch.where(active, rewards, 0.0).flip(1).cumsum(1).flip(1).view(groups)
    weight = torch.where(active, energy, 0.0).cumsum(1).view(groups) * kept
    baseline = (returns * weight).sum(1, keepdim=True) / (weight.sum(1, keepdim=True) + 1e-8)
    baseline = baseline.expand_as(returns)
    if zero_tail:
        lengths = kept.sum(dim=2)
        longest = lengths.topk(2, dim=1).values
        alone = (lengths == longest[:, :1]) & (longest[:, :1] > longest[:, 1:])
        steps = torch.arange(rewards.shape[1], device=rewards.device)
        baseline = baseline.masked_fill(alone.unsqueeze(2) & (steps >= longest[:, 1:].unsqueeze(2)), 0.0)
    return _judged((returns - baseline).view_as(rewards), active)


def at_last_token(rewards: Rewards, mask: Tensor, *, weights: Weights = None) -> Tensor:
    """Each sample's reward on its last active token, 0 elsewhere; 0 for a sample that was not judged.

    Args:
        rewards: `[B]` or `[B, F]`.
        mask: `[B, T]` bool or 0/1: active tokens.
        weights: `[F]`, default all 1.

    Returns:
        `[B, T]` fp64.

    Raises:
        ValueError: wrong shapes, infinite rewards.
        TypeError: rewards, weights or a mask that are not numbers.
    """
    summed = weighted_sum(as_table(rewards), weights)
    check.check_tensor(mask, "mask", check.ZERO_OR_ONE, (len(summed), "T"))
    check.check_zero_or_one(mask)
    active = mask != 0
    following = active.flip(1).cumsum(1).flip(1)
    return torch.where(active & (following == 1), summed.nan_to_num(nan=0.0).to(mask.device).unsqueeze(1), 0.0)


def _groups(rewards: Rewards, num_generations: int, weights: Weights) -> Tensor:
    """[groups, num_generations] fp64, NaN where not judged."""
    summed = weighted_sum(as_table(rewards), weights)
    check_groups(len(summed), num_generations)
    return summed.view(-1, num_generations)


def _judged(advantages: Tensor, active: Tensor | None = None) -> Tensor:
    """fp32, 0 where NaN (not judged) or not active; groups are flattened."""
    if active is not None:
        return torch.where(active, advantages, 0.0).float()
    return advantages.nan_to_num(nan=0.0).flatten().float()


def _lengths(lengths: Tensor, like: Tensor) -> Tensor:
    """Checked and shaped `like` what they belong to, 0 where that is NaN (not judged)."""
    check.check_tensor(lengths, "lengths", check.ANY, (like.numel(),))
    if (lengths < 0).any():
        raise ValueError(f"lengths must be numbers of tokens, at least 0; got {lengths.min():g}")
    return torch.where(like.isnan(), 0.0, lengths.to(like).view_as(like))


def _whitened(x: Tensor, count: Tensor) -> Tensor:
    """(x - mean) / std over elements that count `count` times each, 0 at others; 0 if fewer than two count."""
    total = count.sum()
    known = torch.where(count > 0, x, 0.0)
    mean = (known * count).sum() / total.clamp(min=1)
    variance = ((known - mean).square() * count).sum() / (total - 1).clamp(min=1)
    return torch.where((total > 1) & (count > 0), (x - mean) * (variance + 1e-8).rsqrt(), 0.0)


def _tokens(token_rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T] fp64 rewards and bool mask."""
    check.check_tensor(token_rewards, "token_rewards", check.ANY, ("B", "T"))
    check.check_mask(mask, token_rewards, "mask")
    check.check_zero_or_one(mask)
    rewards = token_rewards.detach().double()
    if not rewards.isfinite().all():
        raise ValueError("token_rewards must be finite; got NaN or an infinite one")
    return rewards, mask != 0


def _like(x: Tensor, name: str, rewards: Tensor, active: Tensor) -> Tensor:
    """[B, T] fp64, 0 where not active."""
    check.check_tensor(x, name, check.ANY, tuple(rewards.shape))
    x = torch.where(active, x.detach().double(), 0.0)
    if not x.isfinite().all():
        raise ValueError(f"{name} must be finite on active tokens; got NaN or an infinite one")
    return x
