"""Weights of an lm head that are not one plain tensor: a quantised one, and a low-rank change of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A frozen lm-head weight of numbers of 8 or 4 bits, times a scale for each row or for each group of columns.

    The engines widen it block by block, never as a whole. With one scale a row nothing is rounded: int8 and fp8 numbers
    are exact in bf16, and the scale multiplies the logits in fp32. With scales of groups, or with codes, each number of
    the weight is the product of number and scale, rounded to the dtype of the computation.
    """

    values: Tensor
    """[V, H] int8 or float8_e4m3fn; with `codes` [V, H / 2] uint8, two numbers a byte, the first in its upper half"""
    scale: Tensor
    """[V], or [V, G] of G groups of H / G neighbouring columns; floating point, finite"""
    codes: Tensor | None = None
    """[16] floating point: what each half byte stands for, such as the numbers of NF4"""

    @classmethod
    def from_q8_0(cls, blocks: Tensor) -> QuantizedWeight:
        """A weight in GGUF's format Q8_0: `blocks` [V, 34 H / 32] uint8, as `gguf.GGUFReader` has a tensor's data.

        Raises:
            ValueError: Another dtype or shape.
        """
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % 34 != 0:
            raise ValueError(
                "the data of Q8_0 must be uint8 [V, 34 * H / 32], H a multiple of 32; got "
                f"{blocks.dtype} {tuple(blocks.shape)}"
            )
        parts = blocks.unflatten(1, (-1, 34))  # a scale in fp16, then 32 numbers
        scale = parts[..., :2].contiguous().view(torch.float16).squeeze(-1)
        is_zero = scale == 0  # its numbers may not be: ggml computes them with a scale that it then rounds to 0
        values = torch.where(is_zero.unsqueeze(-1), 0, parts[..., 2:].view(torch.int8))
        return cls(values.flatten(1), torch.where(is_zero, 1.0, scale.to(torch.float32)))

    @property
    def shape(self) -> torch.Size:
        """(V, H)"""
        rows, columns = self.values.shape
        return torch.Size((rows, columns if self.codes is None else 2 * columns))

    @property
    def scales_rows(self) -> bool:
        """Whether the scales can multiply logits: one a row, of numbers that are exact in bf16."""
        return self.scale.numel() == len(self.values) and self.codes is None

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        return replace(self, values=self.values[rows], scale=self.scale[rows])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[V, H]: the weight as one tensor, each number rounded once."""
        return widened(self.values, self.scale.reshape(len(self.values), -1), self.codes, dtype)


def widened(values: Tensor, scale: Tensor | None, codes: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[K, H]: rows of a `QuantizedWeight`, whose scales are [K, G] or left out."""
    if codes is None and scale is None:
        return values.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if codes is None:
        numbers = values.to(wide)
    else:
        numbers = codes.to(wide)[torch.stack([values >> 4, values & 15], dim=-1).flatten(1).to(torch.int32)]
    if scale is not None:
        numbers = (numbers.unflatten(1, (scale.shape[1], -1)) * scale.to(wide).unsqueeze(2)).flatten(1)
    return numbers.to(dtype)


@dataclass(frozen=True, eq=False)
class HeadAdapter:
    """A low-rank change of an lm head: its weight becomes W + scale * B A, of which [V, H] is never made.

    Gradients go to `a`, `b` and the hidden states; the weight itself must be frozen.
    """

    a: Tensor
    """[r, H]"""
    b: Tensor
    """[V, r]"""
    scale: float = 1.0
    """LoRA: alpha / r; rsLoRA: alpha / sqrt(r)"""
    dropout: float = 0.0
    """probability with which a hidden state's entries are 0 before A, drawn at each call from torch's generator"""


@torch.no_grad()
def dense_weight(weight: Tensor | QuantizedWeight, adapters: Iterable[HeadAdapter] = ()) -> Tensor:
    """[V, H] without a gradient: the weight itself if it is plain, else adapters folded in, in at least fp32."""
    adapters = tuple(adapters)
    if isinstance(weight, Tensor) and not adapters:
        return weight.detach()
    if isinstance(weight, QuantizedWeight):
        total = weight.dequantize()
    else:
        total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    for adapter in adapters:
        total.addmm_(adapter.b.to(total.dtype), adapter.a.to(total.dtype), alpha=adapter.scale)
    return total
