"""Checks of a call before any work: each error says what was expected and what came.

Shapes, dtypes and devices are checked always. What the tensors hold is checked on the CPU always; on other devices
looking would synchronise, so it is checked only where `GRPO_FUSED_DEBUG=1` is set in the environment.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fused.calls import HeadCall, LossInputs, named
from grpo_fused.candidates import CandidateSets, check_values
from grpo_fused.config import TOKEN_NORMALIZED, GRPOLossConfig
from grpo_fused.layout import Layout, values_are_checked


def check_ids(token_ids: Tensor, cu_seqlens: Tensor | None, name: str = "completion_ids") -> None:
    """`token_ids` is [B, T], or [N] with `cu_seqlens` [S + 1]."""
    check_token_ids(token_ids, name)
    _check_packing(token_ids, cu_seqlens, name)


def check_token_ids(token_ids: Tensor, name: str) -> None:
    """Integers, [B, T] or [N]."""
    _check_tensor(token_ids, name)
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise TypeError(f"{name} must have an integer dtype; got {token_ids.dtype}")
    if token_ids.dim() not in (1, 2):
        raise ValueError(f"{name} must be [B, T] or packed [N]; got shape {_shape(token_ids)}")


def check_logps(per_token_logps: Tensor, cu_seqlens: Tensor | None) -> None:
    """[B, T], or [N] with `cu_seqlens`."""
    _check_tensor(per_token_logps, "per_token_logps")
    _check_floating(per_token_logps, "per_token_logps")
    _check_packing(per_token_logps, cu_seqlens, "per_token_logps")


def check_entropies(entropies: Tensor | None, layout: Layout, config: GRPOLossConfig) -> None:
    """Like the log-probs, and there where the loss reads them."""
    if entropies is None:
        if config.needs_entropy:
            option = "entropy_coef" if config.entropy_coef != 0.0 else "top_entropy_quantile"
            raise ValueError(f"{option}={getattr(config, option)} needs entropies {tuple(layout.shape)}; got None")
        return
    _check_tensor(entropies, "entropies")
    _check_floating(entropies, "entropies")
    _check_shape(entropies, "entropies", [tuple(layout.shape)])


def check_logits(logits: Tensor, token_ids: Tensor) -> None:
    """[*ids, V], V >= 1."""
    _check_tensor(logits, "logits")
    _check_floating(logits, "logits")
    if logits.dim() != token_ids.dim() + 1 or logits.shape[:-1] != token_ids.shape or logits.shape[-1] < 1:
        raise ValueError(
            f"logits must be [{', '.join(map(str, token_ids.shape))}, V] to go with token_ids of shape "
            f"{_shape(token_ids)}; got {_shape(logits)}"
        )


def check_scratch(max_scratch_bytes: int | None) -> None:
    """None or a positive number of bytes."""
    if max_scratch_bytes is not None and (
        isinstance(max_scratch_bytes, bool) or not isinstance(max_scratch_bytes, int)
    ):
        raise TypeError(f"max_scratch_bytes must be an int or None; got {max_scratch_bytes!r}")
    if max_scratch_bytes is not None and max_scratch_bytes <= 0:
        raise ValueError(f"max_scratch_bytes must be > 0; got {max_scratch_bytes}")


def _check_packing(x: Tensor, cu_seqlens: Tensor | None, name: str) -> None:
    if cu_seqlens is None:
        if x.dim() != 2:
            raise ValueError(
                f"{name} must be [B, T], or packed [N] together with cu_seqlens; got shape {_shape(x)} "
                "without cu_seqlens"
            )
        return
    _check_tensor(cu_seqlens, "cu_seqlens")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64; got {cu_seqlens.dtype}")
    if x.dim() != 1:
        raise ValueError(f"{name} must be packed [N] where cu_seqlens is given; got shape {_shape(x)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [S + 1]; got shape {_shape(cu_seqlens)}")


def check_head(
    hidden_states: Tensor, lm_head_weight: Tensor, lm_head_bias: Tensor | None, token_ids: Tensor, ids_name: str
) -> None:
    """Hidden states [*ids, H], weight [V, H], bias [V]."""
    _check_tensor(hidden_states, "hidden_states")
    _check_head_weight(lm_head_weight)
    _check_floating(hidden_states, "hidden_states")
    if hidden_states.dim() != token_ids.dim() + 1 or hidden_states.shape[:-1] != token_ids.shape:
        raise ValueError(
            f"hidden_states must be [{', '.join(map(str, token_ids.shape))}, H] to go with {ids_name} of shape "
            f"{_shape(token_ids)}; got {_shape(hidden_states)}"
        )
    if lm_head_weight.numel() == 0 and hasattr(lm_head_weight, "ds_shape"):
        raise ValueError(
            f"lm_head_weight must be [V, H]; DeepSpeed ZeRO-3 has partitioned it ({tuple(lm_head_weight.ds_shape)}): "
            "enter deepspeed.zero.GatheredParameters around the call and its backward"
        )
    if lm_head_weight.dim() != 2 or lm_head_weight.shape[1] != hidden_states.shape[-1]:
        raise ValueError(
            f"lm_head_weight must be [V, {hidden_states.shape[-1]}] to go with hidden_states of shape "
            f"{_shape(hidden_states)}; got {_shape(lm_head_weight)}"
        )
    if 0 in lm_head_weight.shape:
        raise ValueError(f"lm_head_weight must be [V, H] with V >= 1 and H >= 1; got {_shape(lm_head_weight)}")
    if lm_head_bias is not None:
        _check_tensor(lm_head_bias, "lm_head_bias")
        _check_floating(lm_head_bias, "lm_head_bias")
        if lm_head_bias.shape != lm_head_weight.shape[:1]:
            raise ValueError(f"lm_head_bias must be [{lm_head_weight.shape[0]}]; got shape {_shape(lm_head_bias)}")


def _check_head_weight(weight: object) -> None:
    if isinstance(weight, torch.nn.Module):
        adapter = hasattr(weight, "lora_A") or hasattr(weight, "base_layer")
        why = (
            "an adapter on the head must be merged or folded into one weight first (peft: merge_and_unload), since its "
            "base weight alone would score another model; or let lm_head_inputs(model) fold it in"
            if adapter
            else "pass its .weight, and its .bias as lm_head_bias, or **lm_head_inputs(model)"
        )
        raise TypeError(f"lm_head_weight must be a tensor [V, H]; got a module {type(weight).__name__}: {why}")
    _check_tensor(weight, "lm_head_weight")
    assert isinstance(weight, Tensor)
    if weight.is_quantized or hasattr(weight, "quant_state") or not weight.is_floating_point():
        raise TypeError(
            "lm_head_weight must be a plain floating-point tensor [V, H]; got a quantised or packed one "
            f"({type(weight).__name__}, {weight.dtype}); dequantise it first"
        )
    _check_floating(weight, "lm_head_weight")


def check_mask(mask: Tensor | None, token_ids: Tensor, name: str = "completion_mask") -> None:
    """`mask` is shaped like the ids; its values are checked by `check_token_values`."""
    if mask is not None:
        _check_tensor(mask, name)
        if mask.is_complex():
            raise TypeError(f"{name} must be bool, integer or floating point 0/1; got {mask.dtype}")
        _check_shape(mask, name, [tuple(token_ids.shape)])


def check_head_numbers(temperature: Tensor | float, logit_scale: float, softcap: float | None, layout: Layout) -> None:
    """Temperature > 0 (a number or a tensor that spreads over tokens), finite scale, softcap > 0."""
    _check_number(logit_scale, "logit_scale")
    if softcap is not None and _check_number(softcap, "softcap") <= 0:
        raise ValueError(f"softcap must be > 0; got {softcap}")
    if isinstance(temperature, Tensor):
        _check_floating(temperature, "temperature")
        if temperature.dim():
            _check_shape(temperature, "temperature", _spreadable(layout))
    elif _check_number(temperature, "temperature") <= 0:
        raise ValueError(f"temperature must be > 0; got {temperature}")


def check_loss_inputs(inputs: LossInputs, layout: Layout, config: GRPOLossConfig) -> None:
    """Shapes and presence of everything the objective reads."""
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"config must be a GRPOLossConfig; got {type(config).__name__}")
    _check_tensor(inputs.advantages, "advantages")
    _check_floating(inputs.advantages, "advantages")
    spreadable = _spreadable(layout)
    _check_shape(inputs.advantages, "advantages", spreadable)
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        value = getattr(inputs, name)
        if value is not None:
            _check_tensor(value, name)
            _check_floating(value, name)
            _check_shape(value, name, [tuple(layout.shape)])
    _check_importance_sampling_ratio(inputs.importance_sampling_ratio, layout, config)
    if config.beta != 0.0 and inputs.ref_per_token_logps is None:
        raise ValueError(f"beta={config.beta} needs ref_per_token_logps {tuple(layout.shape)}; got None")
    if inputs.sampling_per_token_logps is not None and config.off_policy_mask_threshold is None:
        raise ValueError(
            "sampling_per_token_logps is only used with off_policy_mask_threshold, which is None; pass None"
        )
    if inputs.num_items_in_batch is not None and config.loss_type not in TOKEN_NORMALIZED:
        raise ValueError(
            f"num_items_in_batch is not used by loss_type={config.loss_type!r} "
            f"(only by {', '.join(sorted(TOKEN_NORMALIZED))}); pass None"
        )
    if config.loss_type == "gmpo" and layout.is_per_token(inputs.advantages):
        raise ValueError(
            f"loss_type='gmpo' needs one advantage a sequence, [{layout.num_sequences}]; "
            f"got shape {_shape(inputs.advantages)}"
        )


def _check_importance_sampling_ratio(ratio: Tensor | None, layout: Layout, config: GRPOLossConfig) -> None:
    if ratio is None:
        return
    name = "importance_sampling_ratio"
    _check_tensor(ratio, name)
    _check_floating(ratio, name)
    if config.loss_type == "gmpo":
        raise ValueError(f"{name} is not used by loss_type='gmpo'; pass None")
    expected = [tuple(layout.shape)]
    if config.loss_type != "vespo":  # VESPO sums it over the tokens of a sequence
        expected.append((layout.num_sequences, 1))
    _check_shape(ratio, name, expected)


def as_num_items(value: float | Tensor | None, device: torch.device) -> Tensor | None:
    """`num_items_in_batch` as a 0-d fp64 tensor on `device`."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"num_items_in_batch must be a number or a 0-d tensor; got shape {_shape(value)}")
        return value.detach().to(torch.float64)
    if _check_number(value, "num_items_in_batch") <= 0:
        raise ValueError(f"num_items_in_batch must be > 0; got {value}")
    return torch.full((), float(value), dtype=torch.float64, device=device)


def check_devices(call: Any) -> None:
    """All tensors of a call (`calls.py`) live on one device."""
    check_one_device(**dict(named(call)))


def check_one_device(**values: object) -> None:
    """Those that are tensors live on one device."""
    devices = {name: x.device for name, x in values.items() if isinstance(x, Tensor)}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device; got {listed}")


def check_token_values(
    token_ids: Tensor, mask: Tensor | None, vocab_size: int, temperature: Tensor | None, layout: Layout
) -> None:
    """Ids within the vocabulary and temperatures > 0 on active positions, masks of 0 and 1."""
    if temperature is not None:
        layout.check_reading("temperature", temperature)
    if not values_are_checked(token_ids.device):
        return
    if mask is not None and mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("a mask must hold only 0 and 1 (or be bool); got other values")
    active = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask != 0
    ids = token_ids[active].to(torch.int64)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ValueError(
            f"token ids on active positions must lie in [0, {vocab_size}); got {int(ids.min())} to {int(ids.max())}"
        )
    if temperature is not None and not (layout.per_token(temperature)[active.reshape(-1)] > 0).all():
        raise ValueError("temperature must be > 0 on active positions; got one that is not")


def check_candidates(
    head: HeadCall, token_ids: Tensor, mask: Tensor | None, vocab_size: int, inputs: LossInputs | None = None
) -> None:
    """The sets of a call, and that tokens alone in theirs have log-probs of 0."""
    if head.candidates is not None:
        given = {} if inputs is None else {n: x for n, x in named(inputs) if n.endswith("_logps") and x is not None}
        check_values(CandidateSets(*head.candidates), token_ids, mask, vocab_size, given)


def check_loss_values(inputs: LossInputs, layout: Layout, entropies: Tensor | None = None) -> None:
    """Finite numbers where a token is active, a positive normaliser, and offsets that cover the packed tokens."""
    layout.check_reading("advantages", inputs.advantages)
    device = inputs.advantages.device
    if not values_are_checked(device):
        return
    _check_offsets(layout)
    if inputs.num_items_in_batch is not None and not float(inputs.num_items_in_batch) > 0:
        raise ValueError(f"num_items_in_batch must be > 0; got {float(inputs.num_items_in_batch)}")
    mask = inputs.completion_mask
    active = torch.ones(layout.num_tokens, dtype=torch.bool, device=device) if mask is None else mask.reshape(-1) != 0
    sequence = layout.sequence_ids(device)

    def refuse(name: str, bad: Tensor, must: str) -> None:
        count = int((bad.reshape(-1) & active).sum())
        if count:
            raise ValueError(f"{name} must {must} on active tokens; got {count} otherwise")

    refuse("advantages", ~layout.spread(inputs.advantages, sequence).isfinite(), "be finite, not NaN,")
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        value = getattr(inputs, name)
        if value is not None:  # -inf is an impossible token
            refuse(name, value.isnan() | (value == math.inf), "not be NaN or +inf")
    if entropies is not None:
        refuse("entropies", ~entropies.isfinite(), "be finite, not NaN,")
    ratio = inputs.importance_sampling_ratio
    if ratio is not None:
        ratio = ratio.reshape(-1) if ratio.shape == layout.shape else ratio.reshape(-1).index_select(0, sequence)
        refuse("importance_sampling_ratio", ~(ratio.isfinite() & (ratio >= 0)), "be finite and >= 0")


def check_rollout_logps(
    old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Two log-probs and a mask for each token, [B, T], or [N] with `cu_seqlens`."""
    old, sampling = "old_per_token_logps", "sampling_per_token_logps"
    for name, value in ((old, old_per_token_logps), (sampling, sampling_per_token_logps)):
        _check_tensor(value, name)
        _check_floating(value, name)
    _check_packing(old_per_token_logps, cu_seqlens, old)
    _check_shape(sampling_per_token_logps, sampling, [tuple(old_per_token_logps.shape)])
    check_mask(mask, old_per_token_logps, "mask")
    check_one_device(**{old: old_per_token_logps, sampling: sampling_per_token_logps}, mask=mask, cu_seqlens=cu_seqlens)


def check_ratio_bounds(clip_min: float | None, clip_max: float | None, *, required: bool) -> None:
    """0 <= clip_min < clip_max, 0 < clip_max; at least one of them where `required`."""
    if clip_max is not None and _check_number(clip_max, "clip_max") <= 0:
        raise ValueError(f"clip_max must be > 0, or None; got {clip_max}")
    if clip_min is not None and _check_number(clip_min, "clip_min") < 0:
        raise ValueError(f"clip_min must be >= 0, or None; got {clip_min}")
    if clip_min is not None and clip_max is not None and clip_min >= clip_max:
        raise ValueError(f"clip_min must be below clip_max; got {clip_min} and {clip_max}")
    if required and clip_min is None and clip_max is None:
        raise ValueError("a truncating mode needs clip_min or clip_max; got None for both")


def check_rollout_values(old_per_token_logps: Tensor, mask: Tensor | None, layout: Layout) -> None:
    """Offsets that cover the tokens, masks of 0 and 1, and old log-probs that are numbers where a token is active."""
    if not values_are_checked(old_per_token_logps.device):
        return
    _check_offsets(layout)
    if mask is not None and mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("a mask must hold only 0 and 1 (or be bool); got other values")
    bad = old_per_token_logps.isnan() | (old_per_token_logps == math.inf)
    count = int((bad if mask is None else bad & (mask != 0)).sum())
    if count:
        raise ValueError(f"old_per_token_logps must not be NaN or +inf on active tokens; got {count} otherwise")


def _check_offsets(layout: Layout) -> None:
    if layout.cu_seqlens is None:
        return
    offsets = layout.cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != layout.num_tokens or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {layout.num_tokens}; got {_abridged(offsets)}"
        )


def _spreadable(layout: Layout) -> list[tuple[int, ...]]:
    """Shapes of what may be given for each sequence or for each token."""
    return [(layout.num_sequences,), (layout.num_sequences, 1), tuple(layout.shape)]


def _check_shape(x: Tensor, name: str, expected: Sequence[tuple[int, ...]]) -> None:
    if tuple(x.shape) not in expected:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, expected))}; got {_shape(x)}")


def _check_tensor(x: object, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")


def _check_floating(x: Tensor, name: str) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64; got {x.dtype}")


def _check_number(x: object, name: str) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        if not isinstance(x, numbers.Real) or isinstance(x, bool):  # NumPy's are Real
            raise TypeError(f"{name} must be a number; got {x!r} of type {type(x).__name__}")
        x = float(x)
    if not abs(x) < math.inf:  # NaN neither; torch.compile can trace this, but not math.isfinite
        raise ValueError(f"{name} must be finite; got {x}")
    return float(x)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _abridged(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"


def check_one_process(process_group: object) -> None:
    """The reference knows one process only."""
    if process_group is not None:
        raise ValueError("impl='reference' is of one process; got a process_group")
