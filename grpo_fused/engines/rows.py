"""The row work of a logits chunk in torch operations: statistics, and the gradient in place. Any device; the oracle.

A row holds the logits of one token. `statistics` turns raw products into z (bias, scale, softcap, temperature) in
place and returns what the objective needs; `gradient` turns z into dL/d(product), also in place.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from grpo_fused.call.layout import blocks
from grpo_fused.kernels.row_types import (
    LOWEST_LOG_P,
    Coefficients,
    ObjectiveNumbers,
    RowLoss,
    Rows,
    Statistics,
    TokenInputs,
    Transform,
)

TEMPORARIES = 3
"""Blocks of rows that torch operations allocate at most."""


class RowWork(Protocol):
    """The work on a chunk of logits [R, V] between the products of an engine."""

    is_kernel: bool
    """Whether it is a kernel: logits of any float dtype can be given, and are not changed; `loss` evaluates objectives;
    and nothing is allocated. If not, `gradient` can pick rows, and up to `TEMPORARIES` blocks of rows are allocated."""

    def statistics(self, rows: Rows, *, with_entropy: bool) -> Statistics:
        """Statistics of the rows; their logits may be changed to the input of `gradient`."""
        ...

    def gradient(self, rows: Rows, coefficients: Coefficients, out: Tensor, *, picked: Tensor | None = None) -> None:
        """Write dL/d(product) of K rows to `out` [K, V], which may share the memory of the logits, row by row.

        `rows.raw` is as `statistics` left it. `picked` ([K] int64, ascending) selects some of its rows, None
        all; all other arguments are for these rows only. `out` may be of a narrower dtype with longer rows: its row k
        begins at or before row k of the logits.
        """
        ...

    def loss(
        self, rows: Rows, inputs: TokenInputs, options: ObjectiveNumbers, out: Tensor, *, with_entropy: bool
    ) -> RowLoss:
        """Statistics, objective and gradient in one call, by a kernel; `out` as in `gradient`."""
        ...


def z_(raw: Tensor, transform: Transform) -> Tensor:
    """z from raw products [R, V], in place."""
    if transform.bias is not None:
        raw.add_(transform.bias)
    if transform.logit_scale != 1.0:
        raw.mul_(transform.logit_scale)
    if transform.softcap is not None:
        raw.div_(transform.softcap).tanh_().mul_(transform.softcap)
    if not _is_one(transform.temperature):
        raw.div_(_column(transform, raw))
    return raw


def chain_(dz: Tensor, z: Tensor, transform: Transform) -> Tensor:
    """dz/d(product) multiplied into `dz` [R, V], in place."""
    if not _is_one(transform.temperature):
        dz.div_(_column(transform, dz))
    if transform.softcap is not None:
        capped = (z * _column(transform, z)).div_(transform.softcap)
        dz.mul_(capped.square_().neg_().add_(1.0))
    if transform.logit_scale != 1.0:
        dz.mul_(transform.logit_scale)
    return dz


def _is_one(temperature: Tensor | float) -> bool:
    return not isinstance(temperature, Tensor) and temperature == 1.0


def _column(transform: Transform, like: Tensor) -> Tensor | float:
    """The temperature so that it broadcasts over rows of `like`."""
    temperature = transform.temperature
    return temperature.to(like.dtype).unsqueeze(1) if isinstance(temperature, Tensor) else temperature


class TorchRows:
    """Row work in torch operations, in blocks of `block_rows` rows with `TEMPORARIES` of that size."""

    is_kernel = False

    def statistics(self, rows: Rows, *, with_entropy: bool) -> Statistics:
        """See `RowWork.statistics`; turns the logits into z."""
        parts = []
        for block in blocks(rows.raw.shape[0], rows.block_rows):
            z = z_(rows.raw[block], rows.transform.select(block))
            parts.append(_statistics(z, rows.targets[block], with_entropy))
        return Statistics.concatenate(parts, rows.raw, with_entropy)

    def gradient(self, rows: Rows, coefficients: Coefficients, out: Tensor, *, picked: Tensor | None = None) -> None:
        """See `RowWork.gradient`."""
        stats, dlogp, dentropy, _ = coefficients
        for block in blocks(out.shape[0], rows.block_rows):
            # a block is computed before it is stored, and its stores overwrite only rows that have been read
            source = rows.raw[block] if picked is None else rows.raw.index_select(0, picked[block])
            coefficient = None if dentropy is None else dentropy[block]
            dz = gradient_of_scores(source, rows.targets[block], stats.select(block), dlogp[block], coefficient)
            out[block].copy_(chain_(dz, source, rows.transform.select(block)))

    def loss(
        self, rows: Rows, inputs: TokenInputs, options: ObjectiveNumbers, out: Tensor, *, with_entropy: bool
    ) -> RowLoss:
        """Not supported: it is no kernel."""
        raise NotImplementedError("torch row work has no one-pass loss; use statistics and gradient")


def _statistics(z: Tensor, targets: Tensor, with_entropy: bool) -> Statistics:
    maximum, at = z.max(dim=1, keepdim=True)
    shifted = z - maximum
    target = shifted.gather(1, targets.unsqueeze(1)).squeeze(1)
    e = shifted.exp() if with_entropy else shifted.exp_()
    rest = e.scatter_(1, at, 0.0).sum(dim=1)
    log_sum = rest.log1p()
    logp = (target - log_sum).clamp_(max=0.0)
    if not with_entropy:
        return Statistics(maximum.squeeze(1), log_sum, logp, None)
    moment = e.mul_(shifted.clamp_(min=LOWEST_LOG_P)).sum(dim=1)
    entropy = (log_sum - moment / (1.0 + rest)).clamp_(min=0.0)
    return Statistics(maximum.squeeze(1), log_sum, logp, entropy)


def gradient_of_scores(
    z: Tensor, targets: Tensor, statistics: Statistics, dlogp: Tensor, dentropy: Tensor | None
) -> Tensor:
    """[R, V]: dL/dz from the coefficients on log-probs and entropies ([R] each)."""
    dz = (z - statistics.max.unsqueeze(1)).sub_(statistics.log_sum.unsqueeze(1)).clamp_(min=LOWEST_LOG_P)
    # 1 - p of the target from expm1: a confident token's gradient keeps its digits
    at_target = -torch.expm1(statistics.logp) * dlogp
    here, targets = targets >= 0, targets.clamp(min=0).unsqueeze(1)
    if dentropy is None:
        dz.exp_().mul_(-dlogp.unsqueeze(1))
    else:
        assert statistics.entropy is not None
        slope = (dz + statistics.entropy.unsqueeze(1)).mul_(-dentropy.unsqueeze(1)).sub_(dlogp.unsqueeze(1))
        dz.exp_()
        log_p = statistics.logp.clamp(min=LOWEST_LOG_P)
        at_target -= dentropy * log_p.exp() * (log_p + statistics.entropy)  # in slope it would vanish beside dlogp
        dz.mul_(slope)
    return dz.scatter_(1, targets, torch.where(here, at_target, dz.gather(1, targets).squeeze(1)).unsqueeze(1))
