"""Log-probs whose gradient has been made before anybody asked for it.

A trainer's loss formula stands between the log-probs and their gradient, so an autograd function that returns log-probs
must recompute the head product in its backward: four products. But what the formula is going to do is known from the
trainer's options. `PredictedLogprobs` therefore makes the gradients of the predicted loss in its forward, in one pass
over the head (three products), and remembers the predicted coefficients g* = dL*/dlogp. When the real coefficients g
arrive and are a multiple of g*, row by row, so are the gradients. Where they are not, the gradients are made from g, at
the price of three products more. The host's formula stays in force, with its metrics, accumulation and parallelism.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fused.api import operators
from grpo_fused.api.autograd import first_order, scaled, times
from grpo_fused.call import calls
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import offsets_of
from grpo_fused.integrations.trl.zero import whole
from grpo_fused.objective.formulas import MAX_LOG_RATIO

TOLERANCE = 5e-6
"""Share of a coefficient that is rounding: the predicted and the real one are fp32 evaluations of one formula."""

KL_TOLERANCE = 8 * 2.0**-23
"""The same with a KL, as a share of the coefficient one nat from the reference: beta (1 - e^(ref - logp)) is a
difference of two terms of the size of beta, which rounds like them however small it is itself. With
`use_bias_correction_kl` autograd adds beta e^(ref - logp) and subtracts it again, which rounds like that."""


@dataclass
class Counts:
    """How often predictions came true."""

    fused: int = 0
    recomputed: int = 0


@dataclass
class Prediction:
    """The loss that a trainer is about to compute from the log-probs of a batch of completions."""

    config: GRPOLossConfig
    completion_ids: Tensor
    """[B, T]"""
    completion_mask: Tensor
    """[B, T]: the positions that are scored"""
    inputs: calls.LossInputs
    """of the loss, [B], [B, 1] or [B, T]; its mask (bool) has the positions that count in it"""
    counts: Counts = field(default_factory=Counts)
    used: bool = False
    """whether the scores that it is about have been made: any further ones are about something else"""

    def take(self, targets: Tensor) -> _Packed | None:
        """The same, once, for rows of hidden states that have these targets; None where those are not the loss's."""
        num_rows, device = targets.shape[0], targets.device
        mask = self.completion_mask.to(device) != 0
        batch, length = mask.shape
        count = int(mask.sum())
        if num_rows == count:  # TRL's compact form: scored positions only
            rows = torch.arange(count, device=device)
        elif batch and num_rows % batch == 0 and num_rows // batch >= length:  # every position, completions last
            width = num_rows // batch
            grid = torch.arange(num_rows, device=device).view(batch, width)[:, width - length :]
            rows = grid[mask]
        else:
            return None
        scored = torch.zeros_like(targets, dtype=torch.bool).index_fill_(0, rows, True)
        elsewhere = targets[~scored]  # TRL puts 0 where it is going to throw the score away
        if bool((targets[rows] != self.completion_ids.to(device)[mask]).any()) or bool(elsewhere.any()):
            return None
        self.used = True
        lengths = mask.sum(1)
        if count == 0 or (count == batch and bool((lengths != 1).any())):
            return None  # little to gain; and one value for each token would look like one for each sequence
        offsets = offsets_of(lengths)
        inputs = calls.LossInputs._make(None if x is None else self._pack(x.to(device), mask) for x in self.inputs)
        return _Packed(self.config, self.counts, rows, inputs, offsets)

    @staticmethod
    def _pack(x: Tensor, mask: Tensor) -> Tensor:
        if x.dim() == 0:
            return x
        if x.dim() == 1 or (x.shape[1] == 1 and mask.shape[1] != 1):
            return x.reshape(-1, 1)  # one for each sequence
        return x.detach()[mask]


class _Packed(NamedTuple):
    config: GRPOLossConfig
    counts: Counts
    rows: Tensor
    inputs: calls.LossInputs
    offsets: Tensor


announced: ContextVar[Prediction | None] = ContextVar("grpo_fused_prediction", default=None)
"""The loss that will be computed from the log-probs asked for in a block."""


class PredictedLogprobs(torch.autograd.Function):
    """(logps, entropies) of [N, H] hidden states; see the module."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: calls.LogprobsCall, packed: _Packed
    ) -> Any:
        call = calls.with_tensors(call, hidden, weight, bias)
        logps, entropies, *predicted = _predicted(call, calls.Needs(*ctx.needs_input_grad[:3]), packed)
        ctx.counts = packed.counts
        ctx.call, tensors = calls.detach(call)
        ctx.save_for_backward(packed.rows, *predicted, *tensors)
        ctx.set_materialize_grads(False)
        if not call.with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: tuple[Any, ...], dlogps: Tensor | None, dentropies: Tensor | None) -> Any:
        rows, gstar, hstar, one_nat, dhidden, dweight, dbias, *tensors = saved
        call: calls.LogprobsCall = calls.attach(ctx.call, tensors)
        dentropies = dentropies if call.with_entropy else None
        if dlogps is None and dentropies is None:
            return (None,) * 5
        needs, (hidden, weight, bias) = calls.Needs(*ctx.needs_input_grad[:3]), calls.tensors_of(call)
        scale = _multiple(dlogps, dentropies, rows, gstar, hstar, one_nat)
        if scale is None:
            ctx.counts.recomputed += 1
            with whole(weight, bias):  # under DeepSpeed ZeRO-3, as TRL does in its own backward
                again = calls.LogprobsGradientCall(call, None, dlogps, dentropies, None, needs)
                dhidden, dweight, dbias = operators.linear_logprobs_gradient(again)
        else:
            ctx.counts.fused += 1
            dhidden = _spread(times(dhidden, scale), rows, hidden) if needs.need_hidden else dhidden
            dweight = scaled(dweight, scale, weight.dtype, call.run.engine) if needs.need_weight else dweight
            dbias = dbias * scale
        made = zip((dhidden, dweight, dbias), calls.tensors_of(call), needs, strict=True)
        return *(x.to(of.dtype) if need and of is not None else None for x, of, need in made), None, None


def _predicted(call: calls.LogprobsCall, needs: calls.Needs, packed: _Packed) -> tuple[Tensor, ...]:
    """(logps, entropies) of all rows, 0 where not scored; g* for log-probs and entropies; that for log-probs one nat
    from the reference; dH, dW and db."""
    rows, inputs, offsets = packed.rows, packed.inputs, packed.offsets
    config, some = packed.config.encoded, _at(call, rows)
    whole_loss = calls.LossCall(
        some.hidden_states, call.lm_head, some.token_ids, inputs, offsets, some.candidates, config, True, needs,
        call.run,
    )  # fmt: skip
    loss = operators.linear_grpo_loss(whole_loss)

    def objective(of: calls.LossInputs) -> operators.ObjectiveResult:
        from_logps = calls.ObjectiveCall(loss.logps, loss.entropies.nan_to_num(), of, offsets, config)
        return operators.grpo_objective(from_logps)

    star, one_nat = objective(inputs), loss.logps.new_zeros(loss.logps.shape)
    if inputs.ref_per_token_logps is not None:  # with every weight of the loss
        one_nat = objective(inputs._replace(ref_per_token_logps=loss.logps.nan_to_num() - 1.0)).dlogps
        if packed.config.use_bias_correction_kl:
            one_nat *= (inputs.ref_per_token_logps - loss.logps).nan_to_num(0.0).clamp(0.0, MAX_LOG_RATIO).exp()
    out = loss.logps.new_zeros(call.hidden_states.shape[0]).index_copy_(0, rows, loss.logps)
    entropy_out = torch.zeros_like(out).index_copy_(0, rows, loss.entropies)
    assert inputs.completion_mask is not None
    beside = rows[~inputs.completion_mask]  # scored, and not in the loss: what a tool wrote
    if beside.shape[0]:
        others = _at(call, beside)._replace(mask=None, with_entropy=True)
        scores = operators.linear_logprobs(others)
        out.index_copy_(0, beside, scores.logps)
        entropy_out.index_copy_(0, beside, scores.entropies)
    return out, entropy_out, star.dlogps, star.dentropies, one_nat, loss.dhidden, loss.dweight, loss.dbias


def _at(call: calls.LogprobsCall, rows: Tensor) -> calls.LogprobsCall:
    """The call for some of its rows."""
    sets = call.candidates.sets
    candidates = calls.TokenSets.of(None if sets is None else sets.select(rows))
    return call._replace(hidden_states=call.hidden_states[rows], token_ids=call.token_ids[rows], candidates=candidates)


def _spread(x: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """`like` with the values of `x` at `rows`, and 0 elsewhere."""
    return torch.zeros_like(like).index_copy_(0, rows, x.to(like.dtype))


def _multiple(
    dlogps: Tensor | None, dentropies: Tensor | None, rows: Tensor, gstar: Tensor, hstar: Tensor, one_nat: Tensor
) -> Tensor | None:
    """a with (g, h) = a (g*, h*), or None where there is none. Looks at the values: one synchronisation."""
    same = torch.ones((), dtype=torch.bool, device=rows.device)
    zero = gstar.new_zeros(())
    wants = gstar, hstar if hstar.shape == gstar.shape else torch.zeros_like(gstar)
    gots = []
    for came in (dlogps, dentropies):
        gots.append(torch.zeros_like(gstar) if came is None else came[rows].to(gstar.dtype))
        if came is not None:
            inside = torch.zeros_like(came, dtype=torch.bool).index_fill_(0, rows, True)
            same &= (torch.where(inside, 0.0, came) == 0).all()  # no gradient at positions that were not predicted
    got_of_both, want_of_both = torch.cat(gots), torch.cat(wants)  # groups of equal rewards have entropies alone
    square = want_of_both.square().sum()
    scale = torch.where(square > 0, (got_of_both * want_of_both).sum() / square, zero)
    for got, want, rounding in zip(gots, wants, (KL_TOLERANCE * one_nat.abs(), zero), strict=True):
        size = (scale * want).abs()
        # each row by itself: a large coefficient elsewhere says nothing of this one
        allowed = TOLERANCE * (size + _median_of_nonzero(size)) + scale.abs() * rounding
        same &= ((got - scale * want).abs() <= allowed).all()
    return scale if bool(same) else None


def _median_of_nonzero(x: Tensor) -> Tensor:
    """0-d: the (lower) median of those of x >= 0 that are not 0, 0 where all are; without a look at their number."""
    count = (x > 0).sum()
    return x.sort().values.take(len(x) - count + (count - 1) // 2)
