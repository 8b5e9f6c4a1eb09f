"""Tokens that have a candidate set: products with the rows of their set alone, beside any engine of the whole head.

What is known of a candidate is one number: its logit, then the derivative of that. They lie one after the other, as the
sets do. Two operations on rows do the work, which grows with the number of candidates times H:

- `Pairs.products`: h . w for each candidate.
- `Pairs.sums`: dH sums rows of the weight over a token's set, dW sums hidden states over a candidate's tokens, sorted
  by (id, position). Nothing is added by atomics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from grpo_fused.engines.base import Cost, Engine, Gradients, TokenObjective, Tokens, Work, even_chunks
from grpo_fused.engines.products import Head
from grpo_fused.kernels.row_types import Statistics

_BLOCK_BYTES = 4 * 2**20
"""Rows that the torch operations copy at a time."""

_BLOCK_CANDIDATES = 2**18
"""Candidates that are worked on at a time (more if a token has more): about 100 bytes of temporaries each."""


class Pairs(Protocol):
    """Operations on chosen rows of two matrices, with fp32 sums (fp64 for fp64) in a fixed order."""

    def products(self, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """[K]: a[i[k]] . b[j[k]] for a [M, H], b [L, H] of one dtype, whose rows are contiguous; i, j [K] int64."""
        ...

    def sums(self, x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> Tensor:
        """[S, H]: the sum of factor[k] * x[index[k]] over offsets[s] <= k < offsets[s + 1]; factor [K] fp32."""
        ...


class TorchPairs:
    """In torch operations, on any device."""

    def products(self, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Pairs.products`."""
        wide = torch.promote_types(a.dtype, torch.float32)
        out = a.new_empty(len(i), dtype=wide)
        size = max(_BLOCK_BYTES // (wide.itemsize * a.shape[1]), 1)
        for start in range(0, len(i), size):
            block = slice(start, start + size)
            torch.sum(a[i[block]].to(wide) * b[j[block]].to(wide), dim=1, out=out[block])
        return out

    def sums(self, x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> Tensor:
        """See `Pairs.sums`."""
        out = factor.new_empty((len(offsets) - 1, x.shape[1]))
        size = max(_BLOCK_BYTES // (factor.itemsize * max(len(index), 1)), 1)
        for start in range(0, x.shape[1], size):
            columns = slice(start, start + size)
            rows = x[:, columns][index].to(factor.dtype) * factor.unsqueeze(1)
            out[:, columns] = _segments(rows, "sum", offsets)
        return out


class NativePairs:
    """In C++: fp32, bf16 and fp16 on the CPU; results do not depend on the threads."""

    def products(self, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Pairs.products`."""
        out: Tensor = torch.ops.grpo_fused_C.pair_products(a, b, i, j)
        return out

    def sums(self, x: Tensor, index: Tensor, factor: Tensor, offsets: Tensor) -> Tensor:
        """See `Pairs.sums`."""
        out: Tensor = torch.ops.grpo_fused_C.segment_sums(x, index, factor, offsets)
        return out


def _segments(x: Tensor, how: str, offsets: Tensor, initial: float = 0.0) -> Tensor:
    # unsafe: skips a check that would synchronise
    return torch.segment_reduce(x, how, offsets=offsets, axis=0, unsafe=True, initial=initial)


class _Sets(NamedTuple):
    """The sets of R tokens on this head: a slice of the vocabulary knows only its own candidates."""

    rows: Tensor
    """[R] int64: the tokens' positions in the call"""
    ids: Tensor
    """[K] int64: rows of this head's weight"""
    places: Tensor
    """[K] int64: the candidates in the sets of the call"""
    token: Tensor
    """[K] int64, ascending: which of the R tokens"""
    offsets: Tensor
    """[R + 1]"""
    is_target: Tensor
    """[K] bool"""

    @classmethod
    def of(cls, head: Head, tokens: Tokens, rows: Tensor) -> _Sets:
        assert tokens.candidates is not None
        places = tokens.candidates.places(rows)
        ids = tokens.candidates.ids[places].to(torch.int64)
        sizes = tokens.candidates.sizes[rows]
        token = torch.repeat_interleave(sizes, output_size=len(places))
        if tokens.vocab is not None:
            ids = ids - tokens.vocab.first
            own = (ids >= 0) & (ids < head.vocab_size)
            places, ids, token = places[own], ids[own], token[own]
        starts = torch.searchsorted(token, torch.arange(len(rows) + 1, device=rows.device))
        return cls(rows, ids, places, token, starts, ids == tokens.ids[rows][token])

    def sum(self, x: Tensor) -> Tensor:
        """[R] fp64: sums over each set."""
        return _segments(x.to(torch.float64), "sum", self.offsets)

    def transform(self, head: Head, tokens: Tokens) -> tuple[Tensor | float, Tensor | float]:
        """(temperature, bias) of each candidate."""
        transform = tokens.transform(head, self.rows)
        each, bias = transform.temperature, transform.bias
        if isinstance(each, Tensor):
            each = each.to(head.statistics_dtype)[self.token]
        return each, 0.0 if bias is None else bias[self.ids]


class _Scores(NamedTuple):
    """What scoring found of some tokens."""

    statistics: Statistics
    """[R]"""
    z: Tensor
    """[K]"""


@dataclass
class CandidateEngine:
    """The engine of a call with candidate sets: `whole` works on tokens whose set is empty. One for each call."""

    whole: Engine
    pairs: Pairs
    any_whole: bool
    """whether a set may be empty; if not, `add_weight_gradient` makes dW from the derivatives of the candidates"""

    def chunk_rows(self, head: Head, max_scratch_bytes: int | None) -> int:
        """See `Engine.chunk_rows`."""
        return self.whole.chunk_rows(head, max_scratch_bytes) if self.any_whole else 2**62

    def weight_gradient_dtype(self, head: Head, num_tokens: int, max_scratch_bytes: int | None) -> torch.dtype:
        """See `Engine.weight_gradient_dtype`."""
        return self.whole.weight_gradient_dtype(head, num_tokens, max_scratch_bytes)

    def cost(self, head: Head, num_tokens: int, max_scratch_bytes: int | None) -> Cost:
        """See `Engine.cost`: that of tokens without a set."""
        return self.whole.cost(head, num_tokens, max_scratch_bytes)

    def score(self, work: Work) -> Statistics:
        """See `Engine.score`."""
        own, others = _split(work)
        out = Statistics.empty(len(work.rows), work.rows.device, work.with_entropy, work.head.statistics_dtype).zero_()
        for block in _blocks(work, own):
            out.place_(block, self._score(work, _Sets.of(work.head, work.tokens, work.rows[block])).statistics)
        if len(others):
            out.place_(others, self.whole.score(replace(work, rows=work.rows[others])))
        return out

    def fused(self, work: Work) -> tuple[Statistics, Gradients]:
        """See `Engine.fused`; coefficients are asked for by index, so they must not need more than their token."""
        head, tokens, needs = work.head, work.tokens, work.needs
        own, others = _split(work)
        out = Statistics.empty(len(work.rows), work.rows.device, work.with_entropy, head.statistics_dtype).zero_()
        gradients = Gradients(None, None, None, 0)
        if self.any_whole:
            found, gradients = self.whole.fused(_without_sets(work, others))
            out.place_(others, found)

        assert tokens.candidates is not None
        hidden, worked = gradients.hidden, gradients.tokens
        if needs.need_hidden and hidden is None:
            shape = (tokens.ids.shape[0], head.weight.shape[1])
            hidden = torch.zeros(shape, dtype=head.product_dtype, device=out.logp.device)
        dproducts = out.logp.new_zeros(len(tokens.candidates.ids))
        for block in _blocks(work, own):
            sets = _Sets.of(head, tokens, work.rows[block])
            stats, z = self._score(work, sets)
            stats = tokens.merged(sets.rows, stats) if work.known is None else work.known.select(block)
            out.place_(block, stats)
            dlogp, dentropy = work.coefficients(block, stats.logp, stats.entropy)
            found = _derivatives(head, tokens, sets, z, stats, dlogp, dentropy)
            dproducts.index_copy_(0, sets.places, found)
            worked += int((dlogp != 0 if dentropy is None else (dlogp != 0) | (dentropy != 0)).sum())
            if hidden is not None:
                dhidden = self.pairs.sums(*_chosen_rows(head, sets.ids), found, sets.offsets)
                if tokens.vocab is not None:
                    dhidden = tokens.vocab.start_sum(dhidden)()
                hidden.index_copy_(0, sets.rows, dhidden.to(hidden.dtype))
        if self.any_whole and (needs.need_weight or needs.need_bias):
            add_weight_gradient(self.pairs, head, tokens, dproducts, gradients.weight, gradients.bias)
        return out, gradients._replace(hidden=hidden, tokens=worked, candidates=dproducts)

    def _score(self, work: Work, sets: _Sets) -> _Scores:
        head, tokens = work.head, work.tokens
        hidden = head.operand(tokens.hidden_rows(sets.rows)).contiguous()
        weight, ids = _chosen_rows(head, sets.ids)
        z = self.pairs.products(hidden, weight, sets.token, ids)
        temperature, bias = sets.transform(head, tokens)
        z = (z + bias) * head.logit_scale
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        z = z / temperature
        maximum = _segments(z, "max", sets.offsets, initial=-torch.inf)
        shifted = torch.where(z != -torch.inf, z - maximum[sets.token], -torch.inf)
        e, at_maximum = shifted.exp(), shifted == 0
        # without the maximum's own 1, so that a confident token keeps its digits
        rest = sets.sum(torch.where(at_maximum, 0.0, e)) + (sets.sum(at_maximum) - 1.0).clamp(min=0.0)
        log_sum = rest.log1p()
        logp = sets.sum(torch.where(sets.is_target, shifted, 0.0)) - log_sum
        entropy = None
        if work.with_entropy:
            moment = sets.sum(torch.where(e > 0, e * shifted, 0.0))
            entropy = (log_sum - moment / (1.0 + rest)).clamp(min=0.0).to(z.dtype)
        return _Scores(Statistics(maximum, log_sum.to(z.dtype), logp.clamp(max=0.0).to(z.dtype), entropy), z)


def _derivatives(
    head: Head, tokens: Tokens, sets: _Sets, z: Tensor, stats: Statistics, dlogp: Tensor, dentropy: Tensor | None
) -> Tensor:
    """[K]: dL/d(product) of each candidate."""
    token = sets.token
    log_p = (z - stats.max[token] - stats.log_sum[token]).clamp(min=-1e4)
    p = log_p.exp()
    # 1 - p of the target from expm1: a confident token's gradient keeps its digits
    dz = dlogp[token] * torch.where(sets.is_target, -torch.expm1(stats.logp[token]), -p)
    if dentropy is not None:
        assert stats.entropy is not None
        dz = dz - dentropy[token] * p * (log_p + stats.entropy[token])
    temperature, _ = sets.transform(head, tokens)
    if head.softcap is not None:
        dz = dz * (1.0 - (z * temperature / head.softcap).square())
    return dz * head.logit_scale / temperature


def add_weight_gradient(
    pairs: Pairs, head: Head, tokens: Tokens, dproducts: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Add dW to `weight` [V, H] and db to `bias` [V], from the derivatives of all candidates of the call ([K])."""
    sets = tokens.candidates
    assert sets is not None
    live = (dproducts != 0).nonzero().squeeze(1)
    ids, token = sets.ids[live].to(torch.int64), sets.positions[live]
    if tokens.vocab is not None:
        ids = ids - tokens.vocab.first
    ids, order = ids.sort(stable=True)
    live, token = live[order], token[order]
    unique, counts = ids.unique_consecutive(return_counts=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    factor = dproducts[live]
    if weight is not None:
        everywhere = torch.arange(tokens.ids.shape[0], device=ids.device)
        hidden = head.operand(tokens.hidden_rows(everywhere)).contiguous()
        rows = pairs.sums(hidden, token, factor, offsets)
        weight.index_copy_(0, unique, (weight[unique] + rows).to(weight.dtype))
    if bias is not None:
        bias.index_add_(0, unique, _segments(factor, "sum", offsets).to(bias.dtype))


def _split(work: Work) -> tuple[Tensor, Tensor]:
    """Indices of the rows that have a set, and of those without; a masked one with a set is neither."""
    assert work.tokens.candidates is not None
    has_set = work.tokens.candidates.sizes[work.rows] > 0
    return (has_set & work.tokens.mask[work.rows]).nonzero().squeeze(1), (~has_set).nonzero().squeeze(1)


def _blocks(work: Work, rows: Tensor) -> list[Tensor]:
    """`rows` (indices of those of the work) in blocks of about `_BLOCK_CANDIDATES` candidates."""
    assert work.tokens.candidates is not None
    if len(rows) == 0:
        return []
    before = work.tokens.candidates.sizes[work.rows[rows]].cumsum(0)
    counts = (before // _BLOCK_CANDIDATES).unique_consecutive(return_counts=True)[1]
    return list(rows.split(counts.tolist()))


def _without_sets(work: Work, others: Tensor) -> Work:
    """The work of the rows without a set."""
    given = work.coefficients

    def coefficients(part: slice | Tensor, logp: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return given(others[part], logp, entropy)

    return replace(
        work,
        rows=work.rows[others],
        chunks=even_chunks(len(others), max(work.longest, 1)),
        coefficients=replace(given, batch=given.batch.select(others))
        if isinstance(given, TokenObjective)
        else coefficients,
        known=None if work.known is None else work.known.select(others),
    )


def _chosen_rows(head: Head, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(matrix, rows of it): the weight itself, or a copy of the rows at `ids` in the dtype of the computation."""
    weight = head.weight
    if weight.dtype == head.compute_dtype and (weight.stride(1) == 1 or weight.shape[1] == 1):
        return weight, ids
    unique, index = ids.unique(return_inverse=True)
    return head.operand(weight[unique]).contiguous(), index
