"""The interface of engines: score tokens, and compute gradients from per-token coefficients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from grpo_fused.call.calls import NO_GRADIENT, LinearCall, LMHead, Needs, layout_of
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import active_tokens, blocks
from grpo_fused.engines import products
from grpo_fused.kernels.row_types import Coefficients, Entries, Statistics, Transform
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import Objective, evaluate
from grpo_fused.ranks.parallel import VocabParallel

MANY = 2**62
"""A number of tokens that fits no chunk."""


def even_chunks(count: int, chunk_rows: int) -> tuple[slice, ...]:
    """`count` rows in as few chunks as `chunk_rows` allows, which share the rows evenly."""
    size = longest_chunk(count, chunk_rows)
    return tuple(blocks(count, size))


def longest_chunk(count: int, chunk_rows: int) -> int:
    """Rows of the longest of `even_chunks`: a short last chunk would read the weight, and add to dW, for few rows."""
    size = -(-count // max(-(-count // chunk_rows), 1))
    # whole tiles of a product, where chunks have several of them
    multiple = 128 if size >= 1024 else 64 if size >= 128 else 16
    return max(min(-(-size // multiple) * multiple, chunk_rows), 1)


def all_rows(like: Tensor) -> Tensor:
    """[N] int64: the positions of all rows."""
    return torch.arange(len(like), device=like.device)


def flat_view(x: Tensor) -> Tensor:
    """[N, .] if that is a view; otherwise it stays [B, T, .], since masked rows need no copy."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return x


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """[K, .]: the rows of a `flat_view` at flat positions ([K] int64)."""
    return x.index_select(0, rows) if x.dim() == 2 else x[rows // x.shape[1], rows % x.shape[1]]


class Tokens(NamedTuple):
    """All N positions of a call; an engine computes some of their rows."""

    hidden_states: Tensor
    """[N, H], or [B, T, H] where that cannot be viewed flat"""
    ids: Tensor
    """[N] int64; those of masked positions may be anything"""
    mask: Tensor
    """[N] bool"""
    temperature: Tensor | float
    """a number or [N]"""
    vocab: VocabParallel | None = None
    """if the head is a slice of the vocabulary: then `ids` count within it, with any value if another rank's"""
    candidates: CandidateSets | None = None
    """the sets of all N positions, with ids of the whole vocabulary"""
    only_active: bool = False
    """whether all rows that are asked for are active, so that nothing has to be masked"""

    @classmethod
    def of(cls, call: LinearCall, vocab: VocabParallel | None = None) -> Tokens:
        """The positions of a call."""
        head, ids = call.lm_head, call.token_ids.reshape(-1).to(torch.int64)
        ids = ids if vocab is None else ids - vocab.first
        mask = active_tokens(call.mask, call.token_ids).reshape(-1)
        temperature = head.temperature if head.temperatures is None else layout_of(call).per_token(head.temperatures)
        return cls(flat_view(call.hidden_states), ids, mask, temperature, vocab, call.candidates.sets, call.run.compact)

    def hidden_rows(self, rows: Tensor) -> Tensor:
        """[K, H]: hidden states at flat positions `rows` ([K] int64), 0 where masked."""
        hidden = rows_of(self.hidden_states, rows)
        return hidden if self.only_active else hidden.masked_fill_(~self.mask[rows].unsqueeze(1), 0.0)

    def target_rows(self, rows: Tensor) -> Tensor:
        """[K] int64: target ids at `rows`, 0 where masked or another rank's."""
        if self.vocab is not None:
            return torch.where((self.mask & self.vocab.owned)[rows], self.ids[rows], 0)
        return self.ids[rows] if self.only_active else torch.where(self.mask[rows], self.ids[rows], 0)

    def gradient_targets(self, rows: Tensor, targets: Tensor) -> Tensor:
        """[K] int64: `target_rows`, -1 where the target is another rank's: this head has no entry for it."""
        return targets if self.vocab is None else torch.where(self.vocab.owned[rows] | ~self.mask[rows], targets, -1)

    def own_entries(self, entries: Entries, vocab_size: int) -> Entries:
        """Those of this head's `vocab_size` tokens: ranks know all, so that they agree on the rows with a gradient."""
        if self.vocab is None:
            return entries
        own = (entries.ids >= 0) & (entries.ids < vocab_size)
        return Entries(*(x[own] for x in entries))

    @property
    def undecided(self) -> Tensor:
        """[N] bool: active tokens whose log-prob depends on the head; that of a token in a set of one is 0."""
        return self.mask if self.candidates is None else self.mask & (self.candidates.sizes != 1)

    @property
    def most_chunks_of(self) -> int:
        """N, or more if other ranks may split the call into more chunks than this one would."""
        return self.ids.shape[0] if self.vocab is None else MANY

    def merged(self, rows: Tensor, scores: Statistics) -> Statistics:
        """Scores of `rows` over the whole vocabulary, from this head's."""
        return scores if self.vocab is None else self.vocab.merged(rows, scores)

    def summed(self, x: Tensor) -> Tensor:
        """`x` summed over the slices of the vocabulary."""
        return x if self.vocab is None else self.vocab.start_sum(x)()

    def transform(self, head: LMHead, rows: Tensor) -> Transform:
        """The transform from products of `rows` to z; the temperature is 1 where masked."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[rows]
            temperature = temperature if self.only_active else torch.where(self.mask[rows], temperature, 1.0)
        return products.transform(head, temperature)


class Gradients(NamedTuple):
    """Gradients of a call, None where not needed."""

    hidden: Tensor | None
    """[N, H] in `dhidden_dtype`; 0 at rows without gradient work"""
    weight: Tensor | None
    """[V, H] in `GradientSums.weight_dtype`"""
    bias: Tensor | None
    """[V], statistics dtype"""
    tokens: int
    """number of rows with gradient work"""
    candidates: Tensor | None = None
    """[K] dL/d(product) of each candidate; if all tokens have a set, dW and db are computed from it later"""


class Cost(NamedTuple):
    """Cost of forward and backward of a call on an engine, by the rules that it plans with."""

    products: float
    """head products of 2·N·H·V FLOP, if no scores are needed first: 3, and more if logits are computed again"""
    scratch_bytes: int
    """reserved besides inputs, gradients, a copy of the rows' hidden states and per-token vectors"""
    accumulator_bytes: int
    """the fp32 sum of dW, if it is not in the gradient's own memory"""


CoefficientsOf = Callable[["slice | Tensor", Statistics], Coefficients]
"""From the statistics of some of the rows of the work."""


@dataclass
class TokenObjective:
    """Coefficients from the objective itself: an engine may evaluate it in its own kernel instead of calling this."""

    of_call: TokenBatch
    """the N positions of the call"""
    rows: Tensor
    """[K] int64: those of the work"""
    config: GRPOLossConfig
    place: Callable[[Statistics], Statistics] | None = None
    """in a call of one chunk: takes its scores and returns those of the N positions, which are evaluated"""
    result: Objective | None = None
    """of the N positions, once they are evaluated"""

    @cached_property
    def batch(self) -> TokenBatch:
        """The rows of the work, in their order."""
        return self.of_call.select(self.rows)

    def __call__(self, part: slice | Tensor, stats: Statistics) -> Coefficients:
        """See `CoefficientsOf`; a slice must hold whole sequences if the objective needs them."""
        logp, entropy = stats.logp, stats.entropy
        if self.place is None:
            known = evaluate(logp, entropy, self.batch.select(part), self.config)
            return Coefficients(stats, *known.derivatives())
        scores = self.place(stats)
        self.result = evaluate(scores.logp, scores.entropy, self.of_call, self.config)
        dlogp, dentropy = self.result.derivatives()
        return Coefficients(stats, dlogp[self.rows], None if dentropy is None else dentropy[self.rows])


def no_coefficients(part: slice | Tensor, stats: Statistics) -> Coefficients:
    """Of scoring, which uses none."""
    raise AssertionError("scoring uses no coefficients")


class Started(NamedTuple):
    """Results that were launched before the host knew for how many rows."""

    stats: Statistics
    """of all rows of that work; undefined after those that were wanted"""
    rest: Any = None
    """what `fused` takes of them, if there are gradients"""


@dataclass(frozen=True)
class Work:
    """The work of an engine: `Engine.score` reads the first five fields, `Engine.fused` all."""

    head: LMHead
    tokens: Tokens
    rows: Tensor
    """[K] int64: the positions to compute"""
    with_entropy: bool
    max_scratch_bytes: int | None
    chunks: tuple[slice, ...] = ()
    """of `rows`: all coefficients of a chunk can be computed from its scores"""
    coefficients: CoefficientsOf = no_coefficients
    needs: Needs = NO_GRADIENT
    known: Statistics | None = None
    """the scores of `rows` if they are known: an engine may use them, or compute them again"""
    skip_zeros: bool = False
    """whether the engine may read the coefficients of a chunk and leave out rows where they are 0"""
    only_logps: bool = False
    """whether the coefficients, once they are known, will be of the targets' log-probs alone"""
    candidate_z: Tensor | None = None
    """[K] z of each candidate, which `CandidateEngine` writes: where alternatives are read from"""
    started: Started | None = None
    """what `StartingEngine.start` has made for these rows and more"""

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk, and its positions."""
        return ((chunk, self.rows[chunk]) for chunk in self.chunks)

    @property
    def one_chunk_of(self) -> int:
        """`num_tokens` of `Engine.chunk_rows`: without dW one chunk would save no memory."""
        return self.tokens.most_chunks_of if self.needs.need_weight else MANY

    @property
    def longest(self) -> int:
        """Rows of the longest chunk."""
        return max((chunk.stop - chunk.start for chunk in self.chunks), default=0)


class Engine(Protocol):
    """An implementation of the head. Its scores of a token do not depend on the other tokens of the call."""

    def chunk_rows(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> int:
        """Rows that a chunk of `fused` holds at most: what fits the scratch budget.

        All of `num_tokens`, if that is the default budget and they fit it with the fp32 sum of dW that one chunk does
        not need. `MANY` of them without a dW.
        """
        ...

    def cost(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> Cost:
        """Cost of a dense call of `num_tokens` tokens; of `head.weight` only shape and dtype are read."""
        ...

    def score(self, work: Work) -> Statistics:
        """Statistics, log-probs (and entropies) over this head of the rows: one product."""
        ...

    def fused(self, work: Work) -> tuple[Statistics, Gradients]:
        """Scores of the rows and the gradients of their coefficients, chunk by chunk: three head products.

        Scores are `Tokens.merged` before coefficients are computed; `Tokens.gradient_targets` has the targets.
        """
        ...


@runtime_checkable
class StartingEngine(Engine, Protocol):
    """An engine that can score rows whose number only the device knows yet."""

    def start(self, work: Work, count: Tensor) -> Started | None:
        """Launch the scores of the first `count` of the rows, and what `fused` needs of them if there are gradients.

        Args:
            work: without chunks and coefficients; its rows are more than are wanted.
            count: 0-d int64, on the device.

        Returns:
            `Work.started` of the same work on some of the first `count` rows from the first on, in one chunk; None if
            that does not fit, and then nothing was launched.
        """
        ...
