"""What is computed of candidates: their scores, the derivatives of these, and sums of rows with them.

What is known of a candidate is one number: z, then dL/d(product). They are stored one after the other, in the order of
the sets. The work on rows grows with the number of candidates times H. Nothing is added by atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.call.layout import blocks, segments
from grpo_fused.engines import cpu_library
from grpo_fused.kernels.row_types import LOWEST_LOG_P, Statistics, Transform

_BLOCK_BYTES = 4 * 2**20
"""Rows that the torch operations copy at a time for sums."""
_PRODUCT_BYTES = {"cpu": 2**20}
"""For products: what stays in a CPU's second-level cache; elsewhere 16 MiB, for few launches."""


@dataclass(frozen=True, eq=False)
class Sets:
    """The candidate sets of R tokens on one head; a slice of the vocabulary knows only its own candidates."""

    rows: Tensor
    """[R] int64, ascending: the tokens' positions in the call"""
    ids: Tensor
    """[K] int64: rows of this head's weight"""
    places: Tensor
    """[K] int64: the candidates in the sets of the call"""
    offsets: Tensor
    """[R + 1] int64"""
    targets: Tensor
    """[R] int64: ids; one that is not in the set belongs to another rank"""
    transform: Transform
    """what turns the products of the R tokens into z"""

    @cached_property
    def token(self) -> Tensor:
        """[K] int64, ascending: which of the R tokens."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=len(self.ids))

    @cached_property
    def is_target(self) -> Tensor:
        """[K] bool."""
        return self.ids == self.targets[self.token]

    @property
    def temperature(self) -> Tensor | float:
        """Of each candidate."""
        temperature = self.transform.temperature
        return temperature[self.token] if isinstance(temperature, Tensor) else temperature

    def sum(self, x: Tensor) -> Tensor:
        """[R] fp64: sums over each set."""
        return segments(x.to(torch.float64), "sum", self.offsets)


class Scores(NamedTuple):
    """What scoring found of some tokens."""

    statistics: Statistics
    """[R]"""
    z: Tensor
    """[K]"""


class Pairs:
    """In torch operations, on any device. Sums are fp32 (fp64 for fp64), in a fixed order.

    Matrices of one call have one dtype, and rows that are contiguous; indices are int64.
    """

    def products(self, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """[K]: a[i[k]] . b[j[k]] for a [M, H], b [L, H]."""
        wide = torch.promote_types(a.dtype, torch.float32)
        out = a.new_empty(len(i), dtype=wide)
        size = max(_PRODUCT_BYTES.get(a.device.type, 2**24) // (wide.itemsize * a.shape[1]), 1)
        for block in blocks(len(i), size):
            rows = b.index_select(0, j[block]).to(wide)
            torch.sum(rows.mul_(a.index_select(0, i[block])), dim=1, out=out[block])
        return out

    def sums(self, x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> Tensor:
        """[S, H]: the sum of factor[k] * x[index[k]] over offsets[s] <= k < offsets[s + 1]; factor [K] fp32."""
        out = factor.new_empty((len(offsets) - 1, x.shape[1]))
        size = max(_BLOCK_BYTES // (factor.itemsize * max(len(index), 1)), 1)
        for columns in blocks(x.shape[1], size):
            rows = x[:, columns][index].to(factor.dtype) * factor.unsqueeze(1)
            out[:, columns] = segments(rows, "sum", offsets)
        return out

    def add_sums(self, out: Tensor, rows: Tensor, x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> None:
        """Add `sums` to out[rows]; rows ascend."""
        out.index_copy_(0, rows, (out[rows] + self.sums(x, index, factor, offsets)).to(out.dtype))

    def scores(self, hidden: Tensor, weight: Tensor, index: Tensor, sets: Sets, with_entropy: bool) -> Scores:
        """Statistics of R tokens, hidden [R, H], and z of the candidates, whose rows are weight[index]."""
        transform = sets.transform
        z = self.products(hidden, weight, sets.token, index)
        z = (z if transform.bias is None else z + transform.bias[sets.ids]) * transform.logit_scale
        if transform.softcap is not None:
            z = transform.softcap * torch.tanh(z / transform.softcap)
        z = z / sets.temperature
        maximum = segments(z, "max", sets.offsets, initial=-torch.inf)
        shifted = torch.where(z != -torch.inf, z - maximum[sets.token], -torch.inf)
        e, at_maximum = shifted.exp(), shifted == 0
        # without the maximum's own 1, so that a confident token keeps its digits
        rest = sets.sum(torch.where(at_maximum, 0.0, e)) + (sets.sum(at_maximum) - 1.0)
        log_sum = rest.log1p()
        logp = sets.sum(torch.where(sets.is_target, shifted, 0.0)) - log_sum
        entropy = None
        if with_entropy:
            moment = sets.sum(torch.where(e > 0, e * shifted, 0.0))
            entropy = (log_sum - moment / (1.0 + rest)).clamp(min=0.0).to(z.dtype)
        return Scores(Statistics(maximum, log_sum.to(z.dtype), logp.clamp(max=0.0).to(z.dtype), entropy), z)

    def derivatives(self, sets: Sets, z: Tensor, stats: Statistics, dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
        """[K]: dL/d(product) of each candidate."""
        token, transform = sets.token, sets.transform
        log_p = (z - stats.max[token] - stats.log_sum[token]).clamp(min=LOWEST_LOG_P)
        p = log_p.exp()
        # 1 - p of the target from expm1: a confident token's gradient keeps its digits
        dz = dlogp[token] * torch.where(sets.is_target, -torch.expm1(stats.logp[token]), -p)
        if dentropy is not None:
            assert stats.entropy is not None
            dz = dz - dentropy[token] * p * (log_p + stats.entropy[token])
        if transform.softcap is not None:
            dz = dz * (1.0 - (z * sets.temperature / transform.softcap).square())
        return dz * transform.logit_scale / sets.temperature


class NativePairs(Pairs):
    """In C++: fp32, bf16 and fp16 on the CPU; results do not depend on the threads."""

    def add_sums(self, out: Tensor, rows: Tensor, x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> None:
        """See `Pairs.add_sums`."""
        cpu_library.call("add_segment_sums", out, rows, x, index, factor, offsets)

    def scores(self, hidden: Tensor, weight: Tensor, index: Tensor, sets: Sets, with_entropy: bool) -> Scores:
        """See `Pairs.scores`."""
        z = hidden.new_empty(len(sets.ids), dtype=torch.float32)
        table = z.new_empty((4, len(sets.rows)))
        cpu_library.call(
            "set_scores", hidden, weight, index, sets.ids, sets.offsets, sets.targets, sets.transform.bias,
            *sets.transform.numbers_of(sets.rows), with_entropy, z, table,
        )  # fmt: skip
        return Scores(Statistics.of(table, with_entropy), z)

    def derivatives(self, sets: Sets, z: Tensor, stats: Statistics, dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
        """See `Pairs.derivatives`."""
        out = torch.empty_like(z)
        cpu_library.call(
            "set_derivatives", z, stats.table, sets.ids, sets.offsets, sets.targets,
            *sets.transform.numbers_of(sets.rows), dlogp, dentropy, out,
        )  # fmt: skip
        return out


class TritonPairs(Pairs):
    """Products and sums of rows in Triton."""

    def products(self, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Pairs.products`."""
        from grpo_fused.kernels.candidates import pair_products

        return pair_products(a, b, i, j)

    def sums(self, x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> Tensor:
        """See `Pairs.sums`."""
        from grpo_fused.kernels.candidates import segment_sums

        return segment_sums(x, index, factor, offsets)
