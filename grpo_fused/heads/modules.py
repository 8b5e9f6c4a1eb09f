"""The head of a model: which module it is, and what it multiplies by: weight, bias and adapters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.validation import FLOATS
from grpo_fused.heads.quantized import is_decompressed, quantized_weight
from grpo_fused.ranks.parallel import whole

_OWN = ("weight", "bias", "parametrizations")
"""Parameters whose values reach the logits through `head.weight` and `head.bias`."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, (distributed) data parallel wrappers and DeepSpeed's engine."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    is_parallel = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or any(
        kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__
    )
    inner: Any = model.module if is_parallel else getattr(model, "_orig_mod", None)  # of torch.compile
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def base_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers, peft's too: its forward names its keywords, where peft's takes any."""
    inner: Any = unwrap(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


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


def needs_a_gpu(model: nn.Module) -> bool:
    """Whether the model is on the CPU with layers of Liger's, whose Triton kernels run on a GPU only."""
    liger = any(str(getattr(x.forward, "__module__", "")).startswith("liger_kernel") for x in model.modules())
    return liger and next(model.parameters()).device.type == "cpu"


class HeadParts(NamedTuple):
    """What a head multiplies by: logits = h (W + sum of scale * B A)^T + b."""

    weight: Tensor | QuantizedWeight
    """[V, H]"""
    bias: Tensor | None
    """[V]"""
    adapters: tuple[HeadAdapter, ...] = ()


def head_parts(head: Any) -> HeadParts:
    """The head's current weight, bias and unmerged LoRA adapters.

    Raises:
        ValueError: An adapter that is not W + s B A, or a weight that is not [V, H], or not in memory.
        TypeError: A weight that is quantised in another form than `QuantizedWeight`'s, packed or sharded.
    """
    if hasattr(head, "original_module") and isinstance(getattr(head, "modules_to_save", None), nn.ModuleDict):
        return head_parts(_active_copy(head))
    if hasattr(head, "base_layer"):  # peft has wrapped it
        base = head_parts(head.base_layer)
        bias, adapters = adapters_beside(head, base.bias)
        return HeadParts(base.weight, bias, base.adapters + adapters)
    if hasattr(head, "original_module"):  # peft's other training wrapper: single rows of the weight are trained
        raise ValueError(
            f"an lm head under {type(head).__name__} computes with replaced rows, which lm_head_inputs does not "
            "express; leave the head out of what peft changes (untie a tied one), or merge (peft: merge_and_unload)"
        )
    if (found := quantized_weight(head)) is not None:
        return HeadParts(found, getattr(head, "bias", None))
    # An adapter of an unknown kind usually starts at zero: no comparison would show it before it is trained.
    further = [name for name, _ in head.named_parameters() if name.split(".")[0] not in _OWN]
    if further and not is_decompressed(head, further):
        if hasattr(head, "_orig_mod"):
            raise TypeError("the lm head must not be compiled by itself: compile the model, or call head.compile()")
        raise ValueError(
            f"an lm head must have a weight and perhaps a bias; {type(head).__name__} also has {', '.join(further)}, "
            "which W and b do not express: merge it into the weight first"
        )
    weight = _plain(getattr(head, "weight", None), "weight", head)
    if weight.dim() != 2 or weight.numel() == 0 or weight.device.type == "meta":
        raise ValueError(
            f"an lm head must have a weight [V, H] in memory; {type(head).__name__} has shape {tuple(weight.shape)} "
            f"on {weight.device}: gather a sharded one (ZeRO-3, FSDP) first, load an offloaded one (meta)"
        )
    bias = None if getattr(head, "bias", None) is None else _plain(head.bias, "bias", head)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias of an lm head must be [{weight.shape[0]}]; got shape {tuple(bias.shape)}")
    return HeadParts(weight, bias)


def adapter_state(head: nn.Module) -> tuple[object, ...]:
    """The state of the adapters in the head: it changes with set_adapter, disable_adapter, merge and unmerge."""
    return tuple(
        (
            type(module).__name__,
            bool(getattr(module, "disable_adapters", False)),
            tuple(_active_adapters(module)),
            tuple(getattr(module, "merged_adapters", ())),
        )
        for module in head.modules()
    )


def _active_adapters(head: Any) -> list[str]:
    active = getattr(head, "active_adapters", None) or []
    return [active] if isinstance(active, str) else list(active)


def _active_copy(wrapper: Any) -> nn.Module:
    """The module that `modules_to_save=["lm_head"]` runs: the active adapter's copy, or the original if none is."""
    active = _active_adapters(wrapper)
    if wrapper.disable_adapters or not active or any(name not in wrapper.modules_to_save for name in active):
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def adapters_beside(layer: Any, bias: Tensor | None) -> tuple[Tensor | None, tuple[HeadAdapter, ...]]:
    """The bias with that of the unmerged adapters in a layer of peft, and these, gathered where FSDP2 shards them.

    A plain layer has none. Nothing of the layer's base is read.

    Raises:
        ValueError: An adapter that is not W + s B A.
    """
    if not hasattr(layer, "base_layer"):
        return bias, ()
    merged = bool(getattr(layer, "merged_adapters", ()))
    disabled = bool(getattr(layer, "disable_adapters", False))
    if disabled and merged:  # its forward would unmerge, and so change the weight that is read here
        raise ValueError(
            f"adapters {list(layer.merged_adapters)} are merged into the lm head but disabled; unmerge them first "
            "(peft: unmerge_adapter)"
        )
    available: set[str] = getattr(layer, "_get_available_adapters", set)()
    active = [name for name in _active_adapters(layer) if name in available and not (disabled or merged)]
    adapters: tuple[HeadAdapter, ...] = ()
    for name in active:
        _check_plain_lora(layer, name)
        a, b, scale = layer.lora_A[name], layer.lora_B[name], float(layer.scaling[name])
        dropout = layer.lora_dropout[name]  # an Identity where it is 0
        rate = float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0
        adapters += (HeadAdapter(whole(a.weight, None), whole(b.weight, None), scale, rate),)
        if b.bias is not None:  # lora_bias=True
            wide = torch.promote_types(b.bias.dtype, torch.float32)  # bf16 would round it away
            extra = whole(b.bias, None).to(wide) * scale
            bias = extra if bias is None else bias.to(wide) + extra
    return bias, adapters


def _check_plain_lora(layer: Any, name: str) -> None:
    """Refuses an adapter that is not W + s B A."""
    parts = [getattr(layer, part, {}) for part in ("lora_A", "lora_B")]
    kinds = [type(part[name]) if name in part else None for part in parts]
    variant = getattr(layer, "lora_variant", {}).get(name)
    if kinds != [nn.Linear, nn.Linear] or variant is not None:
        got = type(layer if variant is None else variant).__name__
        of = ", ".join(kind.__name__ for kind in kinds if kind is not None) or "other parts"
        raise ValueError(
            f"adapter {name!r} on the lm head is a {got} of {of}, not a plain LoRA W + s B A of two nn.Linear; merge "
            "it first (peft: merge_and_unload), or leave the head out of target_modules"
        )


def _plain(x: Any, name: str, head: nn.Module) -> Tensor:
    """A plain floating-point tensor: a subclass (DTensor, torchao, bitsandbytes) packs or shards."""
    if type(x) not in (Tensor, nn.Parameter) or x.dtype not in FLOATS or hasattr(x, "quant_state"):
        raise TypeError(
            f"the {name} of an lm head must be a plain tensor of fp16, bf16, fp32 or fp64; {type(head).__name__} has a "
            f"{type(x).__name__} of {getattr(x, 'dtype', None)}: dequantise a quantised or packed one first, gather a "
            "sharded one (its full_tensor())"
        )
    return x
