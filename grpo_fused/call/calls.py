"""Calls of the public functions as typed values, which pass through autograd, operator and pipeline unchanged.

A call is a `NamedTuple` of tensors, numbers and other such tuples. Its fields, in order, define the schema of an
operator and the handshake of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

C = TypeVar("C", bound="tuple[Any, ...]")

_hints = cache(get_type_hints)  # half a millisecond each time


class Needs(NamedTuple):
    """Which gradients are required; a frozen head saves one of the three products."""

    need_hidden: bool
    need_weight: bool
    need_bias: bool

    def any(self) -> bool:
        """Whether any gradient is required."""
        return self.need_hidden or self.need_weight or self.need_bias


NO_GRADIENT = Needs(False, False, False)


class LossInputs(NamedTuple):
    """The per-token and per-sequence tensors of a loss call as the caller gave them, validated."""

    advantages: Tensor
    completion_mask: Tensor | None = None
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    num_items_in_batch: Tensor | None = None


class HeadCall(NamedTuple):
    """Hidden states, an lm head, and how its products are taken."""

    hidden_states: Tensor
    """[B, T, H] or [N, H]"""
    lm_head_weight: Tensor
    """[V, H]"""
    lm_head_bias: Tensor | None
    """[V]"""
    temperatures: Tensor | None
    """as given: 0-d, one for each sequence, or one for each token"""
    temperature: float
    """if it is one number"""
    logit_scale: float
    softcap: float | None
    impl: str
    """an engine's name"""
    compute_dtype: torch.dtype
    max_scratch_bytes: int | None
    compact: bool
    groups: str
    """`ParallelGroups.encode`"""
    candidate_ids: Tensor | None = None
    """`CandidateSets.ids`"""
    candidate_offsets: Tensor | None = None
    any_whole: bool = True
    """whether an active token may need the whole head: its set is empty, or larger than `engines.largest_sparse_set`"""

    @property
    def candidates(self) -> tuple[Tensor, Tensor] | None:
        """The fields of a `CandidateSets`, if there is one."""
        ids, offsets = self.candidate_ids, self.candidate_offsets
        return None if ids is None or offsets is None else (ids, offsets)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those that autograd passes: hidden states, weight, bias."""
        return self.hidden_states, self.lm_head_weight, self.lm_head_bias

    def on(self, hidden_states: Tensor, lm_head_weight: Tensor, lm_head_bias: Tensor | None) -> HeadCall:
        """The same call with other tensors: those that autograd passes."""
        return self._replace(hidden_states=hidden_states, lm_head_weight=lm_head_weight, lm_head_bias=lm_head_bias)


class OtherHead(NamedTuple):
    """Hidden states and head of a frozen reference or teacher at the same tokens, if there is one."""

    other_hidden_states: Tensor | None = None
    """like the policy's; its width may differ"""
    other_lm_head_weight: Tensor | None = None
    other_lm_head_bias: Tensor | None = None
    other_logit_scale: float = 1.0
    other_softcap: float | None = None
    other_compute_dtype: torch.dtype = torch.float32

    def beside(self, head: HeadCall) -> HeadCall:
        """As a call with the temperature, engine and scratch budget of the policy's."""
        assert self.other_hidden_states is not None
        assert self.other_lm_head_weight is not None
        scale, compute = self.other_logit_scale, self.other_compute_dtype
        head = head._replace(logit_scale=scale, softcap=self.other_softcap, compute_dtype=compute)
        return head.on(self.other_hidden_states, self.other_lm_head_weight, self.other_lm_head_bias)


class LossCall(NamedTuple):
    """The loss from hidden states and head."""

    head: HeadCall
    completion_ids: Tensor
    inputs: LossInputs
    cu_seqlens: Tensor | None
    config: str
    """`GRPOLossConfig.encoded`"""
    with_metrics: bool
    needs: Needs
    other: OtherHead = OtherHead()
    """the reference of the exact KL"""

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
        return self.other.other_hidden_states is not None

    @property
    def with_kl(self) -> bool:
        """Whether there is a reference, so that the KL is a metric."""
        return self.inputs.ref_per_token_logps is not None or self.exact


class LogprobsCall(NamedTuple):
    """Log-probs, and entropies if requested, from hidden states and head."""

    head: HeadCall
    token_ids: Tensor
    mask: Tensor | None
    with_entropy: bool


class CustomCall(NamedTuple):
    """The loss of a custom objective."""

    head: HeadCall
    token_ids: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    inputs: tuple[Any, ...]
    """a NamedTuple of the objective's inputs"""
    scope: str
    with_entropy: bool
    needs: Needs
    records: bool
    """whether the caller records gradients: then a tensor of the objective's own must not require one"""


class DivergenceCall(NamedTuple):
    """The divergence of a policy from another head, or from the K most likely tokens of a teacher."""

    head: HeadCall
    mask: Tensor
    weights: Tensor
    kind: str
    beta: float
    other: OtherHead
    other_ids: Tensor | None
    """[..., K]"""
    other_logprobs: Tensor | None
    """[..., K]"""
    needs: Needs


class Scores(NamedTuple):
    """The result of a `LogprobsCall`: log-probs and entropies in the shape of the ids, other statistics as [N]."""

    logps: Tensor
    entropies: Tensor
    """empty if not requested"""
    maxima: Tensor
    log_sums: Tensor


class LogprobsGradientCall(NamedTuple):
    """Gradients of log-probs and entropies."""

    forward: LogprobsCall
    logps: Tensor | None
    """this and the next three: the `Scores` of the forward pass, or None to compute them again"""
    entropies: Tensor | None
    maxima: Tensor | None
    log_sums: Tensor | None
    dlogps: Tensor | None
    dentropies: Tensor | None
    needs: Needs

    @property
    def head(self) -> HeadCall:
        """That of the forward pass."""
        return self.forward.head

    @property
    def token_ids(self) -> Tensor:
        """Those of the forward pass."""
        return self.forward.token_ids

    @property
    def mask(self) -> Tensor | None:
        """That of the forward pass."""
        return self.forward.mask


TokensCall = LossCall | CustomCall | LogprobsCall | LogprobsGradientCall
"""A call on the tokens of a head, which ranks may share."""


class CandidateGradientCall(NamedTuple):
    """dW and db of a call whose tokens all have a candidate set."""

    head: HeadCall
    token_ids: Tensor
    mask: Tensor | None
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


def named(call: Any) -> list[tuple[str, Any]]:
    """Names and values of the fields of a call; fields of inner tuples take the place of the tuple."""
    found: list[tuple[str, Any]] = []
    for name, value in zip(call._fields, call, strict=True):
        found += named(value) if isinstance(value, tuple) else [(name, value)]
    return found


def flat(call: Any) -> list[Any]:
    """The values of `named`."""
    return [value for _, value in named(call)]


def with_values(call: C, values: Iterator[Any]) -> C:
    """The call with other values, in the order of `flat`."""
    parts: Any = call
    return type(call)(*(with_values(x, values) if isinstance(x, tuple) else next(values) for x in parts))


def detach(call: C) -> tuple[C, list[Tensor | None]]:
    """The call without its tensors, and the tensors: autograd saves them separately between forward and backward."""
    values = flat(call)
    bare = with_values(call, iter([None if isinstance(value, Tensor) else value for value in values]))
    return bare, [value if isinstance(value, Tensor) else None for value in values]


def attach(bare: C, tensors: Sequence[Tensor | None]) -> C:
    """The call from the two results of `detach`."""
    pairs = zip(flat(bare), tensors, strict=True)
    return with_values(bare, iter([value if tensor is None else tensor for value, tensor in pairs]))


def fields_of(kind: Any) -> dict[str, Any]:
    """Names and types of the fields of a kind of call, in the order of `flat`."""
    found: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        found |= fields_of(hint) if hasattr(hint, "_fields") else {name: hint}
    return found


def build(kind: Any, values: Iterator[Any]) -> Any:
    """The call of a kind whose `flat` values these are."""
    return kind(*(build(hint, values) if hasattr(hint, "_fields") else next(values) for hint in _hints(kind).values()))
