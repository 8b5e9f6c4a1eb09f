"""Corrections for rollouts of an engine such as vLLM, whose probabilities differ slightly from the trainer's."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from grpo_fused.call import validation as check
from grpo_fused.call.layout import Layout, active_tokens, segments
from grpo_fused.call.options import check_choice, check_number
from grpo_fused.call.outputs import ImportanceSamplingOutput
from grpo_fused.objective.batch import LOWEST_LOGP
from grpo_fused.objective.formulas import MAX_LOG_RATIO

ImportanceSamplingMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@torch.no_grad()
def importance_sampling_correction(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor | None = None,
    *,
    mode: ImportanceSamplingMode = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> ImportanceSamplingOutput:
    """Importance ratios between the trainer's policy and the engine that sampled the completions, bounded.

        d_t = M_t (old_t - sampling_t), 0 where the engine has no log-prob
        ratio_t = exp(d_t)             (mode token_*)
        ratio_s = exp(sum_t d_t)       (mode sequence_*: one for each sequence, the product of its tokens')
        *_truncate: clip(ratio, clip_min, clip_max)
        *_mask:     ratio where clip_min <= ratio <= clip_max, else 0: the token or sequence is left out

    The result goes into `fused_linear_grpo_loss(importance_sampling_ratio=...)`; `loss_type="vespo"` takes it in the
    token modes only (as in TRL).

    Args:
        old_per_token_logps: `[B, T]`, or packed `[N]`, nats: the trainer's log-probs of the sampled tokens (of
            `fused_linear_logprobs`, before the update).
        sampling_per_token_logps: like it, nats, by the engine that sampled. NaN where it has none: no correction.
        mask: like it, bool or 0/1, default all active: completion mask times tool mask.
        mode: see above.
        clip_max: Upper bound on the ratio, > 0, or None.
        clip_min: Lower bound on the ratio, >= 0 and below `clip_max`, or None. The truncating modes need one bound.
        cu_seqlens: `[S + 1]` int32/int64, the offsets of packed sequences.

    Returns:
        `ImportanceSamplingOutput(ratio, metrics)`, detached. `ratio` is `[B, T]` (packed `[N]`) in the token modes,
        `[B, 1]` (packed `[S, 1]`) in the sequence modes, fp32 (fp64 for fp64 inputs), never above e^20: TRL's
        overflows where it has no `clip_max`. Metrics are those of this process; TRL takes the mean of the means, the
        max of the maxima and the min of the minima over processes:

        - `sampling/sampling_logp_difference/mean`, `/max`: |old - sampling| over active tokens with a sampling
          log-prob;
        - `sampling/importance_sampling_ratio/min`, `/mean`, `/max`: of the bounded ratio, over active tokens or over
          all sequences (one without tokens has ratio 1).

        All are 0 if there is nothing to average.

    Raises:
        ValueError: shapes that do not match, an unknown mode, bounds out of range or order, a truncating mode without
            a bound; NaN in the trainer's log-probs or +inf in either on active tokens (CPU; elsewhere with
            `GRPO_FUSED_DEBUG=1`).
        TypeError: a wrong type or dtype.

    Equivalent in plain PyTorch (sequence_mask, no NaN)::

        ratio = ((old_per_token_logps - sampling_per_token_logps) * mask).sum(1, keepdim=True).exp()
        ratio = ratio.masked_fill(ratio > clip_max, 0.0)

    Source: TRL 1.16's `vllm_importance_sampling_correction`, its names and defaults; truncation: Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training"; masking: IcePop.
    """
    old, sampling = "old_per_token_logps", "sampling_per_token_logps"
    check.check_tokens(old_per_token_logps, old, check.FLOAT, cu_seqlens)
    check.check_tensor(sampling_per_token_logps, sampling, check.FLOAT, tuple(old_per_token_logps.shape))
    check.check_mask(mask, old_per_token_logps, "mask")
    given = {old: old_per_token_logps, sampling: sampling_per_token_logps, "mask": mask, "cu_seqlens": cu_seqlens}
    check.check_one_device(**given)
    check_choice(mode, "mode", ImportanceSamplingMode)
    lowest, highest = _checked_bounds(clip_min, clip_max, mode)
    layout = Layout.of(old_per_token_logps, cu_seqlens)
    check.check_rollout_values(old_per_token_logps, sampling_per_token_logps, mask, layout)

    active = active_tokens(mask, old_per_token_logps)
    both = [x.double().clamp(min=LOWEST_LOGP) for x in (old_per_token_logps, sampling_per_token_logps)]
    difference = both[0] - both[1]
    known = active & ~difference.isnan()
    log_ratio = torch.where(known, difference, 0.0)
    if mode.startswith("sequence"):
        log_ratio = _sequence_sum(log_ratio, layout).unsqueeze(1)

    ratio = log_ratio.exp()
    if mode.endswith("truncate"):
        ratio = ratio.clamp(lowest, highest)
    else:
        ratio = ratio.masked_fill((ratio < lowest) | (ratio > highest), 0.0)
    ratio = ratio.clamp(max=math.exp(MAX_LOG_RATIO))
    ratio = ratio if torch.float64 in (old_per_token_logps.dtype, sampling_per_token_logps.dtype) else ratio.float()

    counted = torch.ones_like(ratio, dtype=torch.bool) if mode.startswith("sequence") else active
    name = "sampling/importance_sampling_ratio"
    metrics = {
        "sampling/sampling_logp_difference/mean": _mean(difference.abs(), known),
        "sampling/sampling_logp_difference/max": _max(difference.abs(), known),
        f"{name}/min": 0.0 - _max(-ratio, counted),
        f"{name}/mean": _mean(ratio, counted),
        f"{name}/max": _max(ratio, counted),
    }
    return ImportanceSamplingOutput(ratio, metrics)


def _checked_bounds(clip_min: float | None, clip_max: float | None, mode: str) -> tuple[float, float]:
    """0 <= clip_min < clip_max, 0 and infinity where they are None."""
    if mode.endswith("truncate") and clip_min is None and clip_max is None:
        raise ValueError("a truncating mode needs clip_min or clip_max; got None for both")
    lowest = 0.0 if clip_min is None else check_number(clip_min, "clip_min")
    highest = math.inf if clip_max is None else check_number(clip_max, "clip_max", above=0.0)
    if not 0.0 <= lowest < highest:
        raise ValueError(f"clip_min must be >= 0 and below clip_max; got {clip_min} and {clip_max}")
    return lowest, highest


def _sequence_sum(x: Tensor, layout: Layout) -> Tensor:
    """[B] from [B, T], [S] from packed [N]."""
    return x.sum(dim=1) if layout.cu_seqlens is None else segments(x, "sum", layout.cu_seqlens.to(torch.int64))


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    total = torch.where(counted, x, 0.0).to(torch.float64).sum()
    return (total / counted.sum().clamp(min=1)).to(torch.float32)


def _max(x: Tensor, counted: Tensor) -> Tensor:
    """Largest of those that count, 0 if none does."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    largest = torch.where(counted, x, -math.inf).amax()
    return torch.where(counted.any(), largest, 0.0).to(torch.float32)
