"""How a call runs on an engine: scores and gradients with as few head products as the objective allows.

- Token-level objective: the coefficient of a token depends on that token only. Score and gradient in one pass.
- Sequence-level objective: it depends on the whole sequence. One pass too if chunks can end at sequence boundaries;
  otherwise all rows are scored first.
- `top_entropy_quantile`: it depends on the whole batch. Score first.
- If only hidden states have a gradient, the pass that scores first makes dlogp/dh, which coefficients multiply later.

Rows are gathered once (`compact`): first those that may have a gradient, then those that are only scored. Their numbers
are the only thing that a call waits for on a device, which has work then if the engine can start without them; there is
a second wait if scoring comes first: clipped rows are then removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_fused.call import calls
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.engines.alternatives import Alternatives, cut
from grpo_fused.engines.base import (
    Engine,
    Gradients,
    Started,
    StartingEngine,
    TokenObjective,
    Tokens,
    Work,
    all_rows,
    even_chunks,
)
from grpo_fused.engines.divergence import DivergenceEngine, check_finite
from grpo_fused.engines.products import rounded_bias
from grpo_fused.kernels.row_types import Coefficients, Statistics
from grpo_fused.objective.batch import LOWEST_LOGP, TokenBatch
from grpo_fused.objective.custom import Evaluation, Scope, check_no_other_gradient
from grpo_fused.objective.formulas import evaluate
from grpo_fused.objective.metrics import compute_metrics
from grpo_fused.ranks.parallel import TokenParallel


class LossParts(NamedTuple):
    """All results of a loss call. Tensors have the statistics dtype unless stated otherwise."""

    loss: Tensor
    logps: Tensor
    """[N], 0 where masked; divergences if the loss is one"""
    entropies: Tensor | None
    """[N], 0 where masked; None if neither the loss nor the metrics use them"""
    gradients: Gradients
    metrics: list[Tensor]
    """0-d each, in the order of `loss_metric_names`"""


def run_loss(engine: Engine, tokens: Tokens, call: calls.LossCall, ranks: TokenParallel | None = None) -> LossParts:
    """Loss, scores, metrics and gradients of one call; `ranks` have other tokens of the batch."""
    head, run, needs, config = rounded_bias(call.lm_head), call.run, call.needs, GRPOLossConfig.decode(call.config)
    batch = TokenBatch.build(call.inputs, calls.layout_of(call), config, head.statistics_dtype, ranks)
    mine = None if ranks is None else ranks.mine
    matters = batch.may_have_gradient(config)  # the others add exactly 0 to the loss too
    local_batch = batch  # the positions of this rank among those of all
    if mine is not None:
        local_batch, matters = batch.select(mine), matters[mine]
    with_entropy = call.with_metrics or config.needs_entropy
    scores = _no_scores(tokens, head.statistics_dtype, with_entropy)
    divergence = torch.zeros_like(scores.logp) if call.exact else None
    if divergence is not None:
        engine = DivergenceEngine(call.ref_hidden_states, call.ref_lm_head, divergence, config.beta * batch.weight)
    # reading the coefficients of a chunk synchronises, except on the CPU
    skip_zeros = run.compact and tokens.ids.device.type == "cpu"
    work = Work(
        head, tokens, tokens.ids[:0], with_entropy, run.max_scratch_bytes, needs=needs, skip_zeros=skip_zeros,
        only_logps=config.entropy_coef == 0,
    )  # fmt: skip
    chunk_rows = _chunk_rows(engine, work)
    has_whole_sequences = not (ranks is not None and ranks.split) and tokens.candidates is None
    in_one_pass = needs.any() and (config.token_alone or (has_whole_sequences and not config.needs_batch))
    started = None
    lengths: list[int] | None = None  # rows with a gradient of each sequence, where the loss needs whole sequences
    if run.compact:
        order, counts = _in_order(local_batch, tokens.undecided, matters, config, call)
        read = _copied(counts)
        if in_one_pass and isinstance(engine, StartingEngine):
            started = engine.start(replace(work, rows=order), counts[1])
        first, last, *rest = read()  # the synchronisation of the call
        lengths = rest if config.needs_sequence else None
        rows, scored_only = order[:first], order[first:last]
    else:
        rows = all_rows(tokens.ids)
        scored_only, layout = rows[:0], calls.layout_of(call)
        if layout.cu_seqlens is None:
            lengths = [layout.shape[1]] * layout.num_sequences
    work = replace(work, rows=rows)
    after = None if started is None else Started(started.stats.select(slice(len(rows), None)))
    _score(engine, replace(work, rows=scored_only, started=after), scores)
    chunks = None  # within which every coefficient can be computed; else all rows are scored first
    if config.token_alone:
        chunks = even_chunks(len(rows), chunk_rows)
    elif not config.needs_batch and has_whole_sequences and lengths is not None:
        chunks = sequence_chunks(lengths, chunk_rows)
    gradients, made, result = Gradients(None, None, None, 0), None, None
    if needs.any() and chunks is not None:
        # the only chunk's coefficients are those of the call: then the objective is evaluated once
        once = len(chunks) == 1 and ranks is None and tokens.candidates is None and divergence is None
        place = partial(_place, work=work, out=scores) if once else None
        objective = TokenObjective(local_batch, rows, config, place)
        statistics, gradients = engine.fused(replace(work, chunks=chunks, coefficients=objective, started=started))
        result = objective.result
        if result is None:
            _place(statistics, work, scores)
    else:
        # of a quantile's tokens few have a coefficient: to compute these again is less
        made = _score_first(engine, work, scores, early=not config.needs_batch and divergence is None)

    logp, entropy = _of_all_ranks(scores, ranks)
    if divergence is not None:
        batch = replace(batch, kl=torch.where(batch.mask, divergence, 0.0))
        check_finite(batch.kl, "exact KL")  # type: ignore[arg-type]
    result = result or evaluate(logp, entropy, batch, config)
    if needs.any() and chunks is None:
        dlogp, dentropy = result.derivatives()
        if mine is not None:
            dlogp, dentropy = dlogp[mine], None if dentropy is None else dentropy[mine]
        found = Coefficients(scores, dlogp, dentropy).select(work.rows)
        compact = run.compact and not call.exact  # all rows of `work` have a gradient of the KL
        gradients = _gradient_of_scored(engine, work, scores, made, found, compact)

    worked = torch.full_like(batch.total, gradients.tokens)
    worked = worked if ranks is None else ranks.add(worked)
    metrics = compute_metrics(result, entropy, batch, config, complete=call.with_metrics)
    return LossParts(result.loss, scores.logp, scores.entropy, gradients, [worked, *metrics])


def run_objective(
    engine: Engine, tokens: Tokens, call: calls.CustomCall, alternatives: Alternatives | None
) -> LossParts:
    """Loss (0-d fp64), scores and gradients of a custom objective."""
    head, run, needs = rounded_bias(call.lm_head), call.run, call.needs
    rows = tokens.mask.nonzero().squeeze(1)  # the objective sees active tokens only
    evaluation = evaluation_of(call, rows)
    scores = _no_scores(tokens, head.statistics_dtype, call.with_entropy)
    skip_zeros = run.compact and tokens.ids.device.type == "cpu"
    work = Work(
        head, tokens, rows, call.with_entropy, run.max_scratch_bytes, needs=needs, skip_zeros=skip_zeros,
        candidate_z=None if alternatives is None else alternatives.candidate_z,
        only_logps=not call.with_entropy and alternatives is None,
    )  # fmt: skip

    def coefficients(part: slice | Tensor, stats: Statistics) -> Coefficients:
        if alternatives is None:
            found = evaluation(part, stats.logp, stats.entropy)
            return Coefficients(stats, found.logp, found.entropy)
        where, positions = rows[part], torch.arange(len(rows), device=rows.device)[part]

        def of_block(block: slice, _: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
            own = stats.select(block)
            logps = alternatives.logps_of_block(where[block], own)
            return logps, *evaluation(positions[block], own.logp, own.entropy, logps)

        if call.scope == "token":
            return alternatives.coefficients(where, stats, of_block)
        logps = alternatives.logps(where, stats)
        known = cut(logps, *evaluation(part, stats.logp, stats.entropy, logps))
        return alternatives.coefficients(where, stats, known)

    chunks, chunk_rows = None, _chunk_rows(engine, work)
    if call.scope == "token":
        chunks = even_chunks(len(rows), chunk_rows)
    elif call.scope == "sequence" and tokens.candidates is None:
        layout = evaluation.layout
        counts = torch.bincount(layout.sequence_ids(rows.device)[rows], minlength=layout.num_sequences)
        chunks = sequence_chunks(counts.tolist(), chunk_rows)
    if needs.any() and chunks is not None:
        statistics, gradients = engine.fused(replace(work, chunks=chunks, coefficients=coefficients))
        _place(statistics, work, scores)
        return LossParts(evaluation.loss, scores.logp, scores.entropy, gradients, [])
    made = _score_first(engine, work, scores)
    known, everything = scores.select(rows), slice(0, len(rows))
    if not needs.any():
        others = None if alternatives is None else alternatives.logps(rows, known).clamp(min=LOWEST_LOGP)
        with torch.set_grad_enabled(call.records):
            value = evaluation.value(everything, known.logp.clamp(min=LOWEST_LOGP), known.entropy, others)
        check_no_other_gradient(value, ())
        nothing = Gradients(None, None, None, 0)
        return LossParts(value.to(torch.float64).sum(), scores.logp, scores.entropy, nothing, [])
    found = coefficients(everything, known)
    gradients = _gradient_of_scored(engine, work, scores, made, found, run.compact)
    return LossParts(evaluation.loss, scores.logp, scores.entropy, gradients, [])


def evaluation_of(call: calls.CustomCall, rows: Tensor) -> Evaluation:
    """The objective of a call, on its active tokens at `rows`."""
    layout, alternatives, scope = calls.layout_of(call), call.alternatives.sets, cast(Scope, call.scope)
    return Evaluation(
        call.objective, call.inputs, layout, rows, scope, call.with_entropy, alternatives, call.alternative_inputs
    )


def run_divergence(call: calls.DivergenceCall, tokens: Tokens) -> LossParts:
    """The weighted sum of divergences: a product for each head, two for the gradients."""
    head, run = rounded_bias(call.lm_head), call.run
    weights = torch.where(tokens.mask, call.weights.reshape(-1), 0.0).to(head.statistics_dtype)
    top_k = None if call.other_ids is None or call.other_logprobs is None else (call.other_ids, call.other_logprobs)
    other, divergence = (call.other_hidden_states, call.other_lm_head), torch.zeros_like(weights)
    engine = DivergenceEngine(*other, divergence, weights, kind=call.kind, beta=call.beta, top_k=top_k)
    rows = tokens.mask.nonzero().squeeze(1) if run.compact else all_rows(tokens.ids)
    work = Work(head, tokens, rows, True, run.max_scratch_bytes, needs=call.needs)
    scores = _no_scores(tokens, head.statistics_dtype, with_entropy=True)
    statistics, gradients = engine.fused(replace(work, chunks=even_chunks(len(rows), _chunk_rows(engine, work))))
    _place(statistics, work, scores)
    divergence = torch.where(tokens.mask, divergence, 0.0)
    check_finite(divergence, call.kind)
    loss = (weights * divergence).sum(dtype=torch.float64).to(weights.dtype)
    return LossParts(loss, divergence, scores.entropy, gradients, [])


def run_logprobs(
    engine: Engine, tokens: Tokens, call: calls.LogprobsCall, alternatives: Alternatives | None = None
) -> tuple[Statistics, Tensor, Tensor | None]:
    """Scores of all N positions, log-probs of all alternatives and, if requested, dlogp/dh [N, H]; 0 where masked."""
    head, run = rounded_bias(call.lm_head), call.run
    scores = _no_scores(tokens, head.statistics_dtype, call.with_entropy)
    candidate_z = None if alternatives is None else alternatives.candidate_z
    work = Work(
        head, tokens, tokens.ids[:0], call.with_entropy, run.max_scratch_bytes, candidate_z=candidate_z,
        needs=calls.HIDDEN_ALONE if call.with_dhidden else calls.NO_GRADIENT, only_logps=call.with_dhidden,
    )  # fmt: skip
    started = None
    if not run.compact:
        rows = all_rows(tokens.ids)
    elif isinstance(engine, StartingEngine):
        order = tokens.undecided.to(torch.int8).sort(stable=True, descending=True).indices
        count = tokens.undecided.sum()
        read = _copied(count)
        started = engine.start(replace(work, rows=order), count)
        rows = order[: read()]
    else:
        rows = tokens.undecided.nonzero().squeeze(1)
    made = _score_first(engine, replace(work, rows=rows, started=started), scores)
    if alternatives is None:
        return scores, scores.logp.new_empty(0), None if made is None else made.hidden
    logps = scores.logp.new_zeros(len(alternatives.sets.ids))
    logps.index_copy_(0, alternatives.sets.places(rows), alternatives.logps(rows, scores.select(rows)))
    return scores, logps, None


def run_logprobs_gradient(
    engine: Engine, tokens: Tokens, call: calls.LogprobsGradientCall, alternatives: Alternatives | None
) -> Gradients:
    """Gradients of all N positions from the coefficients on their log-probs and entropies: three products."""
    head, run, known, scores = rounded_bias(call.forward.lm_head), call.forward.run, call.scores, None
    if known is not None:
        entropy = known.entropies.reshape(-1) if call.forward.with_entropy else None
        scores = Statistics(known.maxima, known.log_sums, known.logps.reshape(-1), entropy)
    dlogp, dentropy = clean_coefficients(tokens.undecided, call.dlogps, call.dentropies, head.statistics_dtype)
    rows = all_rows(tokens.ids)
    work = Work(head, tokens, rows, dentropy is not None, run.max_scratch_bytes, needs=call.needs)
    if alternatives is None or call.dalternative_logps is None:
        found = Coefficients(scores or _no_scores(tokens, dlogp.dtype, dentropy is not None), dlogp, dentropy)
    else:
        assert known is not None  # only calls without alternatives come without scores
        assert scores is not None
        active = tokens.undecided[alternatives.sets.positions]
        dlogps, _ = clean_coefficients(active, call.dalternative_logps, None, dlogp.dtype)
        found = alternatives.coefficients(rows, scores, cut(known.alternative_logps, dlogp, dentropy, dlogps))
    return _gradient_of_scored(engine, work, scores, None, found, run.compact)


def clean_coefficients(
    mask: Tensor, dlogps: Tensor | None, dentropies: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Coefficients [N] in `dtype`, 0 where masked for any given values."""
    zero = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    dlogp = zero if dlogps is None else torch.where(mask, dlogps.reshape(-1).to(dtype), zero)
    return dlogp, None if dentropies is None else torch.where(mask, dentropies.reshape(-1).to(dtype), zero)


def _copied(numbers: Tensor) -> Callable[[], Any]:
    """Copy numbers to the host; returns their `tolist`, which waits for them and not for what is launched after.

    So a GPU has work while the host waits, if something is launched before they are read.
    """
    if not numbers.is_cuda or torch._C._len_torch_dispatch_stack() > 0:
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(numbers.device))

    def read() -> Any:
        there.synchronize()
        return copy.tolist()

    return read


def _score(engine: Engine, work: Work, scores: Statistics) -> None:
    """Score the rows of `work`, one product, into `scores` of all N positions."""
    count = work.rows.shape[0]
    if count:
        stats = engine.score(work) if work.started is None else work.started.stats.select(slice(0, count))
        _place(work.tokens.merged(work.rows, stats), work, scores)


def _score_first(engine: Engine, work: Work, scores: Statistics, *, early: bool = True) -> Gradients | None:
    """Score the rows of `work` into `scores`.

    If only dlogp/dh [N, H] will be needed, it is made in the same pass, and returned, where `early` allows.
    """
    if not early or work.needs != calls.HIDDEN_ALONE or not work.only_logps:
        _score(engine, work, scores)
        return None
    statistics, gradients = engine.fused(replace(
        work, chunks=even_chunks(len(work.rows), _chunk_rows(engine, work)),
        coefficients=lambda part, stats: Coefficients(stats, torch.ones_like(stats.logp), None),
    ))  # fmt: skip
    _place(statistics, work, scores)
    return gradients


def times_dlogp(dhidden: Tensor | None, dlogp: Tensor) -> Tensor:
    """[..., H]: dlogp/dh times the coefficients [...]; 0 where these are 0, since a product may not be finite."""
    assert dhidden is not None
    return (dhidden * dlogp.unsqueeze(-1)).masked_fill_((dlogp == 0).unsqueeze(-1), 0.0)


def _gradient_of_scored(
    engine: Engine, work: Work, scores: Statistics | None, made: Gradients | None, found: Coefficients, compact: bool
) -> Gradients:
    """Gradients with known coefficients of the rows of `work`: these times dlogp/dh, if that was `made`.

    Else in three products, if `compact` for rows with a nonzero one.
    """
    rows = work.rows
    if made is not None:
        dlogp = found.dlogp.new_zeros(work.tokens.ids.shape).index_copy_(0, rows, found.dlogp)
        return made._replace(hidden=times_dlogp(made.hidden, dlogp))
    if compact:
        kept = found.any_of_row().nonzero().squeeze(1)
        rows, found = rows[kept], found.select(kept)

    def coefficients(part: slice | Tensor, stats: Statistics) -> Coefficients:
        return found.select(part)._replace(statistics=stats)

    chunks, known = even_chunks(len(rows), _chunk_rows(engine, work)), None if scores is None else scores.select(rows)
    work = replace(work, rows=rows, with_entropy=found.dentropy is not None, chunks=chunks, known=known)
    return engine.fused(replace(work, coefficients=coefficients))[1]


def _of_all_ranks(scores: Statistics, ranks: TokenParallel | None) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of the whole batch."""
    logp, entropy = scores.logp, scores.entropy
    if ranks is None:
        return logp, entropy
    together = ranks.gather(logp.unsqueeze(1) if entropy is None else torch.stack([logp, entropy], dim=1))
    return together[:, 0], None if entropy is None else together[:, 1]


def _chunk_rows(engine: Engine, work: Work) -> int:
    rows = engine.chunk_rows(work.head, work.one_chunk_of, work.max_scratch_bytes)
    return rows if work.tokens.vocab is None else work.tokens.vocab.smallest(rows)


def sequence_chunks(lengths: list[int], chunk_rows: int) -> tuple[slice, ...] | None:
    """Chunks of whole sequences, as many in each as fit `chunk_rows`; None if a sequence does not fit."""
    if max(lengths, default=0) > chunk_rows:
        return None
    chunks, start, stop = [], 0, 0
    for length in lengths:
        if stop + length - start > chunk_rows:
            chunks.append(slice(start, stop))
            start = stop
        stop += length
    return (*chunks, slice(start, stop)) if stop > start else tuple(chunks)


def _in_order(
    batch: TokenBatch, undecided: Tensor, matters: Tensor, config: GRPOLossConfig, call: calls.LossCall
) -> tuple[Tensor, Tensor]:
    """All positions, first those with a gradient, then those that are only scored; and numbers, on the device.

    These are the rows with a gradient, with either, and, if the objective takes sequences, those of each sequence.
    """
    # the entropy quantile is taken over all active tokens, so all of them are scored
    matters = matters & undecided
    scored = undecided if call.with_metrics or config.needs_batch else matters
    gradient = matters if call.needs.any() else torch.zeros_like(matters)
    chosen = torch.stack([gradient, scored]).view(torch.int8)  # rows with a gradient are among those that are scored
    order = chosen.sum(0, dtype=torch.int8).sort(stable=True, descending=True).indices
    counts = chosen.sum(1)
    if config.needs_sequence:
        counts = torch.cat([counts, batch.sequence_sum(gradient.to(torch.float32)).to(torch.int64)])
    return order, counts


def _no_scores(tokens: Tokens, dtype: torch.dtype, with_entropy: bool) -> Statistics:
    """Initial scores of all N positions: 0."""
    return Statistics.empty(tokens.ids.shape[0], tokens.ids.device, with_entropy, dtype).zero_()


def _place(scores: Statistics, work: Work, out: Statistics) -> Statistics:
    """Write the scores of the rows of `work` into those of all N positions, 0 where masked; returns these."""
    if not work.tokens.only_active:
        active = work.tokens.mask[work.rows]
        scores = Statistics(*(None if x is None else torch.where(active, x, 0.0) for x in scores))  # type: ignore[arg-type]
    out.place_(work.rows, scores)
    return out
