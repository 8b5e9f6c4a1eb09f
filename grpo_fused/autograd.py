"""The `torch.autograd.Function`s: they hand gradients on, nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_fused import _ops


class HeadCall(NamedTuple):
    """What a head operator takes beside hidden states, weight, bias, ids and mask."""

    temperatures: Tensor | None
    temperature: float
    logit_scale: float
    softcap: float | None
    impl: str
    compute_dtype: torch.dtype
    max_scratch_bytes: int | None
    compact: bool
    groups: str = ""
    """`ParallelGroups.encoded`"""


class LossCall(NamedTuple):
    """What `LinearGRPOLoss` takes beside the tensors that it differentiates."""

    arguments: dict[str, Any]
    """keyword arguments of `_ops.linear_grpo_loss`"""


class LinearGRPOLoss(torch.autograd.Function):
    """(loss, logps, entropies, metrics); the gradients are made in the forward pass and scaled in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, call: LossCall) -> Any:
        loss, logps, entropies, metrics, dhidden, dweight, dbias = _ops.linear_grpo_loss(
            hidden_states, weight, bias, **call.arguments
        )
        ctx.save_for_backward(dhidden, dweight, dbias)
        needs = call.arguments
        ctx.dtypes = (
            hidden_states.dtype if needs["need_hidden"] else None,
            weight.dtype if needs["need_weight"] else None,
            bias.dtype if bias is not None and needs["need_bias"] else None,
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(logps, entropies, metrics)
        return loss, logps, entropies, metrics

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dloss: Tensor | None, *_: Any) -> Any:
        if dloss is None:
            return None, None, None, None
        (dhidden, dweight, dbias), (hidden_dtype, weight_dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        return (
            None if hidden_dtype is None else (dhidden * dloss).to(hidden_dtype),
            None if weight_dtype is None else scaled(dweight, dloss, weight_dtype),
            None if bias_dtype is None else (dbias * dloss).to(bias_dtype),
            None,
        )


class LinearLogprobs(torch.autograd.Function):
    """(logps, entropies); the backward recomputes the logits of the rows that have a coefficient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        mask: Tensor | None,
        call: HeadCall,
        with_entropy: bool,
    ) -> Any:
        logps, entropies, maxima, log_sums = _ops.linear_logprobs(
            hidden_states, weight, bias, token_ids, mask, *call, with_entropy
        )
        ctx.save_for_backward(
            hidden_states, weight, bias, token_ids, mask, call.temperatures, logps, entropies, maxima, log_sums
        )
        ctx.call = call._replace(temperatures=None)
        ctx.set_materialize_grads(False)
        ctx.with_entropy = with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dlogps: Tensor | None, dentropies: Tensor | None) -> Any:
        if not ctx.with_entropy:  # torch.compile hands in zeros for the empty placeholder
            dentropies = None
        if dlogps is None and dentropies is None:
            return (None,) * 7
        hidden, weight, bias, token_ids, mask, temperatures, logps, entropies, maxima, log_sums = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        call = ctx.call._replace(temperatures=temperatures)
        gradients = _ops.linear_logprobs_backward(
            dlogps,
            dentropies,
            logps,
            entropies if ctx.with_entropy else None,
            maxima,
            log_sums,
            hidden,
            weight,
            bias,
            token_ids,
            mask,
            *call,
            *needs,
        )
        dhidden, dweight, dbias = (x if need else None for x, need in zip(gradients, needs, strict=True))
        return (
            None if dhidden is None else dhidden.to(hidden.dtype),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            *(None,) * 4,
        )


class GRPOObjective(torch.autograd.Function):
    """(loss, logps, entropies, metrics) from log-probs and entropies, by the analytic coefficients."""

    @staticmethod
    def forward(ctx: Any, per_token_logps: Tensor, entropies: Tensor | None, call: LossCall) -> Any:
        loss, logps, entropies_out, metrics, dlogps, dentropies = _ops.grpo_objective(
            per_token_logps, entropies, **call.arguments
        )
        ctx.save_for_backward(dlogps, dentropies)
        ctx.has_bonus = dentropies.shape == logps.shape and entropies is not None
        ctx.dtypes = per_token_logps.dtype, None if entropies is None else entropies.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(logps, entropies_out, metrics)
        return loss, logps, entropies_out, metrics

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dloss: Tensor | None, *_: Any) -> Any:
        if dloss is None:
            return None, None, None
        dlogps, dentropies = ctx.saved_tensors
        logps_dtype, entropies_dtype = ctx.dtypes
        bonus = (dentropies * dloss).to(entropies_dtype) if ctx.has_bonus else None
        return (dlogps * dloss).to(logps_dtype), bonus, None


class SelectiveLogprobs(torch.autograd.Function):
    """(logps, entropies) from logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token_ids: Tensor,
        mask: Tensor | None,
        temperatures: Tensor | None,
        temperature: float,
        with_entropy: bool,
    ) -> Any:
        logps, entropies = _ops.selective_logprobs(logits, token_ids, mask, temperatures, temperature, with_entropy)
        ctx.save_for_backward(logits, token_ids, mask, temperatures)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.with_entropy = with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dlogps: Tensor | None, dentropies: Tensor | None) -> Any:
        if not ctx.with_entropy:  # torch.compile hands in zeros for the empty placeholder
            dentropies = None
        if dlogps is None and dentropies is None:
            return (None,) * 6
        logits, token_ids, mask, temperatures = ctx.saved_tensors
        dlogits = _ops.selective_logprobs_backward(
            dlogps, dentropies, logits, token_ids, mask, temperatures, ctx.temperature
        )
        return (dlogits, *(None,) * 5)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor in `dtype`, rounded once from an fp32 accumulator.

    A vocab-sized gradient is scaled where it stands when the graph is about to be freed: a copy would double it.
    """
    if not _graph_is_freed() or _is_batched(factor):
        return (gradient * factor).to(dtype)
    if gradient.is_cuda and gradient.dtype != dtype:  # one pass over memory; a CPU makes a copy for its `out`
        return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
    return gradient.mul_(factor).to(dtype)


def _is_batched(x: Tensor) -> bool:
    """Whether `x` stands for several, under `vmap` or `torch.autograd.grad(is_grads_batched=True)`."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)


def _graph_is_freed() -> bool:
    """Whether this backward frees its graph (no `retain_graph`), so that nobody reads the saved gradients again."""
    if torch.compiler.is_compiling():
        return False
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is not None and not keeps()
