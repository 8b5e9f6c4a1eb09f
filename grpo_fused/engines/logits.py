"""Scores and gradients of logits that the caller already has, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_fused.engines.base import Tokens
from grpo_fused.engines.chunked import row_block_bytes, row_work
from grpo_fused.engines.rows import RowWork, Statistics, Transform


def score_logits(tokens: Tokens, rows: Tensor, *, with_entropy: bool) -> Statistics:
    """Scores of the tokens at `rows`, whose "hidden states" are logits [N, V] or [B, T, V] of any float dtype."""
    work = _work(tokens)
    parts = [_score(work, tokens, block, raw, with_entropy) for block, raw in _blocks(work, tokens, rows)]
    return Statistics.concatenate(parts, tokens.hidden_states, with_entropy)


def logits_gradient(tokens: Tokens, rows: Tensor, dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
    """dlogits [N, V] in the dtype of the logits, 0 but at `rows`, from coefficients [K] on their scores."""
    logits, work = tokens.hidden_states, _work(tokens)
    out = torch.zeros((tokens.ids.shape[0], logits.shape[-1]), dtype=logits.dtype, device=logits.device)
    start = 0
    for block, raw in _blocks(work, tokens, rows):
        part = slice(start, start + block.shape[0])
        start = part.stop
        statistics = _score(work, tokens, block, raw, dentropy is not None)
        whole = block.shape[0] == out.shape[0]
        target = out if whole else torch.empty_like(raw, dtype=out.dtype)
        coefficient = None if dentropy is None else dentropy[part]
        work.gradient(
            raw,
            None,
            tokens.target_rows(block),
            statistics,
            dlogp[part],
            coefficient,
            _transform(tokens, block),
            target,
            block_rows=raw.shape[0],
        )
        if not whole:
            out.index_copy_(0, block, target)
    return out


def _work(tokens: Tokens) -> RowWork:
    logits = tokens.hidden_states
    return row_work(logits.device, torch.promote_types(logits.dtype, torch.float32))


def _score(work: RowWork, tokens: Tokens, block: Tensor, raw: Tensor, with_entropy: bool) -> Statistics:
    targets, transform = tokens.target_rows(block), _transform(tokens, block)
    return work.statistics(raw, targets, transform, with_entropy=with_entropy, block_rows=raw.shape[0])


def _transform(tokens: Tokens, rows: Tensor) -> Transform:
    return Transform(None, 1.0, None, tokens.temperature_rows(rows))


def _blocks(work: RowWork, tokens: Tokens, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, their logits): the caller's own memory where all rows are wanted and only read, else copies of blocks."""
    logits, count = tokens.hidden_states, rows.shape[0]
    if work.only_reads and count == tokens.ids.shape[0] and logits.dim() == 2 and logits.stride(1) == 1:
        if count:
            yield rows, logits
        return
    wide = logits.dtype if work.only_reads else torch.promote_types(logits.dtype, torch.float32)
    size = max(row_block_bytes(rows.device.type) // (4 * logits.shape[-1]), 1)
    for start in range(0, count, size):
        block = rows[start : start + size]
        yield block, tokens.hidden_rows(block).to(wide)
