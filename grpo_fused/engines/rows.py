"""The row work of a logits chunk in torch operations: statistics, and the gradient in place. Any device; the oracle.

A row holds the logits of one token. `statistics` turns raw products into z (bias, scale, softcap, temperature) where
they stand and returns what the objective needs; `gradient` turns z into dL/d(product), again where it stands.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from grpo_fused.batch import TokenBatch
from grpo_fused.config import GRPOLossConfig

LOWEST_LOG_P = -1e4
"""Stands for log 0 where it meets a factor of 0: finite, and its exponential is 0 in fp64 too."""


class Statistics(NamedTuple):
    """Statistics of R rows, fp32 (fp64 for fp64 inputs)."""

    max: Tensor
    """[R] m = max_j z_j"""
    log_sum: Tensor
    """[R] log sum_j exp(z_j - m); kept apart from m, whose common offset would cost it its digits. It is log1p of the
    sum without the maximum's own 1: a confident token keeps its digits, too."""
    logp: Tensor
    """[R]"""
    entropy: Tensor | None
    """[R], if asked for"""

    def select(self, rows: slice | Tensor) -> Statistics:
        """Statistics of some of the rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Statistics(self.max[rows], self.log_sum[rows], self.logp[rows], entropy)

    @classmethod
    def concatenate(cls, parts: list[Statistics], like: Tensor, with_entropy: bool) -> Statistics:
        """Statistics of consecutive parts of the rows; those of no rows on the device of `like` if there is none."""
        if not parts:
            empty = torch.zeros(0, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
            return cls(empty, empty, empty, empty if with_entropy else None)
        return cls(
            max=torch.cat([part.max for part in parts]),
            log_sum=torch.cat([part.log_sum for part in parts]),
            logp=torch.cat([part.logp for part in parts]),
            entropy=torch.cat([part.entropy for part in parts if part.entropy is not None]) if with_entropy else None,
        )


class Transform(NamedTuple):
    """How raw products become z: softcap(logit_scale * (raw + bias)) / temperature."""

    bias: Tensor | None
    """[V]"""
    logit_scale: float
    softcap: float | None
    temperature: Tensor | float
    """A number, or one for each row ([R])."""

    def select(self, rows: slice | Tensor) -> Transform:
        """The transform of some of the rows."""
        if isinstance(self.temperature, Tensor):
            return self._replace(temperature=self.temperature[rows])
        return self

    def column(self, like: Tensor) -> Tensor | float:
        """The temperature so that it broadcasts over rows of `like`."""
        if isinstance(self.temperature, Tensor):
            return self.temperature.to(like.dtype).unsqueeze(1)
        return self.temperature

    def apply_(self, raw: Tensor) -> Tensor:
        """z from raw products [R, V], in place."""
        if self.bias is not None:
            raw.add_(self.bias)
        if self.logit_scale != 1.0:
            raw.mul_(self.logit_scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            raw.div_(self.column(raw))
        return raw

    def chain_(self, dz: Tensor, z: Tensor) -> Tensor:
        """dz/d(product) multiplied into `dz` [R, V], in place."""
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            dz.div_(self.column(dz))
        if self.softcap is not None:
            capped = (z * self.column(z)).div_(self.softcap)
            dz.mul_(capped.square_().neg_().add_(1.0))
        if self.logit_scale != 1.0:
            dz.mul_(self.logit_scale)
        return dz


class RowWork(Protocol):
    """What an engine does to a chunk of logits [R, V] between its products."""

    picks_rows: bool
    """Whether `gradient` can take some of the rows that `statistics` was given."""

    only_reads: bool
    """Whether logits of any float dtype can be given, and are left as they are."""

    def statistics(
        self, raw: Tensor, targets: Tensor, transform: Transform, *, with_entropy: bool, block_rows: int
    ) -> Statistics:
        """Statistics of the rows for their targets [R]; `raw` may be changed to what `gradient` wants."""
        ...

    def gradient(
        self,
        raw: Tensor,
        rows: Tensor | None,
        targets: Tensor,
        statistics: Statistics,
        dlogp: Tensor,
        dentropy: Tensor | None,
        transform: Transform,
        out: Tensor,
        *,
        block_rows: int,
    ) -> None:
        """Write dL/d(product) of K rows to `out` [K, V], which may be the memory of `raw`, row upon row.

        Args:
            raw: [R, V] as `statistics` left it.
            rows: [K] int64 ascending, the rows of `raw` to use; None for all. The other arguments are of these alone.
            targets: [K] int64; -1 where the target's logit is none of these.
            statistics: of the K rows.
            dlogp: [K] coefficient on the log-prob.
            dentropy: [K] coefficient on the entropy, or None.
            transform: of the K rows.
            out: [K, V], possibly of a narrower dtype with longer rows: row k begins at or before row k of `raw`.
            block_rows: rows worked at a time.
        """
        ...

    def has_one_pass(self, config: GRPOLossConfig) -> bool:
        """Whether `loss` can be called for this objective."""
        ...

    def loss(
        self,
        raw: Tensor,
        targets: Tensor,
        batch: TokenBatch,
        config: GRPOLossConfig,
        transform: Transform,
        out: Tensor,
        *,
        with_entropy: bool,
    ) -> Statistics:
        """Statistics, objective and gradient of [R, V] in one go; `out` as in `gradient`."""
        ...


class TorchRows:
    """Row work in torch operations, in blocks of `block_rows` rows with up to three temporaries of that size."""

    picks_rows = True
    only_reads = False

    def statistics(
        self, raw: Tensor, targets: Tensor, transform: Transform, *, with_entropy: bool, block_rows: int
    ) -> Statistics:
        """See `RowWork.statistics`; turns `raw` into z."""
        parts = []
        for rows in _row_blocks(raw.shape[0], block_rows):
            z = transform.select(rows).apply_(raw[rows])
            parts.append(_statistics(z, targets[rows], with_entropy))
        return Statistics.concatenate(parts, raw, with_entropy)

    def gradient(
        self,
        raw: Tensor,
        rows: Tensor | None,
        targets: Tensor,
        statistics: Statistics,
        dlogp: Tensor,
        dentropy: Tensor | None,
        transform: Transform,
        out: Tensor,
        *,
        block_rows: int,
    ) -> None:
        """See `RowWork.gradient`."""
        for block in _row_blocks(out.shape[0], block_rows):
            # a block is computed before it is stored, and comes from the same or later rows: all is read in time
            source = raw[block] if rows is None else raw.index_select(0, rows[block])
            coefficient = None if dentropy is None else dentropy[block]
            dz = _gradient(source, targets[block], statistics.select(block), dlogp[block], coefficient)
            out[block].copy_(transform.select(block).chain_(dz, source))

    def has_one_pass(self, config: GRPOLossConfig) -> bool:
        """Torch has none."""
        return False

    def loss(
        self,
        raw: Tensor,
        targets: Tensor,
        batch: TokenBatch,
        config: GRPOLossConfig,
        transform: Transform,
        out: Tensor,
        *,
        with_entropy: bool,
    ) -> Statistics:
        """Not to be had."""
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


def _gradient(z: Tensor, targets: Tensor, statistics: Statistics, dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
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
        at_target += dz.gather(1, targets).squeeze(1) * (slope.gather(1, targets).squeeze(1) + dlogp)
        dz.mul_(slope)
    return dz.scatter_(1, targets, torch.where(here, at_target, dz.gather(1, targets).squeeze(1)).unsqueeze(1))


def _row_blocks(count: int, block_rows: int) -> list[slice]:
    return [slice(start, min(start + block_rows, count)) for start in range(0, count, block_rows)]
