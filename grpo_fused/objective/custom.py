"""A custom objective, evaluated inside the pass over the head.

The objective is a differentiable torch function of log-probs (and entropies). A chunk's log-probs are known before its
gradient is computed: then the function is called, and autograd gives its coefficients, one number for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.layout import Layout, offsets_of, values_are_checked
from grpo_fused.call.options import check_choice
from grpo_fused.call.validation import check_objective_scope
from grpo_fused.objective.batch import LOWEST_LOGP

Scope = Literal["token", "sequence", "batch"]
"""Which tokens a token's loss depends on, from narrow to wide."""
Objective = Callable[..., Tensor]

GRADIENTS = ("gradient", "gradient by entropies", "gradient by alternative_logps")
"""of an objective, as errors name them"""


class Derivatives(NamedTuple):
    """Of the loss of R tokens."""

    logp: Tensor
    """[R]"""
    entropy: Tensor | None
    """[R], or None"""
    alternatives: Tensor | None
    """[m] by the log-probs of their alternatives, if there are any"""


@dataclass
class Evaluation:
    """The sums over calls of an objective on parts of a batch."""

    objective: Objective
    inputs: Mapping[str, Tensor]
    """in the layout's shape each"""
    layout: Layout
    rows: Tensor
    """[R] int64, ascending: positions of all active tokens"""
    scope: Scope
    with_entropy: bool
    alternatives: CandidateSets | None = None
    """of the N positions"""
    alternative_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """[M] each"""
    loss: Tensor = field(init=False)
    """0-d fp64"""

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=self.rows.device)

    def __call__(
        self, part: slice | Tensor, logp: Tensor, entropy: Tensor | None, alternative_logps: Tensor | None = None
    ) -> Derivatives:
        """Of some of the rows; their loss is added."""
        # an impossible token counts as the lowest log-prob, so that the loss stays finite; it has no gradient
        scores = (logp, entropy if self.with_entropy else None, alternative_logps)
        with torch.enable_grad():
            leaves = [None if x is None else x.clamp(min=LOWEST_LOGP).detach().requires_grad_() for x in scores]
            there = [x for x in leaves if x is not None]
            value = self.value(part, there[0], *leaves[1:])
            check_no_other_gradient(value, there)
            gradients: Iterator[Tensor | None] = iter([None] * len(there))  # of no token, if the result has none
            if value.requires_grad:
                gradients = iter(torch.autograd.grad(value.sum(), there, allow_unused=True))
        found: list[Tensor | None] = []
        for name, x in zip(GRADIENTS, scores, strict=True):
            gradient = None if x is None else next(gradients)
            if gradient is not None and x is not None:
                check_numbers(name, gradient, logp, x)
                gradient = torch.where(x < LOWEST_LOGP, 0.0, gradient)
            found.append(torch.zeros_like(x) if gradient is None and x is not None else gradient)
        self.loss += value.detach().to(torch.float64).sum()
        return Derivatives(*found)  # type: ignore[arg-type]

    def value(
        self, part: slice | Tensor, logp: Tensor, entropy: Tensor | None, alternative_logps: Tensor | None = None
    ) -> Tensor:
        """The objective of some of the rows, checked."""
        rows = self.rows[part]
        inputs: dict[str, Any] = {name: x.reshape(-1)[rows] for name, x in self.inputs.items()}
        if self.scope != "token":
            inputs["cu_seqlens"] = self._offsets(part, rows)
        if self.alternatives is not None:
            places = self.alternatives.places(rows)
            inputs |= {name: x[places] for name, x in self.alternative_inputs.items()}
            inputs["alternative_logps"] = alternative_logps
            inputs["alternative_offsets"] = offsets_of(self.alternatives.sizes[rows])
        scores = [x for x in (logp, entropy, alternative_logps) if x is not None]
        versions = [_version(x) for x in scores]
        value = self.objective(logp, entropy, **inputs)
        if not isinstance(value, Tensor) or value.shape != logp.shape or not value.is_floating_point():
            came = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the objective must return a real tensor {tuple(logp.shape)}, as logps; got {came}")
        if [_version(x) for x in scores] != versions:
            raise ValueError("the objective must not change logps or entropies in place; got other values in them")
        if logp.requires_grad and len(rows) and not value.requires_grad:
            raise ValueError("the objective's result must depend on logps or entropies; got one without a gradient")
        check_numbers("value", value, *scores)
        return value

    def _offsets(self, part: slice | Tensor, rows: Tensor) -> Tensor:
        """[S + 1]: where the sequences of a part begin. Empty ones belong to the part of the next sequence."""
        sequence = self.layout.sequence_ids(rows.device)
        first, last = 0, self.layout.num_sequences - 1
        if isinstance(part, slice) and part.start:
            first = int(sequence[self.rows[part.start - 1]]) + 1
        if isinstance(part, slice) and part.stop is not None and part.stop < len(self.rows):
            last = int(sequence[self.rows[part.stop - 1]])
        return torch.searchsorted(sequence[rows], torch.arange(first, last + 2, device=rows.device))


def check_no_other_gradient(value: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise if `value` depends on a tensor that requires grad and is none of `leaves`: its gradient would be lost."""
    others = [] if value.grad_fn is not None or not value.requires_grad else [value]
    seen, nodes = set(), [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            others += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    for other in others:
        if all(other is not leaf for leaf in leaves):
            raise ValueError(
                f"the objective uses a tensor of shape {tuple(other.shape)} that requires grad, and its gradient would "
                "be lost: detach it, or write the loss with fused_linear_logprobs"
            )


def _version(x: Tensor) -> int:
    """How often a tensor was changed; those of `torch.inference_mode` do not count that."""
    return 0 if x.is_inference() else x._version


def check_numbers(name: str, x: Tensor, *scores: Tensor) -> None:
    """No NaN, unless a score is one."""
    count = int(x.isnan().sum()) if values_are_checked(x.device) else 0
    if count and not any(score.isnan().any() for score in scores):
        raise ValueError(f"the objective's {name} must be a number for every token; got {count} NaN")


@torch.inference_mode(False)
def check_objective(
    objective: Objective,
    inputs: Mapping[str, Tensor] | None = None,
    scope: Scope = "token",
    *,
    num_tokens: int = 64,
    with_entropy: bool = False,
    alternative_inputs: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> None:
    """Compare a call of an objective on all tokens with calls on parts: `fused_linear_objective` needs them to agree.

    Run it once for a custom objective: one that takes a mean over its tokens, for example, would depend on the chunks.

    Args:
        objective: As in `fused_linear_objective`.
        inputs: Its inputs, `[N]` (or `[B, T]` of B sequences); default none, with `num_tokens` tokens.
        scope: "token": parts are any subsets. "sequence": parts are whole sequences. "batch": nothing to compare, only
            the result's shape and gradient are checked.
        num_tokens: N if there are no inputs, rounded up to eight sequences of one length.
        with_entropy: Pass entropies.
        alternative_inputs: The inputs of an objective that reads alternatives, `[2 N]` each: a token has from none to
            seven. May be empty; default (None) there are no alternatives.
        seed: For the random log-probs, entropies, alternatives and parts.

    Raises:
        ValueError: The results differ (the message says by how much), or `fused_linear_objective` would refuse them.
    """
    check_choice(scope, "scope", Scope)
    check_objective_scope(objective, scope)
    inputs = dict(inputs or {})
    shape = next(iter(inputs.values())).shape if inputs else torch.Size([8, -(-num_tokens // 8)])
    shape = shape if len(shape) == 2 else torch.Size([1, *shape])
    if scope == "sequence" and shape[0] < 2:
        raise ValueError(f"scope 'sequence' needs inputs [B, T] of two sequences or more; got {list(shape)}")
    g = torch.Generator().manual_seed(seed)
    random = partial(torch.rand, generator=g, dtype=torch.float64, device="cpu")
    logps, entropies = -3.0 * random(shape.numel()), 2.0 * random(shape.numel()) if with_entropy else None
    rows = torch.arange(shape.numel(), device="cpu")
    inputs = {name: x.cpu() for name, x in inputs.items()}
    other_inputs = {name: x.cpu() for name, x in (alternative_inputs or {}).items()}
    others, of_others = None, None
    if alternative_inputs is not None:
        sizes = (rows % 5)[torch.randperm(len(rows), generator=g, device="cpu")]
        sizes[-1] += 2 * len(rows) - int(sizes.sum())
        others = CandidateSets(rows.new_zeros(2 * len(rows)), offsets_of(sizes))
        of_others = -3.0 * random(2 * len(rows))
    layout = Layout(shape, shape[0], None)
    run = Evaluation(objective, inputs, layout, rows, scope, with_entropy, others, other_inputs)
    if scope == "token":
        order = torch.randperm(len(rows), generator=g, device="cpu")
        parts: list[slice | Tensor] = list(order.split(max(len(order) // 3, 1)))
    else:
        parts = [slice(b * shape[1], (b + 1) * shape[1]) for b in range(shape[0])]
    whole = run(slice(0, len(rows)), logps, entropies, of_others)
    if scope == "batch":
        return
    total, run.loss = run.loss, torch.zeros_like(run.loss)
    pieces = [None if x is None else torch.zeros_like(x) for x in whole]
    for part in parts:
        places = None if others is None else others.places(rows[part])
        wheres = (part, part, places)
        given = [None if x is None else x[where] for x, where in ((entropies, part), (of_others, places))]
        found = run(part, logps[part], *given)
        for to, x, where in zip(pieces, found, wheres, strict=True):
            if to is not None and x is not None:
                to[where] = x
    names = ("gradient by logps", "gradient by entropies", "gradient by alternative_logps")
    for name, a, b in (("loss", total, run.loss), *zip(names, whole, pieces, strict=True)):
        if a is None or b is None:
            continue
        worst = float((a - b).abs().max()) if a.numel() else 0.0
        if worst > 1e-9 * max(1.0, float(a.abs().max()) if a.numel() else 0.0):
            raise ValueError(
                f"an objective of scope {scope!r} must give each {scope} the same result in any call; "
                f"the {name} of all and of parts differ by {worst:.3g}"
            )
