"""The token-level GRPO objective as jit helpers: per-token loss and coefficient g, as in `objective.formulas`.

Enumerations and booleans are constexpr; every number that a user may vary is a run-time argument, and an option that is
off is a number too (delta = inf), so that a new temperature, beta or epsilon never compiles anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_LOG_RATIO = tl.constexpr(20.0)
LOWEST_LOGP = tl.constexpr(-1.0e4)


@triton.jit
def exp_minus_1_minus(x):
    """exp(x) - 1 - x without cancellation: a series of 8 terms where |x| < 1/4 (the next is below 1e-11 of the sum)."""
    series = 1.0 + x / 9.0
    series = 1.0 + x / 8.0 * series
    series = 1.0 + x / 7.0 * series
    series = 1.0 + x / 6.0 * series
    series = 1.0 + x / 5.0 * series
    series = 1.0 + x / 4.0 * series
    series = 1.0 + x / 3.0 * series
    return tl.where(tl.abs(x) < 0.25, 0.5 * x * x * series, tl.exp(x) - 1.0 - x)


@triton.jit
def expm1(x):
    """exp(x) - 1, exact near 0; -1 at -inf."""
    return tl.where(tl.abs(x) < 0.25, exp_minus_1_minus(x) + x, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, with the digits of a tiny x: the rounding of 1 + x is divided out."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), for scalars too."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def clipped_policy(c, advantage, epsilon, epsilon_high, delta, dual_clip):
    """PPO's clipped loss and its derivative in the ratio c; delta and dual_clip are inf where off."""
    low = 1.0 - epsilon
    high = 1.0 + epsilon_high
    bounded = tl.minimum(tl.maximum(c, low), high)
    # on a GPU the plain minimum drops a NaN
    loss = -tl.minimum(
        tl.minimum(c, delta, propagate_nan=tl.PropagateNan.ALL) * advantage,
        bounded * advantage,
        propagate_nan=tl.PropagateNan.ALL,
    )
    capped = tl.minimum(loss, -dual_clip * advantage, propagate_nan=tl.PropagateNan.ALL)
    loss = tl.where(advantage < 0.0, capped, loss)
    good = c <= tl.minimum(delta, high)
    bad = (c >= low) & (c <= tl.minimum(tl.maximum(delta, high), dual_clip))
    live = tl.where(advantage > 0.0, good, bad)
    return loss, tl.where(live, -advantage, 0.0)


@triton.jit
def kl_estimate(q, KL: tl.constexpr):
    """KL estimate of q = ref - logp, its derivative in logp, and their sum without what cancels in it.

    k3 continues as its tangent beyond 20.
    """
    if KL == 1:
        return -q, 1.0 + 0.0 * q, 1.0 - q
    elif KL == 2:
        return 0.5 * q * q, -q, 0.5 * q * q - q
    else:
        bounded = tl.minimum(q, MAX_LOG_RATIO, propagate_nan=tl.PropagateNan.ALL)
        slope = expm1(bounded)
        tangent = slope * (q - bounded)
        return tangent + exp_minus_1_minus(bounded), -slope, tangent - bounded


@triton.jit
def token_objective(
    logp,
    old,
    ref,
    advantage,
    is_ratio,
    weight,
    epsilon,
    epsilon_high,
    delta,
    dual_clip,
    tau_pos,
    tau_neg,
    beta,
    POLICY: tl.constexpr,
    KL: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_KL: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr,
):
    """Weighted loss of a token and its coefficient g; `weight` is 0 where masked, `is_ratio` 1 where not given."""
    possible = (logp >= LOWEST_LOGP) | (logp != logp)  # NaN must propagate
    logp = tl.maximum(logp, LOWEST_LOGP, propagate_nan=tl.PropagateNan.ALL)
    log_ratio = logp - logp
    if HAS_OLD:
        log_ratio = logp - tl.maximum(old, LOWEST_LOGP, propagate_nan=tl.PropagateNan.ALL)
    beyond = tl.abs(log_ratio) > MAX_LOG_RATIO
    c = tl.exp(tl.where(beyond, tl.where(log_ratio > 0.0, MAX_LOG_RATIO, -MAX_LOG_RATIO), log_ratio))
    chain = tl.where(beyond, 0.0, c)

    if POLICY == 1:  # cispo: the clipped ratio is a constant weight on the log-prob
        scale = tl.minimum(c, epsilon_high, propagate_nan=tl.PropagateNan.ALL) * advantage
        policy = -scale * logp
        g = -scale
    elif POLICY == 2:  # sapo: a sigmoid gate
        tau = tl.where(advantage > 0.0, tau_pos, tau_neg)
        gate = sigmoid(tau * (c - 1.0))
        policy = -4.0 / tau * gate * advantage
        g = chain * (-4.0 * gate * (1.0 - gate) * advantage)
    else:
        policy, dratio = clipped_policy(c, advantage, epsilon, epsilon_high, delta, dual_clip)
        g = chain * dratio
    loss = is_ratio * policy
    g = is_ratio * g
    if HAS_KL:
        kl, dkl, both = kl_estimate(tl.maximum(ref, LOWEST_LOGP, propagate_nan=tl.PropagateNan.ALL) - logp, KL)
        if BIAS_CORRECTION:
            g += beta * tl.where(chain == 0.0, c * dkl, chain * both)
            kl = c * kl
        else:
            g += beta * dkl
        loss += beta * kl
    return weight * loss, tl.where(possible & (weight != 0.0), weight * g, 0.0)
