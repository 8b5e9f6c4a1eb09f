"""Quantised heads, judged by attributes: no library is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_fused.call.head_parts import QuantizedWeight
from grpo_fused.kernels.row_types import BYTES


def quantized_weight(head: nn.Module) -> QuantizedWeight | None:
    """The weight of a head that torchao or bitsandbytes has quantised; None if it is none, or in another form.

    What quantises hidden states too is not linear: torchao's dynamic configurations, bitsandbytes' int8.
    """
    weight: Any = getattr(head, "weight", None)
    return _of_torchao(weight) or _of_bitsandbytes(weight)


def is_decompressed(head: nn.Module, further: list[str]) -> bool:
    """Whether compressed-tensors has widened the weight, so that the parameters `further` of its scales are not read.

    Raises:
        TypeError: It has not yet.
    """
    status = getattr(getattr(head, "quantization_status", None), "value", None)
    if status == "compressed":
        raise TypeError(
            f"compressed-tensors has the {', '.join(further)} of this lm head, and widens it before the model's first "
            "forward: load the model with quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
    return status == "decompressed" and all(name.startswith("weight_") for name in further)


def computes_in(head: nn.Module, dtype: torch.dtype) -> list[tuple[object, str, Any]]:
    """What must be set on a head's modules so that their products are in `dtype`, and nothing of them is changed."""
    settings = {"compute_dtype": dtype, "compute_type_is_set": True, "support_avx512bf16_for_cpu": False}
    return [(x, name, value) for x in head.modules() for name, value in settings.items() if name in vars(x)]


def _of_torchao(weight: Any) -> QuantizedWeight | None:
    """`Int8Tensor` and `Float8Tensor`, weight only, with one scale a row: its layers round other products to bf16."""
    values, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(values, Tensor) or not isinstance(scale, Tensor) or values.dtype not in BYTES:
        return None
    further = [getattr(weight, name, None) for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")]
    one_a_row = values.dim() == 2 and tuple(scale.shape) in ((len(values),), (len(values), 1))
    if not one_a_row or any(x is not None for x in further):
        return None
    zero_point = getattr(weight, "zero_point", None)
    if isinstance(zero_point, Tensor) and bool((zero_point != 0).any()):
        return None
    return QuantizedWeight(values.detach(), scale.detach().to(torch.float32).reshape(-1))


def _of_bitsandbytes(weight: Any) -> QuantizedWeight | None:
    """NF4 and FP4, whose scales may be quantised too; not in the layout that it has for inference on a CPU."""
    state: Any = getattr(weight, "quant_state", None)
    if getattr(state, "quant_type", None) not in ("nf4", "fp4") or getattr(state, "packing_format_for_cpu", False):
        return None
    rows, columns = state.shape
    if columns % state.blocksize != 0:  # a block is of two rows
        return None
    scale = state.absmax
    if state.nested:
        of_scale = state.state2
        outer = of_scale.absmax.repeat_interleave(of_scale.blocksize)[: len(scale)]
        scale = of_scale.code[scale.to(torch.int32)] * outer + state.offset
    values = weight.data.reshape(-1).view(torch.uint8).view(rows, columns // 2)
    return QuantizedWeight(values, scale.to(torch.float32).view(rows, -1), state.code)
