"""The metrics of a loss call, with the names and definitions of TRL 1.16."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import segments
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import Objective


def metric_names(
    config: GRPOLossConfig, *, with_kl: bool, with_entropy: bool, complete: bool = True
) -> tuple[str, ...]:
    """Names of the metrics that `compute_metrics` returns."""
    names: tuple[str, ...] = ("policy_loss", "active_tokens")
    if not complete:
        return names
    if with_kl:
        names += ("kl",)
    if with_entropy:
        names += ("entropy",)
    return names + config.kind.metrics


def loss_metric_names(config: GRPOLossConfig, *, with_kl: bool, complete: bool) -> tuple[str, ...]:
    """Names of the metrics of the fused loss, with the number of rows that have a gradient."""
    return ("gradient_tokens", *metric_names(config, with_kl=with_kl, with_entropy=True, complete=complete))


def compute_metrics(
    objective: Objective, entropy: Tensor | None, batch: TokenBatch, config: GRPOLossConfig, *, complete: bool = True
) -> list[Tensor]:
    """Metrics of all tokens of a call, 0-d each, in the order of `metric_names`.

    `objective` and `entropy` ([R]) cover the whole `batch`.
    Means are over active tokens. Numbers with one value for each sequence (clip decisions at level `sequence`, VESPO's
    phi) are averaged over all sequences, unless advantages differ within one. `low_min` and `high_max` are taken over
    the means of the sequences that have tokens; NaN if there are none. Metrics that need the scores of all tokens are
    included only if `complete`.
    """
    metrics = [objective.policy_loss, batch.total]
    if not complete:
        return metrics
    columns = [x for x in (objective.kl, entropy) if x is not None]
    own = objective.seen()
    if not columns and not own:
        return metrics
    # all in one reduction: a call of few tokens takes as long as its kernels take to launch
    table = torch.where(batch.mask.unsqueeze(1), torch.stack([*columns, *own], dim=1), 0.0)
    sums = segments(table.to(torch.float64), "sum", batch.offsets)  # [B, K]
    mean = sums.sum(0) / batch.total  # NaN without a token
    means = torch.where(batch.total == 0, 0.0, mean).to(batch.total.dtype)
    first = len(columns)
    metrics += means[:first].unbind()
    if own:
        metrics += _own_metrics(sums[:, first:], mean[first:], means[first:], batch, config)
    return metrics


def _own_metrics(
    sums: Tensor, mean: Tensor, means: Tensor, batch: TokenBatch, config: GRPOLossConfig
) -> tuple[Tensor, ...]:
    """The metrics of `LossType.metrics`, from `Term.seen`: sums over sequences ([B, 1 or 2]), means over tokens.

    Without a token, `mean` (fp64) is NaN and `means` 0.
    """
    lengths, dtype = batch.lengths.unsqueeze(1), means.dtype
    by_sequence, is_empty = sums / lengths, lengths == 0
    if config.has_one_value_a_sequence and not batch.advantage_per_token:
        # a sequence without tokens has the ratio exp(0) = 1: it is not clipped, and its phi is 1
        filled = by_sequence.masked_fill(is_empty, 1.0 if config.kind.rule == "vespo" else 0.0)
        means = (filled.sum(0) / max(batch.num_sequences, 1)).to(dtype)
    if sums.shape[1] == 1:
        return means.unbind()
    low, high = means.unbind()
    if batch.num_sequences == 0:
        lowest = highest = means.new_full((2,), math.nan)
    else:
        # an empty sequence counts as the mean over all tokens, which is neither below the others nor above
        lowest, highest = torch.where(is_empty, mean, by_sequence).to(dtype).aminmax(dim=0)
    return low, high, low + high, lowest[0], highest[1]
