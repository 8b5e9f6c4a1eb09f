"""Token chunk x full vocabulary: library GEMMs around in-place row work. Any device, three head products.

A chunk's logits are the only vocab-sized tensor there is. Scores, coefficients and dlogits are made where they stand,
dlogits of a narrower dtype in the memory of the fp32 logits that they come from.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused.batch import TokenBatch
from grpo_fused.config import GRPOLossConfig
from grpo_fused.engines.base import Coefficients, Cost, Gradients, Needs, TokenObjective, Tokens
from grpo_fused.engines.head import VOCAB_BLOCK_BYTES, Head
from grpo_fused.engines.rows import RowWork, Statistics, TorchRows, Transform
from grpo_fused.engines.scratch import scratch_budget
from grpo_fused.engines.sums import GradientSums, fp16_scale
from grpo_fused.kernels.configs import padded

_ROW_TEMPORARIES = 3  # blocks that `rows.gradient_` holds beside the slab
_WIDENED_BLOCKS = 3  # a weight block on its way to fp32, and a block of dW, on the CPU

_ROW_MULTIPLE = 16  # chunks of a multiple fill the tiles of a product, and start 64 bytes aligned in per-token tensors

_WORTH_SKIPPING = 7 / 8
"""Rows without gradient are left out of a chunk when fewer than this share is left: gathering logits is not free."""


def row_block_bytes(device: str) -> int:
    """Size of the blocks that row work takes at a time: what stays in a CPU's cache, or fills a launch elsewhere."""
    return 4 * 2**20 if device == "cpu" else 64 * 2**20


def gradient_fits_in_place(device: torch.device) -> bool:
    """Whether narrower dlogits may lie over their logits; AMD's loads may still be in flight at a barrier."""
    return torch.version.hip is None or device.type == "cpu"


CUDA_ROWS_ARE_FASTER: frozenset[tuple[int, int]] = frozenset()
"""Compute capabilities where `python -m benchmarks.rows` measured the CUDA C++ row kernel to beat Triton's.

None so far, since it has not run on a chip. For a loss it moves 6 bytes a logit and Triton's kernel 10; that is
arithmetic and no measurement, so that it must be asked for: `ChunkedEngine(cuda_row_work)`."""


def row_work(device: torch.device, dtype: torch.dtype) -> RowWork:
    """Who does the row work: a kernel on CUDA for fp32 rows (the fastest measured), torch operations elsewhere."""
    if device.type == "cuda" and dtype == torch.float32 and importlib.util.find_spec("triton") is not None:
        if CUDA_ROWS_ARE_FASTER and torch.cuda.get_device_capability(device) in CUDA_ROWS_ARE_FASTER:
            from grpo_fused.engines import cuda_rows

            if cuda_rows.unavailable() is None:
                return cuda_rows.CudaRows()
        from grpo_fused.engines.triton_rows import TritonRows

        return TritonRows()
    return TorchRows()


def cuda_row_work(device: torch.device, dtype: torch.dtype) -> RowWork:
    """The CUDA C++ row kernel, for `ChunkedEngine(cuda_row_work)`.

    Raises:
        RuntimeError: It cannot run here; it is never replaced silently.
    """
    if device.type != "cuda" or dtype != torch.float32:
        raise RuntimeError(f"CUDA row work needs float32 statistics on a CUDA device; got {dtype} on {device}")
    from grpo_fused.engines.cuda_rows import CudaRows

    return CudaRows()


class _Plan(NamedTuple):
    """How a scratch budget is spent."""

    chunk_rows: int
    """tokens whose logits are held at a time"""
    block_rows: int
    """tokens whose row work shares temporaries"""
    row_bytes: int
    """of a token's logits"""
    widened_bytes: int
    """blocks of the weight on their way to fp32"""

    @classmethod
    def of(cls, head: Head, max_scratch_bytes: int | None) -> _Plan:
        """chunk_rows = (budget - row temporaries - widened weight blocks) / bytes of a row of logits."""
        device = head.weight.device.type
        budget = scratch_budget(head.weight.device, max_scratch_bytes)
        row_bytes = head.statistics_dtype.itemsize * padded(head.vocab_size)
        widened = _WIDENED_BLOCKS * min(VOCAB_BLOCK_BYTES, 4 * head.weight.numel()) if device == "cpu" else 0
        block_rows = max(min(row_block_bytes(device), (budget - widened) // 8) // row_bytes, 1)
        chunk_rows = (budget - widened) // row_bytes - _ROW_TEMPORARIES * block_rows
        if chunk_rows > _ROW_MULTIPLE:
            chunk_rows -= chunk_rows % _ROW_MULTIPLE
        if chunk_rows < 1 and max_scratch_bytes is not None:
            raise ValueError(
                f"max_scratch_bytes={max_scratch_bytes} is too small: one token of a vocabulary of {head.vocab_size} "
                f"takes {(1 + _ROW_TEMPORARIES) * row_bytes + widened} bytes of scratch"
            )
        return cls(max(chunk_rows, 1), block_rows, row_bytes, widened)


class ChunkedEngine:
    """See the module; `rows` chooses the row work of a call by device and dtype of its logits."""

    def __init__(self, rows: Callable[[torch.device, torch.dtype], RowWork] = row_work) -> None:
        self._rows = rows

    def _workspace(self, head: Head, rows: int, plan: _Plan) -> _Workspace:
        return _Workspace(head, rows, plan.block_rows, self._rows(head.weight.device, head.statistics_dtype))

    def chunk_rows(self, head: Head, max_scratch_bytes: int | None) -> int:
        """See `Engine.chunk_rows`."""
        return _Plan.of(head, max_scratch_bytes).chunk_rows

    def weight_gradient_dtype(self, head: Head, num_tokens: int, max_scratch_bytes: int | None) -> torch.dtype:
        """See `Engine.weight_gradient_dtype`."""
        return GradientSums.weight_dtype(head, one_chunk=num_tokens <= self.chunk_rows(head, max_scratch_bytes))

    def cost(self, head: Head, num_tokens: int, max_scratch_bytes: int | None) -> Cost:
        """See `Engine.cost`: the slab of a chunk, the temporaries of its row work, widened blocks."""
        plan = _Plan.of(head, max_scratch_bytes)
        rows = min(plan.chunk_rows, num_tokens)
        scratch = (rows + _ROW_TEMPORARIES * min(plan.block_rows, rows)) * plan.row_bytes + plan.widened_bytes
        dtype = self.weight_gradient_dtype(head, num_tokens, max_scratch_bytes)
        return Cost(3.0, scratch, GradientSums.accumulator_bytes(head, dtype))

    def score(
        self, head: Head, tokens: Tokens, rows: Tensor, *, with_entropy: bool, max_scratch_bytes: int | None
    ) -> Statistics:
        """See `Engine.score`."""
        plan = _Plan.of(head, max_scratch_bytes)
        work = self._workspace(head, min(plan.chunk_rows, rows.shape[0]), plan)
        parts = [
            work.score(tokens, rows[start : start + plan.chunk_rows], with_entropy)
            for start in range(0, rows.shape[0], plan.chunk_rows)
        ]
        return Statistics.concatenate(parts, head.weight, with_entropy)

    def fused(
        self,
        head: Head,
        tokens: Tokens,
        rows: Tensor,
        chunks: list[slice],
        coefficients: Coefficients,
        needs: Needs,
        *,
        known: Statistics | None,
        with_entropy: bool,
        skip_zeros: bool,
        max_scratch_bytes: int | None,
    ) -> tuple[Statistics, Gradients]:
        """See `Engine.fused`."""
        longest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        work = self._workspace(head, longest, _Plan.of(head, max_scratch_bytes))
        dtype = self.weight_gradient_dtype(head, tokens.most_chunks_of, max_scratch_bytes)
        sums = GradientSums(head, tokens, needs, dtype)
        parts = []
        for part in chunks:
            taken = rows[part]
            one_pass = tokens.vocab is None and head.gradient_dtype != torch.float16
            if one_pass and isinstance(coefficients, TokenObjective):
                batch = coefficients.batch.select(part)
                one = work.loss(tokens, taken, batch, coefficients.config, with_entropy)
                if one is not None:
                    parts.append(one[0])
                    sums.add(taken, one[1], None)
                    continue
            if known is not None and work.row_work.only_reads:
                stats = known.select(part)
                work.logits(tokens, taken)
            else:
                stats = work.score(tokens, taken, with_entropy)
                stats = tokens.merged(taken, stats) if known is None else known.select(part)
            parts.append(stats)
            dlogp, dentropy = coefficients(part, stats.logp, stats.entropy)
            kept = _nonzero_rows(dlogp, dentropy) if skip_zeros and work.row_work.picks_rows else None
            if kept is not None:
                taken, stats, dlogp = taken[kept], stats.select(kept), dlogp[kept]
                dentropy = None if dentropy is None else dentropy[kept]
            if taken.shape[0] == 0:
                continue
            temperature = tokens.temperature_rows(taken)
            scale = fp16_scale(head, temperature, dlogp, dentropy) if head.gradient_dtype == torch.float16 else None
            if scale is not None:
                dlogp = dlogp * scale
                dentropy = None if dentropy is None else dentropy * scale
            dlogits = work.gradient(tokens, taken, kept, stats, dlogp, dentropy)
            sums.add(taken, dlogits, scale)
        return Statistics.concatenate(parts, head.weight, with_entropy), sums.result()


class _Workspace:
    """The scratch of a call: one slab for logits, used for all chunks."""

    def __init__(self, head: Head, rows: int, block_rows: int, row_work: RowWork) -> None:
        self.head, self.block_rows, self.row_work = head, block_rows, row_work
        device, dtype = head.weight.device, head.statistics_dtype
        width = padded(head.vocab_size)
        self.slab = torch.empty((rows, width), dtype=dtype, device=device)
        narrow = head.gradient_dtype
        separate = narrow != dtype and not gradient_fits_in_place(device)
        self.gradients = torch.empty((rows, width), dtype=narrow, device=device) if separate else self.slab.view(narrow)

    def score(self, tokens: Tokens, rows: Tensor, with_entropy: bool) -> Statistics:
        """Fill the slab with the logits of `rows` and return their statistics."""
        return self.row_work.statistics(
            self.logits(tokens, rows),
            tokens.target_rows(rows),
            self._transform(tokens, rows),
            with_entropy=with_entropy,
            block_rows=self.block_rows,
        )

    def gradient(
        self,
        tokens: Tokens,
        rows: Tensor,
        kept: Tensor | None,
        statistics: Statistics,
        dlogp: Tensor,
        dentropy: Tensor | None,
    ) -> Tensor:
        """dlogits [K, V] of `rows`, which are those at `kept` of the rows last scored, in place of their logits."""
        out = self._out(rows)
        raw = self.slab[: rows.shape[0] if kept is None else None, : self.head.vocab_size]
        transform = self._transform(tokens, rows)
        targets = tokens.gradient_targets(rows)
        self.row_work.gradient(
            raw, kept, targets, statistics, dlogp, dentropy, transform, out, block_rows=self.block_rows
        )
        if self.slab.device.type == "cpu":  # kernels fill the rows themselves
            self.gradients[: rows.shape[0], self.head.vocab_size : self.slab.shape[1]] = 0.0
        return out

    def loss(
        self, tokens: Tokens, rows: Tensor, batch: TokenBatch, config: GRPOLossConfig, with_entropy: bool
    ) -> tuple[Statistics, Tensor] | None:
        """Statistics and dlogits [R, V] of `rows` in one pass over their logits, or None where that cannot be."""
        if not self.row_work.has_one_pass(config):
            return None
        out = self._out(rows)
        stats = self.row_work.loss(
            self.logits(tokens, rows),
            tokens.target_rows(rows),
            batch,
            config,
            self._transform(tokens, rows),
            out,
            with_entropy=with_entropy,
        )
        return stats, out

    def _out(self, rows: Tensor) -> Tensor:
        return self.gradients[: rows.shape[0], : self.head.vocab_size]

    def logits(self, tokens: Tokens, rows: Tensor) -> Tensor:
        """Fill the slab with the products of `rows`."""
        logits = self.slab[: rows.shape[0], : self.head.vocab_size]
        self.head.logits_into(logits, self.head.operand(tokens.hidden_rows(rows)))
        return logits

    def _transform(self, tokens: Tokens, rows: Tensor) -> Transform:
        bias = None if self.head.bias is None else self.head.bias.to(self.head.statistics_dtype)
        return Transform(bias, self.head.logit_scale, self.head.softcap, tokens.temperature_rows(rows))


def _nonzero_rows(dlogp: Tensor, dentropy: Tensor | None) -> Tensor | None:
    """[K] int64: rows with a coefficient, or None where too few are without one to be worth leaving out."""
    nonzero = dlogp != 0 if dentropy is None else (dlogp != 0) | (dentropy != 0)
    rows = nonzero.nonzero().squeeze(1)
    return rows if rows.shape[0] < _WORTH_SKIPPING * dlogp.shape[0] else None
