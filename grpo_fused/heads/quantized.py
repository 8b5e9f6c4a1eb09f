"""Quantised heads whose rows have one scale each; judged by attributes, no library is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_fused.call.head_parts import BYTES, QuantizedWeight


def quantized_weight(head: nn.Module) -> QuantizedWeight | None:
    """The weight of a head in int8 or fp8 with one scale a row and no other quantisation; None if it is none.

    Known are torchao's `Int8Tensor` and `Float8Tensor`, weight only: what quantises hidden states too is not linear.
    """
    weight: Any = getattr(head, "weight", None)
    values, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(values, Tensor) or not isinstance(scale, Tensor) or values.dtype not in BYTES:
        return None
    if any(
        getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")
    ):
        return None
    zero_point = getattr(weight, "zero_point", None)
    if isinstance(zero_point, Tensor) and bool((zero_point != 0).any()):
        return None
    if values.dim() != 2 or tuple(scale.shape) not in ((len(values),), (len(values), 1)):
        return None
    return QuantizedWeight(values.detach(), scale.detach().to(torch.float32).reshape(-1))
