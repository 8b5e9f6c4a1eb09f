"""Memory that a loss call takes on the CPU beyond inputs and gradients, by the rules that the engines allocate by.

Budgets and chunk sizes are the engines' own (`_Plan`); the buffers are those of csrc/cpu and engines/chunked.py. That
is all that `native` takes: measured peaks were within 2 MiB. `chunked` leaves its products to a library, whose buffers
are not known here, and frees blocks that an allocator may keep: measured peaks were up to 33 MiB above these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fused import _native
from grpo_fused.engines import chunked, native
from grpo_fused.engines.head import VOCAB_BLOCK_BYTES, Head

_LANES = _native.LANES
_SPLITS = 96  # kSplits in csrc/cpu/scores.cpp


class Shape(NamedTuple):
    """A call."""

    N: int
    """tokens, active or not"""
    H: int
    V: int
    active: float = 1.0
    """share of the tokens that are not masked"""

    @property
    def tokens(self) -> int:
        """Active ones, of whom alone anything is computed."""
        return round(self.N * self.active)


class NativeScratch(NamedTuple):
    """What the native engine decides about a call."""

    bytes: int
    recomputed: float
    """share of the tokens whose logits are multiplied a second time, since their exponentials found no place"""


def scratch_bytes(engine: str, shape: Shape, dtype: torch.dtype) -> int:
    """Peak of a loss with both gradients, beyond inputs and gradients."""
    if engine == "native":
        return native_scratch(shape, dtype).bytes
    if engine == "chunked":
        return chunked_scratch(shape, dtype)
    raise ValueError(f"engine must be native or chunked; got {engine!r}")


def native_scratch(shape: Shape, dtype: torch.dtype) -> NativeScratch:
    """Of the default budget, with all active tokens having a gradient.

    Raises:
        RuntimeError: the engine cannot run here, so that its blocks are not known.
    """
    reason = native.unavailable(torch.device("cpu"), dtype)
    if reason is not None:
        raise RuntimeError(f"the native engine's plan is not known here: {reason}")
    head = _head(shape, dtype)
    count, H, V = shape.tokens, shape.H, shape.V
    block_rows, item = _native.head_plan(V, H, dtype)
    wide_dweight = native.NativeEngine().weight_gradient_dtype(head, count, None)
    kept = _stand_in(V, H, wide_dweight)
    plan = native._Plan.of(head, count, kept, native._default_scratch())

    pair, panels, blocks = 4 // item, -(-count // _LANES), -(-V // block_rows)
    padded, column_panels = panels * _LANES, -(-H // _LANES)
    in_gradient = min(H * kept.element_size() // (_LANES * item), panels)
    kept_panels = in_gradient + plan.spill_bytes // (_LANES * item * V)
    words = -(-H // (16 * pair)) * 16
    stride = words + 16 if words % 256 == 0 else words
    token_panel = words * _LANES * 4
    threads = torch.get_num_threads()

    standing = plan.spill_bytes + blocks * kept_panels * _LANES * 4 + count * H * dtype.itemsize  # gathered states
    scorers = min(threads, _SPLITS, blocks)
    scoring = panels * token_panel + min(_SPLITS, blocks) * 3 * padded * 4
    scoring += scorers * block_rows * (stride + _LANES) * 4

    depth = plan.superblock * block_rows // pair
    workers = min(threads, plan.superblock)
    chunk = min(512 * pair, padded)
    gradient = (panels - kept_panels) * token_panel  # states to multiply again
    gradient += padded * column_panels * _LANES * item  # states as an operand of dW
    gradient += padded * depth * 4 + words * pair * (depth + 16) * 4  # dz, and the weight transposed
    gradient += padded * H * 4 + count * H * 4  # dH as summed and as returned
    sums = column_panels if padded > chunk else 1
    gradient += workers * block_rows * (stride + chunk // pair + 16 + (sums + 2) * _LANES) * 4
    return NativeScratch(
        bytes=_with_rounding(head, wide_dweight, standing + max(scoring, gradient)),
        recomputed=(panels - kept_panels) / panels if panels else 0.0,
    )


def chunked_scratch(shape: Shape, dtype: torch.dtype) -> int:
    """Of the default budget."""
    head = _head(shape, dtype)
    plan = chunked._Plan.of(head, None)
    row_bytes = 4 * shape.V
    rows = min(plan.chunk_rows, shape.tokens)
    row_work = chunked._ROW_TEMPORARIES * min(plan.block_rows, rows) * row_bytes
    if dtype != torch.float32:
        row_work = max(row_work, chunked._WIDENED_BLOCKS * min(VOCAB_BLOCK_BYTES, 4 * shape.V * shape.H))
    one_chunk = shape.tokens <= plan.chunk_rows
    dweight = chunked.GradientSums.weight_dtype(head, one_chunk=one_chunk)
    # the blocks of row work are small: the allocator keeps them while dW is made
    return _with_rounding(head, dweight, rows * row_bytes + row_work)


def _with_rounding(head: Head, dweight: torch.dtype, at_work: int) -> int:
    """Peak beyond the gradients, where dW is held in `dweight` while at work and rounded to the weight's dtype then."""
    numbers, narrow = head.weight.numel(), head.weight.dtype.itemsize
    if dweight.itemsize == narrow:
        return at_work
    return max(at_work + numbers * (dweight.itemsize - narrow), numbers * dweight.itemsize)


def _head(shape: Shape, dtype: torch.dtype) -> Head:
    return Head(_stand_in(shape.V, shape.H, dtype), None, 1.0, None, dtype)


def _stand_in(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix of that shape and dtype that holds one number."""
    return torch.empty(1, dtype=dtype).expand(rows, columns)
