"""Sampling inside `generate`, and a record of it.

Of the tokens that top-k, top-p and min-p keep; for an objective also of the sampler's log-probs: those of the sampled
tokens, and of other tokens of the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.layout import offsets_of
from grpo_fused.rollouts.errors import DivergedError
from grpo_fused.rollouts.sampling import draw

Records = Literal["sampled", "mask", "top_k"]
"""The log-probs of the sampled tokens alone; of all that could be sampled too; or of the K most likely tokens too."""


@dataclass(frozen=True, eq=False)
class ScoredSets:
    """Tokens of N positions, and the log-probs that the sampler gave them."""

    sets: CandidateSets
    """each token is named: here an empty set has none"""
    logps: Tensor
    """[M] fp32, nats"""

    @classmethod
    def cat(cls, parts: Sequence[ScoredSets]) -> ScoredSets:
        """The positions of all parts, one part after the other."""
        return cls(CandidateSets.cat([part.sets for part in parts]), torch.cat([part.logps for part in parts]))

    def select(self, positions: Tensor) -> ScoredSets:
        """Those of some positions (`[n]` int64), in this order."""
        return ScoredSets(self.sets.select(positions), self.logps[self.sets.places(positions)])

    def to(self, device: torch.device | str) -> ScoredSets:
        """The same on another device."""
        return ScoredSets(self.sets.to(device), self.logps.to(device))


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
        try:
            self.steps.append(CandidateSets.from_mask(scores > -torch.inf).to("cpu"))  # NaN is not kept either
        except ValueError as error:
            raise DivergedError("a token of each row must be kept: the policy's logits are not finite") from error
        return scores


class Draw(LogitsProcessor):
    """Draws a token of each row by its probability, and leaves a score to no other: `generate` takes the largest.

    Args:
        records: The log-probs that it records; None: none.
        most: K of "top_k"; a smaller vocabulary is recorded whole.
    """

    def __init__(self, records: Records | None, most: int) -> None:
        self.records, self.most = records, most
        self.sampled: list[Tensor] = []
        self.steps: list[ScoredSets] = []

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        """Scores `[rows, V]`: 0 for the drawn token, -inf for the others; the given tensor is overwritten."""
        tokens = draw(scores.softmax(-1)).unsqueeze(1)
        if self.records is not None:
            self._record(scores.log_softmax(-1), tokens)
        return scores.fill_(-torch.inf).scatter_(1, tokens, 0.0)

    def _record(self, logps: Tensor, tokens: Tensor) -> None:
        self.sampled.append(logps.gather(1, tokens))
        if self.records == "mask":
            kept = logps > -torch.inf
            self.steps.append(_scored(kept.nonzero()[:, 1], kept.sum(1), logps[kept]))
        elif self.records == "top_k":
            top = logps.topk(min(self.most, logps.shape[1]))
            sizes = torch.full_like(top.indices[:, 0], top.indices.shape[1])
            self.steps.append(_scored(top.indices.reshape(-1), sizes, top.values.reshape(-1)))

    def logps_of_rows(self, lengths: Sequence[int]) -> list[list[float]]:
        """The log-probs of each row's tokens."""
        rows = torch.cat(self.sampled, dim=1).tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


S = TypeVar("S", CandidateSets, ScoredSets)


def of_rows(steps: Sequence[S], lengths: Sequence[int]) -> list[S]:
    """The sets of each row, as many as it has tokens, of those that the rows had in each step."""
    every, rows = type(steps[0]).cat(steps), len(lengths)
    return [every.select(torch.arange(length) * rows + row) for row, length in enumerate(lengths)]


def _scored(ids: Tensor, sizes: Tensor, logps: Tensor) -> ScoredSets:
    return ScoredSets(CandidateSets(ids, offsets_of(sizes)), logps).to("cpu")
