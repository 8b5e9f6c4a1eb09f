"""What an objective reads of the sampler: its log-probs of the sampled tokens, and of other tokens of the positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.layout import offsets_of
from grpo_fused.rollouts.sampling import Draw, of_rows

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


class RecordedDraw(Draw):
    """`Draw`, with a record of the log-probs that it draws by.

    Args:
        records: Which.
        most: K of "top_k"; a smaller vocabulary is recorded whole.
    """

    def __init__(self, records: Records, most: int) -> None:
        self.records, self.most = records, most
        self.sampled: list[Tensor] = []
        self.steps: list[ScoredSets] = []

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        """See `Draw`."""
        logps = scores.log_softmax(-1)
        drawn = super().__call__(input_ids, scores)
        self.sampled.append(logps.gather(1, drawn.argmax(-1, keepdim=True)).cpu())
        if self.records == "mask":
            kept = logps > -torch.inf
            self.steps.append(_scored(kept.nonzero()[:, 1], kept.sum(1), logps[kept]))
        elif self.records == "top_k":
            top = logps.topk(min(self.most, logps.shape[1]))
            sizes = torch.full_like(top.indices[:, 0], top.indices.shape[1])
            self.steps.append(_scored(top.indices.reshape(-1), sizes, top.values.reshape(-1)))
        return drawn

    def logps(self) -> Tensor:
        """[rows, steps]: of the drawn tokens."""
        return torch.cat(self.sampled, dim=1)

    def of_rows(self, lengths: Sequence[int]) -> list[ScoredSets]:
        """The other tokens of each row, at as many positions as it has tokens; none if they are not recorded."""
        return of_rows(ScoredSets.cat(self.steps), lengths) if self.steps else []


def _scored(ids: Tensor, sizes: Tensor, logps: Tensor) -> ScoredSets:
    return ScoredSets(CandidateSets(ids, offsets_of(sizes)), logps).to("cpu")
