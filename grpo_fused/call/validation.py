"""Checks of a call before any work: each error names what was expected and what came.

Shapes, dtypes and devices are checked always. The values of tensors are checked on the CPU always; on other devices
reading them would synchronise, so they are checked only if `GRPO_FUSED_DEBUG=1` is set in the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from grpo_fused.call.calls import (
    CustomCall,
    DivergenceCall,
    LinearCall,
    LogprobsCall,
    LossCall,
    LossInputs,
    layout_of,
    named,
    tensors_in,
)
from grpo_fused.call.candidates import CandidateSets, check_alternative_values, check_sets, check_values
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.layout import Layout, active_tokens, values_are_checked
from grpo_fused.call.loss_types import LOSS_TYPES
from grpo_fused.call.options import check_number
from grpo_fused.kernels.row_types import BYTES

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_GIVEN = ("cu_seqlens", "alternative_logps", "alternative_offsets")
"""what an objective gets besides its inputs"""

OF_POLICIES = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
"""inputs that are log-probs of the distribution of the call"""

Size = int | str
"""A number of elements, or a letter for any number."""


class Kind(NamedTuple):
    """Allowed dtypes, as a part of the error text and as a function."""

    must: str
    allows: Callable[[torch.dtype], bool]


ANY = Kind("", lambda dtype: True)
FLOAT = Kind("be fp16, bf16, fp32 or fp64", lambda dtype: dtype in FLOATS)
INTEGER = Kind(
    "have an integer dtype", lambda dtype: not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
)
_BYTE = Kind("be int8 or float8_e4m3fn (uint8 needs codes)", lambda dtype: dtype in BYTES)
_HALVES = Kind("be uint8, two numbers a byte, where there are codes", lambda dtype: dtype == torch.uint8)
OFFSET = Kind("be int32 or int64", lambda dtype: dtype in (torch.int32, torch.int64))
ZERO_OR_ONE = Kind("be bool, integer or floating point 0/1", lambda dtype: not dtype.is_complex)


def check_token_ids(token_ids: Tensor, name: str) -> None:
    """Integers, [B, T] or [N]."""
    check_tensor(token_ids, name, INTEGER, ("B", "T"), ("N",))


def check_tokens(x: Tensor, name: str, kind: Kind, cu_seqlens: Tensor | None) -> None:
    """[B, T], or [N] with `cu_seqlens` [S + 1]."""
    check_tensor(x, name, kind)
    if x.dim() != (2 if cu_seqlens is None else 1):
        packing = "without cu_seqlens" if cu_seqlens is None else "with cu_seqlens"
        raise ValueError(
            f"{name} must be [B, T], or packed [N] together with cu_seqlens; got {tuple(x.shape)} {packing}"
        )
    if cu_seqlens is not None:
        check_tensor(cu_seqlens, "cu_seqlens", OFFSET, ("S + 1",))
        if cu_seqlens.shape[0] < 1:
            raise ValueError("cu_seqlens must hold at least one offset, 0; got none")


def check_entropies(entropies: Tensor | None, layout: Layout, config: GRPOLossConfig) -> None:
    """Shaped like the log-probs, and given if the loss reads them."""
    if entropies is not None:
        check_tensor(entropies, "entropies", FLOAT, tuple(layout.shape))
    elif config.needs_entropy:
        option = "entropy_coef" if config.entropy_coef != 0.0 else "top_entropy_quantile"
        raise ValueError(f"{option}={getattr(config, option)} needs entropies {tuple(layout.shape)}; got None")


def check_logits(logits: Tensor, token_ids: Tensor) -> None:
    """[*ids, V], V >= 1."""
    check_tensor(logits, "logits", FLOAT, (*token_ids.shape, "V"))
    if logits.shape[-1] == 0:
        raise ValueError(f"logits must have V >= 1; got shape {tuple(logits.shape)}")


def check_head(
    hidden_states: Tensor,
    lm_head_weight: Tensor | QuantizedWeight,
    lm_head_bias: Tensor | None,
    token_ids: Tensor,
    ids_name: str,
) -> None:
    """Hidden states [*ids, H], weight [V, H], bias [V]."""
    if isinstance(lm_head_weight, QuantizedWeight):
        _check_quantized(lm_head_weight)
    else:
        _check_head_weight(lm_head_weight)
    check_tensor(hidden_states, "hidden_states", FLOAT, (*token_ids.shape, "H"), beside=ids_name)
    width, sizes = hidden_states.shape[-1], lm_head_weight.shape
    hint = ""
    if sizes[-1:] != (width,) and width in sizes[:1]:  # in this order: V != H would guard an exported call
        hint = ": pass its transpose, or the states before the head if these are logits"
    _check_shape(sizes, "lm_head_weight", ("V", width), beside="hidden_states", hint=hint)
    if 0 in lm_head_weight.shape:
        raise ValueError(f"lm_head_weight must have V >= 1 and H >= 1; got {tuple(lm_head_weight.shape)}")
    if lm_head_bias is not None:
        check_tensor(lm_head_bias, "lm_head_bias", FLOAT, tuple(lm_head_weight.shape[:1]))


def _check_quantized(weight: QuantizedWeight) -> None:
    """Values of a byte or half of one, and a finite scale for each row or group; nothing that wants a gradient."""
    if weight.codes is None:
        check_tensor(weight.values, "lm_head_weight.values", _BYTE, ("V", "H"))
    else:
        check_tensor(weight.values, "lm_head_weight.values", _HALVES, ("V", "H / 2"))
        check_tensor(weight.codes, "lm_head_weight.codes", FLOAT, (16,))
    rows, width = weight.shape
    check_tensor(weight.scale, "lm_head_weight.scale", FLOAT, (rows,), (rows, "G"), beside="lm_head_weight.values")
    if weight.scale.dim() == 2 and (weight.scale.shape[1] == 0 or width % weight.scale.shape[1] != 0):
        raise ValueError(
            f"lm_head_weight.scale [V, G] must have one scale for each of G groups of H / G columns; got "
            f"G = {weight.scale.shape[1]} and H = {width}"
        )
    parts = [x for x in (weight.values, weight.scale, weight.codes) if x is not None]
    if any(x.requires_grad for x in parts):
        raise ValueError("a quantised lm_head_weight must be frozen; got values or a scale that require a gradient")
    if torch.compiler.is_compiling() or not values_are_checked(weight.scale.device):
        return
    if weight.scales_rows and not (weight.scale.isfinite() & (weight.scale != 0)).all():
        raise ValueError("lm_head_weight.scale must be finite and not 0 (1 does for a row of zeros); got 0, inf or NaN")
    if not all(x.isfinite().all() for x in parts[1:]):
        raise ValueError("lm_head_weight.scale and codes must be finite; got inf or NaN")


def check_grad_can_be_added_to(weight: Any) -> None:
    """A weight whose gradient no one else waits for, as far as that can be seen, or one that needs none."""
    if reason := waits_for_grad(weight):
        raise ValueError(
            f"add_to_weight_grad needs a plain leaf lm_head_weight without hooks, in eager mode; got {reason}"
        )


def waits_for_grad(weight: Any) -> str | None:
    """Why rows of dW may not be added to the gradient of a weight in a backward, or None."""
    if not isinstance(weight, Tensor) or not weight.requires_grad:
        return None
    reasons = {
        "no plain tensor": type(weight) not in (Tensor, torch.nn.Parameter) or hasattr(weight, "ds_id"),
        "no leaf": not weight.is_leaf,
        "one with hooks": bool(weight._backward_hooks or weight._post_accumulate_grad_hooks),
        "one in a compiled function": torch.compiler.is_compiling(),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_alone_with(weight: Any) -> bool:
    """Whether this is one process without torch.distributed, which DDP and DeepSpeed need, and no hook is seen."""
    return not (dist.is_available() and dist.is_initialized()) and waits_for_grad(weight) is None


def check_adapters(
    adapters: Sequence[HeadAdapter], hidden_states: Tensor, weight: Tensor | QuantizedWeight, *, has_group: bool
) -> None:
    """A [r, H] and B [V, r] of each, beside a checked frozen weight [V, H]; dropout in [0, 1), none for slices of V."""
    scale = weight.scale if adapters and isinstance(weight, QuantizedWeight) and weight.scales_rows else None
    if scale is not None and values_are_checked(scale.device) and float(least := scale.abs().min()) < 1e-20:
        raise ValueError(
            f"beside an adapter, which is divided by them, scales of lm_head_weight must be at least 1e-20; got "
            f"{float(least):.3g}: take 1 for a row of zeros"
        )
    for adapter in adapters:
        if not isinstance(adapter, HeadAdapter):
            raise TypeError(f"lm_head_adapter must be HeadAdapter or a sequence of them; got {type(adapter).__name__}")
        check_tensor(adapter.a, "lm_head_adapter.a", FLOAT, ("r", hidden_states.shape[-1]), beside="hidden_states")
        rank = adapter.a.shape[0]
        if rank == 0:
            raise ValueError("lm_head_adapter.a must be [r, H] with r >= 1; got a rank of 0: leave the adapter out")
        check_tensor(adapter.b, "lm_head_adapter.b", FLOAT, (weight.shape[0], rank), beside="lm_head_weight and a")
        check_number(adapter.scale, "lm_head_adapter.scale")
        check_number(adapter.dropout, "lm_head_adapter.dropout")
        if not 0.0 <= adapter.dropout < 1.0:
            raise ValueError(f"lm_head_adapter.dropout must be in [0, 1); got {adapter.dropout}")
        if has_group and adapter.dropout > 0.0:
            raise ValueError(
                "ranks that hold slices of the vocabulary would drop different states; got "
                f"lm_head_adapter.dropout={adapter.dropout} and a process_group: set it to 0"
            )
    if adapters and isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "lm_head_weight must be frozen beside lm_head_adapter, which trains a low-rank change of it; got one that "
            "requires a gradient: detach() it, or fold the adapter in"
        )


def _check_head_weight(weight: Any) -> None:
    """A plain tensor, not a module, nor a packed or sharded tensor."""
    if isinstance(weight, torch.nn.Module):
        raise TypeError(
            f"lm_head_weight must be a tensor [V, H]; got a module {type(weight).__name__}: pass "
            "**lm_head_inputs(model), or the .weight (and .bias) of a plain head, with lm_head_adapter for a low-rank "
            "change of it"
        )
    if isinstance(weight, Tensor) and (
        weight.is_quantized
        or hasattr(weight, "quant_state")
        or not weight.is_floating_point()
        or weight.layout != torch.strided
        or (type(weight) not in (Tensor, torch.nn.Parameter) and type(weight).__module__.startswith("torchao."))
    ):
        raise TypeError(
            "lm_head_weight must be a plain floating-point tensor [V, H]; got a quantised, packed or sparse one "
            f"({type(weight).__name__}, {weight.dtype}): pass QuantizedWeight(values, scale) for int8 or fp8 with one "
            "scale a row, or groups of 4 bits with their codes, else dequantise it first"
        )
    check_tensor(weight, "lm_head_weight", FLOAT)
    if hasattr(weight, "ds_shape") and weight.numel() == 0:
        raise ValueError(
            f"lm_head_weight must be [V, H]; DeepSpeed ZeRO-3 has partitioned it ({tuple(weight.ds_shape)}): "
            "enter deepspeed.zero.GatheredParameters around the call and its backward"
        )


def check_mask(mask: Tensor | None, token_ids: Tensor, name: str = "completion_mask") -> None:
    """`mask` is shaped like the ids; its values are checked by `check_token_values`."""
    if mask is not None:
        check_tensor(mask, name, ZERO_OR_ONE, tuple(token_ids.shape))


def check_head_numbers(temperature: Tensor | float, logit_scale: float, softcap: float | None, layout: Layout) -> None:
    """Temperature > 0 (a number, or a tensor for sequences or tokens), finite scale, softcap in (0, 400]."""
    check_number(logit_scale, "logit_scale")
    if softcap is not None:
        check_number(softcap, "softcap", above=0.0, most=400.0)  # kernels have tanh to 2.5e-7 of the cap
    if isinstance(temperature, Tensor):
        check_tensor(temperature, "temperature", FLOAT, *([()] if temperature.dim() == 0 else _spreadable(layout)))
    else:
        check_number(temperature, "temperature", above=0.0)


def check_objective_scope(objective: object, scope: str) -> None:
    """A function; one with a `scope` (`grpo_fused.objectives`) must be called with that scope or a larger one."""
    if not callable(objective):
        raise TypeError(f"objective must be a function; got {type(objective).__name__}")
    if getattr(objective, "__annotations__", {}).get("return") == "Objective":
        name = getattr(objective, "__name__", repr(objective))
        raise TypeError(f"objective must be what {name}(...) returns; got the function {name} itself")
    scopes, own_scope = ("token", "sequence", "batch"), getattr(objective, "scope", None)
    if own_scope in scopes and scopes.index(own_scope) > scopes.index(scope):
        raise ValueError(f"{objective!r} must be called with scope={own_scope!r}; got {scope!r}")


def inputs_of(name: str, inputs: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """A copy of inputs by name, which may be a mapping or None."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(f"{name} must be a mapping of names to tensors or None; got {type(inputs).__name__}")
    return dict(inputs or {})


def check_objective_inputs(inputs: Mapping[str, Tensor], layout: Layout) -> None:
    """Tensors shaped like the ids, detached, with names that no other argument has."""
    for name, x in inputs.items():
        check_tensor(x, f"inputs[{name!r}]", ANY, tuple(layout.shape))
        _check_input(f"inputs[{name!r}]", name, x)


def _check_input(said: str, name: str, x: Tensor) -> None:
    if x.requires_grad:
        raise ValueError(f"{said} must be detached: no gradient reaches it; got one that requires grad")
    if name in _GIVEN or not str(name).isidentifier():
        given = ", ".join(_GIVEN)
        raise ValueError(f"names in inputs must be valid argument names, not {given}; got {name!r}")


def check_alternatives(
    alternatives: CandidateSets | None, inputs: Mapping[str, Tensor], token_ids: Tensor, names: Collection[str]
) -> None:
    """N sets, and detached tensors [M] for the objective, whose names are none of `names`."""
    if alternatives is not None:
        check_sets(alternatives, token_ids, "alternatives")
    elif inputs:
        raise ValueError(f"alternative_inputs need alternatives; got {', '.join(inputs)} and None")
    for name, x in inputs.items():
        assert alternatives is not None
        check_tensor(x, f"alternative_inputs[{name!r}]", ANY, (len(alternatives.ids),), beside="alternatives.ids")
        _check_input(f"alternative_inputs[{name!r}]", name, x)
        if name in names:
            raise ValueError(f"inputs and alternative_inputs must have different names; got {name!r} in both")


def check_loss_inputs(inputs: LossInputs, layout: Layout, config: GRPOLossConfig, *, with_heads: bool = False) -> None:
    """Shapes and presence of everything the objective reads; the exact KL needs heads."""
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"config must be a GRPOLossConfig; got {type(config).__name__}")
    check_tensor(inputs.advantages, "advantages", FLOAT, *_spreadable(layout))
    per_token, per_sequence = tuple(layout.shape), (layout.num_sequences, 1)
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"):
        is_spread = name == "importance_sampling_ratio" and config.kind.takes_ratio != "token"
        if (value := getattr(inputs, name)) is not None:
            check_tensor(value, name, FLOAT, *([per_token, per_sequence] if is_spread else [per_token]))

    loss_type = f"loss_type={config.loss_type!r}"
    if config.kl_estimator == "exact" and not with_heads:
        raise ValueError(
            "kl_estimator='exact' needs hidden states and head of policy and reference, which fused_linear_grpo_loss "
            "takes; here use k1, k2 or k3"
        )
    if config.beta != 0.0 and inputs.ref_per_token_logps is None and config.kl_estimator != "exact":
        raise ValueError(f"beta={config.beta} needs ref_per_token_logps {per_token}; got None")
    if inputs.sampling_per_token_logps is not None and config.off_policy_mask_threshold is None:
        raise ValueError(
            "sampling_per_token_logps is only used with off_policy_mask_threshold, which is None; pass None"
        )
    if inputs.num_items_in_batch is not None and config.kind.average != "items":
        users = ", ".join(sorted(name for name, kind in LOSS_TYPES.items() if kind.average == "items"))
        raise ValueError(f"num_items_in_batch is not used by {loss_type} (only by {users}); pass None")
    if inputs.importance_sampling_ratio is not None and config.kind.takes_ratio is None:
        raise ValueError(f"importance_sampling_ratio is not used by {loss_type}; pass None")
    if config.kind.rule == "gmpo" and layout.is_per_token(inputs.advantages):
        raise ValueError(
            f"{loss_type} needs one advantage a sequence, [{layout.num_sequences}]; "
            f"got shape {tuple(inputs.advantages.shape)}"
        )


def check_exact_kl(
    call: LossCall, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, impl: str, group: object
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The reference's hidden states, weight and bias, if a call with `kl_estimator="exact"` has what it must and may
    have."""
    exact = "kl_estimator='exact'"
    if hidden is None or weight is None:
        there = [name for name, x in (("ref_hidden_states", hidden), ("ref_lm_head_weight", weight)) if x is not None]
        raise ValueError(f"{exact} needs ref_hidden_states and ref_lm_head_weight; got {' and '.join(there) or 'none'}")
    if (bias is None) != (call.lm_head.bias is None):
        missing = "ref_lm_head_bias" if bias is None else "lm_head_bias"
        raise ValueError(f"policy and reference must both have a bias or none; got no {missing} (zeros are none)")
    if impl not in ("auto", "chunked", "reference"):
        raise ValueError(f"{exact} runs with impl 'chunked' or 'reference'; got {impl!r}")
    unused = {
        "ref_per_token_logps": call.inputs.ref_per_token_logps, "candidates": call.candidates.sets,
        "process_group": group,
    }  # fmt: skip
    for name, value in unused.items():
        if value is not None:
            raise ValueError(f"{exact} does not support {name}; pass None")
    return hidden, weight, bias


def as_num_items(value: float | Tensor | None, device: torch.device) -> Tensor | None:
    """`num_items_in_batch` as a 0-d fp64 tensor on `device`."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        _check_shape(value.shape, "num_items_in_batch", ())
        return value.detach().to(torch.float64)
    number = check_number(value, "num_items_in_batch", above=0.0)
    return torch.full((), number, dtype=torch.float64, device=device)


def check_devices(call: Any) -> None:
    """All tensors of a call (`calls.py`) are plain ones on one device; names are made where one is not."""
    kinds = {(type(x), x.device) for x in tensors_in(call)}
    if len({device for _, device in kinds}) > 1 or any(kind not in (Tensor, Parameter) for kind, _ in kinds):
        check_one_device(**dict(named(call)))


def check_one_device(**values: object) -> None:
    """Those that are tensors are no `DTensor`, and on one device."""
    from torch.distributed.tensor import DTensor

    tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name} must be a plain tensor, as full_tensor() and to_local() give; got {type(x).__name__}"
            )
    if len({x.device for x in tensors.values()}) > 1:
        listed = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"all tensors must be on one device; got {listed}")


def check_token_values(
    token_ids: Tensor, mask: Tensor | None, vocab_size: int, temperature: Tensor | None, layout: Layout
) -> None:
    """Ids within the vocabulary and finite temperatures > 0 on active positions, masks of 0 and 1."""
    if temperature is not None:
        layout.check_reading("temperature", temperature)
    if not values_are_checked(token_ids.device):
        return
    check_zero_or_one(mask)
    active = active_tokens(mask, token_ids).reshape(-1)
    ids = token_ids.reshape(-1)[active].to(torch.int64)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        got = f"{int(ids.min())} to {int(ids.max())}"
        hint = ": mask the positions that are -100 in labels" if -100 in ids else ""
        raise ValueError(f"token ids on active positions must lie in [0, {vocab_size}); got {got}{hint}")
    if temperature is not None:
        t = layout.per_token(temperature)
        _refuse("temperature", "be > 0 and finite", ~((t > 0) & t.isfinite()), active)


def check_call_states(call: LinearCall) -> None:
    """Finite numbers in the hidden states of active tokens, which may differ between the ranks of a head."""
    if not values_are_checked(call.hidden_states.device) or call.token_ids.numel() == 0:
        return
    for name, states in call._asdict().items():
        if name.endswith("hidden_states") and states is not None:
            # two passes without a copy, also of bf16; the maximum of a row with a NaN is NaN
            finite = states.amax(-1).isfinite() & states.amin(-1).isfinite()
            if name == "hidden_states" and call.lm_head.base is not None and call.lm_head.weight.shape[1]:
                name += ", also times the A of lm_head_adapter,"
            _refuse(name, "be finite", ~finite, active_tokens(call.mask, call.token_ids).reshape(-1))


def check_call_values(call: LinearCall, vocab_size: int) -> None:
    """All other values: ids, mask and temperatures, what a loss reads, candidate sets and alternatives."""
    layout, ids, mask, logps = layout_of(call), call.token_ids, call.mask, {}
    check_token_values(ids, mask, vocab_size, call.lm_head.temperatures, layout)
    if isinstance(call, LossCall):
        check_loss_values(call.inputs, layout)
        logps = {name: x for name, x in named(call.inputs) if name.endswith("_logps") and x is not None}
    elif isinstance(call, DivergenceCall) and values_are_checked(ids.device):
        _refuse("weights", "be finite", ~call.weights.isfinite(), active_tokens(mask, ids).reshape(-1))
        if call.other_ids is not None and call.other_logprobs is not None:
            _check_likeliest_values(call.other_ids, call.other_logprobs, active_tokens(mask, ids), vocab_size)
    elif isinstance(call, CustomCall) and values_are_checked(ids.device):
        check_offsets(layout)
        logps = {name: x for name, x in call.inputs.items() if name in OF_POLICIES}
    sets = call.candidates.sets
    if sets is not None:
        check_values(sets, ids, mask, vocab_size, logps)
    if isinstance(call, (CustomCall, LogprobsCall)) and (alternatives := call.alternatives.sets) is not None:
        check_alternative_values(alternatives, ids, mask, vocab_size, sets)


def _check_likeliest_values(ids: Tensor, logprobs: Tensor, active: Tensor, vocab_size: int) -> None:
    """Ids [..., K] where their probability is not 0: of the vocabulary, different; and probabilities that sum to 1 at
    most."""
    q = logprobs[active].to(torch.promote_types(logprobs.dtype, torch.float32)).exp()
    ids, total = torch.where(q > 0, ids[active].to(torch.int64), 0), q.sum(-1)
    # rounding of log q changes the sum by at most eps / 2 times the entropy
    most = 1.001 + 0.5 * torch.finfo(logprobs.dtype).eps * math.log(max(ids.shape[-1], 2))
    if not ((ids >= 0) & (ids < vocab_size)).all() or not (total <= most).all():
        raise ValueError(
            f"other_ids must be in [0, {vocab_size}), and exponentials of other_logprobs must sum to 1 at most; got "
            f"ids from {int(ids.min())} to {int(ids.max())}, sums up to {float(total.max())}"
        )
    unused = -1 - torch.arange(ids.shape[-1], device=ids.device)  # no ids, and all different
    twice = int((torch.where(q > 0, ids, unused).sort(-1).values.diff(dim=-1) == 0).sum())
    if twice:
        raise ValueError(f"other_ids must be different at each position; got {twice} that are there again")


def check_loss_values(inputs: LossInputs, layout: Layout, entropies: Tensor | None = None) -> None:
    """Finite numbers where a token is active, a positive normaliser, and offsets that cover the packed tokens."""
    layout.check_reading("advantages", inputs.advantages)
    device = inputs.advantages.device
    if not values_are_checked(device):
        return
    check_offsets(layout)
    check_zero_or_one(inputs.completion_mask)
    if inputs.num_items_in_batch is not None and not 0 < float(inputs.num_items_in_batch) < math.inf:
        raise ValueError(f"num_items_in_batch must be > 0 and finite; got {float(inputs.num_items_in_batch)}")
    sequence = layout.sequence_ids(device)
    active = active_tokens(inputs.completion_mask, sequence).reshape(-1)
    _refuse("advantages", "be finite, not NaN,", ~layout.per_token(inputs.advantages, sequence).isfinite(), active)
    _refuse_no_logps("old_per_token_logps", inputs.old_per_token_logps, active)
    _refuse_no_logps("ref_per_token_logps", inputs.ref_per_token_logps, active)
    if (sampling := inputs.sampling_per_token_logps) is not None:
        _refuse("sampling_per_token_logps", "be finite, or NaN where there is none", sampling.isinf(), active)
    if entropies is not None:
        _refuse("entropies", "be finite, not NaN,", ~entropies.isfinite(), active)
    ratio = inputs.importance_sampling_ratio
    if ratio is not None:
        ratio = layout.per_token(ratio, sequence)
        _refuse("importance_sampling_ratio", "be finite and >= 0", ~(ratio.isfinite() & (ratio >= 0)), active)


def check_rollout_values(
    old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor | None, layout: Layout
) -> None:
    """Offsets that cover the tokens, masks of 0 and 1, and log-probs of active tokens; the sampler may lack some."""
    if values_are_checked(old_per_token_logps.device):
        check_offsets(layout)
        check_zero_or_one(mask)
        active = active_tokens(mask, old_per_token_logps).reshape(-1)
        _refuse_no_logps("old_per_token_logps", old_per_token_logps, active)
        _refuse("sampling_per_token_logps", "not be +inf", sampling_per_token_logps == math.inf, active)


def check_tensor(x: Any, name: str, kind: Kind, *shapes: tuple[Size, ...], beside: str = "") -> None:
    """A tensor of a dtype of the kind and, if any are given, of one of the shapes: numbers, or letters for any."""
    if not isinstance(x, Tensor):
        fields = getattr(x, "_fields", ())
        hint = f", whose fields are {', '.join(fields)}: pass one of them" if fields else ""
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}{hint}")
    if not kind.allows(x.dtype):
        raise TypeError(f"{name} must {kind.must}; got {x.dtype}")
    if x.device.type == "meta":
        raise ValueError(f"{name} must be in memory; got a tensor on meta, which has no values")
    if x.is_nested or x.layout != torch.strided:
        form = "nested: pass its values(), packed, and offsets() as cu_seqlens" if x.is_nested else x.layout
        raise TypeError(f"{name} must be a dense tensor; got one that is {form}")
    if shapes:
        _check_shape(x.shape, name, *shapes, beside=beside)


def _check_shape(got: torch.Size, name: str, *shapes: tuple[Size, ...], beside: str = "", hint: str = "") -> None:
    """One of the shapes; `beside` names the argument that it must match, `hint` is the remedy."""
    for shape in shapes:
        sizes = zip(got, shape, strict=False)
        if len(shape) == len(got) and all(isinstance(want, str) or size == want for size, want in sizes):
            return
    expected = " or ".join(str(shape).replace("'", "") for shape in shapes)
    raise ValueError(f"{name} must have shape {expected}{beside and f' to go with {beside}'}; got {tuple(got)}{hint}")


def _spreadable(layout: Layout) -> list[tuple[Size, ...]]:
    """Shapes of an argument with one value for each sequence or for each token."""
    return [(layout.num_sequences,), (layout.num_sequences, 1), tuple(layout.shape)]


def check_zero_or_one(mask: Tensor | None) -> None:
    """Values of a mask."""
    if mask is not None and mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("a mask must hold only 0 and 1 (or be bool); got other values")


def _refuse(name: str, must: str, bad: Tensor, active: Tensor) -> None:
    """Raise if `bad` is true for an active token."""
    found = (bad.reshape(-1) & active).nonzero()
    if len(found):
        raise ValueError(
            f"{name} must {must} on active tokens; got others at {len(found)} of {int(active.sum())}, the first at "
            f"token {int(found[0])} (counted from 0, row by row)"
        )


def _refuse_no_logps(name: str, logps: Tensor | None, active: Tensor) -> None:
    """NaN and +inf are not log-probs; -inf is that of an impossible token."""
    if logps is not None:
        _refuse(name, "not be NaN or +inf", logps.isnan() | (logps == math.inf), active)


def check_offsets(layout: Layout, name: str = "cu_seqlens", of: str = "tokens") -> None:
    """They rise from 0 to the number of tokens, or of what else is laid out like them."""
    if layout.cu_seqlens is None:
        return
    offsets = layout.cu_seqlens.tolist()
    if offsets[:1] != [0] or offsets[-1] != layout.num_tokens or offsets != sorted(offsets):
        got = str(offsets) if len(offsets) <= 8 else f"[{str(offsets[:4])[1:-1]}, ..., {offsets[-1]}]"
        raise ValueError(f"{name} must rise from 0 to the number of {of}, {layout.num_tokens}; got {got}")
