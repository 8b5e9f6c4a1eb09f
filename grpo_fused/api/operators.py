"""The `torch.library` operators behind the public functions, each on one call (`calls.py`).

They are opaque to `torch.compile`: the computation depends on data (which rows are active), the shapes of the results
do not. Gradients are results of an operator, since they are computed in the forward pass; `autograd.py` returns them.
A result that is not required is an empty tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_fused import engines
from grpo_fused.api import logits, pipeline
from grpo_fused.call import calls
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import Layout
from grpo_fused.call.validation import check_loss_values, check_token_values
from grpo_fused.engines.alternatives import Alternatives
from grpo_fused.engines.base import MANY, Engine, Gradients, Tokens
from grpo_fused.engines.candidates import CandidateEngine, add_weight_gradient
from grpo_fused.engines.chunked import ChunkedEngine
from grpo_fused.engines.divergence import torch_rows
from grpo_fused.engines.gradients import GradientSums
from grpo_fused.engines.pairs import Pairs
from grpo_fused.engines.products import dhidden_dtype, ieee_products, rounded_bias
from grpo_fused.engines.scratch import sparse_zeros_like
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate
from grpo_fused.objective.metrics import compute_metrics, loss_metric_names, metric_names
from grpo_fused.ranks.handshake import failing_together, join
from grpo_fused.ranks.parallel import ParallelGroups, TokenParallel


class Operator:
    """A function of one call, which a program that is traced or transformed sees as a `torch.library` operator.

    The schema comes from the fields of the call and of the result. `torch.compile` leaves it out of CUDA graphs, since
    it may wait for the device.
    """

    def __init__(self, body: Callable[..., Any], kind: Any, result: Any) -> None:
        self.body, self.kind, self.result = body, kind, result

        def operator(*values: Any) -> Any:
            return body(calls.build(kind, iter(values)))

        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hint)
            for name, hint in calls.fields_of(kind).items()
        ]
        returns = tuple[(Tensor,) * len(result._fields)] if hasattr(result, "_fields") else result  # type: ignore[misc]
        operator.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
        self.traced: Any = torch.library.custom_op(
            f"grpo_fused::{body.__name__}", operator, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
        )
        """takes `*flat(call)`"""

    def __call__(self, call: Any) -> Any:
        """The result; directly where nothing is traced, since the way through an operator takes the host longer."""
        if not (torch.compiler.is_compiling() or _is_seen(call)):
            return self.body(call)
        values = self.traced(*calls.flat(call))
        return self.result(*values) if hasattr(self.result, "_fields") else values

    def fake(self, fake: Callable[[Any], Any]) -> None:
        """Register a function of the call: its results for tensors without data."""
        self.traced.register_fake(lambda *values: fake(calls.build(self.kind, iter(values))))


def _is_seen(call: tuple[Any, ...]) -> bool:
    """Whether a mode of torch, a subclass of tensors or a transform such as `vmap` sees operators of the call."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0:
        return True
    return any(type(x) not in (Tensor, Parameter) or is_batched(x) for x in calls.tensors_in(call))


def is_batched(x: Tensor) -> bool:
    """Whether `x` is a batch of tensors, under `vmap` or `torch.autograd.grad(is_grads_batched=True)`."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)


def _operator(kind: Any, result: Any) -> Callable[[Callable[..., Any]], Operator]:
    return lambda body: Operator(body, kind, result)


@contextmanager
def _plain(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast (inputs are cast explicitly), IEEE products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ieee_products():
        yield


@contextmanager
def _shared(call: calls.LinearCall | calls.LogprobsGradientCall) -> Iterator[tuple[Tokens, TokenParallel | None]]:
    """The tokens of a call and the ranks that have others, after the handshake; all ranks fail if one does."""
    scored = call.forward if isinstance(call, calls.LogprobsGradientCall) else call
    with _plain(scored.token_ids.device):
        vocab, ranks = join(call)
        with failing_together(vocab, ranks):
            yield Tokens.of(scored, vocab), ranks


class HeadGradients(NamedTuple):
    """Gradients in the dtypes of the products, before the upstream gradient."""

    dhidden: Tensor
    """shaped like the hidden states"""
    dweight: Tensor
    """[V, H]"""
    dbias: Tensor
    """[V]"""


class LossResult(NamedTuple):
    """Loss, scores, metrics in the order of `loss_metric_names`, gradients, and those of candidates."""

    loss: Tensor
    logps: Tensor
    entropies: Tensor
    metrics: Tensor
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor
    dcandidates: Tensor
    """[K] dL/d(product) of each candidate; if all tokens have a set, the backward computes dW and db from it"""


@_operator(calls.LossCall, LossResult)
def linear_grpo_loss(call: calls.LossCall) -> LossResult:
    """The loss from hidden states and head, and its gradients."""
    with _shared(call) as (tokens, ranks):
        return _loss_result(call, pipeline.run_loss(_engine(call, tokens), tokens, call, ranks))


@linear_grpo_loss.fake
def _(call: calls.LossCall) -> LossResult:
    logps = call.hidden_states.new_empty(call.completion_ids.shape, dtype=call.lm_head.statistics_dtype)
    config, ids = GRPOLossConfig.decode(call.config), call.candidates.ids
    names = loss_metric_names(config, with_kl=call.with_kl, complete=call.with_metrics)
    return LossResult(
        logps.new_empty(()),
        logps,
        torch.empty_like(logps) if call.with_metrics or config.needs_entropy else _nothing(logps),
        logps.new_empty(len(names), dtype=torch.float32),
        *_fake_gradients(call, call.needs, in_forward=True, heads=2 * call.exact),
        logps.new_empty(len(ids) if ids is not None and call.needs.any() else 0),
    )


def linear_objective(call: calls.CustomCall) -> LossResult:
    """The loss of a custom objective; not an operator, since an operator takes no function."""
    with _shared(call) as (tokens, ranks):
        parts = pipeline.run_objective(_engine(call, tokens), tokens, call, _alternatives(call, tokens))
        loss = parts.loss if ranks is None else ranks.add(parts.loss)
    return _loss_result(call, parts._replace(loss=loss.to(parts.logps.dtype)))


@_operator(calls.LogprobsCall, calls.Scores)
def linear_logprobs(call: calls.LogprobsCall) -> calls.Scores:
    """Log-probs and entropies from hidden states and head, and what the gradient needs."""
    with _shared(call) as (tokens, _):
        alternatives = _alternatives(call, tokens)
        scores, others, dhidden = pipeline.run_logprobs(_engine(call, tokens), tokens, call, alternatives)
    shape, hidden = call.token_ids.shape, call.hidden_states
    entropies = _shaped(scores.entropy, shape, scores.logp)
    dhidden = _shaped(dhidden, hidden.shape, hidden)
    return calls.Scores(scores.logp.view(shape), entropies, scores.max, scores.log_sum, others, dhidden)


@linear_logprobs.fake
def _(call: calls.LogprobsCall) -> calls.Scores:
    like = call.hidden_states.new_empty(0, dtype=call.lm_head.statistics_dtype)
    row, ids = like.new_empty(call.token_ids.numel()), call.alternatives.ids
    others = _nothing(like) if ids is None else like.new_empty(ids.shape)
    dhidden = _fake_gradients(call, calls.HIDDEN_ALONE if call.with_dhidden else calls.NO_GRADIENT).dhidden
    scores = _fake_scores(like, call.token_ids, call.with_entropy)
    return calls.Scores(*scores, row, torch.empty_like(row), others, dhidden)


@_operator(calls.LogprobsGradientCall, HeadGradients)
def linear_logprobs_gradient(call: calls.LogprobsGradientCall, add_to: Tensor | None = None) -> HeadGradients:
    """Gradients of log-probs and entropies. Without the scores of the forward pass these are computed again.

    `add_to`: see `candidate_weight_gradient`.
    """
    scored = call.forward
    with _shared(call) as (tokens, _):
        alternatives = _alternatives(scored, tokens)
        gradients = pipeline.run_logprobs_gradient(_engine(scored, tokens), tokens, call, alternatives)
        if gradients.candidates is not None and not scored.run.any_whole:
            return _candidate_gradients(scored, tokens, gradients, call.needs, add_to)
    return _head_gradients(scored, gradients)


linear_logprobs_gradient.fake(lambda call: _fake_gradients(call.forward, call.needs))


@_operator(calls.CandidateGradientCall, HeadGradients)
def candidate_weight_gradient(call: calls.CandidateGradientCall, add_to: Tensor | None = None) -> HeadGradients:
    """dW and db from the derivatives of candidates; dH was made in the forward pass.

    dW is added to `add_to` [V, H], if there is one, which is then the result: by `body`, since an operator writes to no
    argument.
    """
    scored = call.forward
    with _plain(scored.token_ids.device):
        tokens, nothing = Tokens.of(scored), Gradients(None, None, None, 0, call.dproducts)
        return _candidate_gradients(scored, tokens, nothing, call.needs, add_to)


candidate_weight_gradient.fake(lambda call: _fake_gradients(call.forward, call.needs))


@_operator(calls.DivergenceCall, LossResult)
def linear_divergence(call: calls.DivergenceCall) -> LossResult:
    """The divergence of a policy from another head in place of log-probs, and the gradients of its weighted sum."""
    with _shared(call) as (tokens, _):
        return _loss_result(call, pipeline.run_divergence(call, tokens))


@linear_divergence.fake
def _(call: calls.DivergenceCall) -> LossResult:
    row = call.mask.new_empty(call.mask.shape, dtype=call.lm_head.statistics_dtype)
    made = _fake_gradients(call, call.needs, heads=1 if call.other_lm_head is None else 2)
    return LossResult(row.new_empty(()), row, torch.empty_like(row), _nothing(row), *made, _nothing(row))


class ObjectiveResult(NamedTuple):
    """Loss, scores as used in it, metrics in the order of `metric_names`, and coefficients."""

    loss: Tensor
    logps: Tensor
    entropies: Tensor
    metrics: Tensor
    dlogps: Tensor
    dentropies: Tensor


@_operator(calls.ObjectiveCall, ObjectiveResult)
def grpo_objective(call: calls.ObjectiveCall) -> ObjectiveResult:
    """The loss from log-probs, and its derivatives."""
    layout, config = Layout.of(call.per_token_logps, call.cu_seqlens), GRPOLossConfig.decode(call.config)
    with _plain(call.per_token_logps.device):
        check_loss_values(call.inputs, layout, call.entropies)
        dtype = torch.promote_types(call.per_token_logps.dtype, torch.float32)
        batch = TokenBatch.build(call.inputs, layout, config, dtype)
        logp, entropy = (
            None if x is None else torch.where(batch.mask, x.reshape(-1).to(dtype), 0.0)
            for x in (call.per_token_logps, call.entropies)
        )
        assert logp is not None
        result = evaluate(logp, entropy, batch, config)
        dlogp, dentropy = result.derivatives()
        metrics = compute_metrics(result, entropy, batch, config)
    return ObjectiveResult(
        result.loss,
        logp.view(layout.shape),
        _shaped(entropy, layout.shape, logp),
        torch.stack([x.to(torch.float32) for x in metrics]),
        dlogp.view(layout.shape),
        _shaped(dentropy, layout.shape, logp),
    )


@grpo_objective.fake
def _(call: calls.ObjectiveCall) -> ObjectiveResult:
    logps = call.per_token_logps
    logp = logps.new_empty(logps.shape, dtype=torch.promote_types(logps.dtype, torch.float32))
    config, has_entropy = GRPOLossConfig.decode(call.config), call.entropies is not None
    names = metric_names(config, with_kl=call.inputs.ref_per_token_logps is not None, with_entropy=has_entropy)
    return ObjectiveResult(
        logp.new_empty(()),
        logp,
        torch.empty_like(logp) if has_entropy else _nothing(logp),
        logp.new_empty(len(names), dtype=torch.float32),
        torch.empty_like(logp),
        torch.empty_like(logp) if has_entropy and config.entropy_coef != 0.0 else _nothing(logp),
    )


@_operator(calls.LogitsCall, tuple[Tensor, Tensor])
def selective_logprobs(call: calls.LogitsCall) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from logits, in the shape of the ids."""
    ids = call.token_ids
    with _plain(call.logits.device):
        check_token_values(ids, call.mask, call.logits.shape[-1], call.temperatures, Layout.of(ids))
        scores = logits.scores(call)
        return scores.logp.view(ids.shape), _shaped(scores.entropy, ids.shape, scores.logp)


@selective_logprobs.fake
def _(call: calls.LogitsCall) -> tuple[Tensor, Tensor]:
    like = call.logits.new_empty(0, dtype=torch.promote_types(call.logits.dtype, torch.float32))
    return _fake_scores(like, call.token_ids, call.with_entropy)


@_operator(calls.LogitsGradientCall, Tensor)
def selective_logprobs_gradient(call: calls.LogitsGradientCall) -> Tensor:
    """dlogits in the dtype of the logits."""
    with _plain(call.forward.logits.device):
        return logits.gradient(call).view(call.forward.logits.shape)


selective_logprobs_gradient.fake(lambda call: call.forward.logits.new_empty(call.forward.logits.shape))


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _shaped(x: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    return _nothing(like) if x is None else x.view(shape)


def _loss_result(call: calls.LinearCall, parts: pipeline.LossParts) -> LossResult:
    shape = calls.layout_of(call).shape
    values = [x.to(torch.float32) for x in parts.metrics]
    return LossResult(
        parts.loss,
        parts.logps.view(shape),
        _shaped(parts.entropies, shape, parts.loss),
        torch.stack(values) if values else _nothing(parts.loss),
        *_head_gradients(call, parts.gradients),
        _nothing(parts.loss) if parts.gradients.candidates is None else parts.gradients.candidates,
    )


def _fake_scores(like: Tensor, token_ids: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    logps = like.new_empty(token_ids.shape)
    return logps, torch.empty_like(logps) if with_entropy else _nothing(logps)


def _head_gradients(call: calls.LinearCall, gradients: Gradients) -> HeadGradients:
    hidden, weight = call.hidden_states, call.lm_head.weight
    return HeadGradients(
        _shaped(gradients.hidden, hidden.shape, hidden),
        _nothing(weight) if gradients.weight is None else gradients.weight,
        _nothing(weight) if gradients.bias is None else gradients.bias,
    )


def _engine(call: calls.TokensCall, tokens: Tokens) -> Engine:
    engine = engines.engine(call.run.engine)
    if tokens.candidates is None:
        return engine
    return CandidateEngine(engine, tokens.candidates, _pairs(call), call.run.any_whole, _largest_set(call, tokens))


def _pairs(call: calls.TokensCall) -> Pairs:
    return engines.pairs(call.run.engine, call.hidden_states.device, call.lm_head.compute_dtype)


def _alternatives(call: calls.CustomCall | calls.LogprobsCall, tokens: Tokens) -> Alternatives | None:
    sets = call.alternatives.sets
    if sets is None:
        return None
    return Alternatives(rounded_bias(call.lm_head), tokens, sets, _pairs(call), _largest_set(call, tokens))


def _largest_set(call: calls.TokensCall, tokens: Tokens) -> int:
    """See `engines.largest_sparse_set`, of the vocabulary of all ranks."""
    vocab_size = call.lm_head.vocab_size if tokens.vocab is None else tokens.vocab.total
    return engines.largest_sparse_set(call.run.engine, vocab_size)


def _candidate_gradients(
    call: calls.LogprobsCall, tokens: Tokens, gradients: Gradients, needs: calls.Needs, add_to: Tensor | None
) -> HeadGradients:
    """With dW in the weight's dtype and db, from the derivatives of candidates."""
    head, weight = rounded_bias(call.lm_head), call.lm_head.weight
    assert gradients.candidates is not None
    made = gradients._replace(
        weight=(sparse_zeros_like(weight) if add_to is None else add_to) if needs.need_weight else None,
        bias=weight.new_zeros(weight.shape[0], dtype=head.statistics_dtype) if needs.need_bias else None,
    )
    add_weight_gradient(_pairs(call), head, tokens, gradients.candidates, made.weight, made.bias)
    return _head_gradients(call, made)


def _fake_gradients(
    call: calls.LinearCall, needs: calls.Needs, *, in_forward: bool = False, heads: int = 0
) -> HeadGradients:
    """`heads`: those that the engine of divergences compares."""
    head, hidden, weight, run = call.lm_head, call.hidden_states, call.lm_head.weight, call.run
    if not run.any_whole:
        needs = needs._replace(need_weight=False, need_bias=False) if in_forward else needs
    count = hidden[..., 0].numel()  # not from the shape, which would be compiled in
    most = count if ParallelGroups.decode(run.groups).vocab is None else MANY  # `Tokens.most_chunks_of`
    engine = engines.engine(run.engine) if heads == 0 else ChunkedEngine(torch_rows, heads)
    dtype = GradientSums.weight_dtype(engine, head, most, run.max_scratch_bytes) if run.any_whole else weight.dtype
    return HeadGradients(
        hidden.new_empty(hidden.shape, dtype=dhidden_dtype(head)) if needs.need_hidden else _nothing(hidden),
        weight.new_empty(weight.shape, dtype=dtype) if needs.need_weight else _nothing(weight),
        weight.new_empty(weight.shape[:1], dtype=head.statistics_dtype) if needs.need_bias else _nothing(weight),
    )
