"""Gradients of a call, summed over its chunks from their dlogits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_fused.call.calls import LMHead, Needs
from grpo_fused.engines.base import MANY, Engine, Gradients, Tokens, Work
from grpo_fused.engines.products import (
    VOCAB_BLOCK_BYTES_CUDA,
    accumulate_weight_gradient,
    dhidden_dtype,
    gradient_dtype,
    hidden_gradient,
)
from grpo_fused.engines.scratch import scratch_budget
from grpo_fused.kernels.row_types import Coefficients, Entries


class GradientSums:
    """Gradients of a call; chunks are added to them."""

    @staticmethod
    def weight_dtype(engine: Engine, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> torch.dtype:
        """Dtype of dW for a call of N = `num_tokens` positions: the weight's own if nothing is accumulated."""
        alone = _dtype_of_one_chunk(head)
        rows = MANY if alone == head.statistics_dtype else engine.chunk_rows(head, num_tokens, max_scratch_bytes)
        # compared only where it matters: torch.compile would make the result a condition on the number of tokens
        return alone if rows == MANY or num_tokens <= rows else head.statistics_dtype

    @staticmethod
    def accumulator_bytes(head: LMHead, weight_dtype: torch.dtype) -> int:
        """Bytes of a dW that is rounded into the gradient later; on a GPU also of a block that fp16 adds to it.

        On a CPU such blocks are within the scratch budget.
        """
        dweight = 0 if weight_dtype == head.weight.dtype else weight_dtype.itemsize * head.weight.numel()
        in_blocks = head.weight.is_cuda and head.compute_dtype == torch.float16
        return dweight + (min(VOCAB_BLOCK_BYTES_CUDA, dweight) if in_blocks else 0)

    def __init__(self, head: LMHead, tokens: Tokens, needs: Needs, weight_dtype: torch.dtype) -> None:
        self.head, self.tokens, self.needs = head, tokens, needs
        self.dtype = weight_dtype
        self.rows = 0
        hidden, weight = tokens.hidden_states, head.weight
        shape = (tokens.ids.shape[0], head.width)
        self.hidden = hidden.new_zeros(shape, dtype=dhidden_dtype(head)) if needs.need_hidden else None
        self.pending: tuple[Tensor, Callable[[], Tensor]] | None = None
        """rows of the last chunk, and a function that returns their dH summed over the ranks"""
        self.weight: Tensor | None = None
        self.bias = weight.new_zeros(len(weight), dtype=head.statistics_dtype) if needs.need_bias else None

    def add(
        self, rows: Tensor, hidden: Tensor, dlogits: Tensor, scale: Tensor | None, factor: Tensor | None = None
    ) -> None:
        """Add the gradients of `rows`.

        Args:
            rows: [K] int64, positions.
            hidden: [K, H], their states as the head product takes them.
            dlogits: [K, V]; multiplied by the head's `row_scale` here.
            scale: what dlogits are multiplied by, a power of two, or None.
            factor: [K] fp32, what they are still to be multiplied by, or None (see `takes_factors`).
        """
        self.rows += rows.shape[0]
        self._finish_sum()  # of the previous chunk: only one chunk's dH is held at a time
        if self.bias is not None:
            dbias = dlogits.sum(dim=0, dtype=self.bias.dtype) if factor is None else _weighted_sum(dlogits, factor)
            self.bias += dbias if scale is None else dbias / scale
        if self.head.row_scale is not None:
            dlogits *= self.head.row_scale
        if self.hidden is not None:
            dhidden = hidden_gradient(self.head, dlogits)
            if scale is not None:
                dhidden = dhidden.float() / scale
            if factor is not None:
                dhidden *= factor.unsqueeze(1)
            if self.tokens.vocab is not None:  # during the product for the weight and the next chunk's scores
                self.pending = rows, self.tokens.vocab.start_sum(dhidden)
            else:
                self.hidden.index_copy_(0, rows, dhidden.to(self.hidden.dtype))
        if self.needs.need_weight:
            for states in self.head.weight_states(hidden):
                if factor is not None:
                    states = states.to(gradient_dtype(self.head))  # in fp16 the product might underflow
                    states = torch.mul(states, factor.unsqueeze(1), out=torch.empty_like(states))
                first = self.weight is None
                if self.weight is None:
                    self.weight = torch.empty(self.head.weight.shape, dtype=self.dtype, device=dlogits.device)
                accumulate_weight_gradient(self.head, self.weight, dlogits, states, first=first, scale=scale)

    def _finish_sum(self) -> None:
        if self.pending is not None and self.hidden is not None:
            rows, summed = self.pending
            self.pending = None
            self.hidden.index_copy_(0, rows, summed().to(self.hidden.dtype))

    def result(self) -> Gradients:
        """The sums; zeros where nothing was added."""
        self._finish_sum()
        if self.needs.need_weight and self.weight is None:
            self.weight = self.head.weight.new_zeros(self.head.weight.shape, dtype=self.dtype)
        if self.weight is not None and self.head.row_scale is not None:  # which multiplies the base alone
            self.weight /= self.head.row_scale.unsqueeze(1)
        return Gradients(self.hidden, self.weight, self.bias, self.rows)


def takes_factors(head: LMHead) -> bool:
    """Whether a row's factor can be left to the products: it multiplies the fp32 dH, and the hidden states of dW."""
    return dhidden_dtype(head) == torch.float32 and gradient_dtype(head) != torch.float16


def _weighted_sum(dlogits: Tensor, factor: Tensor) -> Tensor:
    """[V] fp32 = factor [K] x dlogits [K, V]; a narrow product takes the factor as two numbers, of 16 digits in all."""
    if dlogits.dtype == torch.float32:
        return factor @ dlogits
    high = factor.to(dlogits.dtype)
    both = torch.stack([high, (factor - high).to(dlogits.dtype)])
    return torch.mm(both, dlogits, out_dtype=torch.float32).sum(0)


def one_chunk_budget(head: LMHead) -> int:
    """Bytes of scratch that a call of one chunk may take by default: it needs no fp32 sum of dW."""
    dtypes = head.statistics_dtype, _dtype_of_one_chunk(head)
    of_several, of_one = (GradientSums.accumulator_bytes(head, dtype) for dtype in dtypes)
    return scratch_budget(head.weight.device, None) + of_several - of_one


def _dtype_of_one_chunk(head: LMHead) -> torch.dtype:
    """Dtype of dW in a call of one chunk: the weight's own.

    Not for an adapter, whose dW is a sum of products, nor in fp16, whose range a loss scale may leave.
    """
    sums = head.base is not None or torch.float16 in (head.weight.dtype, head.compute_dtype)
    return head.statistics_dtype if sums else head.weight.dtype


def slab_rows(work: Work, chunk_rows: int) -> int:
    """Rows to reserve: a full chunk, whatever is active, so that a GPU's allocator finds the same block each time."""
    return min(chunk_rows, work.tokens.ids.shape[0])


def lifted(work: Work, rows: Tensor, coefficients: Coefficients) -> tuple[Coefficients, Tensor | None]:
    """Coefficients of `rows`, times a power of two where dlogits are fp16; and that power, else None."""
    head, (_, dlogp, dentropy, entries) = work.head, coefficients
    if gradient_dtype(head) != torch.float16:
        return coefficients, None
    scale = fp16_scale(head, work.tokens.transform(head, rows).temperature, dlogp, dentropy, entries)
    return coefficients.scaled(scale), scale


def fp16_scale(
    head: LMHead, temperature: Tensor | float, dlogp: Tensor, dentropy: Tensor | None, entries: Entries | None = None
) -> Tensor:
    """0-d power of two that scales a chunk's largest dlogits to about 2^8: far from fp16's underflow and overflow."""
    # |dlogits| <= |g| + |g_H| * p * |log p + H|, whose last factor stays below 32
    bound = dlogp.abs() if dentropy is None else dlogp.abs() + 32 * dentropy.abs()
    # times dz/d(product) <= |logit_scale| / T
    bound = bound * (abs(head.logit_scale) / temperature)
    bound = bound if entries is None else torch.cat([bound, entries.values.abs()])
    largest = bound.max().clamp(min=torch.finfo(torch.float32).tiny, max=torch.finfo(torch.float32).max)
    return torch.exp2((8.0 - largest.log2()).floor().clamp(-120.0, 120.0))
