"""The loss of a custom objective, from hidden states and the lm head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from grpo_fused.api import reference
from grpo_fused.api.autograd import LinearLoss
from grpo_fused.api.head import HeadOptions, checking, head_of, needs_of
from grpo_fused.api.operators import is_batched
from grpo_fused.api.pipeline import evaluation_of
from grpo_fused.call import validation as check
from grpo_fused.call.calls import CustomCall, TokenSets, tensors_of
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.head_parts import QuantizedWeight
from grpo_fused.call.layout import Layout, active_tokens
from grpo_fused.call.options import check_choice, check_flag
from grpo_fused.call.outputs import ObjectiveOutput
from grpo_fused.objective.batch import LOWEST_LOGP
from grpo_fused.objective.custom import GRADIENTS, Objective, Scope, check_numbers
from grpo_fused.ranks.parallel import ParallelGroups

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.disable`, which imports the compiler, only in calls from a compiled caller."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@eager  # an operator takes no function
def fused_linear_objective(
    hidden_states: Tensor,
    lm_head_weight: Tensor | QuantizedWeight,
    token_ids: Tensor,
    objective: Objective,
    mask: Tensor | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    scope: Scope = "token",
    with_entropy: bool = False,
    alternatives: CandidateSets | None = None,
    alternative_inputs: Mapping[str, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    **head: Unpack[HeadOptions],
) -> ObjectiveOutput:
    """The loss of a custom objective, with the head products of `fused_linear_grpo_loss`.

        loss = sum over active tokens of objective(logps, entropies, **inputs)

    The objective is called inside the pass over the head, on the log-probs of a part of the tokens, and differentiated
    there by autograd: one number for each token. The logits are not computed again for the gradient.

    | scope | the objective is called with | head products (frozen head: one less) |
    |---|---|---|
    | `"token"` | any subset of the active tokens | 3 |
    | `"sequence"` | whole sequences | 3; 4 in `chunked` and `triton` if a sequence does not fit a chunk |
    | `"batch"` | all active tokens | 4 |

    Args:
        hidden_states: `[B, T, H]`, or packed `[N, H]`: the state that *predicts* each token.
        lm_head_weight: `[V, H]`.
        token_ids: `[B, T]` or `[N]` integers in `[0, V)` where active.
        objective: `objective(logps, entropies, **inputs) -> Tensor`, a differentiable torch function, such as those of
            `grpo_fused.objectives`. It gets active tokens only, flat `[n]` in fp32 (fp64 for fp64 inputs), and returns
            each token's share of the loss, `[n]`, weights and signs included. With scope `"token"` it must not
            combine tokens (no mean, no `.shape[0]`): run `check_objective` once. In the other scopes it gets
            `cu_seqlens` (`[S + 1]` int64, where the sequences of this part begin, empty ones included) as a further
            keyword.
        mask: like `token_ids`, bool or 0/1, default all active.
        inputs: tensors shaped like `token_ids`, without gradient, split like the tokens: `{"advantages": ...}`.
        scope: which tokens must be in the same call of the objective.
        with_entropy: pass entropies (nats), differentiable too; else None.
        alternatives: `CandidateSets`: other tokens of each position, [M] in all, as in `fused_linear_logprobs`. The
            objective gets `alternative_logps` ([m], nats, differentiable too) and `alternative_offsets` ([n + 1] int64)
            of its part as further keywords: token i has those from `alternative_offsets[i]` to the next offset.
        alternative_inputs: tensors `[M]` without gradient, split like the alternatives.
        cu_seqlens: `[S + 1]` int32/int64, the offsets of packed sequences; needed by packed calls unless the scope is
            `"token"`.
        **head: those of `HeadOptions`. `compact` also drops tokens whose gradient turns out to be 0 before the gradient
            products. With a `process_group` all ranks of a vocabulary call the objective with the same numbers; with
            ranks that have other tokens, scope `"token"` only, the loss is the sum.

    Returns:
        `ObjectiveOutput(loss, per_token_logps, entropies)`; the loss is differentiable in hidden states, weight, bias.

    Raises:
        ValueError, TypeError, RuntimeError: as `fused_linear_grpo_loss`; ValueError if the objective returns another
            shape, a result without a gradient, or NaN (on the CPU; elsewhere with `GRPO_FUSED_DEBUG=1`).

    Equivalent in plain PyTorch (scope "batch", all active)::

        log_p = (hidden_states.float() @ lm_head_weight.float().T / temperature).log_softmax(-1)
        logps = log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).reshape(-1)
        loss = objective(logps, None, **{name: x.reshape(-1) for name, x in inputs.items()}).sum()

    Source: the idea of FlexAttention (arXiv 2412.05496), applied to policy losses.
    """
    with checking(fused_linear_objective, head, with_tokens=True):
        check_choice(scope, "scope", Scope)
        check_flag(with_entropy, "with_entropy")
        check.check_objective_scope(objective, scope)
        token_inputs = check.inputs_of("inputs", inputs)
        alternative_inputs = check.inputs_of("alternative_inputs", alternative_inputs)
        if scope == "token" and cu_seqlens is None:
            check.check_token_ids(token_ids, "token_ids")
        else:
            check.check_tokens(token_ids, "token_ids", check.INTEGER, cu_seqlens)
        layout = Layout.of(token_ids, cu_seqlens)
        hidden_states, lm_head, candidates, run = head_of(hidden_states, lm_head_weight, token_ids, mask, layout, head)
        check.check_objective_inputs(token_inputs, layout)
        check.check_alternatives(alternatives, alternative_inputs, token_ids, token_inputs)
        if scope != "token" and ParallelGroups.of(head.get("process_group")).tokens is not None:
            raise ValueError(f"ranks with other tokens must have an objective of scope 'token'; got {scope!r}")
        needs = needs_of(hidden_states, lm_head.weight, lm_head.bias)
        call = CustomCall(
            hidden_states, lm_head, token_ids, objective, mask, cu_seqlens, candidates, token_inputs, scope,
            with_entropy, needs, run, torch.is_grad_enabled(), TokenSets.of(alternatives),
            alternative_inputs,
        )  # fmt: skip
        check.check_devices(call)

    if run.engine == "reference":
        scores = reference.linear_logprobs(call)
        rows = active_tokens(mask, token_ids).reshape(-1).nonzero()[:, 0]
        entropies, of_alternatives = scores.entropies if with_entropy else None, scores.alternative_logps
        if alternatives is not None and of_alternatives is not None:
            of_alternatives = of_alternatives[alternatives.places(rows)].clamp(min=LOWEST_LOGP)
        with torch.autocast(hidden_states.device.type, enabled=False):  # as the engines call it
            logps = scores.logps.reshape(-1)[rows].clamp(min=LOWEST_LOGP)
            of_rows = None if entropies is None else entropies.reshape(-1)[rows]
            shares = evaluation_of(call, rows).value(slice(0, len(rows)), logps, of_rows, of_alternatives)
            _check_gradients(shares, logps, of_rows, of_alternatives)
        nothing = scores.logps.reshape(-1)[:0].sum()  # has a gradient, also if no token is active
        loss = shares.sum().to(scores.logps.dtype) + nothing
        return ObjectiveOutput(loss, scores.logps.detach(), None if entropies is None else entropies.detach())
    loss, logps, entropies, _, _ = LinearLoss.apply(*tensors_of(call), call)
    return ObjectiveOutput(loss, logps, entropies if with_entropy else None)


def _check_gradients(value: Tensor, logps: Tensor, *others: Tensor | None) -> None:
    """Let autograd raise where the gradient by a score is NaN, though that of the objective's value is finite."""
    # hooks hold no tensor with a graph, or they would keep themselves alive
    scores, upstream = logps.detach(), list[Tensor]()

    def remember(gradient: Tensor) -> None:
        upstream[:] = [gradient.detach() * 0]  # NaN where it is not finite

    def check_one(gradient: Tensor, name: str, own: Tensor) -> None:
        if not is_batched(gradient):
            check_numbers(name, gradient, scores, own, *upstream)

    if value.requires_grad:  # first, for an objective that returns a score
        value.register_hook(remember)
    for name, x in zip(GRADIENTS, (logps, *others), strict=True):
        if x is not None and x.requires_grad:
            x.register_hook(partial(check_one, name=name, own=x.detach()))
