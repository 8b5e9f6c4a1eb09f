"""Token chunk x full vocabulary: library GEMMs around in-place row work. Any device, three head products.

A chunk's logits are the only vocab-sized tensor. Scores, coefficients and dlogits are computed in place; dlogits of a
narrower dtype share the memory of their fp32 logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.call.calls import LMHead
from grpo_fused.engines.base import Cost, Gradients, TokenObjective, Tokens, Work, even_chunks
from grpo_fused.engines.gradients import GradientSums, lifted, one_chunk_budget, slab_rows
from grpo_fused.engines.products import gradient_dtype, logits_into, rounded_weight, widened_bytes
from grpo_fused.engines.rows import TEMPORARIES, RowWork, TorchRows
from grpo_fused.engines.scratch import check_fits_a_token, scratch_budget
from grpo_fused.engines.token_kernels import objective_numbers, token_inputs
from grpo_fused.kernels.configs import padded, row_config
from grpo_fused.kernels.row_types import Coefficients, Rows, Statistics

_ROW_MULTIPLE = 16  # chunks of a multiple fill the tiles of a product, and start 64 bytes aligned in per-token tensors

_WORTH_SKIPPING = 7 / 8
"""Rows without gradient are left out of a chunk if less than this share remains: gathering logits has a cost."""


def row_block_bytes(device: str) -> int:
    """Size of the blocks that row work takes at a time: they fit a CPU's cache, or fill a launch on other devices."""
    return 4 * 2**20 if device == "cpu" else 64 * 2**20


def row_work(device: torch.device, dtype: torch.dtype) -> RowWork:
    """The implementation of the row work: Triton kernels on a GPU for fp32 rows, torch operations elsewhere."""
    if device.type == "cuda" and dtype == torch.float32 and importlib.util.find_spec("triton") is not None:
        from grpo_fused.kernels.launch import TritonRows

        return TritonRows()
    return TorchRows()


class _Plan(NamedTuple):
    """How a scratch budget is spent."""

    chunk_rows: int
    """tokens of a chunk"""
    block_rows: int
    """tokens whose row work shares temporaries"""
    row_bytes: int
    """bytes of a token's logits"""
    temporaries: int
    """blocks that row work allocates"""
    widened_bytes: int
    """bytes of weight blocks converted to fp32"""


class ChunkedEngine:
    """See the module; `rows` chooses the row work of a call by device and dtype of its logits.

    `heads` share a scratch budget evenly.
    """

    def __init__(self, rows: Callable[[torch.device, torch.dtype], RowWork] = row_work, heads: int = 1) -> None:
        self._rows, self._heads = rows, heads

    def chunk_rows(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> int:
        """See `Engine.chunk_rows`."""
        return self._plan(head, num_tokens, max_scratch_bytes).chunk_rows

    def cost(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> Cost:
        """See `Engine.cost`: the slab of a chunk, the temporaries of its row work, widened blocks."""
        plan = self._plan(head, num_tokens, max_scratch_bytes)
        rows = min(plan.chunk_rows, num_tokens)
        scratch = (rows + plan.temporaries * min(plan.block_rows, rows)) * plan.row_bytes + plan.widened_bytes
        dtype = GradientSums.weight_dtype(self, head, num_tokens, max_scratch_bytes)
        return Cost(3.0, scratch, GradientSums.accumulator_bytes(head, dtype))

    def score(self, work: Work) -> Statistics:
        """See `Engine.score`."""
        plan = self._plan(work.head, work.one_chunk_of, work.max_scratch_bytes)
        work = replace(work, chunks=even_chunks(work.rows.shape[0], plan.chunk_rows))
        slab = self._slab(rounded_weight(work.head), work, plan)
        parts = []
        for _, taken in work.parts():
            _, logits = slab.logits(work.tokens, taken)
            parts.append(slab.row_work.statistics(logits, with_entropy=work.with_entropy))
        return Statistics.concatenate(parts, work.head.weight, work.with_entropy)

    def fused(self, work: Work) -> tuple[Statistics, Gradients]:
        """See `Engine.fused`."""
        tokens, head = work.tokens, rounded_weight(work.head)
        slab = self._slab(head, work, self._plan(head, work.one_chunk_of, work.max_scratch_bytes))
        rows_of = slab.row_work
        dtype = GradientSums.weight_dtype(self, work.head, tokens.most_chunks_of, work.max_scratch_bytes)
        sums = GradientSums(head, tokens, work.needs, dtype)
        objective, parts = _in_one_launch(work, rows_of), []
        for part, taken in work.parts():
            (hidden, logits), out = slab.logits(tokens, taken), slab.dlogits(taken.shape[0])
            if objective is not None:
                inputs = token_inputs(objective.batch.select(part), objective.config)
                options = objective_numbers(objective.config)
                parts.append(rows_of.loss(logits, inputs, options, out, with_entropy=work.with_entropy).statistics)
                sums.add(taken, hidden, out, None)
                continue
            if work.known is None or not rows_of.is_kernel:
                stats = rows_of.statistics(logits, with_entropy=work.with_entropy)
            stats = work.known.select(part) if work.known is not None else tokens.merged(taken, stats)
            parts.append(stats)
            coefficients = work.coefficients(part, stats)
            kept = _nonzero_rows(coefficients) if work.skip_zeros and not rows_of.is_kernel else None
            if kept is not None:
                taken, hidden, coefficients = taken[kept], hidden[kept], coefficients.select(kept)
                logits = logits._replace(targets=logits.targets[kept], transform=logits.transform.select(kept))
                out = slab.dlogits(taken.shape[0])
            if taken.shape[0] == 0:
                continue
            coefficients, scale = lifted(work, taken, coefficients)
            wanted = logits._replace(targets=tokens.gradient_targets(taken, logits.targets))
            rows_of.gradient(wanted, coefficients, out, picked=kept)
            if coefficients.entries is not None:
                tokens.own_entries(coefficients.entries, head.vocab_size).put(out)
            slab.clear_padding(taken.shape[0])
            sums.add(taken, hidden, out, scale)
        return Statistics.concatenate(parts, head.weight, work.with_entropy), sums.result()

    def _plan(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> _Plan:
        """The plan of the scratch budget, or of `one_chunk_budget` if a chunk of it holds all tokens."""
        plan = self._within(head, scratch_budget(head.weight.device, max_scratch_bytes))
        if plan.chunk_rows < num_tokens and max_scratch_bytes is None:
            larger = self._within(head, one_chunk_budget(head))
            if num_tokens <= larger.chunk_rows:
                return larger
        token_bytes = self._heads * ((1 + plan.temporaries) * plan.row_bytes + plan.widened_bytes)
        check_fits_a_token(max_scratch_bytes, plan.chunk_rows, token_bytes, head.vocab_size)
        return plan._replace(chunk_rows=max(plan.chunk_rows, 1))

    def _within(self, head: LMHead, budget: int) -> _Plan:
        """chunk_rows = (budget of a head - row temporaries - widened weight blocks) / bytes of a row of logits."""
        device, dtype, budget = head.weight.device, head.statistics_dtype, budget // self._heads
        temporaries = 0 if self._rows(device, dtype).is_kernel else TEMPORARIES
        row_bytes, widened = dtype.itemsize * padded(head.vocab_size), widened_bytes(head)
        block_rows = max(min(row_block_bytes(device.type), (budget - widened) // 8) // row_bytes, 1)
        chunk_rows = (budget - widened) // row_bytes - temporaries * block_rows
        if chunk_rows > _ROW_MULTIPLE:
            chunk_rows -= chunk_rows % _ROW_MULTIPLE
        return _Plan(chunk_rows, block_rows, row_bytes, temporaries, widened)

    def _slab(self, head: LMHead, work: Work, plan: _Plan) -> Slab:
        rows = slab_rows(work, plan.chunk_rows)
        return Slab(head, rows, plan.block_rows, self._rows(head.weight.device, head.statistics_dtype))


class Slab:
    """The scratch of a call: memory for the logits of a chunk, reused by all chunks."""

    def __init__(self, head: LMHead, rows: int, block_rows: int, row_work: RowWork) -> None:
        self.head, self.block_rows, self.row_work = head, block_rows, row_work
        device, dtype, narrow = head.weight.device, head.statistics_dtype, gradient_dtype(head)
        self._width = padded(head.vocab_size)
        self._logits = torch.empty((rows, self._width), dtype=dtype, device=device)
        separate = narrow != dtype and not row_config(device, head.vocab_size).in_place
        self._dlogits = torch.empty_like(self._logits, dtype=narrow) if separate else self._logits.view(narrow)

    def logits(self, tokens: Tokens, rows: Tensor) -> tuple[Tensor, Rows]:
        """The hidden states of `rows`, and their products, written to the slab."""
        raw, hidden = self._logits[: rows.shape[0], : self.head.vocab_size], self.head.operand(tokens.hidden_rows(rows))
        logits_into(self.head, raw, hidden)
        return hidden, Rows(raw, tokens.target_rows(rows), tokens.transform(self.head, rows), self.block_rows)

    def dlogits(self, count: int) -> Tensor:
        """[count, V]: memory for the gradients of that many rows, shared with their logits."""
        return self._dlogits[:count, : self.head.vocab_size]

    def clear_padding(self, count: int) -> None:
        """Write zeros after the rows of dlogits; kernels write them themselves."""
        if self._dlogits.device.type == "cpu":
            self._dlogits[:count, self.head.vocab_size : self._width] = 0.0


def _in_one_launch(work: Work, rows: RowWork) -> TokenObjective | None:
    """The objective, if the row work evaluates it in the launch that scores and differentiates."""
    objective = work.coefficients
    if not isinstance(objective, TokenObjective) or work.tokens.vocab is not None:
        return None
    supported = rows.is_kernel and objective.config.token_alone and gradient_dtype(work.head) != torch.float16
    return objective if supported else None


def _nonzero_rows(coefficients: Coefficients) -> Tensor | None:
    """[K] int64: rows with a gradient, or None if too few are without one to be worth leaving out."""
    has = coefficients.any_of_row()
    rows = has.nonzero().squeeze(1)
    return rows if len(rows) < _WORTH_SKIPPING * len(has) else None
