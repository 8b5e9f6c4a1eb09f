"""How a loss call runs on an engine: scores and gradients in as few head products as the objective allows.

- A token-level objective knows a token's coefficient from the token alone: score and gradient in one pass.
- A sequence-level one needs whole sequences: one pass too if chunks can end at sequence boundaries, else all rows are
  scored first.
- `top_entropy_quantile` needs the whole batch: score first.

Rows are moved together once (`compact`): those that may have a gradient, then those that are only scored. That is the
call's one device synchronisation; a second one follows where scoring comes first, since clipped rows are then dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.batch import LossInputs, TokenBatch
from grpo_fused.config import GRPOLossConfig
from grpo_fused.engines.base import Coefficients, Engine, Gradients, Needs, TokenObjective, Tokens
from grpo_fused.engines.head import Head
from grpo_fused.engines.logits import logits_gradient, score_logits
from grpo_fused.engines.rows import Statistics
from grpo_fused.layout import Layout
from grpo_fused.metrics import compute_metrics
from grpo_fused.objective import evaluate
from grpo_fused.parallel import TokenParallel


class Execution(NamedTuple):
    """How a call shall run; nothing here changes its result."""

    max_scratch_bytes: int | None
    compact: bool
    with_metrics: bool
    ranks: TokenParallel | None = None
    """where other ranks have other tokens of the batch"""


class LossResult(NamedTuple):
    """Everything a loss call makes. Tensors have the statistics dtype unless said otherwise."""

    loss: Tensor
    logps: Tensor
    """[N], 0 where masked"""
    entropies: Tensor | None
    """[N], 0 where masked; None where neither the loss nor the metrics read them"""
    metrics: dict[str, Tensor]
    gradients: Gradients


class _Rows(NamedTuple):
    """Which rows of a call do what: [.] int64, ascending."""

    gradient: Tensor
    scored_only: Tensor
    sequence_lengths: list[int] | None
    """rows of each sequence among `gradient`, where known without another synchronisation"""


def run_loss(
    engine: Engine,
    head: Head,
    tokens: Tokens,
    inputs: LossInputs,
    layout: Layout,
    config: GRPOLossConfig,
    needs: Needs,
    how: Execution,
) -> LossResult:
    """Loss, scores, metrics and gradients of one call."""
    batch, mine = TokenBatch.of_all_ranks(inputs, layout, config, head.statistics_dtype, how.ranks)
    matters = batch.may_have_gradient(config)  # to the loss, too: the others add exactly 0 to it
    own = batch
    if mine is not None:
        own, matters = batch.select(mine), matters[mine]
    call = _LossCall(engine, head, tokens, batch, mine, config, needs, how)
    rows = _choose_rows(own, matters, layout, config, needs, how)
    call.score(rows.scored_only)
    chunk_rows = _chunk_rows(engine, head, tokens, how)
    split = how.ranks is not None and how.ranks.split
    chunks = _one_pass_chunks(rows, config, chunk_rows, split=split)
    if how.ranks is not None and config.needs_sequence and not how.ranks.all_of(chunks is not None, own.mask.device):
        chunks = None  # where the sequences of one rank do not fit a chunk, all score first
    if not needs.any():
        call.score(rows.gradient)
        gradients = Gradients(None, None, None, 0)
    elif chunks is not None:
        gradients = call.one_pass(rows.gradient, chunks)
    else:
        call.score(rows.gradient)
        gradients = call.gradient_of_scored(rows.gradient, chunk_rows)

    logp, entropy = call.of_all_ranks()
    result = evaluate(logp, entropy, batch, config)
    worked = gradients.tokens if how.ranks is None else how.ranks.sum(gradients.tokens, logp.device)
    metrics = {"gradient_tokens": torch.full_like(batch.total, worked)}
    metrics |= compute_metrics(result, entropy, batch, config, complete=how.with_metrics)
    return LossResult(result.loss, call.scores.logp, call.scores.entropy, metrics, gradients)


class _LossCall:
    """The state of a call: scores of all N positions as they become known."""

    def __init__(
        self,
        engine: Engine,
        head: Head,
        tokens: Tokens,
        batch: TokenBatch,
        mine: Tensor | None,
        config: GRPOLossConfig,
        needs: Needs,
        how: Execution,
    ) -> None:
        self.engine, self.head, self.tokens = engine, head, tokens
        self.own = batch if mine is None else batch.select(mine)  # the positions of this rank among those of all
        self.mine = mine
        self.batch, self.config, self.needs, self.how = batch, config, needs, how
        self.with_entropy = how.with_metrics or config.needs_entropy
        self.scores = _no_scores(tokens, head.statistics_dtype, self.with_entropy)
        # looking at a chunk's coefficients costs a synchronisation, except on the CPU
        self.skip_zeros = how.compact and tokens.ids.device.type == "cpu"

    def score(self, rows: Tensor) -> None:
        """Score `rows`: one product."""
        if rows.shape[0]:
            scratch = self.how.max_scratch_bytes
            scores = self.engine.score(
                self.head, self.tokens, rows, with_entropy=self.with_entropy, max_scratch_bytes=scratch
            )
            self._place(rows, self.tokens.merged(rows, scores))

    def of_all_ranks(self) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of the whole batch."""
        logp, entropy = self.scores.logp, self.scores.entropy
        if self.how.ranks is None:
            return logp, entropy
        together = self.how.ranks.gather(logp.unsqueeze(1) if entropy is None else torch.stack([logp, entropy], dim=1))
        return together[:, 0], None if entropy is None else together[:, 1]

    def one_pass(self, rows: Tensor, chunks: list[slice]) -> Gradients:
        """Scores and gradients of `rows` together: three products."""
        coefficients = TokenObjective(self.own.select(rows), self.config)
        scores, gradients = self._fused(rows, chunks, coefficients, None, self.with_entropy)
        self._place(rows, scores)
        return gradients

    def gradient_of_scored(self, rows: Tensor, chunk_rows: int) -> Gradients:
        """Gradients once all is scored: three more products, for the rows that turned out to have one."""
        logp, entropy = self.of_all_ranks()
        result = evaluate(logp, entropy, self.batch, self.config)
        dlogp, dentropy = result.dlogp, result.dentropy
        if self.mine is not None:
            dlogp, dentropy = dlogp[self.mine], None if dentropy is None else dentropy[self.mine]
        if self.how.compact:
            rows = rows[(_has_coefficient(dlogp, dentropy)[rows]).nonzero().squeeze(1)]

        def coefficients(part: slice, _logp: Tensor, _entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
            where = rows[part]
            return dlogp[where], None if dentropy is None else dentropy[where]

        chunks = even_chunks(rows.shape[0], chunk_rows)
        return self._fused(rows, chunks, coefficients, self.scores.select(rows), dentropy is not None)[1]

    def _fused(
        self,
        rows: Tensor,
        chunks: list[slice],
        coefficients: Coefficients,
        known: Statistics | None,
        with_entropy: bool,
    ) -> tuple[Statistics, Gradients]:
        return self.engine.fused(
            self.head,
            self.tokens,
            rows,
            chunks,
            coefficients,
            self.needs,
            known=known,
            with_entropy=with_entropy,
            skip_zeros=self.skip_zeros,
            max_scratch_bytes=self.how.max_scratch_bytes,
        )

    def _place(self, rows: Tensor, scores: Statistics) -> None:
        _place(scores, rows, self.tokens.mask, self.scores)


def run_logprobs(engine: Engine, head: Head, tokens: Tokens, *, with_entropy: bool, how: Execution) -> Statistics:
    """Scores of all N positions, 0 where masked."""
    out = _no_scores(tokens, head.statistics_dtype, with_entropy)
    if how.compact:
        rows = tokens.mask.nonzero().squeeze(1)
    else:
        rows = torch.arange(out.logp.shape[0], device=out.logp.device)
    if rows.shape[0]:
        scratch = how.max_scratch_bytes
        scores = engine.score(head, tokens, rows, with_entropy=with_entropy, max_scratch_bytes=scratch)
        _place(tokens.merged(rows, scores), rows, tokens.mask, out)
    return out


def run_logprobs_gradient(
    engine: Engine,
    head: Head,
    tokens: Tokens,
    scores: Statistics | None,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    needs: Needs,
    how: Execution,
) -> Gradients:
    """Gradients of all N positions from the coefficients ([N]) on their log-probs and entropies: three products.

    `scores` ([N]) are what `run_logprobs` returned, if at hand.
    """
    dlogp, dentropy = _clean_coefficients(tokens, dlogp, dentropy, head.statistics_dtype)
    if how.compact:
        rows = _has_coefficient(dlogp, dentropy).nonzero().squeeze(1)
    else:
        rows = torch.arange(dlogp.shape[0], device=dlogp.device)

    def coefficients(part: slice, _logp: Tensor, _entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return dlogp[rows[part]], None if dentropy is None else dentropy[rows[part]]

    return engine.fused(
        head,
        tokens,
        rows,
        even_chunks(rows.shape[0], _chunk_rows(engine, head, tokens, how)),
        coefficients,
        needs,
        known=None if scores is None else scores.select(rows),
        with_entropy=dentropy is not None,
        skip_zeros=False,
        max_scratch_bytes=how.max_scratch_bytes,
    )[1]


def run_scores_of_logits(tokens: Tokens, *, with_entropy: bool) -> Statistics:
    """Scores of all N positions from logits, 0 where masked."""
    out = _no_scores(tokens, torch.promote_types(tokens.hidden_states.dtype, torch.float32), with_entropy)
    rows = tokens.mask.nonzero().squeeze(1)
    if rows.shape[0]:
        _place(score_logits(tokens, rows, with_entropy=with_entropy), rows, tokens.mask, out)
    return out


def run_logits_gradient(tokens: Tokens, dlogp: Tensor | None, dentropy: Tensor | None) -> Tensor:
    """dlogits [N, V] from the coefficients ([N]) on scores."""
    dtype = torch.promote_types(tokens.hidden_states.dtype, torch.float32)
    dlogp, dentropy = _clean_coefficients(tokens, dlogp, dentropy, dtype)
    rows = _has_coefficient(dlogp, dentropy).nonzero().squeeze(1)
    return logits_gradient(tokens, rows, dlogp[rows], None if dentropy is None else dentropy[rows])


def _clean_coefficients(
    tokens: Tokens, dlogp: Tensor | None, dentropy: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Coefficients [N] in `dtype`, 0 where masked whatever came."""
    zero = torch.zeros(tokens.ids.shape[0], dtype=dtype, device=tokens.ids.device)
    dlogp = zero if dlogp is None else torch.where(tokens.mask, dlogp.to(dtype), zero)
    return dlogp, None if dentropy is None else torch.where(tokens.mask, dentropy.to(dtype), zero)


def _chunk_rows(engine: Engine, head: Head, tokens: Tokens, how: Execution) -> int:
    rows = engine.chunk_rows(head, how.max_scratch_bytes)
    return rows if tokens.vocab is None else tokens.vocab.smallest(rows)


def even_chunks(count: int, chunk_rows: int) -> list[slice]:
    """`count` rows in chunks of `chunk_rows`."""
    return [slice(start, min(start + chunk_rows, count)) for start in range(0, count, chunk_rows)]


def sequence_chunks(lengths: list[int], chunk_rows: int) -> list[slice] | None:
    """Chunks of whole sequences, as many in each as fit `chunk_rows`; None where a sequence does not fit."""
    if max(lengths, default=0) > chunk_rows:
        return None
    chunks, start, stop = [], 0, 0
    for length in lengths:
        if stop + length - start > chunk_rows:
            chunks.append(slice(start, stop))
            start = stop
        stop += length
    return [*chunks, slice(start, stop)] if stop > start else chunks


def _one_pass_chunks(rows: _Rows, config: GRPOLossConfig, chunk_rows: int, *, split: bool) -> list[slice] | None:
    """Chunks within which every coefficient can be known, or None where scoring must come first."""
    if config.needs_batch or (split and config.needs_sequence):
        return None
    if not config.needs_sequence:
        return even_chunks(rows.gradient.shape[0], chunk_rows)
    return None if rows.sequence_lengths is None else sequence_chunks(rows.sequence_lengths, chunk_rows)


def _choose_rows(
    batch: TokenBatch, matters: Tensor, layout: Layout, config: GRPOLossConfig, needs: Needs, how: Execution
) -> _Rows:
    device = batch.mask.device
    if not how.compact:
        everything = torch.arange(layout.num_tokens, device=device)
        lengths = [layout.shape[1]] * layout.num_sequences if layout.cu_seqlens is None else None
        return _Rows(everything, everything[:0], lengths)

    # the entropy quantile is taken over all active tokens, so all of them are scored
    scored = batch.mask if how.with_metrics or config.needs_batch else matters
    gradient = matters if needs.any() else torch.zeros_like(matters)
    scored_only = scored & ~gradient
    order = torch.where(gradient, 0, torch.where(scored_only, 1, 2)).sort(stable=True).indices
    counts = torch.stack([gradient.sum(), scored_only.sum()])
    if config.needs_sequence:
        counts = torch.cat([counts, batch.sequence_sum(gradient.to(torch.float32)).to(torch.int64)])
    first, second, *lengths_of = counts.tolist()  # the synchronisation of the call
    return _Rows(order[:first], order[first : first + second], lengths_of if config.needs_sequence else None)


def _no_scores(tokens: Tokens, dtype: torch.dtype, with_entropy: bool) -> Statistics:
    """Scores of all N positions before any is known: 0."""
    # a tensor each: an operator's results must not share memory
    zeros = [torch.zeros(tokens.ids.shape[0], dtype=dtype, device=tokens.ids.device) for _ in range(4)]
    return Statistics(zeros[0], zeros[1], zeros[2], zeros[3] if with_entropy else None)


def _place(scores: Statistics, rows: Tensor, mask: Tensor, out: Statistics) -> None:
    """Write the scores of `rows` into those of all N positions, 0 where masked."""
    active = mask[rows]
    for to, value in zip(out, scores, strict=True):
        if to is not None and value is not None:
            to.index_copy_(0, rows, torch.where(active, value, 0.0))


def _has_coefficient(dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
    return dlogp != 0 if dentropy is None else (dlogp != 0) | (dentropy != 0)
