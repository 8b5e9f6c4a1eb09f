"""The `torch.autograd.Function`s: they call the operators and return their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from grpo_fused.api import operators
from grpo_fused.api.pipeline import times_dlogp
from grpo_fused.call import calls
from grpo_fused.engines import triton
from grpo_fused.engines.base import Tokens


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward of (ctx, saved tensors, *upstream) whose gradients cannot be differentiated again: that raises, and
    `create_graph=True` alone does not. Saved tensors are read once: checkpointing unpacks them a single time.

    torch's `once_differentiable` returns constants where no upstream gradient requires grad, and its node that raises
    is connected to no input: `torch.autograd.grad` never runs it, and a term of a second-order loss is lost without a
    word. Here the node is connected to what was saved with a graph: an input, or an output of the function.
    """

    @wraps(backward)
    def checked(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        ctx.creates_graph = torch.is_grad_enabled()
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, saved, *upstream)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiled backward refuses this itself
            return gradients
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in gradients]
        graph = [x for x in (*upstream, *saved) if isinstance(x, Tensor) and x.requires_grad]
        raising = torch._C._functions.DelayedError(_SECOND_ORDER, len(leaves) + len(graph))
        return tuple(raising(*leaves, *graph))[: len(leaves)]

    return checked


_SECOND_ORDER = b"grpo_fused has no second derivatives: differentiate once, or use impl='reference'"


class LinearLoss(torch.autograd.Function):
    """(loss, logps, entropies, metrics, link); the gradients are made in the forward pass and scaled in the backward.

    The loss is that of a `LossCall`, of a `CustomCall`, or of a `DivergenceCall`; log-probs are then divergences. The
    link is an empty output, saved for `first_order`; a caller may change the other outputs in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: calls.LossCall | calls.CustomCall | calls.DivergenceCall,
    ) -> Any:
        call = calls.with_tensors(call, hidden_states, weight, bias)
        if isinstance(call, calls.CustomCall):
            result = operators.linear_objective(call)
        elif isinstance(call, calls.DivergenceCall):
            result = operators.linear_divergence(call)
        else:
            result = operators.linear_grpo_loss(call)
        ctx.later, ctx.engine = not call.run.any_whole, call.run.engine
        ctx.leaf = weight if call.run.adds_to_grad and weight.is_leaf else None
        tensors: list[Tensor] = []
        if ctx.later:
            scored = calls.LogprobsCall(
                hidden_states, call.lm_head, call.token_ids, call.mask, call.candidates, False, call.run
            )  # fmt: skip
            ctx.call, tensors = calls.detach(calls.CandidateGradientCall(scored, result.dcandidates, call.needs))
        link = result.loss.new_empty(0)
        ctx.save_for_backward(link, result.dhidden, result.dweight, result.dbias, *tensors)
        inputs = zip((hidden_states, weight, bias), call.needs, strict=True)
        ctx.dtypes = [x.dtype if x is not None and need else None for x, need in inputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(result.logps, result.entropies, result.metrics)
        return result.loss, result.logps, result.entropies, result.metrics, link

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: tuple[Any, ...], dloss: Tensor | None, *_: Any) -> Any:
        if dloss is None:
            return None, None, None, None
        (_, dhidden, dweight, dbias, *tensors), (hidden_dtype, weight_dtype, bias_dtype) = saved, ctx.dtypes
        if ctx.later and (weight_dtype is not None or bias_dtype is not None):
            call: calls.CandidateGradientCall = calls.attach(ctx.call, tensors)
            # scaled before it is rounded: fp16 may need it
            call = call._replace(dproducts=call.dproducts * dloss, needs=call.needs._replace(need_hidden=False))
            add_to = None if weight_dtype is None else _grad_to_add_to(ctx, dloss)
            if add_to is None:
                _, dweight, dbias = operators.candidate_weight_gradient(call)
            else:
                dbias, weight_dtype = operators.candidate_weight_gradient.body(call, add_to).dbias, None
        else:
            dweight = None if weight_dtype is None else scaled(dweight, dloss, weight_dtype, ctx.engine)
            dbias = None if bias_dtype is None else dbias * dloss
        return (
            None if hidden_dtype is None else times(dhidden, dloss).to(hidden_dtype),
            None if weight_dtype is None else dweight,
            None if bias_dtype is None else dbias.to(bias_dtype),
            None,
        )


class LinearLogprobs(torch.autograd.Function):
    """(logps, entropies, alternative_logps); the backward recomputes the logits of rows that have a coefficient.

    Where dlogp/dh was made in the forward pass, the backward scales it, and recomputes logits for entropies alone.
    The outputs are copies, which a caller may change in place.
    """

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, call: calls.LogprobsCall) -> Any:
        call = calls.with_tensors(call, hidden_states, weight, bias)
        scores = operators.linear_logprobs(call)
        ctx.call, tensors = calls.detach(call)
        ctx.leaf = weight if call.run.adds_to_grad and not call.run.any_whole and weight.is_leaf else None
        ctx.save_for_backward(*scores, *tensors)
        ctx.set_materialize_grads(False)
        outputs = scores.logps.clone(), scores.entropies.clone(), scores.alternative_logps.clone()
        requested = True, call.with_entropy, call.alternatives.sets is not None
        ctx.mark_non_differentiable(*(x for x, wanted in zip(outputs, requested, strict=True) if not wanted))
        return outputs

    @staticmethod
    @first_order
    def backward(
        ctx: Any, saved: tuple[Any, ...], dlogps: Tensor | None, dentropies: Tensor | None,
        dalternatives: Tensor | None,
    ) -> Any:  # fmt: skip
        count = len(calls.Scores._fields)
        scores = calls.Scores(*saved[:count])
        call: calls.LogprobsCall = calls.attach(ctx.call, saved[count:])
        # torch.compile passes zeros for an empty placeholder
        dentropies = dentropies if call.with_entropy else None
        dalternatives = None if call.alternatives.sets is None else dalternatives
        if dlogps is None and dentropies is None and dalternatives is None:
            return None, None, None, None
        of_logps: Tensor | None = None
        if call.with_dhidden and dlogps is not None:
            # coefficients may be NaN where a log-prob is constant: masked, or alone in its candidate set
            known = torch.where(Tokens.of(call).undecided.view(dlogps.shape), dlogps, 0.0)
            of_logps, dlogps = times_dlogp(scores.dhidden, known), None
            if dentropies is None:
                return of_logps.to(call.hidden_states.dtype), None, None, None
        needs = calls.Needs(*ctx.needs_input_grad[:3])
        gradient_call = calls.LogprobsGradientCall(call, scores, dlogps, dentropies, dalternatives, needs)
        add_to = _grad_to_add_to(ctx, dlogps, dentropies, dalternatives) if needs.need_weight else None
        if add_to is None:
            gradients = operators.linear_logprobs_gradient(gradient_call)
        else:
            gradients = operators.linear_logprobs_gradient.body(gradient_call, add_to)
            needs = needs._replace(need_weight=False)
        if of_logps is not None:
            gradients = gradients._replace(dhidden=gradients.dhidden + of_logps)
        made = zip(gradients, calls.tensors_of(call), needs, strict=True)
        return *(gradient.to(x.dtype) if need and x is not None else None for gradient, x, need in made), None


class GRPOObjective(torch.autograd.Function):
    """(loss, logps, entropies, metrics, link) from log-probs and entropies, by the analytic coefficients.

    The link is that of `LinearLoss`.
    """

    @staticmethod
    def forward(ctx: Any, per_token_logps: Tensor, entropies: Tensor | None, call: calls.ObjectiveCall) -> Any:
        call = call._replace(per_token_logps=per_token_logps, entropies=entropies)
        result = operators.grpo_objective(call)
        link = result.loss.new_empty(0)
        ctx.save_for_backward(link, result.dlogps, result.dentropies)
        ctx.has_bonus = result.dentropies.shape == result.logps.shape and entropies is not None
        ctx.dtypes = per_token_logps.dtype, None if entropies is None else entropies.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(result.logps, result.entropies, result.metrics)
        return result.loss, result.logps, result.entropies, result.metrics, link

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: tuple[Any, ...], dloss: Tensor | None, *_: Any) -> Any:
        if dloss is None:
            return None, None, None
        _, dlogps, dentropies = saved
        logps_dtype, entropies_dtype = ctx.dtypes
        bonus = (dentropies * dloss).to(entropies_dtype) if ctx.has_bonus else None
        return (dlogps * dloss).to(logps_dtype), bonus, None


class SelectiveLogprobs(torch.autograd.Function):
    """(logps, entropies) from logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: calls.LogitsCall) -> Any:
        call = call._replace(logits=logits)
        made = operators.selective_logprobs(call)
        logps, entropies = (x.clone() for x in made)  # to be changed in place
        ctx.call, tensors = calls.detach(call)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if not call.with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: tuple[Any, ...], dlogps: Tensor | None, dentropies: Tensor | None) -> Any:
        call: calls.LogitsCall = calls.attach(ctx.call, saved)
        dentropies = dentropies if call.with_entropy else None  # torch.compile passes zeros for the empty placeholder
        if dlogps is None and dentropies is None:
            return None, None
        gradient_call = calls.LogitsGradientCall(call, dlogps, dentropies)
        return operators.selective_logprobs_gradient(gradient_call), None


def times(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient * factor (0-d) in fp32 or wider: a GPU rounds a factor without dimensions to the gradient's dtype."""
    return gradient * factor.reshape(1)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, engine: str) -> Tensor:
    """gradient * factor in `dtype`, rounded once from an fp32 accumulator.

    A vocab-sized gradient is scaled in place if the graph is freed after this backward: a copy would double its memory.
    On a GPU by a kernel of Triton, if the engine has others.
    """
    if torch.compiler.is_compiling() or operators.is_batched(factor):
        return times(gradient, factor).to(dtype)
    if gradient.is_cuda and gradient.dtype != dtype:  # one pass over memory; a CPU makes a copy for its `out`
        return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
    if not _graph_is_freed():
        gradient = gradient.clone()
    if _can_be_read(factor) and factor == 1:  # as from `loss.backward()`
        return gradient.to(dtype)
    if engine != "cuda" and _takes_kernels(gradient) and factor.device == gradient.device:
        from grpo_fused.kernels.scale import scale

        scale(gradient, factor)
        torch.autograd.graph.increment_version(gradient)
        return gradient.to(dtype)
    return gradient.mul_(factor.reshape(1) if gradient.is_cuda else factor).to(dtype)  # see `times`


def _grad_to_add_to(ctx: Any, *upstream: Tensor | None) -> Tensor | None:
    """The gradient that takes rows of dW in this backward, if the caller allows that, wants dW, and it is there.

    Raises:
        ValueError: `main_grad` cannot take rows.
    """
    weight: Any = ctx.leaf
    if weight is None or ctx.creates_graph or not _reaches(ctx.next_functions[1][0]):
        return None
    if any(x is not None and operators.is_batched(x) for x in upstream):
        return None
    main = getattr(weight, "main_grad", None)
    grad: Tensor | None = weight.grad if main is None else main
    if grad is None:
        return None
    takes_rows = (
        grad.layout == torch.strided
        and (grad.shape, grad.device) == (weight.shape, weight.device)
        and grad.dtype in (weight.dtype, torch.float32)
        and (grad.stride(1) == 1 or grad.shape[1] == 1)
        and grad.stride(0) >= grad.shape[1]
    )
    if takes_rows:
        torch.autograd.graph.increment_version(grad)
        return grad
    if main is None:
        return None
    raise ValueError(
        f"main_grad of lm_head_weight must be {list(weight.shape)} of {weight.dtype} or float32 on {weight.device}, "
        f"row by row; got {list(grad.shape)} of {grad.dtype} on {grad.device} with strides {grad.stride()}"
    )


def _reaches(node: Any) -> bool:
    """Whether this backward accumulates the gradient of a leaf: not if it was asked for that of other leaves only."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # `torch.autograd.grad` returns it instead
        return False


def _can_be_read(x: Tensor) -> bool:
    """Whether the value of `x` is there without waiting for a device: also not while a program is traced."""
    return x.device.type == "cpu" and type(x) is Tensor and torch._C._len_torch_dispatch_stack() == 0


def _takes_kernels(x: Tensor) -> bool:
    """Whether a kernel of Triton can write to `x`: not while a mode of torch looks for operators."""
    plain = type(x) is Tensor and x.is_contiguous() and torch._C._len_torch_dispatch_stack() == 0
    return plain and x.is_cuda and triton.unavailable(x.device, x.dtype) is None


def _graph_is_freed() -> bool:
    """Whether this backward frees its graph (no `retain_graph`), so that the saved gradients are not read again."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()
