"""The tokens that top-k, top-p and min-p keep, recorded while `generate` samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_fused.candidates import CandidateSets


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
        self.steps.append(CandidateSets.from_mask(scores > -torch.inf).to("cpu"))
        return scores

    def of_rows(self, lengths: Sequence[int]) -> list[CandidateSets]:
        """The sets of each row, as many as it has tokens."""
        every, rows = CandidateSets.cat(self.steps), len(lengths)  # ordered by step, then by row
        return [every.select(torch.arange(length) * rows + row) for row, length in enumerate(lengths)]


def padded_sets(rows: Sequence[CandidateSets], width: int) -> CandidateSets:
    """The sets of B rows as those of B * width positions; those of padding are empty, and must not be read."""
    sizes = [torch.nn.functional.pad(row.sizes, (0, width - len(row))) for row in rows]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *sizes]).cumsum(0)
    return CandidateSets(torch.cat([row.ids for row in rows]), offsets)
