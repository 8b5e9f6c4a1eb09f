"""The type of an objective: a named function of log-probs, and the tokens that it gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from grpo_fused.call import validation as check
from grpo_fused.call.layout import Layout, offsets_of, segments, values_are_checked
from grpo_fused.call.options import check_choice, check_number
from grpo_fused.objective.batch import LOWEST_LOGP
from grpo_fused.objective.custom import Scope
from grpo_fused.objective.formulas import MAX_LOG_RATIO

Reduction = Literal["sum", "mean", "max"]

WHAT = {
    "advantages": "advantages, in units of reward",
    "old_per_token_logps": "log-probs of the policy before the update, nats",
    "ref_per_token_logps": "log-probs of the reference model, nats",
    "sampling_per_token_logps": "log-probs of the engine that sampled, nats; NaN where it has none",
    "weights": "each token's factor in the sum, for instance of `token_weights`",
    "sampling_alternative_logps": "log-probs of each alternative by the engine that sampled, nats",
    "teacher_alternative_logps": "log-probs of each alternative by the teacher, nats; NaN where it has none",
}
"""The inputs that objectives read."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of n tokens."""

    cu_seqlens: Tensor
    """[S + 1] int64: sequence s owns the tokens `cu_seqlens[s] : cu_seqlens[s + 1]`; it may have none."""
    num_tokens: int

    @cached_property
    def lengths(self) -> Tensor:
        """[S] int64."""
        return self.cu_seqlens.diff()

    @cached_property
    def of_token(self) -> Tensor:
        """[n] int64, ascending: the sequence of each token."""
        tokens = torch.arange(self.num_tokens, device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens, tokens, right=True) - 1

    def at_tokens(self, x: Tensor) -> Tensor:
        """[n]: the value of per-sequence `x` ([S]) at each token."""
        return x.index_select(0, self.of_token)

    def reduce(self, x: Tensor, how: Reduction) -> Tensor:
        """[n]: sum, mean or maximum of `x` ([n]) over the token's sequence. The maximum has no gradient."""
        if self.num_tokens == 0:
            return x
        if how == "max":
            largest = x.new_full(self.lengths.shape, -math.inf)
            return self.at_tokens(largest.scatter_reduce(0, self.of_token, x.detach(), "amax"))
        total = segments(x, "sum", self.cu_seqlens)  # a fixed order, unlike `index_add` on CUDA
        return self.at_tokens(total if how == "sum" else total / self.lengths.clamp(min=1))

    def discounted_future(self, x: Tensor, discount: float) -> Tensor:
        """[n]: sum over the tokens k >= t of t's sequence of `discount^(k - t) x_k`, in log2(n) steps."""
        step = 1
        while step < self.num_tokens:
            same = self.of_token[step:] == self.of_token[:-step]
            later = torch.where(same, x[step:], 0.0) * discount**step
            x = torch.cat([x[:-step] + later, x[-step:]])
            step *= 2
        return x


@dataclass(frozen=True)
class Alternatives:
    """Other tokens of the positions of n tokens, [m] in all: the alternatives of a call."""

    logps: Tensor
    """[m] nats, at least `LOWEST_LOGP`"""
    offsets: Tensor
    """[n + 1] int64: token i has those from `offsets[i]` to `offsets[i + 1]`"""
    inputs: dict[str, Tensor]
    """[m] each"""

    @cached_property
    def of_token(self) -> Tensor:
        """[m] int64, ascending: the token of each."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=len(self.logps))

    def sum(self, x: Tensor) -> Tensor:
        """[n]: sums of `x` ([m]) over the alternatives of each token."""
        return segments(x, "sum", self.offsets)

    def at(self, x: Tensor) -> Tensor:
        """[m]: the value of per-token `x` ([n]) at each alternative."""
        return x.index_select(0, self.of_token)

    def select(self, rows: Tensor) -> Alternatives:
        """Those of some of the tokens ([k] int64, ascending)."""
        sizes = self.offsets.diff()
        kept = torch.zeros_like(sizes, dtype=torch.bool).index_fill(0, rows, True)[self.of_token]
        inputs = {name: x[kept] for name, x in self.inputs.items()}
        return Alternatives(self.logps[kept], offsets_of(sizes[rows]), inputs)


@dataclass(frozen=True)
class Tokens:
    """The active tokens of a call, [n] each, in the dtype of the log-probs; an input that was not given is None."""

    logps: Tensor
    """nats, at least `LOWEST_LOGP`: an impossible token (-inf) is finite and has no gradient."""
    entropies: Tensor | None
    inputs: dict[str, Tensor]
    sequences: Sequences | None
    """None in scope "token"."""
    others: Alternatives | None = None

    @property
    def alternatives(self) -> Alternatives:
        """Of the tokens.

        Raises:
            TypeError: the call has none.
        """
        if self.others is None:
            raise TypeError("the objective needs alternatives, as fused_linear_objective(alternatives=...) passes them")
        return self.others

    @property
    def advantages(self) -> Tensor:
        """[n]"""
        return self.inputs["advantages"]

    @property
    def old(self) -> Tensor:
        """[n] nats; if not given (on-policy) the log-probs themselves, detached."""
        return self.inputs.get("old_per_token_logps", self.logps.detach())

    @property
    def sampling(self) -> Tensor:
        """[n] nats; where the engine has none (NaN) the log-probs themselves, detached: a ratio of 1."""
        sampling = self.inputs["sampling_per_token_logps"]
        return torch.where(sampling.isnan(), self.logps.detach(), sampling)

    @property
    def groups(self) -> Sequences:
        """The sequences, if the scope is not "token".

        Raises:
            TypeError: the call has none.
        """
        if self.sequences is None:
            raise TypeError("an objective that sums over sequences needs scope 'sequence' or 'batch', and cu_seqlens")
        return self.sequences

    def log_ratio(self, behaviour: Tensor) -> Tensor:
        """[n] logp - behaviour, clamped at +-20 nats, as everywhere in this package."""
        return (self.logps - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


class Objective:
    """A loss function that `fused_linear_objective` can take, with its name, scope and inputs.

    Called as `objective(logps, entropies, **inputs)` it checks the inputs, and returns each token's loss times its
    weight. The factories of this package make one; so does this constructor from a function of `Tokens`.

    Args:
        name: The name in `__name__` and errors.
        function: `function(tokens) -> Tensor`, the loss of each token, [n], differentiable in `tokens.logps`.
        scope: `"token"` (a token's loss depends on that token only), `"sequence"` or `"batch"`.
        needs: Inputs that must be given.
        may_have: Optional inputs, besides `weights`; None: any.
        of_alternatives: Inputs that must be given for each alternative: then the objective reads `Tokens.alternatives`.

    Raises:
        ValueError: an unknown scope.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Tokens], Tensor],
        *,
        scope: Scope = "token",
        needs: tuple[str, ...] = ("advantages",),
        may_have: tuple[str, ...] | None = (),
        of_alternatives: tuple[str, ...] = (),
    ) -> None:
        check_choice(scope, "scope", Scope)
        self.__name__ = name
        self.function = function
        self.scope: Scope = scope
        self.needs = frozenset(needs)
        self.of_alternatives = frozenset(of_alternatives)
        self.reads = None if may_have is None else frozenset((*needs, *may_have, *of_alternatives, "weights"))

    def __repr__(self) -> str:
        return f"<objective {self.__name__}, scope {self.scope!r}>"

    def __call__(
        self,
        logps: Tensor,
        entropies: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        alternative_logps: Tensor | None = None,
        alternative_offsets: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """Each token's share of the loss; the loss is their sum.

        Args:
            logps: `[n]` floating point, nats: log-probs of the active tokens.
            entropies: `[n]` nats, or None; no objective of this package reads them.
            cu_seqlens: `[S + 1]` int64 offsets of the sequences, for the scopes "sequence" and "batch".
            alternative_logps: `[m]` nats: log-probs of other tokens of the positions, for objectives of these.
            alternative_offsets: `[n + 1]` int64: token i has those from one offset to the next.
            **inputs: `[n]` each (those in `of_alternatives` `[m]`), by the names in `reads` (None: any).

        Returns:
            `[n]` in the dtype of `logps`, differentiable in all log-probs.

        Raises:
            ValueError: a shape that is not [n]; offsets that do not rise from 0 to n (checked on the CPU, elsewhere
                with `GRPO_FUSED_DEBUG=1`).
            TypeError: an input that is missing, not read, or not a tensor.
        """
        check.check_tensor(logps, f"{self.__name__}: logps", check.FLOAT, ("n",))
        if missing := sorted((self.needs | self.of_alternatives) - inputs.keys()):
            said = ", ".join(f"{name} ({WHAT.get(name, 'one for each token')})" for name in missing)
            raise TypeError(f"{self.__name__} needs {said}; got {', '.join(sorted(inputs)) or 'no inputs'}")
        self._check_alternatives(logps, alternative_logps, alternative_offsets)
        if self.reads is not None and (unread := sorted(inputs.keys() - self.reads)):
            raise TypeError(f"{self.__name__} reads {', '.join(sorted(self.reads))}; got {', '.join(unread)}, too")
        for name, x in {**inputs, **({} if entropies is None else {"entropies": entropies})}.items():
            of_each = alternative_logps if name in self.of_alternatives and alternative_logps is not None else logps
            check.check_tensor(x, f"{self.__name__}: {name}", check.ANY, tuple(of_each.shape))
        if self.scope == "sequence" and cu_seqlens is None:
            raise TypeError(f"{self.__name__} has scope 'sequence' and needs cu_seqlens [S + 1] int64; got None")
        sequences = None
        if self.scope != "token" and cu_seqlens is not None:
            name = f"{self.__name__}: cu_seqlens"
            check.check_tensor(cu_seqlens, name, check.OFFSET, ("S + 1",))
            if values_are_checked(cu_seqlens.device):
                check.check_offsets(Layout.of(logps, cu_seqlens), name)
            sequences = Sequences(cu_seqlens.to(logps.device, torch.int64), logps.shape[0])

        floor = logps.clamp(min=LOWEST_LOGP)
        token_inputs = {name: x.detach().to(logps.dtype) for name, x in inputs.items()}
        # clamp keeps NaN
        token_inputs |= {name: x.clamp(min=LOWEST_LOGP) for name, x in token_inputs.items() if name.endswith("_logps")}
        weights, others = token_inputs.pop("weights", None), None
        if alternative_logps is not None and alternative_offsets is not None:
            given = {name: token_inputs.pop(name) for name in self.of_alternatives}
            others = Alternatives(alternative_logps.clamp(min=LOWEST_LOGP), alternative_offsets, given)
        loss = self.function(Tokens(floor, entropies, token_inputs, sequences, others))
        return loss if weights is None else loss * weights

    def _check_alternatives(self, logps: Tensor, alternative_logps: Tensor | None, offsets: Tensor | None) -> None:
        if self.of_alternatives and (alternative_logps is None or offsets is None):
            raise TypeError(f"{self.__name__} needs alternatives; got no alternative_logps and alternative_offsets")
        if alternative_logps is not None and offsets is not None:
            name, count = f"{self.__name__}: alternative_offsets", (logps.shape[0] + 1,)
            check.check_tensor(alternative_logps, f"{self.__name__}: alternative_logps", check.FLOAT, ("m",))
            check.check_tensor(offsets, name, check.OFFSET, count)
            if values_are_checked(offsets.device):
                check.check_offsets(Layout.of(alternative_logps, offsets), name, "alternatives")
        if not self.of_alternatives and self.reads is not None and alternative_logps is not None:
            raise TypeError(f"{self.__name__} reads no alternatives; got alternative_logps")


LossFunction = Objective | Callable[..., Tensor]
"""An `Objective`, or a custom function with an attribute `scope`, which then takes all inputs by keyword."""


def scope_of(objective: LossFunction) -> Scope:
    """Its attribute `scope`.

    Raises:
        TypeError: it has none, or an unknown one.
    """
    scope = getattr(objective, "scope", None)
    if not callable(objective) or scope not in get_args(Scope):
        raise TypeError(f"expected an objective with scope {', '.join(get_args(Scope))}; got {objective!r}")
    return cast(Scope, scope)


def name_of(objective: LossFunction) -> str:
    """Its `__name__`, else its `repr`."""
    return getattr(objective, "__name__", repr(objective))


def call_part(objective: LossFunction, tokens: Tokens) -> Tensor:
    """[n]: the losses of an objective inside another one, with only the inputs that it reads."""
    reads = getattr(objective, "reads", None)
    inputs = {name: x for name, x in tokens.inputs.items() if reads is None or name in reads}
    if scope_of(objective) != "token" and tokens.sequences is not None:
        inputs["cu_seqlens"] = tokens.sequences.cu_seqlens
    others = tokens.others
    if others is not None and (reads is None or getattr(objective, "of_alternatives", None)):
        inputs |= {name: x for name, x in others.inputs.items() if reads is None or name in reads}
        inputs |= {"alternative_logps": others.logps, "alternative_offsets": others.offsets}
    return objective(tokens.logps, tokens.entropies, **inputs)


def made_of(
    name: str,
    function: Callable[[Tokens], Tensor],
    parts: Collection[LossFunction],
    *,
    scope: Scope = "token",
    needs: tuple[str, ...] = (),
) -> Objective:
    """An objective made of others: it reads their inputs, and has the widest of their scopes and `scope`."""
    scope = max([scope, *map(scope_of, parts)], key=get_args(Scope).index)
    reads: list[Any] = [getattr(part, "reads", None) for part in parts]
    may_have = None if None in reads else tuple(frozenset(name for part in reads for name in part))
    needs = tuple(frozenset(needs).union(*(getattr(part, "needs", ()) for part in parts)))
    of_alternatives = tuple(frozenset().union(*(getattr(part, "of_alternatives", ()) for part in parts)))
    return Objective(name, function, scope=scope, needs=needs, may_have=may_have, of_alternatives=of_alternatives)


def described(name: str, **options: object) -> str:
    """`name(option=value, ...)`, without the options that are None."""
    said = (f"{key}={value!r}" for key, value in options.items() if value is not None)
    return f"{name}({', '.join(said)})"


def check_bounds(name: str, low: float, high: float | None) -> tuple[float, float]:
    """Two numbers above 0, of which the second is the first where it is None."""
    low = check_number(low, name, above=0.0)
    return low, low if high is None else check_number(high, f"{name}_high", above=0.0)


def check_clip(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """The bounds 1 - epsilon and 1 + epsilon_high on a ratio; epsilon_high defaults to epsilon."""
    low, high = check_bounds("epsilon", epsilon, epsilon_high)
    return 1.0 - low, 1.0 + high
