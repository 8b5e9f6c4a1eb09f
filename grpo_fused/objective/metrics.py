"""The metrics of a loss call, with the names and definitions of TRL 1.16."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.loss_types import Rule
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import Objective


def metric_names(
    config: GRPOLossConfig, *, with_kl: bool, with_entropy: bool, complete: bool = True
) -> tuple[str, ...]:
    """Names of the metrics that `compute_metrics` returns, in its order."""
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
) -> dict[str, Tensor]:
    """Metrics of all tokens of a call, 0-d each: `objective` and `entropy` ([R]) cover the whole `batch`.

    Means are over active tokens. Numbers with one value for each sequence (clip decisions at level `sequence`, VESPO's
    phi) are averaged over all sequences, unless advantages differ within one. `low_min` and `high_max` are taken over
    the means of the sequences that have tokens; NaN if there are none. Metrics that need the scores of all tokens are
    included only if `complete`.
    """
    metrics = {"policy_loss": objective.policy_loss, "active_tokens": batch.total}
    if not complete:
        return metrics
    per_sequence = not batch.advantage_per_token and (
        config.importance_sampling_level == "sequence" or config.kind.one_value_a_sequence
    )
    if objective.kl is not None:
        metrics["kl"] = _token_mean(objective.kl, batch)
    if entropy is not None:
        metrics["entropy"] = _token_mean(entropy, batch)

    def mean(x: Tensor, empty: float = 0.0) -> Tensor:
        return _sequence_mean(x, batch, empty) if per_sequence else _token_mean(x, batch)

    values = _VALUES[config.kind.rule](objective, batch, config, mean)
    return metrics | dict(zip(config.kind.metrics, values, strict=True))


_Mean = Callable[..., Tensor]
_Values = tuple[Tensor, ...]


def _clip_ratios(objective: Objective, batch: TokenBatch, config: GRPOLossConfig, mean: _Mean) -> _Values:
    return _outside(objective.ratio, 1.0 - config.epsilon, 1.0 + config.epsilon_upper, batch, mean)


def _log_clip_ratios(objective: Objective, batch: TokenBatch, config: GRPOLossConfig, mean: _Mean) -> _Values:
    return _outside(objective.log_ratio, -config.epsilon, config.epsilon_upper, batch, mean)


def _outside(value: Tensor, low: float, high: float, batch: TokenBatch, mean: _Mean) -> _Values:
    is_low, is_high = (
        ((value < low) & (batch.advantages < 0)).float(),
        ((value > high) & (batch.advantages > 0)).float(),
    )
    return (
        mean(is_low),
        mean(is_high),
        mean(is_low + is_high),
        _sequence_means(is_low, batch, missing=math.inf).amin(),
        _sequence_means(is_high, batch, missing=-math.inf).amax(),
    )


def _cispo_ratio(objective: Objective, batch: TokenBatch, config: GRPOLossConfig, mean: _Mean) -> _Values:
    return (mean(((objective.ratio > config.epsilon_upper) & (batch.advantages > 0)).float()),)


def _phi(objective: Objective, batch: TokenBatch, config: GRPOLossConfig, mean: _Mean) -> _Values:
    assert objective.phi is not None
    return (mean(objective.phi, empty=1.0),)


_VALUES: dict[Rule, Callable[..., _Values]] = {
    "clip": _clip_ratios, "cispo": _cispo_ratio, "sapo": lambda *_: (), "vespo": _phi, "gmpo": _log_clip_ratios,
}  # fmt: skip
"""The values of `LossType.metrics`, by rule."""


def _token_mean(x: Tensor, batch: TokenBatch) -> Tensor:
    return torch.where(batch.mask, x, 0.0).to(torch.float64).sum() / batch.total.clamp(min=1.0)


def _sequence_mean(x: Tensor, batch: TokenBatch, empty: float) -> Tensor:
    """Mean over all sequences of a value that the tokens of a sequence share.

    A sequence without tokens counts as `empty`: its ratio is exp(0) = 1, so it is not clipped and its phi is 1.
    """
    total = batch.sequence_sum(torch.where(batch.mask, x, 0.0)) / batch.lengths.clamp(min=1.0)
    return torch.where(batch.lengths == 0, empty, total).sum() / max(batch.num_sequences, 1)


def _sequence_means(x: Tensor, batch: TokenBatch, missing: float) -> Tensor:
    """Means of the sequences that have tokens, `missing` for the others; NaN if none has tokens."""
    means = batch.sequence_sum(torch.where(batch.mask, x, 0.0)) / batch.lengths
    has_tokens = batch.lengths > 0
    if means.numel() == 0:
        return x.new_full((1,), math.nan)
    return torch.where(has_tokens, means, torch.where(has_tokens.any(), missing, math.nan))
