"""The type of an objective: a named function of log-probs, and the tokens that it gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from grpo_fused.call.layout import values_are_checked
from grpo_fused.call.options import check_choice, check_number
from grpo_fused.objective.batch import LOWEST_LOGP
from grpo_fused.objective.formulas import MAX_LOG_RATIO

Scope = Literal["token", "sequence", "batch"]
"""Which tokens a token's loss depends on, from narrow to wide."""

Reduction = Literal["sum", "mean", "max"]

WHAT = {
    "advantages": "advantages, in units of reward",
    "old_per_token_logps": "log-probs of the policy before the update, nats",
    "ref_per_token_logps": "log-probs of the reference model, nats",
    "sampling_per_token_logps": "log-probs of the engine that sampled, nats; NaN where it has none",
    "weights": "each token's factor in the sum, for instance of `token_weights`",
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
        # unsafe: skips a check that would synchronise; a fixed order, unlike `index_add` on CUDA
        total = torch.segment_reduce(x, "sum", offsets=self.cu_seqlens, axis=0, unsafe=True, initial=0)
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
class Tokens:
    """The active tokens of a call, [n] each, in the dtype of the log-probs; an input that was not given is None."""

    logps: Tensor
    """nats, at least `LOWEST_LOGP`: an impossible token (-inf) is finite and has no gradient."""
    entropies: Tensor | None
    inputs: dict[str, Tensor]
    sequences: Sequences | None
    """None in scope "token"."""

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
    ) -> None:
        check_choice(scope, "scope", Scope)
        self.__name__ = name
        self.function = function
        self.scope: Scope = scope
        self.needs = frozenset(needs)
        self.reads = None if may_have is None else frozenset((*needs, *may_have, "weights"))

    def __repr__(self) -> str:
        return f"<objective {self.__name__}, scope {self.scope!r}>"

    def __call__(
        self, logps: Tensor, entropies: Tensor | None = None, *, cu_seqlens: Tensor | None = None, **inputs: Tensor
    ) -> Tensor:
        """Each token's share of the loss; the loss is their sum.

        Args:
            logps: `[n]` floating point, nats: log-probs of the active tokens.
            entropies: `[n]` nats, or None; no objective of this package reads them.
            cu_seqlens: `[S + 1]` int64 offsets of the sequences, for the scopes "sequence" and "batch".
            **inputs: `[n]` each, by the names in `reads` (None: any).

        Returns:
            `[n]` in the dtype of `logps`, differentiable in it.

        Raises:
            ValueError: a shape that is not [n]; offsets that do not rise from 0 to n (checked on the CPU, elsewhere
                with `GRPO_FUSED_DEBUG=1`).
            TypeError: an input that is missing, not read, or not a tensor.
        """
        self._check(logps, entropies, cu_seqlens, inputs)
        floor = logps.clamp(min=LOWEST_LOGP)
        token_inputs = {name: x.detach().to(logps.dtype) for name, x in inputs.items()}
        for name in token_inputs:
            if name.endswith("_logps"):
                token_inputs[name] = token_inputs[name].clamp(min=LOWEST_LOGP)  # keeps NaN
        sequences = None
        if self.scope != "token" and cu_seqlens is not None:
            sequences = Sequences(cu_seqlens.to(logps.device, torch.int64), logps.shape[0])
        weights = token_inputs.pop("weights", None)
        loss = self.function(Tokens(floor, entropies, token_inputs, sequences))
        return loss if weights is None else loss * weights

    def _check(
        self, logps: Tensor, entropies: Tensor | None, cu_seqlens: Tensor | None, inputs: dict[str, Tensor]
    ) -> None:
        if not isinstance(logps, Tensor) or not logps.is_floating_point() or logps.dim() != 1:
            got = f"{logps.dtype} {tuple(logps.shape)}" if isinstance(logps, Tensor) else type(logps).__name__
            raise TypeError(f"{self.__name__}: logps must be a floating-point tensor [n]; got {got}")
        if missing := sorted(self.needs - inputs.keys()):
            said = ", ".join(f"{name} ({WHAT.get(name, 'one for each token')})" for name in missing)
            raise TypeError(f"{self.__name__} needs {said}; got {', '.join(sorted(inputs)) or 'no inputs'}")
        if self.reads is not None and (unread := sorted(inputs.keys() - self.reads)):
            raise TypeError(f"{self.__name__} reads {', '.join(sorted(self.reads))}; got {', '.join(unread)}, too")
        for name, x in {**inputs, **({} if entropies is None else {"entropies": entropies})}.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{self.__name__}: {name} must be a tensor; got {type(x).__name__}")
            if x.shape != logps.shape:
                raise ValueError(f"{self.__name__}: {name} must be {tuple(logps.shape)}; got {tuple(x.shape)}")
        if self.scope == "sequence" and (not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1):
            got = type(cu_seqlens).__name__ if not isinstance(cu_seqlens, Tensor) else str(tuple(cu_seqlens.shape))
            raise TypeError(f"{self.__name__} has scope 'sequence' and needs cu_seqlens [S + 1] int64; got {got}")
        if self.scope != "token" and cu_seqlens is not None and values_are_checked(cu_seqlens.device):
            offsets = cu_seqlens.tolist()
            if offsets[:1] != [0] or offsets[-1] != len(logps) or offsets != sorted(offsets):
                raise ValueError(f"{self.__name__}: cu_seqlens must rise from 0 to {len(logps)}; got {offsets[:8]}")


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


def widest(*scopes: Scope) -> Scope:
    """The widest of the scopes."""
    return max(scopes, key=get_args(Scope).index)


def name_of(objective: LossFunction) -> str:
    """Its `__name__`, else its `repr`."""
    return getattr(objective, "__name__", repr(objective))


def call_part(objective: LossFunction, tokens: Tokens) -> Tensor:
    """[n]: the losses of an objective inside another one, with only the inputs that it reads."""
    reads = getattr(objective, "reads", None)
    inputs = {name: x for name, x in tokens.inputs.items() if reads is None or name in reads}
    if scope_of(objective) != "token":
        inputs["cu_seqlens"] = tokens.groups.cu_seqlens
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
    scope = widest(scope, *map(scope_of, parts))
    reads: list[Any] = [getattr(part, "reads", None) for part in parts]
    may_have = None if None in reads else tuple(frozenset(name for part in reads for name in part))
    needs = tuple(frozenset(needs).union(*(getattr(part, "needs", ()) for part in parts)))
    return Objective(name, function, scope=scope, needs=needs, may_have=may_have)


def described(name: str, **options: object) -> str:
    """`name(option=value, ...)`, without the options that are None."""
    said = (f"{key}={value!r}" for key, value in options.items() if value is not None)
    return f"{name}({', '.join(said)})"


def check_clip(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """The bounds 1 - epsilon and 1 + epsilon_high on a ratio; epsilon_high defaults to epsilon."""
    low = check_number(epsilon, "epsilon", above=0.0)
    high = low if epsilon_high is None else check_number(epsilon_high, "epsilon_high", above=0.0)
    return 1.0 - low, 1.0 + high
