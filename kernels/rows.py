"""Row kernels: log-softmax statistics, objective and gradient of a chunk of logits [R, V], one program a row.

The gradient may be written over the logits that it comes from, in a narrower dtype: `dlogits` row r then begins where
logits row r begins. A block's stores overwrite blocks that were loaded before or its own, so a barrier between the
load and the store of every block is enough (warps do not run in step; the interpreter cannot show that race, the
compile test checks for the barrier in the PTX).

Bytes per logit, fp32 logits and bf16 gradient in place: statistics 4; gradient 4 + 2 = 6; statistics, objective and
gradient in one launch 4 + 4 + 2 = 10. Rows are padded to 16 elements and masked by their stride, since with rows
whose length is no multiple of 16 every access would be scalar.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .objective import LOWEST_LOGP, expm1, log1p, token_objective

# Slices of per-token tensors start anywhere: without this an odd start would compile another kernel.
PER_ROW_POINTERS = [
    "targets_ptr",
    "temperature_ptr",
    "advantages_ptr",
    "weight_ptr",
    "old_ptr",
    "ref_ptr",
    "is_ratio_ptr",
    "entropy_weight_ptr",
    "max_ptr",
    "log_sum_ptr",
    "logp_ptr",
    "entropy_ptr",
    "loss_ptr",
    "dlogp_ptr",
    "dentropy_ptr",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def to_z(raw, bias_ptr, cols, valid, logit_scale, softcap, inv_t, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """z = softcap(logit_scale * (raw + bias)) / temperature, and the slope dz/d(raw)."""
    slope = logit_scale * inv_t
    u = raw
    if HAS_BIAS:
        u += tl.load(bias_ptr + cols, mask=valid, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        # tanh x = 2 / (1 + e^-2x) - 1; its slope, 1 - tanh^2, without the cancellation where it is flat
        power = tl.minimum(tl.exp(-2.0 * (u * logit_scale) / softcap), 1e15, propagate_nan=tl.PropagateNan.ALL)
        half = 2.0 / (1.0 + power)
        return softcap * (half - 1.0) * inv_t, slope * (power * half * half)
    else:
        return u * slope, slope


@triton.jit
def finite(m):
    """A maximum that can be subtracted: 0 if no entry is possible."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def shares(shifted, WITH_ENTROPY: tl.constexpr, HAS_INF: tl.constexpr, LOG2: tl.constexpr):
    """exp(shifted) of the last axis for shifted = z - maximum, and the inputs of `merge_statistics`: (e, rest, moment).

    HAS_INF: whether shifted may be -inf. LOG2: whether it is in units of ln 2.
    """
    axis: tl.constexpr = len(shifted.shape) - 1
    e = tl.exp2(shifted if LOG2 else shifted * LOG2E)  # tl.exp keeps subnormal numbers, by three more instructions
    total = tl.sum(e, axis=axis)
    moment = total
    if WITH_ENTROPY:
        if HAS_INF:
            shifted = tl.maximum(shifted, LOWEST_LOGP)
        moment = tl.sum(e * shifted, axis=axis)
        if LOG2:
            moment *= LN2
    # The maximum's own 1 is left out of the sum, whose digits a confident token needs. If the sum is close to 1, that
    # 1 is the only exponential which is not small. Counting equal maxima would take up to 55 registers more. Few tiles
    # of a head have such a row: the others do not make the second sum.
    confident = total < 1.01
    any_confident = confident
    if axis == 1:
        any_confident = tl.max(confident.to(tl.int32), axis=0) > 0
    rest = total - 1.0
    if any_confident:
        small = tl.sum(tl.where(e < 0.5, e, 0.0), axis=axis)
        rest = tl.where(confident, small, rest)
    return e, rest, moment


@triton.jit
def merge_statistics(m, rest, moment, other_m, other_rest, other_moment, WITH_ENTROPY: tl.constexpr):
    """(max, rest, moment) of two parts of a row: the online softmax.

    rest is the sum of exp(z - max) without the 1 of the maximum itself, moment the sum of exp(z - max) * (z - max).
    """
    new_m = tl.maximum(m, other_m)
    safe_m = finite(new_m)
    scale, other_scale = tl.exp(m - safe_m), tl.exp(other_m - safe_m)
    if WITH_ENTROPY:
        drop = tl.where(m == -float("inf"), 0.0, m - safe_m)
        other_drop = tl.where(other_m == -float("inf"), 0.0, other_m - safe_m)
        moment = (moment + (1.0 + rest) * drop) * scale + (other_moment + (1.0 + other_rest) * other_drop) * other_scale
    # one scale is 1: that of the part whose maximum is left out of the sum; the other's maximum is now in it
    return new_m, rest * scale + other_rest * other_scale + tl.minimum(scale, other_scale), moment


@triton.jit
def finish_statistics(m, rest, moment, z_target):
    """(log_sum, logp, entropy) of merged statistics and the target's logit."""
    log_sum = log1p(rest)
    logp = tl.minimum((z_target - m) - log_sum, 0.0, propagate_nan=tl.PropagateNan.ALL)
    entropy = tl.maximum(log_sum - moment / (1.0 + rest), 0.0, propagate_nan=tl.PropagateNan.ALL)
    return log_sum, logp, entropy


@triton.jit
def dlogits(log_p, p, is_target, at_target, dlogp, dentropy, entropy, slope, HAS_DENTROPY: tl.constexpr):
    """dL/d(product): -g p, at the target g (1 - p), and -h p (log p + H) of the entropy, times the slope dz/d(raw)."""
    dz = tl.where(is_target, at_target, -dlogp * p)
    if HAS_DENTROPY:
        dz -= dentropy * p * (log_p + entropy)
    return dz * slope


@triton.jit
def row_statistics(
    row_ptr,
    bias_ptr,
    target,
    V,
    padded,
    logit_scale,
    softcap,
    inv_t,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(max, log_sum, logp, entropy) of a row, online over blocks; max + log_sum would lose the digits of log_sum.

    A target outside the vocabulary is not read: its log-prob is NaN.
    """
    m = -float("inf")
    rest = 0.0
    moment = 0.0
    for start in tl.range(0, padded, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        raw = tl.load(row_ptr + cols, mask=cols < padded, other=0.0).to(tl.float32)
        z, _ = to_z(raw, bias_ptr, cols, cols < V, logit_scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
        z = tl.where(cols < V, z, -float("inf"))
        block_m = tl.max(z, axis=0)
        _, block_rest, block_moment = shares(z - finite(block_m), WITH_ENTROPY, HAS_INF=True, LOG2=False)
        m, rest, moment = merge_statistics(m, rest, moment, block_m, block_rest, block_moment, WITH_ENTROPY)
    known = (target >= 0) & (target < V)
    raw_target = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    z_target, _ = to_z(raw_target, bias_ptr, target, known, logit_scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
    log_sum, logp, entropy = finish_statistics(m, rest, moment, z_target)
    return m, log_sum, logp, entropy


@triton.jit
def write_row_gradient(
    row_ptr,
    out_ptr,
    bias_ptr,
    target,
    V,
    padded,
    m,
    log_sum,
    logp,
    entropy,
    dlogp,
    dentropy,
    logit_scale,
    softcap,
    inv_t,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/d(raw) of a row from the coefficients on its log-prob and entropy."""
    at_target = -dlogp * expm1(logp)  # g * (1 - p), accurate for a confident token
    for start in tl.range(0, padded, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        raw = tl.load(row_ptr + cols, mask=cols < padded, other=0.0).to(tl.float32)
        z, slope = to_z(raw, bias_ptr, cols, cols < V, logit_scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
        log_p = tl.maximum((z - m) - log_sum, LOWEST_LOGP, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp(log_p)
        dz = dlogits(log_p, p, cols == target, at_target, dlogp, dentropy, entropy, slope, HAS_DENTROPY)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(out_ptr + cols, tl.where(cols < V, dz, 0.0).to(out_ptr.dtype.element_ty), mask=cols < padded)


@triton.jit(do_not_specialize_on_alignment=PER_ROW_POINTERS)
def row_statistics_fwd_kernel(
    logits_ptr,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    entropy_ptr,
    stride_r,
    V,
    padded,
    temperature,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of each row of [R, V] logits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if HAS_TEMPERATURES:
        temperature = tl.load(temperature_ptr + row)
    m, log_sum, logp, entropy = row_statistics(
        logits_ptr + row * stride_r, bias_ptr, target, V, padded, logit_scale, softcap, 1.0 / temperature,
        HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK,
    )  # fmt: skip
    tl.store(max_ptr + row, m)
    tl.store(log_sum_ptr + row, log_sum)
    tl.store(logp_ptr + row, logp)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + row, entropy)


@triton.jit(do_not_specialize_on_alignment=PER_ROW_POINTERS)
def row_gradient_bwd_kernel(
    logits_ptr,
    dlogits_ptr,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    entropy_ptr,
    dlogp_ptr,
    dentropy_ptr,
    stride_r,
    stride_dr,
    V,
    padded,
    temperature,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of each row of [R, V] logits from given coefficients ([R])."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if HAS_TEMPERATURES:
        temperature = tl.load(temperature_ptr + row)
    entropy = 0.0
    dentropy = 0.0
    if HAS_DENTROPY:
        entropy = tl.load(entropy_ptr + row)
        dentropy = tl.load(dentropy_ptr + row)
    write_row_gradient(
        logits_ptr + row * stride_r, dlogits_ptr + row * stride_dr, bias_ptr, target, V, padded,
        tl.load(max_ptr + row), tl.load(log_sum_ptr + row), tl.load(logp_ptr + row), entropy,
        tl.load(dlogp_ptr + row), dentropy, logit_scale, softcap, 1.0 / temperature,
        HAS_BIAS, HAS_SOFTCAP, HAS_DENTROPY, IN_PLACE, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=PER_ROW_POINTERS)
def row_loss_fwd_bwd_kernel(
    logits_ptr,
    dlogits_ptr,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    advantages_ptr,
    weight_ptr,
    old_ptr,
    ref_ptr,
    is_ratio_ptr,
    entropy_weight_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    entropy_ptr,
    loss_ptr,
    dlogp_ptr,
    stride_r,
    stride_dr,
    V,
    padded,
    temperature,
    logit_scale,
    softcap,
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
    HAS_IS_RATIO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics, token-level objective and gradient of each row of [R, V] logits, in one launch."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if HAS_TEMPERATURES:
        temperature = tl.load(temperature_ptr + row)
    inv_t = 1.0 / temperature
    row_ptr = logits_ptr + row * stride_r
    m, log_sum, logp, entropy = row_statistics(
        row_ptr, bias_ptr, target, V, padded, logit_scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP, WITH_ENTROPY, BLOCK
    )
    weight = tl.load(weight_ptr + row)
    old = 0.0
    if HAS_OLD:
        old = tl.load(old_ptr + row)
    ref = 0.0
    if HAS_KL:
        ref = tl.load(ref_ptr + row)
    is_ratio = 1.0
    if HAS_IS_RATIO:
        is_ratio = tl.load(is_ratio_ptr + row)
    loss, dlogp = token_objective(
        logp, old, ref, tl.load(advantages_ptr + row), is_ratio, weight, epsilon, epsilon_high, delta, dual_clip,
        tau_pos, tau_neg, beta, POLICY, KL, HAS_OLD, HAS_KL, BIAS_CORRECTION,
    )  # fmt: skip
    dentropy = 0.0
    if HAS_DENTROPY:  # every active token has the same share of the bonus
        dentropy = tl.where(weight != 0.0, -tl.load(entropy_weight_ptr), 0.0)
    tl.store(max_ptr + row, m)
    tl.store(log_sum_ptr + row, log_sum)
    tl.store(logp_ptr + row, logp)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + row, entropy)
    tl.store(loss_ptr + row, loss)
    tl.store(dlogp_ptr + row, dlogp)
    write_row_gradient(
        row_ptr, dlogits_ptr + row * stride_dr, bias_ptr, target, V, padded, m, log_sum, logp, entropy, dlogp, dentropy,
        logit_scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP, HAS_DENTROPY, IN_PLACE, BLOCK,
    )  # fmt: skip
