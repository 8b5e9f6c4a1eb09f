"""Scores and gradients from the caller's logits, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.api.pipeline import clean_coefficients
from grpo_fused.call.calls import LogitsCall, LogitsGradientCall
from grpo_fused.call.layout import Layout, active_tokens, blocks
from grpo_fused.engines.base import flat_view, rows_of
from grpo_fused.engines.chunked import row_block_bytes, row_work
from grpo_fused.engines.rows import RowWork
from grpo_fused.kernels.row_types import Coefficients, Rows, Statistics, Transform, has_coefficient


def scores(call: LogitsCall) -> Statistics:
    """Statistics of all N positions, 0 where masked; entropies only if requested."""
    source = _Logits.of(call)
    out = Statistics.empty(source.mask.shape[0], source.mask.device, call.with_entropy, source.dtype).zero_()
    for positions, rows in source.blocks(source.mask.nonzero().squeeze(1)):
        out.place_(positions, source.work.statistics(rows, with_entropy=call.with_entropy))
    return out


def gradient(call: LogitsGradientCall) -> Tensor:
    """dlogits [N, V] in the dtype of the logits, from coefficients on log-probs and entropies."""
    source, logits = _Logits.of(call.forward), call.forward.logits
    dlogp, dentropy = clean_coefficients(source.mask, call.dlogps, call.dentropies, source.dtype)
    out = torch.zeros((source.mask.shape[0], logits.shape[-1]), dtype=logits.dtype, device=dlogp.device)
    for positions, rows in source.blocks(has_coefficient(dlogp, dentropy).nonzero().squeeze(1)):
        stats = source.work.statistics(rows, with_entropy=dentropy is not None)
        whole = positions.shape[0] == out.shape[0]
        target = out if whole else torch.empty_like(rows.raw, dtype=out.dtype)
        entropy_of = None if dentropy is None else dentropy[positions]
        source.work.gradient(rows, Coefficients(stats, dlogp[positions], entropy_of), target)
        if not whole:
            out.index_copy_(0, positions, target)
    return out


class _Logits(NamedTuple):
    """The positions of a call; those that are read are active."""

    logits: Tensor
    """[N, V], or [B, T, V] if it cannot be viewed as [N, V]"""
    ids: Tensor
    mask: Tensor
    temperature: Tensor | float
    work: RowWork
    dtype: torch.dtype
    """of statistics"""

    @classmethod
    def of(cls, call: LogitsCall) -> _Logits:
        dtype = torch.promote_types(call.logits.dtype, torch.float32)
        mask = active_tokens(call.mask, call.token_ids).reshape(-1)
        ids, temperatures = call.token_ids.reshape(-1).to(torch.int64), call.temperatures
        temperature = call.temperature if temperatures is None else Layout.of(call.token_ids).per_token(temperatures)
        return cls(flat_view(call.logits), ids, mask, temperature, row_work(call.logits.device, dtype), dtype)

    def blocks(self, positions: Tensor) -> Iterator[tuple[Tensor, Rows]]:
        """The logits at `positions`: the caller's memory if all rows are read, none written; else copied blocks."""
        logits, count = self.logits, positions.shape[0]
        if self.work.is_kernel and count == self.ids.shape[0] and logits.dim() == 2 and logits.stride(1) == 1:
            if count:
                yield positions, self._rows(positions, logits)
            return
        wide = logits.dtype if self.work.is_kernel else self.dtype
        size = max(row_block_bytes(positions.device.type) // (4 * logits.shape[-1]), 1)
        for block in (positions[part] for part in blocks(count, size)):
            yield block, self._rows(block, rows_of(logits, block).to(wide))

    def _rows(self, positions: Tensor, raw: Tensor) -> Rows:
        temperature = self.temperature
        transform = Transform(temperature=temperature[positions] if isinstance(temperature, Tensor) else temperature)
        return Rows(raw, self.ids[positions], transform, raw.shape[0])
