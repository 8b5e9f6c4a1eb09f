"""Sampling inside of `generate`: a draw of one token, and a record of the tokens that top-k, top-p and min-p keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_fused.call.candidates import CandidateSets
from grpo_fused.rollouts.errors import DivergedError

BLOCK = 128
"""Tokens that are summed before a row is searched; sizes of vocabularies are often multiples of it."""


class Draw(LogitsProcessor):
    """Draws a token of each row by its probability, and leaves a score to no other: `generate` takes the largest.

    `torch.multinomial` makes a random number for each token of the vocabulary (on a CPU in one thread: 0.75 s for 64
    rows of 262,144, twice the time of the model). One number for each row is enough.
    """

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        """Scores `[rows, V]`: 0 for the drawn token, -inf for the others; the given tensor is overwritten."""
        tokens = draw(scores.softmax(-1))
        return scores.fill_(-torch.inf).scatter_(1, tokens.unsqueeze(1), 0.0)


def draw(p: Tensor) -> Tensor:
    """`[R]` int64: a column of each row of p `[R, V]` fp32, with a probability in proportion to its value (>= 0).

    A column whose value is 0 is never drawn. Sums are in fp64 from blocks of fp32.

    Raises:
        DivergedError: A row has NaN or inf, or only zeros.
    """
    blocks = torch.nn.functional.pad(p, (0, -p.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    if not ((ends[:, -1] > 0) & ends[:, -1].isfinite()).all():
        raise DivergedError("each row of probabilities must be finite, with a sum > 0: the policy's logits are not")
    below_one = 1 - 2.0**-52  # an index beyond the last positive value must not be found
    at = torch.rand(len(p), 1, dtype=torch.float64, device=p.device) * below_one * ends[:, -1:]
    block = torch.searchsorted(ends, at, right=True)
    share = (at - (ends - sums).gather(1, block)) / sums.gather(1, block)
    inside = blocks[torch.arange(len(p), device=p.device), block[:, 0]].double().cumsum(-1)
    column = torch.searchsorted(inside, share.clamp(0, below_one) * inside[:, -1:], right=True)
    return (block * BLOCK + column)[:, 0]


class RecordedSets(LogitsProcessor):
    """Temperature, top-k, top-p and min-p as in `generate`, and a record of the tokens that they keep.

    `generate` itself must have them off: it applies its own after this one.
    """

    def __init__(self, *, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
        self.warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
        self.warpers += [TopKLogitsWarper(top_k)] if top_k else []
        self.warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        self.warpers += [MinPLogitsWarper(min_p)] if min_p else []
        self.steps: list[CandidateSets] = []

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        """Scores of what may be sampled, `[rows, V]`; those of other tokens are -inf."""
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        kept = scores > -torch.inf
        if not kept.any(-1).all():  # NaN is not kept either
            raise DivergedError("a token of each row must be kept: the policy's logits are not finite")
        self.steps.append(CandidateSets.from_mask(kept).to("cpu"))
        return scores

    def of_rows(self, lengths: Sequence[int]) -> list[CandidateSets]:
        """The sets of each row, as many as it has tokens."""
        return of_rows(CandidateSets.cat(self.steps), lengths)


class Sets(Protocol):
    """Of positions."""

    def select(self: S, positions: Tensor) -> S:
        """Those of some positions."""
        ...


S = TypeVar("S", bound=Sets)


def of_rows(every: S, lengths: Sequence[int]) -> list[S]:
    """The sets of each row, as many as it has tokens, of sets ordered by step and then by row."""
    rows = len(lengths)
    return [every.select(torch.arange(length) * rows + row) for row, length in enumerate(lengths)]
