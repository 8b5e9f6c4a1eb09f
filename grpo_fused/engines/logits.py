"""Scores and gradients of logits that the caller already has, in cache-sized blocks of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused.engines.base import Scores, Tokens
from grpo_fused.engines.chunked import row_block_bytes, row_work
from grpo_fused.engines.rows import RowWork, Statistics, Transform


def score_logits(tokens: Tokens, rows: Tensor, *, with_entropy: bool) -> Scores:
    """Scores of the tokens at `rows`, whose "hidden states" are logits [N, V] or [B, T, V] of any float dtype."""
    parts = [_score_block(tokens, block, with_entropy)[1] for block in _blocks(tokens, rows)]
    logp = torch.cat([part.logp for part in parts])
    return Scores(
        logp, torch.cat([part.entropy for part in parts if part.entropy is not None]) if with_entropy else None
    )


def logits_gradient(tokens: Tokens, rows: Tensor, dlogp: Tensor, dentropy: Tensor | None) -> Tensor:
    """dlogits [N, V] in the dtype of the logits, 0 but at `rows`, from coefficients [K] on their scores."""
    logits = tokens.hidden_states
    out = torch.zeros((tokens.ids.shape[0], logits.shape[-1]), dtype=logits.dtype, device=logits.device)
    start = 0
    for block in _blocks(tokens, rows):
        part = slice(start, start + block.shape[0])
        start = part.stop
        z, statistics = _score_block(tokens, block, dentropy is not None)
        _rows(z).gradient(
            z,
            None,
            tokens.target_rows(block),
            statistics,
            dlogp[part],
            None if dentropy is None else dentropy[part],
            _transform(tokens, block),
            z,
            block_rows=z.shape[0],
        )
        out.index_copy_(0, block, z.to(out.dtype))
    return out


def _score_block(tokens: Tokens, block: Tensor, with_entropy: bool) -> tuple[Tensor, Statistics]:
    logits = tokens.hidden_rows(block)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    targets, transform = tokens.target_rows(block), _transform(tokens, block)
    statistics = _rows(z).statistics(z, targets, transform, with_entropy=with_entropy, block_rows=z.shape[0])
    return z, statistics


def _rows(z: Tensor) -> RowWork:
    return row_work(z.device, z.dtype)


def _transform(tokens: Tokens, rows: Tensor) -> Transform:
    return Transform(None, 1.0, None, tokens.temperature_rows(rows))


def _blocks(tokens: Tokens, rows: Tensor) -> tuple[Tensor, ...]:
    if rows.shape[0] == 0:
        return ()
    vocab_size, device = tokens.hidden_states.shape[-1], rows.device.type
    return rows.split(max(row_block_bytes(device) // (4 * vocab_size), 1))
