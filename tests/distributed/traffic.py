"""Collectives of a call by kind: how many, and how many numbers this rank sent."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from grpo_fused.ranks import parallel

KINDS = {
    "merged": "statistics", "first_of": "statistics", "smallest": "sizes", "add": "sizes", "gather": "objective",
    "meet": "status", "agree": "agreement",
}  # fmt: skip
"""The function that makes a collective: the kind of this."""


class Traffic(NamedTuple):
    """Calls of each kind, and numbers that were sent."""

    calls: Counter[str]
    numbers: Counter[str]

    def add(self, kind: str, x: Tensor) -> None:
        self.calls[kind] += 1
        self.numbers[kind] += x.numel()


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count the collectives in the block."""
    traffic, all_gather = Traffic(Counter(), Counter()), parallel.all_gather
    start_sum = parallel.VocabParallel.start_sum

    def counted(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        caller = sys._getframe(1)
        if caller.f_code is parallel._Ranks.all_gather.__code__:
            caller = caller.f_back  # type: ignore[assignment]
        traffic.add(KINDS[caller.f_code.co_name], x)
        return all_gather(x, group)

    def counted_sum(self: parallel.VocabParallel, x: Tensor) -> Callable[[], Tensor]:
        traffic.add("hidden gradient", x)
        return start_sum(self, x)

    with (
        mock.patch.object(parallel, "all_gather", counted),
        mock.patch.object(parallel.VocabParallel, "start_sum", counted_sum),
    ):
        yield traffic
