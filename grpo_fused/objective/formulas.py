"""The GRPO objective on log-probabilities and its analytic derivative, in plain torch.

Each formula exists once, for all engines: the per-token loss l, its aggregation, and the coefficients g = dL/dlogp and
dL/dH, which an engine multiplies with the gradient of the log-softmax. The derivative is analytic, so a value that a
mask or a clip discards cannot make a gradient NaN. `reference.py` computes the same by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.loss_types import Rule
from grpo_fused.objective.batch import LOWEST_LOGP, TokenBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped at +-20 before they are exponentiated; TRL overflows for larger ones."""

LOG_TINY_RATIO = math.log(1e-8)
"""VESPO's lower bound on log-ratios."""


class Ratio(NamedTuple):
    """The importance ratio of each token."""

    log_ratio: Tensor
    """[R] logp - old; 0 on-policy."""
    value: Tensor
    """[R] c, at the level of the configuration."""
    exponent: Tensor | None
    """[R] log c before its clamp; None if the clamp passes the gradient on (sequence_token)."""

    def chain(self) -> Tensor:
        """[R] dc/dlogp of the token itself (token, sequence_token) or dc_s/ds (sequence)."""
        x = self.exponent
        return self.value if x is None else torch.where(x.abs() > MAX_LOG_RATIO, 0.0, self.value)


class Slope(NamedTuple):
    """The derivative of a term of each token; None where it is 0."""

    dlogp: Tensor | None
    """[R] in the log-prob itself (cispo, vespo, gmpo, KL)."""
    dratio: Tensor | None
    """[R] in the ratio c, if the term depends on the log-prob through it."""


class Term(NamedTuple):
    """A term of the loss of each token, before masks and weights."""

    value: Tensor
    """[R]"""
    slope: Callable[[], Slope]
    """Computed only where a gradient is asked for."""
    seen: Callable[[], list[Tensor]] = list
    """The values that are averaged for `LossType.metrics` ([R] each): whether clipped below and above, or one value."""


class Derivatives(NamedTuple):
    """The derivatives of a loss."""

    dlogp: Tensor
    """[R] g = dL/dlogp; exactly 0 where masked or impossible."""
    dentropy: Tensor | None
    """[R] dL/dH; None without an entropy bonus."""


class Objective(NamedTuple):
    """The loss of R tokens, its derivatives, and the inputs of the metrics."""

    loss: Tensor
    """0-d."""
    policy_loss: Tensor
    """0-d: the loss before the entropy bonus."""
    derivatives: Callable[[], Derivatives]
    """Computed only where a gradient is asked for."""
    per_token: Callable[[], Tensor]
    """[R] the loss of each token before it is weighted and summed, without the entropy bonus; 0 where masked."""
    seen: Callable[[], list[Tensor]]
    """That of its policy term."""
    kl: Tensor | None
    """[R] KL estimate with its bias correction; None without reference log-probs."""


def evaluate(logp: Tensor, entropy: Tensor | None, batch: TokenBatch, config: GRPOLossConfig) -> Objective:
    """Loss and coefficients of `batch`, whose tokens have log-probs `logp` and entropies `entropy` ([R] each)."""
    given = logp
    logp = torch.where(batch.mask, logp.clamp(min=LOWEST_LOGP), 0.0)
    high_entropy = _high_entropy_mask(entropy, batch, config)

    ratio = _importance_ratio(logp, batch, config)
    policy = _POLICY[config.kind.rule](_Inputs(logp, ratio, high_entropy, batch, config))
    factor = _policy_factor(logp, high_entropy, batch, config)
    kept = batch.weight if factor is None else factor * batch.weight

    loss = (kept * policy.value).sum(dtype=torch.float64)
    penalty, weight = _kl(logp, ratio, batch, config), config.beta * batch.weight if config.beta != 0.0 else None
    if penalty is not None and weight is not None:
        loss = loss + (weight * penalty.value).sum(dtype=torch.float64)
    bonus, dentropy = _entropy_bonus(entropy, high_entropy, batch, config)

    def derivatives() -> Derivatives:
        slope = policy.slope()
        dlogp = None if slope.dlogp is None else kept * slope.dlogp
        dratio = None if slope.dratio is None else kept * slope.dratio
        if penalty is not None and weight is not None:
            slope = penalty.slope()
            dlogp, dratio = _plus(dlogp, weight, slope.dlogp), _plus(dratio, weight, slope.dratio)
        if config.importance_sampling_level == "sequence" and dratio is not None:
            dsequence = batch.sequence_sum(torch.where(batch.mask, dratio, 0.0)) / batch.lengths.clamp(min=1.0)
            dratio = batch.of_sequence(dsequence)
        # without a ratio too: a NaN must propagate
        dlogp = _plus(dlogp, ratio.chain(), torch.zeros_like(logp) if dratio is None else dratio)
        assert dlogp is not None
        # the logit of an impossible token is masked: no gradient could raise it
        dlogp = torch.where(batch.mask, dlogp, 0.0).masked_fill_(given < LOWEST_LOGP, 0.0)
        return Derivatives(dlogp, dentropy)

    def per_token() -> Tensor:
        losses = policy.value if factor is None else factor * policy.value  # masked tokens have neutral values
        return losses if penalty is None or weight is None else losses + config.beta * penalty.value

    policy_loss = loss.to(logp.dtype)
    return Objective(
        loss=policy_loss if bonus is None else (loss - bonus).to(logp.dtype),
        policy_loss=policy_loss,
        derivatives=derivatives,
        per_token=per_token,
        seen=policy.seen,
        kl=None if penalty is None else penalty.value,
    )


def _plus(x: Tensor | None, a: Tensor, b: Tensor | None) -> Tensor | None:
    """x + a * b, where None is 0."""
    if b is None:
        return x
    return a * b if x is None else torch.addcmul(x, a, b)


def _importance_ratio(logp: Tensor, batch: TokenBatch, config: GRPOLossConfig) -> Ratio:
    log_ratio = logp - (logp if batch.old is None else batch.old)
    level = config.importance_sampling_level
    if level == "token":
        exponent = log_ratio
    else:
        mean = batch.sequence_sum(torch.where(batch.mask, log_ratio, 0.0)) / batch.lengths.clamp(min=1.0)
        exponent = batch.of_sequence(mean)
    value = exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Ratio(log_ratio, value, None if level == "sequence_token" else exponent)


class _Inputs(NamedTuple):
    """What a policy term may read."""

    logp: Tensor
    ratio: Ratio
    high_entropy: Tensor | None
    batch: TokenBatch
    config: GRPOLossConfig


def _cispo(x: _Inputs) -> Term:
    c, advantages, high = x.ratio.value, x.batch.advantages, x.config.epsilon_upper
    return _weighted_logp(c.clamp(max=high) * advantages, x.logp, lambda: [(c > high) & (advantages > 0)])


def _vespo(x: _Inputs) -> Term:
    batch, config = x.batch, x.config
    log_w = x.ratio.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if batch.is_ratio is not None:
        log_w = log_w + batch.is_ratio.log().clamp(LOG_TINY_RATIO, MAX_LOG_RATIO)
    log_w = batch.of_sequence(batch.sequence_sum(torch.where(batch.mask, log_w, 0.0)))
    log_w = log_w.clamp(LOG_TINY_RATIO, MAX_LOG_RATIO)
    good = batch.advantages >= 0
    k = _choose(good, config.vespo_k_pos, config.vespo_k_neg, log_w.dtype)
    rate = _choose(good, max(config.vespo_lambda_pos, 1e-4), max(config.vespo_lambda_neg, 1e-4), log_w.dtype)
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    phi = torch.where(phi.isfinite(), phi, 0.0)
    return _weighted_logp(phi * batch.advantages, x.logp, lambda: [phi])


def _sapo(x: _Inputs) -> Term:
    c, advantages, config = x.ratio.value, x.batch.advantages, x.config
    tau = _choose(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg, c.dtype)
    excess = tau * (c - 1.0)
    gate, closed = torch.sigmoid(excess), torch.sigmoid(-excess)  # 1 - gate, with its digits where the gate is near 1
    return Term(-4.0 / tau * gate * advantages, lambda: Slope(None, -4.0 * gate * closed * advantages))


def _clipped(x: _Inputs) -> Term:
    """PPO's clipped objective, with INTELLECT-2's delta or verl's dual clip."""
    c, advantages, config = x.ratio.value, x.batch.advantages, x.config
    low, high = 1.0 - config.epsilon, 1.0 + config.epsilon_upper
    capped = c if config.delta is None else c.clamp(max=config.delta)
    loss = -torch.minimum(capped * advantages, c.clamp(low, high) * advantages)
    cap_good = high if config.delta is None else min(config.delta, high)
    cap_bad = None if config.delta is None else max(config.delta, high)
    if config.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -config.dual_clip * advantages), loss)
        cap_bad = config.dual_clip

    def slope() -> Slope:
        live = c >= low if cap_bad is None else (c >= low) & (c <= cap_bad)
        live = torch.where(advantages > 0, c <= cap_good, live)
        return Slope(None, torch.where(live, -advantages, 0.0))

    return Term(loss, slope, partial(_outside, capped, low, high, advantages))


def _outside(x: Tensor, low: float, high: float, advantages: Tensor) -> list[Tensor]:
    """[R] bool each: tokens that are clipped below and above."""
    return [(x < low) & (advantages < 0), (x > high) & (advantages > 0)]


def _weighted_logp(weight: Tensor, logp: Tensor, seen: Callable[[], list[Tensor]]) -> Term:
    """-stopgrad(weight) * logp"""
    return Term(-weight * logp, lambda: Slope(-weight, None), seen)


def _choose(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """`torch.where` of two numbers in `dtype` (torch would use the default dtype)."""
    return torch.full_like(condition, no, dtype=dtype).masked_fill_(condition, yes)


def _gmpo(x: _Inputs) -> Term:
    """Geometric mean of ratios clipped on one side. A token's share is the loss of its sequence over its length."""
    log_ratio, high_entropy, batch, config = x.ratio.log_ratio, x.high_entropy, x.batch, x.config
    good = batch.advantages > 0
    clipped = torch.where(good, log_ratio.clamp(max=config.epsilon_upper), log_ratio.clamp(min=-config.epsilon))
    counted = batch.mask if high_entropy is None else batch.mask & high_entropy
    count = batch.sequence_sum(counted.to(log_ratio.dtype)).clamp(min=1.0)
    mean = batch.sequence_sum(torch.where(counted, clipped, 0.0)) / count
    value = batch.of_sequence(mean.clamp(max=MAX_LOG_RATIO).exp())

    def slope() -> Slope:
        live = torch.where(good, log_ratio <= config.epsilon_upper, log_ratio >= -config.epsilon)
        live = live & counted & (batch.of_sequence(mean) <= MAX_LOG_RATIO)
        # batch.weight is 1 / (n_b * B), as for KL: n_b equal shares sum to the sequence's loss, and `share` scales the
        # gradient of each
        share = batch.of_sequence(batch.lengths.clamp(min=1.0) / count)
        return Slope(torch.where(live, -share * value * batch.advantages, 0.0), None)

    outside = partial(_outside, log_ratio, -config.epsilon, config.epsilon_upper, batch.advantages)
    return Term(-value * batch.advantages, slope, outside)


_POLICY: dict[Rule, Callable[[_Inputs], Term]] = {
    "clip": _clipped, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo, "gmpo": _gmpo,
}  # fmt: skip
"""The policy term of each rule."""


def _policy_factor(
    logp: Tensor, high_entropy: Tensor | None, batch: TokenBatch, config: GRPOLossConfig
) -> Tensor | None:
    """[R]: off-policy mask x entropy mask x importance-sampling ratio, those that the loss type uses; None if none."""
    factor = None
    if config.off_policy_mask_threshold is not None:
        behaviour = batch.sampling if batch.sampling is not None else batch.old
        drift = torch.zeros_like(logp)
        if behaviour is not None:
            drift = torch.where(batch.mask & ~behaviour.isnan(), behaviour - logp, 0.0)
            drift = batch.of_sequence(batch.sequence_sum(drift) / batch.lengths.clamp(min=1.0))
        factor = ((batch.advantages >= 0) | (drift <= config.off_policy_mask_threshold)).to(logp.dtype)
    if high_entropy is not None and not config.kind.masks_inside:
        factor = high_entropy.to(logp.dtype) if factor is None else torch.where(high_entropy, factor, 0.0)
    if batch.is_ratio is not None and config.kind.takes_ratio == "spread":
        factor = batch.is_ratio if factor is None else factor * batch.is_ratio
    return factor


def _kl(logp: Tensor, ratio: Ratio, batch: TokenBatch, config: GRPOLossConfig) -> Term | None:
    """The KL estimate; None without reference log-probs."""
    if batch.ref is None:  # the exact KL does not depend on the log-prob and the ratio: its gradient is the engine's
        return None if batch.kl is None else Term(batch.kl, lambda: Slope(None, None))
    q = torch.where(batch.mask, batch.ref - logp, 0.0)
    if config.kl_estimator == "k3":
        bounded = q.clamp(max=MAX_LOG_RATIO)
        # beyond 20 exp continues as its tangent: with the clamp alone the gradient would change its sign
        steepness = bounded.expm1()
        tangent = torch.where(q > bounded, steepness * (q - bounded), 0.0)
        kl = tangent + steepness - bounded
        dkl, both = lambda: -steepness, lambda: tangent - bounded  # kl + dkl, without cancellation
    elif config.kl_estimator == "k1":
        kl = -q
        dkl, both = lambda: torch.ones_like(q), lambda: 1.0 - q
    else:
        kl = 0.5 * q * q
        dkl, both = lambda: -q, lambda: kl - q
    if not (config.use_bias_correction_kl and config.kind.corrects_kl):
        return Term(kl, lambda: Slope(dkl(), None))
    corrected = ratio.value * kl
    if config.importance_sampling_level == "sequence":
        return Term(corrected, lambda: Slope(ratio.value * dkl(), kl))

    def slope() -> Slope:
        # d(c kl) = c (kl + dkl), whose exponentials cancel: simplified by hand, as next to e^20 fp32 has no digits of q
        chain = ratio.chain()
        return Slope(torch.where(chain == 0, ratio.value * dkl(), chain * both()), None)

    return Term(corrected, slope)


def _high_entropy_mask(entropy: Tensor | None, batch: TokenBatch, config: GRPOLossConfig) -> Tensor | None:
    """[R] bool: tokens at or above the (1 - top_entropy_quantile) quantile of the active tokens' entropies."""
    if config.top_entropy_quantile >= 1.0:
        return None
    assert entropy is not None
    if entropy.numel() == 0:
        return batch.mask
    entropy = entropy.to(torch.float32)
    # torch.quantile does not support more than 2**24 elements; sorting does
    ordered = torch.where(batch.mask, entropy, math.inf).sort().values.to(torch.float64)
    last = (batch.mask.sum() - 1).clamp(min=0)
    position = (1.0 - config.top_entropy_quantile) * last.to(torch.float64)
    below = position.floor().to(torch.int64)
    low = ordered.gather(0, below.reshape(1))
    high = ordered.gather(0, torch.minimum(below + 1, last).reshape(1))
    threshold = torch.lerp(low, high, (position - below).reshape(1))
    return batch.mask & (entropy >= threshold.to(entropy.dtype))


def _entropy_bonus(
    entropy: Tensor | None, high_entropy: Tensor | None, batch: TokenBatch, config: GRPOLossConfig
) -> tuple[Tensor | None, Tensor | None]:
    if config.entropy_coef == 0.0:
        return None, None
    assert entropy is not None
    counted = batch.mask if high_entropy is None else high_entropy
    count = batch.total if high_entropy is None else high_entropy.sum()
    weight = config.entropy_coef / count.to(entropy.dtype).clamp(min=1.0)
    bonus = weight.to(torch.float64) * torch.where(counted, entropy, 0.0).to(torch.float64).sum()
    return bonus, torch.where(counted, -weight, 0.0)
