"""The head of a model: which module it is, and the weight and bias that it multiplies by, adapters included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("weight", "bias", "parametrizations")
"""Parameters whose values reach the logits through `head.weight` and `head.bias`."""

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and (distributed) data parallel wrappers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def output_head(model: nn.Module) -> nn.Module:
    """The module that makes logits: `get_output_embeddings()`, or `lm_head` of a model without that method."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"model must be a causal LM; got the encoder-decoder {type(model).__name__}, whose hidden states and logit "
            "biases are made in another way"
        )
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else getattr(model, "lm_head", None)
    if not isinstance(head, nn.Module) or isinstance(head, (nn.ModuleList, nn.ModuleDict)):
        raise TypeError(
            f"model must be a causal LM with one output head (get_output_embeddings() or lm_head); "
            f"{type(model).__name__} gives {type(head).__name__}"
        )
    return head


def head_tensors(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] (or None) that the head multiplies by now.

    An unmerged LoRA adapter is folded in: W + s B A as one new tensor of at least fp32, differentiable in A and B (and
    in W, unless frozen). Lower precision would round the adapter away.

    Raises:
        ValueError: An adapter that cannot be folded in, or a weight that is not [V, H] and here.
        TypeError: A weight that is not a plain floating-point tensor: quantised, packed or sharded.
    """
    if _is_saved_module(head):
        return head_tensors(_active_copy(head))
    if hasattr(head, "base_layer"):
        return _adapted(head)
    if hasattr(head, "original_module"):  # peft's other training wrapper: single rows of the weight are trained
        raise ValueError(
            f"an lm head under {type(head).__name__} computes with replaced rows, which lm_head_inputs does not "
            "express; merge them first (peft: merge_and_unload)"
        )
    # An adapter of an unknown kind usually starts at zero: no comparison would see it before it has learned something.
    further = [name for name, _ in head.named_parameters() if name.split(".")[0] not in _OWN]
    if further:
        raise ValueError(
            f"an lm head must have a weight and perhaps a bias; {type(head).__name__} also has {', '.join(further)}, "
            "which W and b do not express: merge it into the weight first"
        )
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    _check_weight(weight, head)
    assert isinstance(weight, Tensor)
    if bias is not None:
        _check_plain(bias, "bias", head)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"the bias of an lm head must be [{weight.shape[0]}]; got shape {tuple(bias.shape)}")
    return weight, bias


def adapter_state(head: nn.Module) -> tuple[object, ...]:
    """What decides which adapters act in the head: changes with set_adapter, disable_adapter, merge and unmerge."""
    state = [
        type(head).__name__,
        bool(getattr(head, "disable_adapters", False)),
        tuple(_active_adapters(head)),
        tuple(getattr(head, "merged_adapters", ())),
    ]
    inner = _active_copy(head) if _is_saved_module(head) else getattr(head, "base_layer", None)
    return (*state, *adapter_state(inner)) if isinstance(inner, nn.Module) else tuple(state)


def _is_saved_module(head: nn.Module) -> bool:
    return hasattr(head, "original_module") and isinstance(getattr(head, "modules_to_save", None), nn.ModuleDict)


def _active_adapters(head: Any) -> list[str]:
    active = getattr(head, "active_adapters", None) or []
    return [active] if isinstance(active, str) else list(active)


def _active_copy(wrapper: Any) -> nn.Module:
    """What `modules_to_save=["lm_head"]` runs: the active adapter's copy, or the original where none is active."""
    active = _active_adapters(wrapper)
    if wrapper.disable_adapters or not active or any(name not in wrapper.modules_to_save for name in active):
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def _adapted(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The tensors of a head that peft has wrapped."""
    base = head_tensors(layer.base_layer)
    merged = bool(getattr(layer, "merged_adapters", ()))
    if getattr(layer, "disable_adapters", False):
        if merged:  # its forward would unmerge, and so change the weight that is being read here
            raise ValueError(
                f"adapters {list(layer.merged_adapters)} are merged into the lm head but disabled; unmerge them first "
                "(peft: unmerge_adapter)"
            )
        return base
    if merged:
        return base
    active = [name for name in _active_adapters(layer) if name in getattr(layer, "_get_available_adapters", list)()]
    lora = getattr(layer, "lora_A", None)
    if not isinstance(lora, nn.ModuleDict):
        if not active:
            return base
        raise ValueError(
            f"an unmerged {type(layer).__name__} adapter on the lm head is not a LoRA W + s B A; merge it first "
            "(peft: merge_and_unload)"
        )
    active = [name for name in active if name in lora]
    return _folded(layer, *base, active) if active else base


def _folded(layer: Any, weight: Tensor, bias: Tensor | None, active: list[str]) -> tuple[Tensor, Tensor | None]:
    for name in active:
        _check_plain_lora(layer, name)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    for name in active:
        dtype = torch.promote_types(dtype, layer.lora_A[name].weight.dtype)
    weight = weight.to(dtype, copy=True)  # the one extra weight: everything else is added in place
    for name in active:
        a, b, scale = layer.lora_A[name], layer.lora_B[name], float(layer.scaling[name])
        weight = weight.addmm_(b.weight.to(dtype), a.weight.to(dtype), alpha=scale)
        if b.bias is not None:  # lora_bias=True
            extra = b.bias.to(dtype) * scale
            bias = extra if bias is None else bias.to(dtype) + extra
    return weight, bias


def _check_plain_lora(layer: Any, name: str) -> None:
    """Refuses what is more than W + s B A."""
    variant = getattr(layer, "lora_variant", {}).get(name)
    if variant is not None:
        raise ValueError(
            f"adapter {name!r} on the lm head is {type(variant).__name__}, not a plain LoRA W + s B A; merge it first "
            "(peft: merge_and_unload), or leave the head out of target_modules"
        )
    if type(layer.lora_A[name]) is not nn.Linear or type(layer.lora_B[name]) is not nn.Linear:
        raise ValueError(
            f"adapter {name!r} on the lm head must be two nn.Linear to be folded in; got "
            f"{type(layer.lora_A[name]).__name__} and {type(layer.lora_B[name]).__name__}"
        )
    dropout = layer.lora_dropout[name]
    p = float(getattr(dropout, "p", 0.0))  # peft puts an Identity where it is 0
    if dropout.training and p > 0:
        raise ValueError(
            f"adapter {name!r} on the lm head has lora_dropout={p} in training mode: its output is random, and no "
            "weight gives it; set lora_dropout to 0, or put the model in eval mode"
        )


def _check_weight(weight: object, head: nn.Module) -> None:
    _check_plain(weight, "weight", head)
    assert isinstance(weight, Tensor)
    if weight.dim() != 2 or weight.numel() == 0:
        hint = "; it is sharded (ZeRO-3, FSDP): gather it first" if weight.dim() == 1 else ""
        raise ValueError(
            f"the weight of an lm head must be [V, H]; {type(head).__name__} has shape {tuple(weight.shape)}{hint}"
        )
    if weight.device.type == "meta":
        raise ValueError(f"the weight of the lm head ({type(head).__name__}) is offloaded (device meta); load it first")


def _check_plain(x: object, name: str, head: nn.Module) -> None:
    """A floating-point tensor and nothing more: a subclass (DTensor, torchao, bitsandbytes) packs or shards."""
    where = f"the {name} of an lm head must be a plain tensor of fp16, bf16, fp32 or fp64; {type(head).__name__}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{where} has {type(x).__name__}; if it is quantised or packed, dequantise it first")
    if hasattr(x, "full_tensor"):
        raise TypeError(f"{where} has a sharded {type(x).__name__}; gather it first (its full_tensor())")
    if type(x) not in (Tensor, nn.Parameter) or hasattr(x, "quant_state") or x.dtype not in _FLOATING or x.is_quantized:
        raise TypeError(f"{where} has a {type(x).__name__} of {x.dtype}: quantised or packed; dequantise it first")
