"""Calls of the public functions as typed values, which pass through autograd, operator and pipeline unchanged.

A call is a `NamedTuple` of tensors, numbers and other such tuples; that of a custom objective, which is no operator,
has mappings of tensors too. Its fields, in order, define the schema of an operator and the handshake of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.head_parts import widened
from grpo_fused.call.layout import Layout

C = TypeVar("C", bound="tuple[Any, ...]")
L = TypeVar("L", bound="LinearCall")

_hints = cache(get_type_hints)  # half a millisecond each time


class Needs(NamedTuple):
    """Which gradients are required; a frozen head saves one of the three products."""

    need_hidden: bool
    need_weight: bool
    need_bias: bool

    def any(self) -> bool:
        """Whether any gradient is required."""
        return self.need_hidden or self.need_weight or self.need_bias


NO_GRADIENT, HIDDEN_ALONE = Needs(False, False, False), Needs(True, False, False)


class LossInputs(NamedTuple):
    """The per-token and per-sequence tensors of a loss call as the caller gave them, validated."""

    advantages: Tensor
    completion_mask: Tensor | None = None
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    num_items_in_batch: Tensor | None = None


class LMHead(NamedTuple):
    """An lm head: z = softcap * tanh(logit_scale * (h W^T + b) / softcap) / temperature.

    With a base, W is frozen, and low-rank states u [N, R] add to its products: row_scale * (h base^T) + u weight^T. The
    hidden states of a call are then [h, u], in narrow products [h, u', u', u''], where u' + u'' = u.
    """

    weight: Tensor
    """[V, H], or [V, R] with a base"""
    bias: Tensor | None = None
    """[V]"""
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    """if it is one number"""
    temperatures: Tensor | None = None
    """else as given: 0-d, one for each sequence, or one for each token"""
    compute_dtype: torch.dtype = torch.float32
    """hidden states and weight are rounded to it first: their promoted dtype, or autocast's"""
    rounds_bias: bool = False
    """whether the bias is, too: by autocast"""
    base: Tensor | None = None
    """[V, B] without a gradient, in floating point, or the values of a `QuantizedWeight`"""
    row_scale: Tensor | None = None
    """[V] of the statistics dtype: what products of the base are multiplied by"""
    group_scale: Tensor | None = None
    """[V, G] of the base, in the statistics dtype, see `QuantizedWeight`"""
    codes: Tensor | None = None
    """[16] of the base, in the statistics dtype: then its values are [V, B / 2]"""
    terms: int = 1
    """columns of the products for each column of `weight`: three where one would be rounded to a narrow dtype"""

    @property
    def base_width(self) -> int:
        """B"""
        if self.base is None:
            return 0
        return self.base.shape[1] if self.codes is None else 2 * self.base.shape[1]

    @property
    def base_group(self) -> int:
        """Columns of the base that share a scale."""
        return self.base_width if self.group_scale is None else self.base_width // self.group_scale.shape[1]

    @property
    def width(self) -> int:
        """Columns of the products, and of the hidden states."""
        return self.base_width + self.terms * self.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """V"""
        return self.weight.shape[0]

    @property
    def statistics_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    def operand(self, x: Tensor) -> Tensor:
        """Hidden states or rows of the weight in the dtype of the computation."""
        return x.to(self.compute_dtype)

    def rows(self, where: slice | Tensor) -> Tensor:
        """[K, width]: rows of base and weight in the dtype of the computation, still to be scaled by `row_scale`."""
        if self.base is None:
            return self.operand(self.weight[where])
        if self.weight.shape[1] == 0:
            return self.base_rows(where)
        return torch.cat([self.base_rows(where), self.weight_columns(where)], dim=1)

    def weight_columns(self, where: slice | Tensor) -> Tensor:
        """[K, terms R]: what rows of `weight` are beside a base, whose `row_scale` they are divided by."""
        rows = self.weight[where].to(self.statistics_dtype)
        if self.row_scale is not None:
            rows = rows / self.row_scale[where].unsqueeze(1)
        if self.terms == 1:
            return rows
        rounded = self.operand(rows)
        return torch.cat([self.operand(rows - rounded.to(rows.dtype)), rounded, rounded], dim=1)

    def weight_states(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Parts of hidden states [..., width], which sum to what the gradient of `weight` is a product of."""
        own, columns = hidden[..., self.base_width :], self.weight.shape[1]
        return (own,) if self.terms == 1 else (own[..., columns : 2 * columns], own[..., 2 * columns :])

    def base_rows(self, where: slice | Tensor) -> Tensor:
        """[K, B]: those of the base."""
        assert self.base is not None
        scale = None if self.group_scale is None else self.group_scale[where]
        return widened(self.base[where], scale, self.codes, self.compute_dtype)


class TokenSets(NamedTuple):
    """Sets of tokens of the positions of a call, if it has any: a `CandidateSets` as two tensors."""

    ids: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(cls, sets: CandidateSets | None) -> TokenSets:
        """Those that the caller gave, if any."""
        return cls() if sets is None else cls(sets.ids, sets.offsets)

    @property
    def sets(self) -> CandidateSets | None:
        """The tensors as the caller gave them."""
        ids, offsets = self
        return None if ids is None or offsets is None else CandidateSets(ids, offsets)


class Run(NamedTuple):
    """How a call runs."""

    engine: str
    """its name"""
    max_scratch_bytes: int | None = None
    compact: bool = True
    groups: str = ""
    """`ParallelGroups.encode`"""
    adds_to_grad: bool = False
    """whether rows of dW may be added to the weight's gradient, see `HeadOptions`"""
    any_whole: bool = True
    """whether an active token may need the whole head: it has no candidate set, or one that is too large"""


class LossCall(NamedTuple):
    """The loss from hidden states and head."""

    hidden_states: Tensor
    """[B, T, H] or [N, H]"""
    lm_head: LMHead
    completion_ids: Tensor
    inputs: LossInputs
    cu_seqlens: Tensor | None
    candidates: TokenSets
    config: str
    """`GRPOLossConfig.encoded`"""
    with_metrics: bool
    needs: Needs
    run: Run
    ref_hidden_states: Tensor | None = None
    """this and the next: the reference of the exact KL"""
    ref_lm_head: LMHead | None = None

    @property
    def token_ids(self) -> Tensor:
        """The completion ids."""
        return self.completion_ids

    @property
    def mask(self) -> Tensor | None:
        """The completion mask."""
        return self.inputs.completion_mask

    @property
    def exact(self) -> bool:
        """Whether it has the exact KL towards another head."""
        return self.ref_lm_head is not None

    @property
    def with_kl(self) -> bool:
        """Whether there is a reference, so that the KL is a metric."""
        return self.inputs.ref_per_token_logps is not None or self.exact


class LogprobsCall(NamedTuple):
    """Log-probs, and entropies if requested, from hidden states and head."""

    hidden_states: Tensor
    lm_head: LMHead
    token_ids: Tensor
    mask: Tensor | None
    candidates: TokenSets
    with_entropy: bool
    run: Run
    alternatives: TokenSets = TokenSets()
    with_dhidden: bool = False
    """whether derivatives of the log-probs are made with them: only hidden states have a gradient"""


class CustomCall(NamedTuple):
    """The loss of a custom objective."""

    hidden_states: Tensor
    lm_head: LMHead
    token_ids: Tensor
    objective: Callable[..., Tensor]
    mask: Tensor | None
    cu_seqlens: Tensor | None
    candidates: TokenSets
    inputs: Mapping[str, Tensor]
    """the objective's inputs"""
    scope: str
    with_entropy: bool
    needs: Needs
    run: Run
    records: bool
    """whether the caller records gradients: then a tensor of the objective's own must not require one"""
    alternatives: TokenSets
    """other tokens of the positions, whose log-probs are wanted too; one may be several times"""
    alternative_inputs: Mapping[str, Tensor]
    """the objective's inputs for each alternative"""


class DivergenceCall(NamedTuple):
    """The divergence of a policy from another head, or from the K most likely tokens of a teacher."""

    hidden_states: Tensor
    lm_head: LMHead
    mask: Tensor
    weights: Tensor
    kind: str
    beta: float
    other_hidden_states: Tensor | None
    other_lm_head: LMHead | None
    other_ids: Tensor | None
    """[..., K]"""
    other_logprobs: Tensor | None
    """[..., K]"""
    needs: Needs
    run: Run

    @property
    def token_ids(self) -> Tensor:
        """Any: a divergence has none."""
        return torch.zeros_like(self.mask, dtype=torch.int64)

    @property
    def candidates(self) -> TokenSets:
        """None: it is over the whole vocabulary."""
        return TokenSets()


class Scores(NamedTuple):
    """The result of a `LogprobsCall`: log-probs and entropies in the shape of the ids, other statistics as [N].

    What was not requested is empty.
    """

    logps: Tensor
    entropies: Tensor
    maxima: Tensor
    log_sums: Tensor
    alternative_logps: Tensor
    """[M]"""
    dhidden: Tensor
    """[..., H] dlogp/dh of each token, in the dtype of the products"""


class LogprobsGradientCall(NamedTuple):
    """Gradients of log-probs and entropies."""

    forward: LogprobsCall
    scores: Scores | None
    """those of the forward pass, or None to compute them again"""
    dlogps: Tensor | None
    dentropies: Tensor | None
    dalternative_logps: Tensor | None
    needs: Needs


LinearCall = LossCall | CustomCall | LogprobsCall | DivergenceCall
"""A call on hidden states and an lm head."""
TokensCall = LossCall | CustomCall | LogprobsCall
"""One that ranks may share."""


def layout_of(call: LinearCall) -> Layout:
    """The layout of its tokens; only a loss has packed sequences."""
    return Layout.of(call.token_ids, getattr(call, "cu_seqlens", None))


def with_tensors(call: L, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> L:
    """The call with other tensors: those that autograd passes."""
    head = call.lm_head._replace(weight=weight, bias=bias)
    return cast(L, call._replace(hidden_states=hidden_states, lm_head=head))


def tensors_of(call: LinearCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Those that autograd passes: hidden states, weight, bias."""
    return call.hidden_states, call.lm_head.weight, call.lm_head.bias


class CandidateGradientCall(NamedTuple):
    """dW and db of a call whose tokens all have a candidate set."""

    forward: LogprobsCall
    """of the same tokens"""
    dproducts: Tensor
    """[K] dL/d(product) of each candidate"""
    needs: Needs


class ObjectiveCall(NamedTuple):
    """The loss from log-probs."""

    per_token_logps: Tensor
    entropies: Tensor | None
    inputs: LossInputs
    cu_seqlens: Tensor | None
    config: str


class LogitsCall(NamedTuple):
    """Log-probs, and entropies if requested, from logits."""

    logits: Tensor
    """[B, T, V] or [N, V]"""
    token_ids: Tensor
    mask: Tensor | None
    temperatures: Tensor | None
    temperature: float
    with_entropy: bool


class LogitsGradientCall(NamedTuple):
    """Gradient of log-probs and entropies in the logits."""

    forward: LogitsCall
    dlogps: Tensor | None
    dentropies: Tensor | None


_NO_HEAD: Any = LMHead(*[None] * len(LMHead._fields))  # type: ignore[arg-type]
_NO_SCORES: Any = Scores(*[None] * len(Scores._fields))  # type: ignore[arg-type]


def named(call: Any) -> list[tuple[str, Any]]:
    """Names and values of the fields of a call; an inner tuple or mapping gives its own, the latter as `inputs['x']`.

    The objective of a `CustomCall` is left out: it may be any callable.
    """
    pairs: list[tuple[str, Any]] = []
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(call, CustomCall) and name == "objective":
            continue
        if value is None and name.endswith("lm_head"):
            value = _NO_HEAD
        elif value is None and name == "scores":
            value = _NO_SCORES
        if isinstance(value, tuple):
            pairs += [(_argument(name, field), x) for field, x in named(value)]
        elif isinstance(value, Mapping):
            pairs += [(f"{name}[{key!r}]", x) for key, x in value.items()]
        else:
            pairs.append((name, value))
    return pairs


def flat(call: Any) -> list[Any]:
    """The values of `named`."""
    return [value for _, value in named(call)]


def tensors_in(call: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors of a call, in the order of `flat`."""
    for value in call:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(tuple(value.values()))


def _argument(outer: str, inner: str) -> str:
    """The public name of a field of an inner tuple, such as `lm_head_weight`, `other_softcap` and `candidate_ids`."""
    if outer.endswith("lm_head"):
        return f"{outer}_{inner}" if inner in ("weight", "bias") else f"{outer.removesuffix('lm_head')}{inner}"
    return f"{outer.removesuffix('s')}_{inner}" if inner in TokenSets._fields else inner


def fields_of(kind: Any) -> dict[str, Any]:
    """Names and types of the fields of a kind of call, in the order of `flat`."""
    types: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        inner, may_be_none = _tuple_of(hint)
        if inner is None:
            types[name] = hint
        else:
            types |= {_argument(name, x): y | None if may_be_none else y for x, y in fields_of(inner).items()}
    return types


def build(kind: Any, values: Iterator[Any]) -> Any:
    """The call of a kind whose `flat` values these are."""
    parts = []
    for hint in _hints(kind).values():
        inner, may_be_none = _tuple_of(hint)
        part = next(values) if inner is None else build(inner, values)
        parts.append(None if may_be_none and part[0] is None else part)
    return kind(*parts)


@cache
def _tuple_of(hint: Any) -> tuple[Any, bool]:
    """The inner tuple's kind, or None if the field is none, and whether the field may be None."""
    kinds = [kind for kind in (get_args(hint) or (hint,)) if hasattr(kind, "_fields")]
    return (kinds[0], hint is not kinds[0]) if kinds else (None, False)


_TENSOR = "a tensor"  # its place in a call without tensors


def detach(call: C) -> tuple[C, list[Tensor]]:
    """The call without its tensors, and the tensors: autograd saves them separately between forward and backward."""
    return attach(call, repeat(_TENSOR)), list(tensors_in(call))


def attach(bare: C, tensors: Iterable[Any]) -> C:
    """The call from the two results of `detach`."""
    tensors, parts = iter(tensors), []
    for value in bare:
        if isinstance(value, tuple):
            value = attach(value, tensors)
        parts.append(next(tensors) if value is _TENSOR or isinstance(value, Tensor) else value)
    return type(bare)(*parts)
