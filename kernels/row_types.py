"""Types for rows of logits, one row for each token: the values that engines and kernels exchange. Needs only torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KL_ESTIMATORS = {"k1": 1, "k2": 2, "k3": 3}
LOWEST_LOG_P = -1e4
"""Used for log 0 where it is multiplied by 0: finite, and its exponential is 0 in fp64 too."""


class Statistics(NamedTuple):
    """Statistics of R rows, fp32 (fp64 for fp64 inputs)."""

    max: Tensor
    """[R] m = max_j z_j"""
    log_sum: Tensor
    """[R] log sum_j exp(z_j - m); separate from m, since the sum of both would lose its digits. It is log1p of the
    sum without the maximum's own 1: a confident token keeps its digits, too."""
    logp: Tensor
    """[R]"""
    entropy: Tensor | None
    """[R], if requested"""

    def select(self, rows: slice | Tensor) -> Statistics:
        """Statistics of some of the rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Statistics(self.max[rows], self.log_sum[rows], self.logp[rows], entropy)

    @classmethod
    def of(cls, table: Tensor, with_entropy: bool) -> Statistics:
        """From [4, R], the form of the CPU library."""
        return cls(table[0], table[1], table[2], table[3] if with_entropy else None)

    @property
    def table(self) -> Tensor:
        """[4, R], contiguous: the form of the CPU library; log-probs in place of an entropy that is not there."""
        return torch.stack([self.max, self.log_sum, self.logp, self.logp if self.entropy is None else self.entropy])

    @classmethod
    def concatenate(cls, parts: list[Statistics], like: Tensor, with_entropy: bool) -> Statistics:
        """Statistics of consecutive parts of the rows; those of no rows on the device of `like` if there is none."""
        if not parts:
            empty = torch.zeros(0, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
            return cls(empty, empty, empty, empty if with_entropy else None)
        if len(parts) == 1:
            return parts[0]
        maxima, log_sums, logps, entropies = zip(*parts, strict=True)
        entropy = torch.cat(entropies) if with_entropy else None
        return cls(torch.cat(maxima), torch.cat(log_sums), torch.cat(logps), entropy)

    @classmethod
    def empty(
        cls, num_rows: int, device: torch.device, with_entropy: bool, dtype: torch.dtype = torch.float32
    ) -> Statistics:
        """Uninitialised statistics of some rows."""
        # separate tensors: an operator's results must not share memory
        new = [torch.empty(num_rows, dtype=dtype, device=device) for _ in range(4)]
        return cls(new[0], new[1], new[2], new[3] if with_entropy else None)

    def zero_(self) -> Statistics:
        """All set to 0: no row is known yet."""
        for x in self:
            if x is not None:
                x.zero_()
        return self

    def place_(self, rows: Tensor, found: Statistics) -> None:
        """Write the statistics of `rows` ([K] int64)."""
        for to, value in zip(self, found, strict=True):
            if to is not None and value is not None:
                to.index_copy_(0, rows, value.to(to.dtype))


class Transform(NamedTuple):
    """How raw products become z: softcap(logit_scale * (raw + bias)) / temperature."""

    bias: Tensor | None = None
    """[V], contiguous"""
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: Tensor | float = 1.0
    """A number, or one for each row ([R])."""

    def select(self, rows: slice | Tensor) -> Transform:
        """The transform of some of the rows."""
        if isinstance(self.temperature, Tensor):
            return self._replace(temperature=self.temperature[rows])
        return self

    @property
    def numbers(self) -> tuple[Tensor | None, float, float, float]:
        """What kernels take: (fp32 temperature of each row or None, one temperature, logit scale, softcap or 0).

        An int would be compiled in.
        """
        given = self.temperature
        each, number = (given.to(torch.float32), 1.0) if isinstance(given, Tensor) else (None, float(given))
        return each, number, float(self.logit_scale), float(self.softcap or 0.0)

    def numbers_of(self, rows: Tensor) -> tuple[Tensor, float, float]:
        """What the CPU library takes: (fp32 temperature of each of `rows`, logit scale, softcap or 0)."""
        each, number, scale, softcap = self.numbers
        if each is None:
            each = rows.new_full(rows.shape, number, dtype=torch.float32)
        return each.contiguous(), scale, softcap


BYTES = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of quantised numbers, one a byte."""


class Extras(NamedTuple):
    """What a frozen weight [V, H] may have beside it, in a product of hidden states [N, H + C].

    With it the weight may be int8 or float8_e4m3fn, which the kernel widens.
    """

    more: Tensor | None = None
    """[V, C] further columns, those of an adapter, in the dtype of the computation"""
    row_scale: Tensor | None = None
    """[V] fp32, contiguous, by which products are multiplied"""

    def any(self) -> bool:
        """Whether there is any."""
        return self.more is not None or self.row_scale is not None

    def rows(self, which: slice) -> Extras:
        """Those of some rows of the weight."""
        more, row_scale = (None if x is None else x[which] for x in self)
        return Extras(more, None if row_scale is None else row_scale.contiguous())


NOTHING = Extras()
"""beside a plain weight"""


class Rows(NamedTuple):
    """A chunk of logits, and what is done to it."""

    raw: Tensor
    """[R, V] products, unit column stride"""
    targets: Tensor
    """[R] int64; in a gradient -1 if the target's logit is not among these"""
    transform: Transform
    block_rows: int = 1
    """rows that row work in torch operations takes at a time"""


def has_coefficient(dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
    """[K] bool: rows whose coefficients are not 0."""
    return dlogp != 0 if dentropy is None else (dlogp != 0) | (dentropy != 0)


class Entries(NamedTuple):
    """Derivatives of single products, which take the place of those by the row's formula; none is there twice."""

    rows: Tensor
    """[E] int64, ascending"""
    ids: Tensor
    """[E] int64: columns; others are another rank's (`Tokens.own_entries`)"""
    values: Tensor
    """[E] dL/d(product)"""

    def select(self, rows: slice | Tensor) -> Entries:
        """Those of some of the rows ([K] int64, ascending), numbered among these."""
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self.rows.device)
        place = torch.searchsorted(rows, self.rows)
        kept = rows[place.clamp(max=len(rows) - 1)] == self.rows if len(rows) else place < 0
        return Entries(place[kept], self.ids[kept], self.values[kept])

    def put(self, out: Tensor) -> None:
        """Write them into derivatives [R, V]."""
        out[self.rows, self.ids] = self.values.to(out.dtype)


class Coefficients(NamedTuple):
    """The inputs of the gradient of K rows."""

    statistics: Statistics
    dlogp: Tensor
    """[K] dL/dlogp; with other log-probs of a row: the sum of all their dL/dlogp, the factor of its -p"""
    dentropy: Tensor | None
    """[K] dL/dentropy, or None"""
    entries: Entries | None = None
    """of the rows with other log-probs"""

    def select(self, rows: slice | Tensor) -> Coefficients:
        """Those of some of the rows ([K] int64, ascending)."""
        dentropy = None if self.dentropy is None else self.dentropy[rows]
        entries = None if self.entries is None else self.entries.select(rows)
        return Coefficients(self.statistics.select(rows), self.dlogp[rows], dentropy, entries)

    def scaled(self, factor: Tensor) -> Coefficients:
        """All derivatives times a number."""
        dentropy = None if self.dentropy is None else self.dentropy * factor
        entries = None if self.entries is None else self.entries._replace(values=self.entries.values * factor)
        return Coefficients(self.statistics, self.dlogp * factor, dentropy, entries)

    def any_of_row(self) -> Tensor:
        """[K] bool: rows with a gradient."""
        has = has_coefficient(self.dlogp, self.dentropy)
        return has if self.entries is None else has.index_fill(0, self.entries.rows[self.entries.values != 0], True)


class TokenInputs(NamedTuple):
    """Inputs of a token-level objective for each row, [R] fp32 each, None where there is none."""

    advantages: Tensor
    weight: Tensor
    """factor on a token's loss; 0 where masked"""
    old: Tensor | None
    ref: Tensor | None
    is_ratio: Tensor | None
    entropy_weight: Tensor | None
    """0-d: weight of every active token's entropy in the bonus"""


class ObjectiveNumbers(NamedTuple):
    """The options of a token-level objective; an option that is off is inf (delta, dual_clip) or unread."""

    policy: int
    kl_estimator: str
    bias_correction: bool
    epsilon: float
    epsilon_high: float
    delta: float
    dual_clip: float
    tau_pos: float
    tau_neg: float
    beta: float


class RowLoss(NamedTuple):
    """Results of one launch for R rows and a token-level objective."""

    statistics: Statistics
    loss: Tensor
    """[R] loss of each token, weighted"""
    dlogp: Tensor
    """[R] its coefficient"""
