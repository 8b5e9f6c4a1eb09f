"""The head product as a Triton kernel: logits that never leave the registers.

Scores need no vocab-sized memory. Training keeps exponentials of 2 bytes a logit and takes three products: the kernel's
own, which scores and stores them, and after a light pass in place the library's two gradient products. Where scores are
known already (sequence-level objectives whose sequences do not fit a chunk, the backward of log-probs), dlogits come
straight from a second product of the kernel: one write instead of a write and a pass.

A token's scores are bitwise the same in any batch, and the same in scoring and training.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from grpo_fused.engines.base import Coefficients, Gradients, Needs, Tokens
from grpo_fused.engines.head import Head
from grpo_fused.engines.rows import Statistics
from grpo_fused.engines.scratch import scratch_budget
from grpo_fused.engines.sums import GradientSums, fp16_scale

ROW_MULTIPLE = 128
"""Chunks of a multiple fill the kernel's token panels."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the engine cannot run for inputs of `dtype` on `device`, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype == torch.float64:
        return "it takes float32, bfloat16 and float16, not float64"
    if device.type == "cuda":
        return None
    import triton

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return "Triton needs a GPU (or TRITON_INTERPRET=1, to test on the CPU)"


class TritonEngine:
    """See the module."""

    def chunk_rows(self, head: Head, max_scratch_bytes: int | None) -> int:
        """Rows whose dlogits, offsets and partial statistics fit the scratch budget."""
        from grpo_fused.kernels import head_launch

        each = sum(head_launch.row_bytes(head.rounded_weight, _transform(head, 1.0)))
        each += head.gradient_dtype.itemsize * head_launch.padded(head.vocab_size)
        return self._rows_of(head, each, max_scratch_bytes)

    def weight_gradient_dtype(self, head: Head, num_tokens: int, max_scratch_bytes: int | None) -> torch.dtype:
        """See `Engine.weight_gradient_dtype`."""
        return GradientSums.weight_dtype(head, one_chunk=num_tokens <= self.chunk_rows(head, max_scratch_bytes))

    def score(
        self, head: Head, tokens: Tokens, rows: Tensor, *, with_entropy: bool, max_scratch_bytes: int | None
    ) -> Statistics:
        """See `Engine.score`; scratch is the rows' hidden states and partial statistics."""
        from grpo_fused.kernels import head_launch

        partials, _ = head_launch.row_bytes(head.rounded_weight, _transform(head, 1.0))
        each = partials + head.rounded_weight.shape[1] * head.compute_dtype.itemsize
        count = self._rows_of(head, each, max_scratch_bytes)
        parts = []
        for start in range(0, rows.shape[0], count):
            part = rows[start : start + count]
            hidden = head.operand(tokens.hidden_rows(part)).contiguous()
            transform = _transform(head, tokens.temperature_rows(part))
            stats = head_launch.head_scores(
                hidden, head.rounded_weight, tokens.target_rows(part), transform, with_entropy=with_entropy
            )
            parts.append(Statistics(*stats))
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
        from grpo_fused.kernels import head_launch

        weight = head.rounded_weight
        longest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        slab = head_launch.Exponentials.empty(longest, weight, head.gradient_dtype, _transform(head, 1.0))
        sums = GradientSums(
            head, tokens, needs, self.weight_gradient_dtype(head, tokens.ids.shape[0], max_scratch_bytes)
        )
        parts = []
        for part in chunks:
            taken = rows[part]
            hidden, targets = head.operand(tokens.hidden_rows(taken)).contiguous(), tokens.target_rows(taken)
            transform = _transform(head, tokens.temperature_rows(taken))
            place = slab.rows(taken.shape[0])
            if known is None:
                stats = head_launch.head_scores(
                    hidden, weight, targets, transform, with_entropy=with_entropy, exponentials=place
                )
            else:
                stats = head_launch.RowStatistics(*known.select(part))
            dlogp, dentropy = coefficients(part, stats.logp, stats.entropy)
            parts.append(Statistics(*stats))
            scale = fp16_scale(dlogp, dentropy) if head.gradient_dtype == torch.float16 else None
            if scale is not None:
                dlogp = dlogp * scale
                dentropy = None if dentropy is None else dentropy * scale
            if known is None:
                head_launch.exponentials_to_dlogits(place, targets, stats, dlogp, dentropy, transform)
            else:
                head_launch.head_dlogits(hidden, weight, targets, stats, dlogp, dentropy, transform, place.values)
            sums.add(taken, place.values, scale)
        return Statistics.concatenate(parts, head.weight, with_entropy), sums.result()

    def _rows_of(self, head: Head, bytes_each: int, max_scratch_bytes: int | None) -> int:
        count = scratch_budget(head.weight.device, max_scratch_bytes) // bytes_each
        if count < 1 and max_scratch_bytes is not None:
            raise ValueError(
                f"max_scratch_bytes={max_scratch_bytes} is too small: one token of a vocabulary of {head.vocab_size} "
                f"takes {bytes_each} bytes of scratch"
            )
        return max(count - count % ROW_MULTIPLE if count > ROW_MULTIPLE else count, 1)


def _transform(head: Head, temperature: Tensor | float):  # type: ignore[no-untyped-def]
    from grpo_fused.kernels import launch

    bias = None if head.bias is None else head.bias.to(head.statistics_dtype)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(torch.float32)
    return launch.RowTransform(bias, head.logit_scale, head.softcap, temperature)
