"""What the functions of hidden states and an lm head share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fused import engines
from grpo_fused.api.composed import composed
from grpo_fused.call import validation as check
from grpo_fused.call.calls import HIDDEN_ALONE, LMHead, LogprobsCall, Needs, Run, TokenSets, tensors_of
from grpo_fused.call.candidates import CandidateSets, may_need_whole_head
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.layout import Layout, split_temperature
from grpo_fused.call.options import check_flag, check_integer
from grpo_fused.engines import Impl
from grpo_fused.engines.products import autocast_rounds, compute_dtype
from grpo_fused.ranks.handshake import refusing_together
from grpo_fused.ranks.parallel import ParallelGroups, whole


class LogitOptions(TypedDict, total=False):
    """Keyword arguments of `fused_linear_divergence`: see `HeadOptions`, which has all of them."""

    lm_head_bias: Tensor | None
    lm_head_adapter: HeadAdapter | Sequence[HeadAdapter] | None
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    max_scratch_bytes: int | None
    compact: bool
    add_to_weight_grad: bool
    process_group: dist.ProcessGroup | ParallelGroups | None


class HeadOptions(LogitOptions, total=False):
    """Keyword arguments that the functions of hidden states and an lm head share.

        logits = softcap_c(logit_scale * (h W^T + b)) / temperature

    Hidden states, weight, bias and adapters get gradients. Other tensors, such as a temperature, advantages or old
    log-probs, get none, even if they require it; an input of an objective that requires one raises an error.

    Args:
        lm_head_bias: `[V]`; default None.
        lm_head_adapter: `HeadAdapter`, or several: the weight is W + scale * B A with W frozen. Gradients go to A and
            B, without a tensor of the size of W.
        temperature: > 0: a number, one for each sequence (`[B]`, `[B, 1]`), or one for each token; default 1.
        logit_scale: factor on the logits, before the cap; default 1.
        softcap: c in `c * tanh(logits / c)`, in (0, 400]; default None.
        candidates: `CandidateSets`: the tokens that top-k, top-p or min-p kept at each position. Log-probs, entropies
            and KL are then of the distribution renormalised over them, and only their rows of the weight are read. Old,
            reference and sampling log-probs must be of that distribution, too. An empty set means the whole vocabulary.
        impl: `"auto"` (the default), or an engine by name, which then runs or raises. `"reference"` holds all logits
            and always gives all metrics: it ignores `max_scratch_bytes` and `compact`.
        max_scratch_bytes: budget for temporaries beyond inputs, gradients and the fp32 accumulator of dW; default
            256 MiB on the CPU and 2 GiB on CUDA, and in `native` 64 MiB, 12 MiB for each thread or the size of dW,
            whichever is most. One that is too small raises, except in `native`, which takes what it needs and computes
            again what it cannot keep.
        compact: gather the active rows first, at the cost of a device synchronisation (two if scoring comes
            first); False has none, computes masked rows too (and ignores them), and gives the same results. Default
            True.
        add_to_weight_grad: where all tokens have a candidate set, `backward()` adds the rows in the sets to
            `lm_head_weight.main_grad` if there is one, as Megatron names it, else to `lm_head_weight.grad` if it is not
            None, in place of filling a [V, H] that autograd adds: for the second and later micro-batches of an
            optimizer step. It has no effect beside an adapter. Default False, since hooks of a reducer (DDP outside of
            `no_sync`, Megatron's overlapped reduction) are not called then. What is known to need it otherwise is
            refused: a weight that is no leaf or sharded, one with hooks, `torch.compile`.
        process_group: ranks that share the call. A group: ranks with the same tokens, of which each holds a slice of
            the vocabulary (rows of `lm_head_weight` and of `lm_head_bias`, those of rank r after those of r - 1; any
            number of rows); ids are those of the whole vocabulary. `ParallelGroups` also has groups whose ranks have
            other tokens of the batch: a loss and its metrics are then those of all ranks, and gradients those of that
            loss; log-probs do not change. For a framework that averages gradients over W ranks, multiply the loss by W.
    """

    candidates: CandidateSets | None
    impl: Impl


def check_names(function: Callable[..., object], options: Mapping[str, object], *refused: str) -> None:
    """Raise `TypeError` as Python does, if there are other names than those of `HeadOptions` without the refused.

    It names the nearest one that the function has.
    """
    for name in options:
        if name not in HeadOptions.__optional_keys__ or name in refused:
            own = {p.name for p in signature(function).parameters.values() if p.kind != Parameter.VAR_KEYWORD}
            known = (own | HeadOptions.__optional_keys__) - {*refused}
            near = get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if name in GRPOLossConfig.__dataclass_fields__ and "loss" in function.__name__.lower():
                hint = f": pass config=GRPOLossConfig({name}=...)"
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")


def checking(
    function: Callable[..., object], options: Mapping[str, Any], *refused: str, with_tokens: bool = False
) -> AbstractContextManager[None]:
    """Check the names of options, and give a block for the other checks: ranks of a group fail together in both."""
    group = options.get("process_group")

    def together() -> AbstractContextManager[None]:
        return nullcontext() if group is None else refusing_together(group, with_tokens=with_tokens)

    with together():
        check_names(function, options, *refused)
    return together()


def head_of(
    hidden_states: Tensor,
    lm_head_weight: Tensor | QuantizedWeight,
    token_ids: Tensor,
    mask: Tensor | None,
    layout: Layout,
    options: HeadOptions,
    names: tuple[str, str] = ("token_ids", "mask"),
) -> tuple[Tensor, LMHead, TokenSets, Run]:
    """What a call multiplies, its candidate sets and how it runs, checked, with the engine that `impl` chooses.

    Args:
        layout: that of the token ids, which are checked already.
        names: of the ids and the mask in errors.
    """
    group, bias = options.get("process_group"), options.get("lm_head_bias")
    temperature, logit_scale = options.get("temperature", 1.0), options.get("logit_scale", 1.0)
    softcap, max_scratch_bytes = options.get("softcap"), options.get("max_scratch_bytes")
    if not isinstance(lm_head_weight, QuantizedWeight):
        lm_head_weight = whole(lm_head_weight, group)
    bias = None if bias is None else whole(bias, group)
    given = options.get("lm_head_adapter")
    given = () if given is None else given
    adapters = tuple(given) if isinstance(given, Sequence) else (given,)
    adds = options.get("add_to_weight_grad", False)
    check_flag(adds, "add_to_weight_grad")
    if adds:
        check.check_grad_can_be_added_to(lm_head_weight)
    adds = adds and not adapters  # their own hooks must be called
    check.check_head(hidden_states, lm_head_weight, bias, token_ids, names[0])
    has_slices = ParallelGroups.of(group).vocab is not None
    check.check_adapters(adapters, hidden_states, lm_head_weight, has_group=has_slices)
    adapters = tuple(replace(x, a=whole(x.a, group), b=whole(x.b, group)) for x in adapters)
    check.check_mask(mask, token_ids, names[1])
    check.check_head_numbers(temperature, logit_scale, softcap, layout)
    if max_scratch_bytes is not None:
        check_integer(max_scratch_bytes, "max_scratch_bytes", least=1)
    compact = options.get("compact", True)
    check_flag(compact, "compact")
    compute = compute_dtype(hidden_states, lm_head_weight if isinstance(lm_head_weight, Tensor) else hidden_states)
    impl, width = options.get("impl", "auto"), hidden_states.shape[-1]
    form = engines.WeightForm.of(lm_head_weight, adapters)
    engine = engines.choose(impl, hidden_states.device, compute, width, form)
    if engine == "reference" and group is not None:
        raise ValueError("impl='reference' supports one process only; got a process_group")
    sets, any_whole = options.get("candidates"), True
    if sets is not None:
        most = engines.largest_sparse_set(engine, lm_head_weight.shape[0])
        any_whole = may_need_whole_head(sets, token_ids, mask, most) or group is not None
    weight = lm_head_weight if isinstance(lm_head_weight, Tensor) else lm_head_weight.values
    softcap = None if softcap is None else float(softcap)
    rounds_bias = autocast_rounds(compute, hidden_states.device)
    head = LMHead(weight, bias, float(logit_scale), softcap, *split_temperature(temperature), compute, rounds_bias)
    head, hidden_states = composed(head, lm_head_weight, adapters, hidden_states, mask)
    run = Run(engine, max_scratch_bytes, compact, ParallelGroups.encode(group), adds, any_whole)
    return hidden_states, head, TokenSets.of(sets), run


def needs_of(*tensors: Tensor | None) -> Needs:
    """Which gradients autograd will request, of hidden states, weight and bias."""
    return Needs(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors))


def early(call: LogprobsCall) -> LogprobsCall:
    """The call, with dlogp/dh if that is all that its gradient needs of the head."""
    alone = needs_of(*tensors_of(call)) == HIDDEN_ALONE and call.alternatives.sets is None
    return call._replace(with_dhidden=alone)


def beside(
    head: LMHead,
    layout: Layout,
    name: str,
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> tuple[LMHead, LMHead]:
    """The policy's head and a frozen one, checked.

    Args:
        name: of the other head in errors.
    """
    if isinstance(lm_head_weight, QuantizedWeight):
        raise TypeError(f"{name}: lm_head_weight must be a plain tensor; got a QuantizedWeight: pass its dequantize()")
    lm_head_weight = whole(lm_head_weight, None)
    lm_head_bias = None if lm_head_bias is None else whole(lm_head_bias, None)
    tokens = head.weight.new_zeros(layout.shape, dtype=torch.int64)
    try:
        check.check_head(hidden_states, lm_head_weight, lm_head_bias, tokens, "hidden_states")
        check.check_head_numbers(1.0, logit_scale, softcap, layout)
    except (TypeError, ValueError) as error:  # its argument names lack the prefix
        raise type(error)(f"{name}: {error}") from None
    if lm_head_weight.shape[0] != head.vocab_size:
        raise ValueError(
            f"both heads must have the same vocabulary; got {head.vocab_size} and {lm_head_weight.shape[0]} rows"
        )
    computes = head.compute_dtype, compute_dtype(hidden_states, lm_head_weight)
    if torch.float64 in computes:  # differences of logits are taken in one dtype
        computes = torch.float64, torch.float64
    other = LMHead(
        lm_head_weight, lm_head_bias, float(logit_scale), softcap, compute_dtype=computes[1],
        rounds_bias=autocast_rounds(computes[1], hidden_states.device),
    )  # fmt: skip
    return head._replace(compute_dtype=computes[0]), other
