"""Other tokens of a position, its alternatives: their log-probs beside those of the targets, and their gradient.

A row's maximum and log-sum are known from the head product; a log-prob more costs the product of one row of the weight.
With c_y and c_k the derivatives of the loss by the log-probs of the target and of the alternatives, and C their sum,

    dz_v = c_y 1[v = y] + sum_k c_k 1[v = a_k] - C p_v.

-C p_v is what an engine computes anyway. Where v is the target or an alternative the whole dz_v, once for each token of
the vocabulary, takes its place before the derivatives of a row are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from grpo_fused.call.calls import LMHead
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.layout import offsets_of, segments
from grpo_fused.engines.base import Tokens
from grpo_fused.engines.candidates import score_pairs, sets_of
from grpo_fused.engines.pairs import Pairs
from grpo_fused.kernels.row_types import LOWEST_LOG_P, Coefficients, Entries, Statistics

_BLOCKS = {"cpu": 2**13}
_BLOCK = 2**16
"""Alternatives that are worked on at a time, by device or elsewhere (more if a token has more): about 100 bytes of
temporaries each, in a CPU's caches, or enough for a launch."""

Differentiate = Callable[[slice, slice], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
"""Of a block of rows, and where its alternatives are among those of all: their log-probs [m], and dL/dlogp [n] of the
targets, dL/dentropy [n] or None, dL/dlogp [m] of the alternatives."""

_SURE = -0.6
"""nats; a token of more than half of the probability is the row's maximum, whatever the rounding of z is"""


def cut(logps: Tensor, dlogp: Tensor, dentropy: Tensor | None, dlogps: Tensor | None) -> Differentiate:
    """The blocks of what is known of all rows."""

    def at(x: Tensor | None, where: slice) -> Tensor | None:
        return None if x is None else x[where]

    return lambda block, part: (logps[part], dlogp[block], at(dentropy, block), at(dlogps, part))


class Alternatives:
    """The alternatives of all N positions of a call."""

    def __init__(self, head: LMHead, tokens: Tokens, sets: CandidateSets, pairs: Pairs, most: int) -> None:
        """`most`: tokens of the largest candidate set whose z is in `candidate_z`."""
        self.head, self.tokens, self.pairs = head, tokens, pairs
        ids = sets.ids.to(torch.int64)  # those of masked positions may be anything
        ids = ids if tokens.only_active else torch.where(tokens.mask[sets.positions], ids, 0)
        self.sets = CandidateSets(ids, sets.offsets)
        vocab = tokens.vocab
        self._first, self._total = (0, head.vocab_size) if vocab is None else (vocab.first, vocab.total)
        self.candidate_z: Tensor | None = None
        """[K] z of each candidate, for an engine to write; then nothing is multiplied here"""
        if tokens.candidates is not None:
            sizes = tokens.candidates.sizes
            self._in_sets = (sizes > 0) & (sizes <= most)
            self.candidate_z = head.weight.new_zeros(len(tokens.candidates.ids), dtype=head.statistics_dtype)
            self._candidates = tokens.candidates.find(self.sets, self._total)

    def logps(self, rows: Tensor, stats: Statistics) -> Tensor:
        """[m] of the alternatives of `rows`, from the rows' statistics; 0 where masked."""
        parts = [self.logps_of_block(rows[block], stats.select(block)) for block, _ in self._blocks(rows)]
        return torch.cat(parts) if parts else torch.empty_like(stats.logp)

    def logps_of_block(self, rows: Tensor, stats: Statistics) -> Tensor:
        """`logps` of so few rows that their temporaries are small."""
        sets, z = self.sets.select(rows), self.tokens.summed(self._z(rows))
        token = sets.positions
        logp = z - stats.max[token] - stats.log_sum[token]
        logp = torch.where(logp > _SURE, -stats.log_sum[token], logp)  # keeps the digits of a confident token
        is_target = sets.ids - self._first == self.tokens.ids[rows][token]
        return torch.where(self.tokens.mask[rows][token], torch.where(is_target, stats.logp[token], logp), 0.0)

    def coefficients(self, rows: Tensor, stats: Statistics, differentiate: Differentiate) -> Coefficients:
        """What gives the gradient of `rows` ([R] int64, ascending), from their statistics, in blocks of rows."""
        most = int(self.sets.sizes[rows].sum()) + len(rows)  # the targets are entries too
        entries = Entries(rows.new_empty(most), rows.new_empty(most), stats.logp.new_empty(most))
        sums, slopes, used = torch.empty_like(stats.logp), [], 0
        for block, part in self._blocks(rows):
            logps, dlogp, dentropy, dlogps = differentiate(block, part)
            assert dlogps is not None
            sums[block], found = self._of_block(rows[block], stats.select(block), logps, dlogp, dlogps, dentropy)
            found = found._replace(rows=found.rows + block.start)
            for to, values in zip(entries, found, strict=True):
                to[used : used + len(values)] = values
            used += len(found.rows)
            slopes += [] if dentropy is None else [dentropy]
        return Coefficients(stats, sums, torch.cat(slopes) if slopes else None, Entries(*(x[:used] for x in entries)))

    def _of_block(
        self, rows: Tensor, stats: Statistics, logps: Tensor, dlogp: Tensor, dlogps: Tensor, dentropy: Tensor | None
    ) -> tuple[Tensor, Entries]:
        """(the sums of each row's derivatives, its entries)"""
        sets, tokens, head = self.sets.select(rows), self.tokens, self.head
        token = sets.positions
        total = dlogp.to(torch.float64) + segments(dlogps.to(torch.float64), "sum", sets.offsets)
        having = ((sets.sizes > 0) & tokens.mask[rows]).nonzero().squeeze(1)
        row = torch.cat([having, token])
        ids = torch.cat([tokens.ids[rows[having]] + self._first, sets.ids])
        logp = torch.cat([stats.logp[having], logps]).to(torch.float64)
        own = torch.cat([dlogp[having], dlogps]).to(torch.float64)
        # one entry for each token of the vocabulary
        keys, order = (row * self._total + ids).sort(stable=True)
        counts = keys.unique_consecutive(return_counts=True)[1]
        offsets = offsets_of(counts)
        first = order[offsets[:-1]]
        row, ids, logp, own = row[first], ids[first] - self._first, logp[first], segments(own[order], "sum", offsets)

        # own - total p: 1 - p of a confident token must not cancel, nor p of an unlikely one
        sure = (own - total[row]) - total[row] * torch.expm1(logp)
        dz = torch.where(logp > _SURE, sure, own - total[row] * logp.exp())
        if dentropy is not None:
            assert stats.entropy is not None
            low = logp.clamp(min=LOWEST_LOG_P)
            dz = dz - dentropy[row] * low.exp() * (low + stats.entropy[row])
        transform = tokens.transform(head, rows[row])
        if transform.softcap is not None:
            capped = (logp + stats.log_sum[row] + stats.max[row]) * transform.temperature / transform.softcap
            dz = dz * (1.0 - capped.square())
        dz = dz * transform.logit_scale / transform.temperature  # 0 where masked, as what it is made of
        return total.to(dlogp.dtype), Entries(row, ids, dz.to(dlogp.dtype))

    def _z(self, rows: Tensor) -> Tensor:
        """[m] of the alternatives of `rows` that this head has, 0 for others."""
        if self.candidate_z is None and self.tokens.vocab is None:
            return self._products(rows)[1]
        places, dense = self.sets.places(rows), rows
        z = torch.zeros(len(places), dtype=self.head.statistics_dtype, device=rows.device)
        if self.candidate_z is not None:
            in_sets = self._in_sets[rows]
            known = torch.repeat_interleave(in_sets, self.sets.sizes[rows], output_size=len(places))
            z[known] = self.candidate_z[self._candidates[places[known]]]
            dense = rows[~in_sets]
        if len(dense):
            at, found = self._products(dense)
            z[torch.searchsorted(places, at)] = found
        return z

    def _products(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(places, z) of the alternatives of `rows` that this head has."""
        sets = sets_of(self.head, self.tokens, self.sets, rows)
        return sets.places, score_pairs(self.pairs, self.head, self.tokens, sets, False).z

    def _blocks(self, rows: Tensor) -> Iterator[tuple[slice, slice]]:
        """`rows` in blocks of about as many alternatives, and where these are among those of `rows`."""
        ends = self.sets.sizes[rows].cumsum(0)
        size = _BLOCKS.get(rows.device.type, _BLOCK)
        last = ((ends - 1).clamp(min=0) // size).unique_consecutive(return_counts=True)[1].cumsum(0)
        begin, first = 0, 0
        for end, stop in torch.stack([last, ends[last - 1]], dim=1).tolist():
            yield slice(begin, end), slice(first, stop)
            begin, first = end, stop
