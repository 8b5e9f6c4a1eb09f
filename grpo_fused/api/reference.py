"""The loss in plain PyTorch: full logits, autograd, any float dtype up to fp64. Slow and simple; tests compare with it.

It shares only the formulas with `objective.py`, no code: it takes one sequence at a time and only its active tokens,
writes the losses with clamps and stop-gradients that autograd supports, and leaves every derivative to PyTorch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.call.calls import DivergenceCall, LMHead, LogitsCall, LossCall, ObjectiveCall, TokensCall, layout_of
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import Layout, active_tokens
from grpo_fused.call.outputs import DivergenceOutput, GRPOLossOutput, LogprobOutput
from grpo_fused.call.validation import check_call_states, check_call_values, check_token_values
from grpo_fused.engines.divergence import check_finite
from grpo_fused.engines.products import ieee_products, rounded_bias


def linear_logprobs(call: TokensCall) -> LogprobOutput:
    """Log-probs and entropies of a call from all logits at once, in fp32, from inputs as autocast rounds them."""
    head, token_ids, mask = call.lm_head, call.token_ids, call.mask
    check_call_states(call)
    check_call_values(call, head.vocab_size)
    active = active_tokens(mask, token_ids)
    if (sets := call.candidates.sets) is None:
        logits = _logits(call.hidden_states, head, active)
    else:
        rows = active.reshape(-1).nonzero().squeeze(1)
        kept = torch.ones((active.numel(), head.vocab_size), dtype=torch.bool, device=active.device)
        kept[rows] = sets.select(rows).to_mask(head.vocab_size)
        logits = _logits(call.hidden_states, _with_rows(head, kept[rows].any(0)), active)
        logits = torch.where(kept.view(logits.shape), logits, -math.inf)
    alternatives = None if isinstance(call, LossCall) else call.alternatives.sets
    return _logprobs(_at_temperature(logits, active, head, layout_of(call)), token_ids, active, alternatives)


def selective_logprobs(call: LogitsCall) -> LogprobOutput:
    """Log-probs and entropies of a call from its logits, in at least fp32."""
    layout, active = Layout.of(call.token_ids), active_tokens(call.mask, call.token_ids)
    check_token_values(call.token_ids, call.mask, call.logits.shape[-1], call.temperatures, layout)
    logits = call.logits.to(torch.promote_types(call.logits.dtype, torch.float32))
    return _logprobs(_at_temperature(logits, active, call, layout), call.token_ids, active, None)


def _with_rows(head: LMHead, used: Tensor) -> LMHead:
    """The head with 0 in the rows that no token keeps, which may hold anything: 0 * NaN would be NaN."""

    def of_used(x: Tensor) -> Tensor:
        return torch.where(used.view(-1, *[1] * (x.dim() - 1)), x, 0)

    return head._replace(
        weight=of_used(head.weight),
        base=None if head.base is None else of_used(head.base_rows(slice(None))),
        group_scale=None,
        codes=None,
        bias=None if head.bias is None else of_used(head.bias),
    )


def _logits(hidden: Tensor, head: LMHead, active: Tensor) -> Tensor:
    """[..., V] at temperature 1; hidden states count 0 where not `active`."""
    compute, dtype, bias = head.compute_dtype, head.statistics_dtype, rounded_bias(head).bias
    with torch.autocast(hidden.device.type, enabled=False), ieee_products():
        rounded = hidden.to(compute) if head.base is None else hidden  # `composed` has done so, for gradients in fp32
        states = torch.where(active.unsqueeze(-1), rounded.to(dtype), 0.0)
        if head.base is None:
            logits = states @ head.operand(head.weight).to(dtype).T
        else:
            logits = states[..., : head.base_width] @ head.base_rows(slice(None)).to(dtype).T
            logits = logits if head.row_scale is None else logits * head.row_scale
            low_rank = torch.stack(head.weight_states(states)).sum(0)
            logits = logits + low_rank @ head.weight.to(dtype).T
        if bias is not None:
            logits = logits + bias.to(dtype)
        logits = logits * head.logit_scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return logits


def exact_kl(call: LossCall) -> Tensor | None:
    """KL(policy || reference) of each token in the layout of the call, differentiable; None without a reference."""
    if call.ref_hidden_states is None:
        return None
    mask = active_tokens(call.mask, call.token_ids)
    compared = DivergenceCall(
        call.hidden_states, call.lm_head, mask, mask, "reverse_kl", 0.5, call.ref_hidden_states, call.ref_lm_head, None,
        None, call.needs, call.run,
    )  # fmt: skip
    divergences = _divergence(compared, layout_of(call))[0]
    check_finite(divergences.detach(), "exact KL")
    return divergences


def linear_divergence(call: DivergenceCall) -> DivergenceOutput:
    """The divergence of a policy from another head, from all logits of both at once."""
    check_call_states(call)
    check_call_values(call, call.lm_head.vocab_size)
    divergences, entropies = _divergence(call, layout_of(call))
    check_finite(divergences.detach(), call.kind)
    loss = (torch.where(call.mask != 0, call.weights.detach(), 0.0).to(divergences.dtype) * divergences).sum()
    return DivergenceOutput(loss, divergences.detach(), entropies.detach())


def _divergence(call: DivergenceCall, layout: Layout) -> tuple[Tensor, Tensor]:
    """Divergences and entropies."""
    head, active, top_logprobs, ids = call.lm_head, call.mask != 0, call.other_logprobs, call.other_ids
    log_p = _at_temperature(_logits(call.hidden_states, head, active), active, head, layout).log_softmax(-1)
    low = log_p.clamp(min=-1e4)
    entropies = -(low.exp() * low).sum(-1)
    if call.other_hidden_states is not None and call.other_lm_head is not None:
        other = _logits(call.other_hidden_states, call.other_lm_head, active).detach()
        log_q = _at_temperature(other, active, head, layout).log_softmax(-1)
    else:
        assert top_logprobs is not None
        assert ids is not None
        log_q = torch.where(active.unsqueeze(-1), top_logprobs.detach().to(log_p.dtype), -math.inf)
        log_p = log_p.gather(-1, torch.where(log_q.exp() > 0, ids.to(torch.int64), 0))
    if call.kind == "jsd":
        low_q, beta = log_q.clamp(min=-1e4), call.beta
        log_mean = torch.logaddexp(low + math.log(1.0 - beta), low_q + math.log(beta))
        divergences = beta * _kl_divergence(log_q, log_mean) + (1.0 - beta) * _kl_divergence(log_p, log_mean)
    else:
        divergences = _kl_divergence(log_q, log_p) if call.kind == "forward_kl" else _kl_divergence(log_p, log_q)
    return torch.where(active, divergences, 0.0), torch.where(active, entropies, 0.0)


def _kl_divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """[...]: KL(a, b) over the last dimension; entries of probability 0 in a count 0."""
    low = log_a.clamp(min=-1e4)
    return (low.exp() * (low - torch.where(log_a == -math.inf, low, log_b))).sum(-1)


def _at_temperature(logits: Tensor, active: Tensor, of: LMHead | LogitsCall, layout: Layout) -> Tensor:
    """Logits divided by the temperature, 0 where not `active`."""
    temperature: Tensor | float = of.temperature
    if of.temperatures is not None:
        temperature_of_token = layout.per_token(of.temperatures).view(layout.shape)
        temperature = torch.where(active, temperature_of_token.to(logits.dtype), 1.0).unsqueeze(-1)
    return torch.where(active.unsqueeze(-1), logits, 0.0) / temperature


def _logprobs(logits: Tensor, token_ids: Tensor, active: Tensor, alternatives: CandidateSets | None) -> LogprobOutput:
    """Log-probs and entropies of `token_ids` ([...]) under `logits` ([..., V]) in the dtype of the logits."""
    at = logits.argmax(-1, keepdim=True)
    maximum = logits.gather(-1, at)
    possible = logits != -math.inf  # 0 * (-inf) counts 0 in value and gradient
    shifted = torch.where(possible, logits - maximum, 0.0)
    others = torch.where(possible, shifted.exp(), 0.0).scatter(-1, at, 0.0)
    rest = others.sum(-1)  # without the maximum's own 1, so that a confident token stays accurate
    ids = torch.where(active, token_ids, 0).to(torch.int64).unsqueeze(-1)
    below = torch.where(ids == at, 0.0, logits.gather(-1, ids) - maximum)  # the maximum's own gradient must not cancel
    logps = below.squeeze(-1) - rest.log1p()
    entropies = rest.log1p() - (others * shifted).sum(-1) / (1.0 + rest)
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    logps, entropies = torch.where(active, logps, zero), torch.where(active, entropies, zero)
    if alternatives is None:
        return LogprobOutput(logps, entropies)
    position, on = alternatives.positions, active.reshape(-1)[alternatives.positions]
    others = torch.where(on, alternatives.ids, 0).to(torch.int64)
    z, maximum, at, rest = (x.flatten(0, active.dim() - 1) for x in (logits, maximum, at, rest))
    below = torch.where(others == at[position, 0], 0.0, z[position, others] - maximum[position, 0])
    return LogprobOutput(logps, entropies, torch.where(on, below - rest[position].log1p(), zero))


class Tokens(NamedTuple):
    """Active tokens, of the call or of a sequence: [t] each."""

    logps: Tensor
    advantages: Tensor
    high_entropy: Tensor
    """bool: whether `top_entropy_quantile` keeps it"""
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None
    is_ratio: Tensor | None
    kl: Tensor | None
    """exact"""

    def select(self, chosen: Tensor) -> Tokens:
        """Those where `chosen` ([n] bool) is set."""
        return Tokens._make(None if x is None else x[chosen] for x in self)

    def mean(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """0-d: over the tokens, or those kept; 0 if there are none."""
        weight = torch.ones_like(x) if kept is None else kept.to(x.dtype)
        return (x * weight).sum() / weight.sum().clamp(min=1)


class TokenLosses(NamedTuple):
    """The losses of the tokens of a sequence, [t] each."""

    loss: Tensor
    kl: Tensor | None
    seen: Tensor
    """input of the metrics: the ratio after delta, gmpo's log-ratio, or VESPO's phi"""
    advantages: Tensor


def grpo_loss(
    logps: Tensor, entropies: Tensor | None, call: LossCall | ObjectiveCall, kl: Tensor | None = None
) -> GRPOLossOutput:
    """The loss from log-probs, entropies and exact KL in the layout of the call; differentiable in all three."""
    inputs, layout, config = call.inputs, Layout.of(logps, call.cu_seqlens), GRPOLossConfig.decode(call.config)
    sequence = layout.sequence_ids(logps.device)
    active = active_tokens(inputs.completion_mask, logps).reshape(-1)

    def of_active(x: Tensor | None, lowest: float = -math.inf) -> Tensor | None:
        return None if x is None else layout.per_token(x.detach().to(logps.dtype), sequence)[active].clamp(min=lowest)

    chosen = torch.ones_like(active[active])
    entropy = None if entropies is None else entropies.reshape(-1)[active]
    if config.top_entropy_quantile < 1.0:
        assert entropy is not None
        chosen = high_entropy_tokens(entropy.detach(), config.top_entropy_quantile)
    every = Tokens(
        logps=logps.reshape(-1)[active].clamp(min=-1e4),  # an impossible token: finite, without a gradient
        advantages=layout.per_token(inputs.advantages.detach().to(logps.dtype), sequence)[active],
        high_entropy=chosen,
        old=of_active(inputs.old_per_token_logps, -1e4),
        ref=of_active(inputs.ref_per_token_logps, -1e4),
        sampling=of_active(inputs.sampling_per_token_logps, -1e4),
        is_ratio=of_active(inputs.importance_sampling_ratio),
        kl=None if kl is None else kl.reshape(-1)[active],
    )
    owner = sequence[active]
    parts = [_token_losses(every.select(owner == s), config) for s in range(layout.num_sequences)]

    # the loss of no tokens is differentiable, too
    policy_loss = _aggregate([part.loss for part in parts], inputs.num_items_in_batch, config) + 0.0 * every.logps.sum()
    loss = policy_loss
    if config.entropy_coef != 0.0:
        assert entropy is not None
        loss = loss - config.entropy_coef * every.mean(torch.where(chosen, entropy, 0.0), chosen)
    metrics = {"policy_loss": policy_loss, "active_tokens": active.sum().to(logps.dtype)}
    if every.ref is not None or kl is not None:
        metrics["kl"] = every.mean(torch.cat([part.kl for part in parts if part.kl is not None] or [every.logps]))
    if entropy is not None:
        metrics["entropy"] = every.mean(entropy)
    metrics |= _clip_metrics(parts, every.logps[:0], layout.is_per_token(inputs.advantages), config)
    flat_mask = active.view(layout.shape)
    return GRPOLossOutput(
        loss=loss,
        per_token_logps=torch.where(flat_mask, logps, 0.0).detach(),
        entropies=None if entropies is None else torch.where(flat_mask, entropies, 0.0).detach(),
        metrics={name: value.detach().to(torch.float32) for name, value in metrics.items()},
    )


def high_entropy_tokens(entropies: Tensor, share: float) -> Tensor:
    """Tokens at or above the (1 - share) quantile of the entropies ([n])."""
    entropies = entropies.float()
    if entropies.numel() == 0:
        return entropies.bool()
    ordered = entropies.double().sort().values
    position = (1.0 - share) * (entropies.numel() - 1)
    below = int(position)
    above = min(below + 1, entropies.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return entropies >= threshold.to(entropies.dtype)


def _token_losses(tokens: Tokens, config: GRPOLossConfig) -> TokenLosses:
    logps, advantages = tokens.logps, tokens.advantages
    old = logps.detach() if tokens.old is None else tokens.old
    log_ratio = logps - old
    c = _ratio(log_ratio, tokens, config)
    loss, seen = _policy_loss(c, log_ratio, tokens, config)
    if config.off_policy_mask_threshold is not None:
        behaviour = old if tokens.sampling is None else tokens.sampling
        drift = tokens.mean(torch.nan_to_num(behaviour - logps.detach(), nan=0.0))
        loss = loss * ((advantages >= 0) | (drift <= config.off_policy_mask_threshold))
    if not config.kind.masks_inside:
        loss = torch.where(tokens.high_entropy, loss, 0.0)
    if tokens.is_ratio is not None and config.kind.takes_ratio == "spread":
        loss = loss * tokens.is_ratio
    kl = tokens.kl
    if tokens.ref is not None:
        kl = _kl(tokens.ref - logps, config.kl_estimator)
        if config.use_bias_correction_kl and config.kind.corrects_kl:
            kl = kl * c
    loss = loss if kl is None or config.beta == 0.0 else loss + config.beta * kl
    return TokenLosses(loss, kl, seen, advantages)


def _clamp(x: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """With the derivative 1 at a bound; that of `torch.clamp` is 1 in torch 2.13, and 0 in 2.15."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


def _ratio(log_ratio: Tensor, tokens: Tokens, config: GRPOLossConfig) -> Tensor:
    if config.importance_sampling_level == "token":
        return _clamp(log_ratio, -20, 20).exp()
    c = _clamp(tokens.mean(log_ratio), -20, 20).exp().expand_as(log_ratio)
    if config.importance_sampling_level == "sequence":
        return c
    return c.detach() * (tokens.logps - tokens.logps.detach()).exp()


def _policy_loss(c: Tensor, log_ratio: Tensor, tokens: Tokens, config: GRPOLossConfig) -> tuple[Tensor, Tensor]:
    """Per-token policy loss, and the input of its metrics."""
    logps, advantages = tokens.logps, tokens.advantages
    rule = config.kind.rule
    if rule == "cispo":
        return -c.clamp(max=config.epsilon_upper).detach() * advantages * logps, c
    if rule == "sapo":
        tau = torch.full_like(advantages, config.sapo_temperature_neg)
        tau = tau.masked_fill(advantages > 0, config.sapo_temperature_pos)
        # the derivative of sigmoid loses its digits near 1, that of logsigmoid does not
        return -(4.0 / tau) * torch.nn.functional.logsigmoid(tau * (c - 1.0)).exp() * advantages, c
    if rule == "vespo":
        phi = _gamma_weight(log_ratio.detach(), tokens, config)
        return -phi * advantages * logps, phi
    if rule == "gmpo":
        good, bad = _clamp(log_ratio, high=config.epsilon_upper), _clamp(log_ratio, low=-config.epsilon)
        mean = tokens.mean(torch.where(advantages > 0, good, bad), tokens.high_entropy)
        return -_clamp(mean, high=20).exp() * advantages, log_ratio
    assert rule == "clip"
    capped = c if config.delta is None else _clamp(c, high=config.delta)
    clipped = _clamp(c, 1.0 - config.epsilon, 1.0 + config.epsilon_upper)
    loss = -torch.min(capped * advantages, clipped * advantages)
    if config.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.min(loss, -config.dual_clip * advantages), loss)
    return loss, capped


def _gamma_weight(log_ratio: Tensor, tokens: Tokens, config: GRPOLossConfig) -> Tensor:
    lowest = math.log(1e-8)
    log_w = log_ratio.clamp(-20, 20).sum()
    if tokens.is_ratio is not None:
        log_w = log_w + tokens.is_ratio.log().clamp(lowest, 20).sum()
    log_w = log_w.clamp(lowest, 20)

    def phi(k: float, rate: float) -> Tensor:
        rate = max(rate, 1e-4)
        return torch.exp(rate + k * log_w - rate * torch.exp(log_w)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    good = phi(config.vespo_k_pos, config.vespo_lambda_pos)
    return torch.where(tokens.advantages >= 0, good, phi(config.vespo_k_neg, config.vespo_lambda_neg))


def _kl(q: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -q
    if estimator == "k2":
        return q.square() / 2
    near = q.clamp(max=20)
    tangent = math.exp(20) - 21 + (math.exp(20) - 1) * (q - 20)
    return torch.where(q > 20, tangent, near.exp() - near - 1)


def _aggregate(losses: list[Tensor], num_items: Tensor | None, config: GRPOLossConfig) -> Tensor | float:
    """The losses of each sequence, [t] each, as one number: how each loss type averages."""
    num_sequences, tokens = max(len(losses), 1), max(sum(map(len, losses)), 1)
    average = config.kind.average
    if average == "sequences":
        return sum(x.mean() for x in losses if len(x)) / num_sequences
    divisors = {
        "items": tokens if num_items is None else num_items,
        "tokens": tokens,
        "length": num_sequences * (config.max_completion_length or 1),
        "sum": num_sequences,
    }
    return sum(x.sum() for x in losses) / divisors[average]


def _clip_metrics(
    parts: list[TokenLosses], nothing: Tensor, advantage_per_token: bool, config: GRPOLossConfig
) -> dict[str, Tensor]:
    """TRL's metrics: means over active tokens, or over sequences for what has one value a sequence.

    `nothing` is [0], on the device of the results.
    """
    rule = config.kind.rule

    def mean(values: list[Tensor], empty: float = 0.0) -> Tensor:
        if config.has_one_value_a_sequence and not advantage_per_token:
            values = [x[:1] if len(x) else x.new_full((1,), empty) for x in values]
        return torch.cat([nothing, *values]).sum() / max(sum(map(len, values)), 1)

    if rule == "vespo":
        return {"vespo/phi_seq_mean": mean([part.seen for part in parts], empty=1.0)}
    if rule == "sapo":
        return {}
    low, high = 1 - config.epsilon, 1 + config.epsilon_upper
    if rule == "gmpo":
        low, high = -config.epsilon, config.epsilon_upper
    if rule == "cispo":
        high = config.epsilon_upper
    is_low = [((part.seen < low) & (part.advantages < 0)).double() for part in parts]
    is_high = [((part.seen > high) & (part.advantages > 0)).double() for part in parts]
    if rule == "cispo":
        return {"cispo_clip_ratio": mean(is_high)}
    lows, highs = ([x.mean() for x in values if len(x)] or [nothing.mean()] for values in (is_low, is_high))
    return {
        "clip_ratio/low_mean": mean(is_low),
        "clip_ratio/high_mean": mean(is_high),
        "clip_ratio/region_mean": mean([a + b for a, b in zip(is_low, is_high, strict=True)]),
        "clip_ratio/low_min": torch.stack(lows).min(),
        "clip_ratio/high_max": torch.stack(highs).max(),
    }
