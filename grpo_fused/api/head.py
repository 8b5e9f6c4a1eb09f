"""What the functions of hidden states and an lm head share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fused import engines
from grpo_fused.call import validation as check
from grpo_fused.call.calls import HeadCall, Needs, OtherHead
from grpo_fused.call.candidates import CandidateSets, checked
from grpo_fused.call.layout import Layout, split_temperature
from grpo_fused.call.options import check_integer
from grpo_fused.engines import Impl
from grpo_fused.engines.products import compute_dtype
from grpo_fused.ranks.parallel import ParallelGroups, whole


def head_call(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    layout: Layout,
    *,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    impl: Impl,
    max_scratch_bytes: int | None,
    compact: bool,
    candidates: CandidateSets | None = None,
    process_group: dist.ProcessGroup | ParallelGroups | None = None,
    names: tuple[str, str] = ("token_ids", "mask"),
) -> HeadCall:
    """The head's part of a call, checked, with the engine that `impl` chooses.

    Args:
        layout: that of the token ids, which are checked already.
        names: of the ids and the mask in errors.
    """
    lm_head_weight = whole(lm_head_weight, process_group)
    lm_head_bias = None if lm_head_bias is None else whole(lm_head_bias, process_group)
    check.check_head(hidden_states, lm_head_weight, lm_head_bias, token_ids, names[0])
    check.check_mask(mask, token_ids, names[1])
    check.check_head_numbers(temperature, logit_scale, softcap, layout)
    if max_scratch_bytes is not None:
        check_integer(max_scratch_bytes, "max_scratch_bytes", least=1)
    compute = compute_dtype(hidden_states, lm_head_weight)
    engine = engines.choose(impl, hidden_states.device, compute)
    if engine == "reference" and process_group is not None:
        raise ValueError("impl='reference' supports one process only; got a process_group")
    number, temperatures = split_temperature(temperature)
    return HeadCall(
        hidden_states, lm_head_weight, lm_head_bias, temperatures, number, float(logit_scale), softcap, engine, compute,
        max_scratch_bytes, compact, ParallelGroups.encode(process_group),
        *checked(candidates, token_ids, mask, process_group, engines.largest_sparse_set(engine, len(lm_head_weight))),
    )  # fmt: skip


def needs_of(head: HeadCall) -> Needs:
    """Which gradients autograd will request."""
    return Needs(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in head.tensors))


def beside(
    head: HeadCall,
    layout: Layout,
    name: str,
    hidden_states: Tensor | None,
    lm_head_weight: Tensor | None,
    lm_head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> tuple[HeadCall, OtherHead]:
    """The policy's head and a frozen one, checked.

    Args:
        name: of the other head in errors.
    """
    assert hidden_states is not None
    assert lm_head_weight is not None
    lm_head_weight = whole(lm_head_weight, None)
    lm_head_bias = None if lm_head_bias is None else whole(lm_head_bias, None)
    tokens = head.hidden_states.new_zeros(layout.shape, dtype=torch.int64)
    try:
        check.check_head(hidden_states, lm_head_weight, lm_head_bias, tokens, "hidden_states")
        check.check_head_numbers(1.0, logit_scale, softcap, layout)
    except (TypeError, ValueError) as error:  # its argument names lack the prefix
        raise type(error)(f"{name}: {error}") from None
    if lm_head_weight.shape[0] != head.lm_head_weight.shape[0]:
        got = f"{head.lm_head_weight.shape[0]} and {lm_head_weight.shape[0]}"
        raise ValueError(f"both heads must have the same vocabulary; got {got} rows")
    computes = head.compute_dtype, compute_dtype(hidden_states, lm_head_weight)
    if torch.float64 in computes:  # differences of logits are taken in one dtype
        computes = torch.float64, torch.float64
    head = head._replace(compute_dtype=computes[0])
    return head, OtherHead(hidden_states, lm_head_weight, lm_head_bias, float(logit_scale), softcap, computes[1])
