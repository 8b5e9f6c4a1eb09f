"""The head product as a Triton kernel: logits stay in registers.

Scores need no vocab-sized memory. Training keeps exponentials of 2 bytes a logit and takes three products: the kernel's
own, which scores and stores them, and the library's two gradient products. These take the exponentials with a factor
for each row (bf16 and fp32, without an entropy's gradient and alternatives) or, after a pass in place, dlogits. If
scores are known already (sequence-level objectives whose sequences do not fit a chunk, the backward of log-probs), and
for heads with a softcap, a second product of the kernel computes dlogits directly: one write instead of a write and a
pass.

A weight in another dtype than the computation's, without contiguous rows, or whose rows are no multiple of 16 elements
(fp32: 32), is copied completely: kernels with narrow loads would take longer than the copy. A frozen one of bytes is
widened by the kernel, and block by block for the gradient products (on AMD GPUs in fp32, with exponentials of 4 bytes).

A token's scores are bitwise the same in any batch (without an adapter), and the same in scoring and training.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_fused.call.calls import LMHead
from grpo_fused.call.layout import blocks
from grpo_fused.engines import products
from grpo_fused.engines.base import Cost, Gradients, Started, Work
from grpo_fused.engines.gradients import GradientSums, lifted, one_chunk_budget, slab_rows, takes_factors
from grpo_fused.engines.products import gradient_dtype
from grpo_fused.engines.scratch import check_fits_a_token, scratch_budget
from grpo_fused.kernels.configs import padded
from grpo_fused.kernels.head_configs import HeadConfig, aligned_width, head_config
from grpo_fused.kernels.row_types import BYTES, NOTHING, Extras, Statistics

if TYPE_CHECKING:
    from grpo_fused.kernels import head_launch

ROW_MULTIPLE = 128
"""Chunks of a multiple fill the kernel's token panels."""


_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETS = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when a kernel is decorated


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the engine cannot run for inputs of `dtype` on `device`, or None."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if dtype == torch.float64:
        return "it takes float32, bfloat16 and float16, not float64"
    if device.type == "cuda" or (device.type == "cpu" and _INTERPRETS):
        return None
    return "Triton needs a GPU (or TRITON_INTERPRET=1, to test on the CPU)"


class _Prepared(NamedTuple):
    """What `TritonEngine.fused` works with."""

    head: LMHead
    """its weight in the compute dtype"""
    weight: Tensor
    extras: Extras
    slab: head_launch.Exponentials | None
    hidden: Tensor | None = None
    """states of the rows as kernels take them, if the work was started"""


class TritonEngine:
    """See the module."""

    def chunk_rows(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> int:
        """See `Engine.chunk_rows`: rows of dlogits, offsets, partial statistics and copies of hidden states."""
        row_bytes, widened = _row_bytes(head), _widened_bytes(head)
        most = (one_chunk_budget(head) - widened) // row_bytes if max_scratch_bytes is None else 0
        return max(num_tokens, 1) if num_tokens <= most else self._rows_of(head, row_bytes, max_scratch_bytes, widened)

    def cost(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> Cost:
        """See `Engine.cost`: bytes for each row of a chunk; a softcap's exponentials are not kept."""
        rows = min(self.chunk_rows(head, num_tokens, max_scratch_bytes), num_tokens)
        dtype = GradientSums.weight_dtype(self, head, num_tokens, max_scratch_bytes)
        scratch = rows * _row_bytes(head) + _widened_bytes(head)
        return Cost(3.0 if head.softcap is None else 4.0, scratch, GradientSums.accumulator_bytes(head, dtype))

    def start(self, work: Work, count: Tensor) -> Started | None:
        """See `StartingEngine.start`."""
        from grpo_fused.kernels import head_launch

        tokens, rows, stores = work.tokens, work.rows, work.needs.any()
        most = (
            self.chunk_rows(work.head, work.one_chunk_of, work.max_scratch_bytes) if stores else self._score_rows(work)
        )
        refused = tokens.vocab is not None or (stores and work.head.softcap is not None)
        if refused or rows.shape[0] > most or work.head.compute_dtype == torch.float32:  # `head_scores` says why
            return None
        made = self._prepared(work) if stores else _Prepared(work.head, *_weight(work.head), None)
        hidden = head_launch.aligned(made.head.operand(tokens.hidden_rows(rows)))
        stats = head_launch.head_scores(
            hidden, made.weight, tokens.target_rows(rows), tokens.transform(made.head, rows),
            with_entropy=work.with_entropy, exponentials=made.slab, extras=made.extras, count=count,
        )  # fmt: skip
        return Started(stats, made._replace(hidden=hidden) if stores else None)

    def score(self, work: Work) -> Statistics:
        """See `Engine.score`; scratch holds the rows' hidden states and partial statistics."""
        from grpo_fused.kernels import head_launch

        head, tokens, rows, count = work.head, work.tokens, work.rows, self._score_rows(work)
        weight, extras = _weight(head)
        parts = []
        for part in (rows[block] for block in blocks(rows.shape[0], count)):
            hidden = head_launch.aligned(head.operand(tokens.hidden_rows(part)))
            targets, transform = tokens.target_rows(part), tokens.transform(head, part)
            stats = head_launch.head_scores(
                hidden, weight, targets, transform, with_entropy=work.with_entropy, extras=extras
            )
            parts.append(stats)
            del hidden  # before the next copy is made
        return Statistics.concatenate(parts, head.weight, work.with_entropy)

    def fused(self, work: Work) -> tuple[Statistics, Gradients]:
        """See `Engine.fused`."""
        from grpo_fused.kernels import head_launch

        tokens, started = work.tokens, work.started
        head, weight, extras, slab, hidden_rows = self._prepared(work) if started is None else started.rest
        assert slab is not None  # it is None only in a start without gradients
        stores = work.known is None and head.softcap is None
        dtype = GradientSums.weight_dtype(self, work.head, tokens.most_chunks_of, work.max_scratch_bytes)
        sums = GradientSums(head, tokens, work.needs, dtype)
        parts = []
        for part, taken in work.parts():
            transform, place = tokens.transform(head, taken), slab.rows(taken.shape[0])
            targets = tokens.target_rows(taken)
            if hidden_rows is None:
                hidden = head_launch.aligned(head.operand(tokens.hidden_rows(taken)))
            else:
                hidden = hidden_rows[part]
            if work.known is not None:
                stats = work.known.select(part)
            elif started is not None:
                stats = started.stats.select(part)
            else:
                stats = head_launch.head_scores(
                    hidden, weight, targets, transform, with_entropy=work.with_entropy,
                    exponentials=place if stores else None, extras=extras,
                )  # fmt: skip
                stats = tokens.merged(taken, stats)
            parts.append(stats)
            coefficients, scale = lifted(work, taken, work.coefficients(part, stats))
            targets = tokens.gradient_targets(taken, targets)
            factor = None
            entries = coefficients.entries
            if stores and coefficients.dentropy is None and entries is None and takes_factors(head):
                factor = head_launch.exponentials_factor(place, targets, coefficients, transform)
            elif stores:
                head_launch.exponentials_to_dlogits(place, targets, coefficients, transform)
            else:
                head_launch.head_dlogits(hidden, weight, targets, coefficients, transform, place.values, extras=extras)
            if entries is not None:
                tokens.own_entries(entries, head.vocab_size).put(place.values)
            sums.add(taken, hidden[:, : head.width], place.values, scale, factor)
        return Statistics.concatenate(parts, head.weight, work.with_entropy), sums.result()

    def _prepared(self, work: Work) -> _Prepared:
        from grpo_fused.kernels import head_launch

        head = products.rounded_weight(work.head)
        weight, extras = _weight(head)
        reserved = slab_rows(work, self.chunk_rows(work.head, work.one_chunk_of, work.max_scratch_bytes))
        slab = head_launch.Exponentials.empty(reserved, weight, gradient_dtype(head), _config(head))
        return _Prepared(head, weight, extras, slab)

    def _score_rows(self, work: Work) -> int:
        """Rows that are scored at a time."""
        head = work.head
        partials, _ = _statistics_bytes(head)
        return self._rows_of(head, partials + _copies_bytes(head), work.max_scratch_bytes, _terms_bytes(head))

    def _rows_of(self, head: LMHead, bytes_each: int, max_scratch_bytes: int | None, once: int = 0) -> int:
        count = (scratch_budget(head.weight.device, max_scratch_bytes) - once) // bytes_each
        check_fits_a_token(max_scratch_bytes, count, bytes_each + once, head.vocab_size)
        return max(count - count % ROW_MULTIPLE if count > ROW_MULTIPLE else count, 1)


def _weight(head: LMHead) -> tuple[Tensor, Extras]:
    """What the kernels multiply: a weight in the compute dtype, or bytes, and what is beside it."""
    from grpo_fused.kernels import head_launch

    if head.base is None:
        return head_launch.aligned(head.operand(head.weight)), NOTHING
    base = head.base if head.base.dtype in BYTES else head.operand(head.base)
    return head_launch.aligned(base), Extras(
        head_launch.aligned(head.weight_columns(slice(None))) if head.weight.shape[1] else None,
        None if head.row_scale is None else head.row_scale.contiguous(),
    )


def _config(head: LMHead) -> HeadConfig:
    """How the kernels score it."""
    operand = head.weight.new_empty(0, dtype=head.compute_dtype)
    has_extras = head.base is not None and (head.width > head.base_width or head.row_scale is not None)
    return head_config(operand, products.transform(head), has_extras=has_extras)


def _statistics_bytes(head: LMHead) -> tuple[int, int]:
    """Bytes for each row of (partial statistics, offsets)."""
    config, weight = _config(head), head.weight if head.base is None else head.base
    return 12 * config.splits(*weight.shape)[0], 4 * config.tiles(head.vocab_size)


def _widened_bytes(head: LMHead) -> int:
    """Bytes of blocks of a frozen weight, for the gradient products, and of an adapter's terms, for the kernels."""
    return 0 if head.base is None else products.widened_bytes(head) + _terms_bytes(head)


def _terms_bytes(head: LMHead) -> int:
    columns = 0 if head.base is None else head.width - head.base_width
    return head.vocab_size * columns * head.compute_dtype.itemsize


def _row_bytes(head: LMHead) -> int:
    """Bytes for each row: exponentials or dlogits, offsets, partial statistics, copies."""
    row_bytes = _copies_bytes(head) + sum(_statistics_bytes(head))
    return row_bytes + gradient_dtype(head).itemsize * padded(head.vocab_size)


def _copies_bytes(head: LMHead) -> int:
    """Bytes for each row: hidden states gathered, then masked, then its fp32 dhidden."""
    return aligned_width(head.width, head.compute_dtype) * (2 * head.compute_dtype.itemsize + 4)
