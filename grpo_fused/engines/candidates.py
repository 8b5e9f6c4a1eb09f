"""Tokens that have a candidate set: products with the rows of their set alone, beside any engine of the whole head.

dH sums rows of the weight over a token's set; dW sums hidden states over a candidate's tokens, by position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_fused.call.calls import LMHead
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.layout import offsets_of, segments
from grpo_fused.engines.base import MANY, Cost, Engine, Gradients, TokenObjective, Tokens, Work, all_rows, even_chunks
from grpo_fused.engines.pairs import Pairs, Scores, Sets
from grpo_fused.engines.products import dhidden_dtype
from grpo_fused.kernels.row_types import Coefficients, Entries, Statistics

_BLOCK_CANDIDATES = 2**18
"""Candidates that are worked on at a time (more if a token has more): about 100 bytes of temporaries each."""
_BLOCK_COPIED = 2**13
"""Candidates at a time where the head has a base: their rows are copied, H numbers each."""


@dataclass
class CandidateEngine:
    """The engine of a call with candidate sets. One for each call."""

    whole: Engine
    """works on tokens whose set is empty, or too large"""
    sets: CandidateSets
    """of all positions of the call"""
    pairs: Pairs
    any_whole: bool
    """whether there may be such tokens; if not, `add_weight_gradient` makes dW from the candidates' derivatives"""
    most: int
    """tokens of a set that is not too large"""

    def chunk_rows(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> int:
        """See `Engine.chunk_rows`."""
        return self.whole.chunk_rows(head, num_tokens, max_scratch_bytes) if self.any_whole else MANY

    def cost(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> Cost:
        """See `Engine.cost`: that of the whole head."""
        return self.whole.cost(head, num_tokens, max_scratch_bytes)

    def score(self, work: Work) -> Statistics:
        """See `Engine.score`."""
        sparse, others = self._split(work)
        out = Statistics.empty(len(work.rows), work.rows.device, work.with_entropy, work.head.statistics_dtype).zero_()
        for block in self._blocks(work, sparse):
            out.place_(block, self._score(work, block)[1].statistics)
        if len(others):
            out.place_(others, self.whole.score(replace(work, rows=work.rows[others])))
        return out

    def fused(self, work: Work) -> tuple[Statistics, Gradients]:
        """See `Engine.fused`; coefficients are asked for by index, so they must not need more than their token."""
        head, tokens, needs = work.head, work.tokens, work.needs
        sparse, others = self._split(work)
        out = Statistics.empty(len(work.rows), work.rows.device, work.with_entropy, head.statistics_dtype).zero_()
        gradients = Gradients(None, None, None, 0)
        if self.any_whole:
            statistics, gradients = self.whole.fused(_of_whole_head(work, others))
            out.place_(others, statistics)

        hidden, worked = gradients.hidden, gradients.tokens
        if needs.need_hidden and hidden is None:
            shape = (tokens.ids.shape[0], head.width)
            hidden = torch.zeros(shape, dtype=dhidden_dtype(head), device=out.logp.device)
        dproducts = out.logp.new_zeros(len(self.sets.ids))
        for block in self._blocks(work, sparse):
            sets, (stats, z) = self._score(work, block)
            stats = tokens.merged(sets.rows, stats) if work.known is None else work.known.select(block)
            out.place_(block, stats)
            coefficients = work.coefficients(block, stats)
            derivatives = self.pairs.derivatives(sets, z, stats, coefficients.dlogp, coefficients.dentropy)
            if coefficients.entries is not None:
                entries = tokens.own_entries(coefficients.entries, head.vocab_size)
                _put(entries, sets, head.vocab_size, derivatives)
            dproducts.index_copy_(0, sets.places, derivatives)
            worked += int(coefficients.any_of_row().sum())
            if hidden is not None:
                chosen = _chosen_rows(head, sets.ids)
                if tokens.vocab is None:
                    self.pairs.add_sums(hidden, sets.rows, *chosen, derivatives, sets.offsets)
                else:
                    dhidden = derivatives.new_zeros((len(sets.rows), hidden.shape[1]))
                    self.pairs.add_sums(dhidden, all_rows(dhidden), *chosen, derivatives, sets.offsets)
                    hidden.index_copy_(0, sets.rows, tokens.summed(dhidden).to(hidden.dtype))
        if self.any_whole and (needs.need_weight or needs.need_bias):
            add_weight_gradient(self.pairs, head, tokens, dproducts, gradients.weight, gradients.bias)
        return out, gradients._replace(hidden=hidden, tokens=worked, candidates=dproducts)

    def _split(self, work: Work) -> tuple[Tensor, Tensor]:
        """Indices of the active rows that need their set only, and of those of the whole head."""
        sizes, active = self.sets.sizes[work.rows], work.tokens.mask[work.rows]
        small = (sizes > 0) & (sizes <= self.most)
        return (small & active).nonzero().squeeze(1), (~small & active).nonzero().squeeze(1)

    def _blocks(self, work: Work, rows: Tensor) -> tuple[Tensor, ...]:
        """`rows` (indices of those of the work) in blocks of about `_BLOCK_CANDIDATES` candidates."""
        if len(rows) == 0:
            return ()
        before = self.sets.sizes[work.rows[rows]].cumsum(0)
        size = _BLOCK_CANDIDATES if work.head.base is None else _BLOCK_COPIED
        counts = (before // size).unique_consecutive(return_counts=True)[1]
        return rows.split(counts.tolist())

    def _score(self, work: Work, block: Tensor) -> tuple[Sets, Scores]:
        sets = sets_of(work.head, work.tokens, self.sets, work.rows[block])
        scores = score_pairs(self.pairs, work.head, work.tokens, sets, work.with_entropy)
        if work.candidate_z is not None:
            work.candidate_z.index_copy_(0, sets.places, scores.z)
        return sets, scores


def score_pairs(pairs: Pairs, head: LMHead, tokens: Tokens, sets: Sets, with_entropy: bool) -> Scores:
    """Products of the tokens of some sets with the weight's rows in them."""
    matrix, index = _chosen_rows(head, sets.ids)
    hidden = head.operand(tokens.hidden_rows(sets.rows)).to(matrix.dtype).contiguous()
    return pairs.scores(hidden, matrix, index, sets, with_entropy)


def _put(entries: Entries, sets: Sets, vocab_size: int, derivatives: Tensor) -> None:
    """Write entries into the derivatives of candidates."""
    keys, order = (sets.token * vocab_size + sets.ids).sort()
    derivatives[order[torch.searchsorted(keys, entries.rows * vocab_size + entries.ids)]] = entries.values


def sets_of(head: LMHead, tokens: Tokens, sets: CandidateSets, rows: Tensor) -> Sets:
    """Those of N sets whose tokens are at `rows` [R], which ascend."""
    if len(rows) == len(sets):
        places = all_rows(sets.ids)
    else:
        sets, places = sets.select(rows), sets.places(rows)
    if tokens.vocab is not None:
        sets, is_local = sets.within(tokens.vocab.first, head.vocab_size)
        places = places[is_local]
    transform = tokens.transform(head, rows)
    if isinstance(transform.temperature, Tensor):
        transform = transform._replace(temperature=transform.temperature.to(head.statistics_dtype))
    ids, offsets = sets.ids.to(torch.int64).contiguous(), sets.offsets.contiguous()  # as kernels read them
    return Sets(rows, ids, places, offsets, tokens.ids[rows], transform)


def add_weight_gradient(
    pairs: Pairs, head: LMHead, tokens: Tokens, dproducts: Tensor, weight: Tensor | None, bias: Tensor | None
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
    offsets = offsets_of(counts)
    factor = dproducts[live]
    if weight is not None:
        for states in head.weight_states(head.operand(tokens.hidden_rows(all_rows(tokens.ids)))):
            pairs.add_sums(weight, unique, states.contiguous(), token, factor, offsets)
    if bias is not None:
        bias.index_add_(0, unique, segments(factor, "sum", offsets).to(bias.dtype))


def _of_whole_head(work: Work, others: Tensor) -> Work:
    """The work of the rows of the whole head."""
    coefficients_of_work = work.coefficients

    def coefficients(part: slice | Tensor, stats: Statistics) -> Coefficients:
        return coefficients_of_work(others[part], stats)

    return replace(
        work,
        rows=work.rows[others],
        chunks=even_chunks(len(others), max(work.longest, 1)),
        coefficients=replace(coefficients_of_work, rows=coefficients_of_work.rows[others])
        if isinstance(coefficients_of_work, TokenObjective)
        else coefficients,
        known=None if work.known is None else work.known.select(others),
    )


def _chosen_rows(head: LMHead, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(matrix, rows of it): the weight itself, or a copy of the rows at `ids` in the dtype of the computation.

    Rows with a scale are fp32 (fp64 in fp64).
    """
    weight = head.weight
    if head.base is None and weight.dtype == head.compute_dtype and (weight.stride(1) == 1 or weight.shape[1] == 1):
        return weight, ids
    unique, index = ids.unique(return_inverse=True)
    rows = head.rows(unique)
    return (rows if head.row_scale is None else rows * head.row_scale[unique].unsqueeze(1)).contiguous(), index
