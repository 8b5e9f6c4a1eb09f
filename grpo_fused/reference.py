"""The loss in plain PyTorch: full logits, autograd, any float dtype up to fp64. Slow, clear, and the test of all else.

This derivation shares nothing with `objective.py` but the formulas on paper: it works on padded `[B, T]` tensors,
writes the losses with autograd-friendly clamps and stop-gradients, and leaves every derivative to PyTorch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.config import GRPOLossConfig
from grpo_fused.outputs import GRPOLossOutput, LogprobOutput


class PaddedInputs(NamedTuple):
    """A loss call, each tensor `[B, T]` with neutral values where masked (`advantages` and ratios may be `[B, 1]`)."""

    mask: Tensor
    advantages: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None
    is_ratio: Tensor | None
    num_items: Tensor | None
    advantage_per_token: bool
    """Whether the advantages are `[B, T]`, one value for each token."""


def linear_logprobs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    *,
    temperature: Tensor | float,
    logit_scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> LogprobOutput:
    """Log-probs and entropies of `token_ids` from all logits at once; `temperature` is a number or per token."""
    active = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask != 0
    hidden = torch.where(active.unsqueeze(-1), hidden_states.to(dtype), 0.0)
    logits = hidden @ lm_head_weight.to(dtype).T
    if lm_head_bias is not None:
        logits = logits + lm_head_bias.to(dtype)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logprobs(logits, token_ids, mask, temperature=temperature)


def logprobs(logits: Tensor, token_ids: Tensor, mask: Tensor | None, *, temperature: Tensor | float) -> LogprobOutput:
    """Log-probs and entropies of `token_ids` ([...]) under `logits` ([..., V]) in the dtype of the logits."""
    active = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask != 0
    if isinstance(temperature, Tensor):
        temperature = torch.where(active, temperature.to(logits.dtype), 1.0).unsqueeze(-1)
    logits = torch.where(active.unsqueeze(-1), logits, 0.0) / temperature
    at = logits.argmax(-1, keepdim=True)
    maximum = logits.gather(-1, at)
    possible = logits != -math.inf  # 0 * (-inf) counts 0 in value and gradient
    shifted = torch.where(possible, logits - maximum, 0.0)
    others = torch.where(possible, shifted.exp(), 0.0).scatter(-1, at, 0.0)
    rest = others.sum(-1)  # without the maximum's own 1, so that a confident token keeps its digits
    ids = torch.where(active, token_ids, 0).to(torch.int64)
    ids = ids.unsqueeze(-1)
    below = torch.where(ids == at, 0.0, logits.gather(-1, ids) - maximum)  # the maximum's own gradient must not cancel
    logps = below.squeeze(-1) - rest.log1p()
    entropies = rest.log1p() - (others * shifted).sum(-1) / (1.0 + rest)
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    return LogprobOutput(torch.where(active, logps, zero), torch.where(active, entropies, zero))


def grpo_loss(logps: Tensor, entropies: Tensor | None, inputs: PaddedInputs, config: GRPOLossConfig) -> GRPOLossOutput:
    """The loss from padded log-probs and entropies; differentiable in both."""
    mask = inputs.mask.to(logps.dtype)
    lengths = mask.sum(1)
    returned = torch.where(inputs.mask, logps, 0.0).detach()
    logps = torch.where(inputs.mask, logps.clamp(min=-1e4), 0.0)  # an impossible token: finite, without a gradient
    advantages = inputs.advantages.to(logps.dtype)
    high_entropy = torch.ones_like(inputs.mask)
    if config.top_entropy_quantile < 1.0:
        assert entropies is not None
        high_entropy = high_entropy_tokens(entropies.detach(), inputs.mask, config.top_entropy_quantile)

    old = logps.detach() if inputs.old is None else inputs.old
    log_ratio = logps - old
    c = _ratio(log_ratio, logps, mask, config)

    policy, seen = _policy_loss(c, log_ratio, logps, advantages, high_entropy, inputs, config)
    if config.off_policy_mask_threshold is not None:
        behaviour = inputs.sampling if inputs.sampling is not None else old
        drift = (torch.nan_to_num(behaviour - logps.detach(), nan=0.0) * mask).sum(1, keepdim=True)
        drift = drift / lengths.clamp(min=1).unsqueeze(1)
        policy = policy * ((advantages >= 0) | (drift <= config.off_policy_mask_threshold))
    if config.loss_type != "gmpo":
        policy = policy * high_entropy
    if inputs.is_ratio is not None and config.loss_type != "vespo":
        policy = policy * inputs.is_ratio

    per_token, kl = policy, None
    if inputs.ref is not None:
        kl = _kl(inputs.ref - logps, config.kl_estimator)
        if config.use_bias_correction_kl and config.loss_type != "gmpo":
            kl = kl * c
        if config.beta != 0.0:
            per_token = per_token + config.beta * kl
    policy_loss = _aggregate(per_token.expand_as(mask), mask, inputs.num_items, config)

    loss = policy_loss
    if config.entropy_coef != 0.0:
        assert entropies is not None
        kept = mask * high_entropy
        loss = loss - config.entropy_coef * (torch.where(kept != 0, entropies, 0.0).sum() / kept.sum().clamp(min=1))
    metrics = _metrics(seen, kl, entropies, inputs, mask, config)
    metrics["policy_loss"] = policy_loss
    return GRPOLossOutput(
        loss=loss,
        per_token_logps=returned,
        entropies=None if entropies is None else torch.where(inputs.mask, entropies, 0.0).detach(),
        metrics={name: value.detach() for name, value in metrics.items()},
    )


def high_entropy_tokens(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """Active tokens at or above the (1 - share) quantile of the active entropies."""
    entropies = entropies.float()
    active = entropies[mask]
    if active.numel() == 0:
        return torch.zeros_like(mask)
    ordered = active.double().sort().values
    position = (1.0 - share) * (active.numel() - 1)
    below = int(position)
    above = min(below + 1, active.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return mask & (entropies >= threshold.to(entropies.dtype))


def _ratio(log_ratio: Tensor, logps: Tensor, mask: Tensor, config: GRPOLossConfig) -> Tensor:
    if config.importance_sampling_level == "token":
        return log_ratio.clamp(-20, 20).exp()
    mean = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    c = mean.clamp(-20, 20).exp()
    if config.importance_sampling_level == "sequence":
        return c
    return c.detach() * (logps - logps.detach()).exp()


def _policy_loss(
    c: Tensor,
    log_ratio: Tensor,
    logps: Tensor,
    advantages: Tensor,
    high_entropy: Tensor,
    inputs: PaddedInputs,
    config: GRPOLossConfig,
) -> tuple[Tensor, Tensor]:
    """Per-token (or `[B, 1]`) policy loss, and what its metrics look at: the ratio after delta, or VESPO's phi."""
    if config.loss_type == "cispo":
        return -c.clamp(max=config.epsilon_upper).detach() * advantages * logps, c
    if config.loss_type == "sapo":
        tau = torch.full_like(advantages, config.sapo_temperature_neg)
        tau = torch.where(advantages > 0, torch.full_like(tau, config.sapo_temperature_pos), tau)
        return -(4.0 / tau) * torch.sigmoid(tau * (c - 1.0)) * advantages, c
    if config.loss_type == "vespo":
        phi = _gamma_weight(log_ratio.detach(), advantages, inputs, config)
        return -phi * advantages * logps, phi
    if config.loss_type == "gmpo":
        kept = inputs.mask * high_entropy
        one_sided = torch.where(
            advantages > 0, log_ratio.clamp(max=config.epsilon_upper), log_ratio.clamp(min=-config.epsilon)
        )
        mean = (one_sided * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
        return -mean.clamp(max=20).exp() * advantages, log_ratio
    capped = c if config.delta is None else c.clamp(max=config.delta)
    clipped = c.clamp(1.0 - config.epsilon, 1.0 + config.epsilon_upper)
    loss = -torch.min(capped * advantages, clipped * advantages)
    if config.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -config.dual_clip * advantages), loss)
    return loss, capped


def _gamma_weight(log_ratio: Tensor, advantages: Tensor, inputs: PaddedInputs, config: GRPOLossConfig) -> Tensor:
    lowest = math.log(1e-8)
    log_w = (log_ratio.clamp(-20, 20) * inputs.mask).sum(1, keepdim=True)
    if inputs.is_ratio is not None:
        log_w = log_w + (inputs.is_ratio.log().clamp(lowest, 20) * inputs.mask).sum(1, keepdim=True)
    log_w = log_w.clamp(lowest, 20)

    def phi(k: float, rate: float) -> Tensor:
        rate = max(rate, 1e-4)
        return torch.exp(rate + k * log_w - rate * torch.exp(log_w)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    good = phi(config.vespo_k_pos, config.vespo_lambda_pos)
    return torch.where(advantages >= 0, good, phi(config.vespo_k_neg, config.vespo_lambda_neg))


def _kl(q: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -q
    if estimator == "k2":
        return q.square() / 2
    near = q.clamp(max=20)
    tangent = math.exp(20) - 21 + (math.exp(20) - 1) * (q - 20)
    return torch.where(q > 20, tangent, near.exp() - near - 1)


def _aggregate(per_token: Tensor, mask: Tensor, num_items: Tensor | None, config: GRPOLossConfig) -> Tensor:
    lengths, sums = mask.sum(1), torch.where(mask != 0, per_token, 0.0).sum(1)
    num_sequences = max(mask.shape[0], 1)
    if config.loss_type in ("grpo", "sapo", "gmpo"):
        return (sums / lengths.clamp(min=1)).sum() / num_sequences
    if config.loss_type == "bnpo":
        return sums.sum() / lengths.sum().clamp(min=1)
    if config.loss_type == "dr_grpo":
        assert config.max_completion_length is not None
        return sums.sum() / (num_sequences * config.max_completion_length)
    if config.loss_type == "luspo":
        return sums.sum() / num_sequences
    return sums.sum() / (lengths.sum().clamp(min=1) if num_items is None else num_items.to(mask))


def _metrics(
    seen: Tensor,
    kl: Tensor | None,
    entropies: Tensor | None,
    inputs: PaddedInputs,
    mask: Tensor,
    config: GRPOLossConfig,
) -> dict[str, Tensor]:
    """TRL's metrics: means over active tokens, or over sequences for what has one value a sequence."""
    lengths, advantages = mask.sum(1), inputs.advantages

    def token_mean(x: Tensor) -> Tensor:
        return torch.where(mask != 0, x, 0.0).sum() / mask.sum().clamp(min=1)

    one_value_a_sequence = not inputs.advantage_per_token and (
        config.importance_sampling_level == "sequence" or config.loss_type == "vespo"
    )

    def mean(x: Tensor) -> Tensor:
        return x.mean() if one_value_a_sequence and x.numel() else token_mean(x)

    def of_sequences(x: Tensor) -> Tensor:
        return ((x * mask).sum(1) / lengths)[lengths > 0]

    metrics: dict[str, Tensor] = {"active_tokens": mask.sum()}
    if kl is not None:
        metrics["kl"] = token_mean(kl)
    if entropies is not None:
        metrics["entropy"] = token_mean(entropies)
    if config.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = mean(((seen > config.epsilon_upper) & (advantages > 0)).to(mask))
    elif config.loss_type == "vespo":
        metrics["vespo/phi_seq_mean"] = mean(seen)
    elif config.loss_type != "sapo":
        low, high = 1 - config.epsilon, 1 + config.epsilon_upper
        if config.loss_type == "gmpo":
            low, high = -config.epsilon, config.epsilon_upper
        is_low = ((seen < low) & (advantages < 0)).to(mask)
        is_high = ((seen > high) & (advantages > 0)).to(mask)
        metrics["clip_ratio/low_mean"] = mean(is_low)
        metrics["clip_ratio/high_mean"] = mean(is_high)
        metrics["clip_ratio/region_mean"] = mean(is_low + is_high)
        lows, highs = of_sequences(is_low), of_sequences(is_high)
        nan = mask.new_full((), math.nan)
        metrics["clip_ratio/low_min"] = lows.min() if lows.numel() else nan
        metrics["clip_ratio/high_max"] = highs.max() if highs.numel() else nan
    return metrics
