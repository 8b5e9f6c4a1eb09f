"""Predicted memory and time of a call on this machine: scratch by the engines' own rules, time from a part of the call.

Nearly all work grows with the vocabulary. So each engine is timed here, now, on all tokens and some rows of the head,
and the time is multiplied by what the whole call has more of: rows, and head products for each.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from grpo_fused import engines
from grpo_fused.call.calls import LMHead
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.engines.base import Cost
from grpo_fused.testing import make_problem

ENGINES: tuple[engines.Impl, ...] = ("native", "chunked", "triton")
ROUNDS = 3
LEAST_ROWS, FLOP = 2048, 1e11
"""Rows of the head that are timed at least, and about the work of a round: a second at the speed of a slow CPU."""


class Shape(NamedTuple):
    """A dense call."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype

    def head(self, device: torch.device) -> LMHead:
        """A head of this shape whose weight takes no memory."""
        weight = torch.empty(1, dtype=self.dtype, device=device).expand(self.vocab, self.hidden)
        return LMHead(weight, compute_dtype=self.dtype)

    @property
    def part(self) -> Shape:
        """The same with the rows of the head that are timed."""
        rows = max(int(FLOP / (6 * self.tokens * self.hidden)), LEAST_ROWS)
        return self._replace(vocab=min(self.vocab, rows))


def costs(shape: Shape, device: torch.device) -> dict[engines.Impl, Cost]:
    """The cost of each engine that runs on `device`; Triton's interpreter, for tests on a CPU, is none of them."""
    head = shape.head(device)
    names = [name for name in ENGINES if name != "triton" or device.type != "cpu"]
    here = [name for name in names if engines.unavailable(name, device, shape.dtype) is None]
    return {name: engines.engine(name).cost(head, shape.tokens, None) for name in here}


def seconds(shape: Shape, device: torch.device, engine: engines.Impl) -> tuple[float, float]:
    """(loss and both gradients, log-probs alone) of the whole call, from measurements of `shape.part`."""
    part = shape.part
    problem = make_problem(
        B=1, T=part.tokens, H=part.hidden, V=part.vocab, dtype=part.dtype, device=device, drift=0.0, masked=0.0,
        extras=False, scored_by=engine,
    )  # fmt: skip
    calls: tuple[Callable[[], object], ...] = (
        lambda: problem.run(GRPOLossConfig(), impl=engine, with_metrics=False),
        lambda: problem.score(engine),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(1 + ROUNDS):
        for call, kept in zip(calls, times, strict=True):
            start = perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number > 0:
                kept.append(perf_counter() - start)
    products = [engines.engine(engine).cost(x.head(device), x.tokens, None).products for x in (shape, part)]
    rows = shape.vocab / part.vocab
    return median(times[0]) * rows * products[0] / products[1], median(times[1]) * rows
