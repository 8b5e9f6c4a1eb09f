"""Weights of an lm head that are not one plain tensor: a quantised one, and a low-rank change of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

BYTES = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of quantised numbers."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A frozen lm-head weight in one byte a number: row v is `scale[v] * values[v]`.

    The engines widen it block by block, never as a whole. int8 and fp8 numbers are exact in bf16, and the scale
    multiplies the logits in fp32, so that log-probs are those of the unrounded product.
    """

    values: Tensor
    """[V, H] int8 or float8_e4m3fn"""
    scale: Tensor
    """[V] or [V, 1], floating point, finite"""

    @property
    def shape(self) -> torch.Size:
        """(V, H)"""
        return self.values.shape

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        return QuantizedWeight(self.values[rows], self.scale[rows])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[V, H]: the weight as one tensor."""
        return self.values.to(dtype) * self.scale.to(dtype).reshape(-1, 1)


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
