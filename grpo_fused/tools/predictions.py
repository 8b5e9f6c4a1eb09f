"""Predicted memory and time of a call on this machine: scratch by the engines' own rules, time by measured ratios.

A time is the machine's rate of bare head products, measured now on a part of the vocabulary, times the ratio of an
engine to bare products that a benchmark measured before, perhaps on another machine. It is a prediction.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from grpo_fused import engines
from grpo_fused.call.calls import LMHead
from grpo_fused.engines.base import Cost
from grpo_fused.engines.products import has_products_in

ENGINES = ("native", "chunked", "triton")


class Shape(NamedTuple):
    """A dense call."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype

    @property
    def flop(self) -> int:
        """FLOP of one head product."""
        return 2 * self.tokens * self.hidden * self.vocab

    def head(self, device: torch.device) -> LMHead:
        """A head of this shape whose weight takes no memory."""
        weight = torch.empty(1, dtype=self.dtype, device=device).expand(self.vocab, self.hidden)
        return LMHead(weight, compute_dtype=self.dtype)


class Ratios(NamedTuple):
    """An engine's time over that of bare products, from low to high."""

    training: tuple[float, float]
    """over the head product and its two gradient products"""
    scoring: tuple[float, float]
    """over one product"""


class Prediction(NamedTuple):
    """The prediction for an engine."""

    engine: str
    is_auto: bool
    cost: Cost
    ratios: Ratios | None
    """None if none was measured"""


MEASURED = {
    ("native", torch.bfloat16): Ratios((0.82, 1.22), (0.53, 0.94)),
    ("native", torch.float32): Ratios((0.85, 1.49), (0.59, 1.15)),
    ("chunked", torch.bfloat16): Ratios((1.37, 3.85), (1.11, 3.42)),
    ("chunked", torch.float32): Ratios((1.01, 1.49), (1.05, 1.97)),
}
"""On the CPU, from the lowest p20 to the highest p80 of the dense cases of `MEASURED_IN`: 128 to 4096 tokens, V = 32000
and 151936, H = 896 and 2048; 2 cores of an AMD EPYC with AVX512-BF16, and of an Intel Xeon with AMX, torch 2.13. No GPU
has been measured. A test compares it with these files."""

MEASURED_IN = (
    "benchmarks/results/amd-epyc-2-cores/2026-11-21-94bf6d3.json",
    "benchmarks/results/intel-r-xeon-r-processor-2-cores/2026-11-22-49b65d2.json",
)


def predict(shape: Shape, device: torch.device) -> list[Prediction]:
    """The predictions for each engine that runs on `device`."""
    auto, head, found = engines.fastest(device, shape.dtype, shape.hidden), shape.head(device), []
    as_measured = device.type == "cpu" and has_products_in(shape.dtype, device)  # else bare products are very slow
    for name in ENGINES:
        if engines.unavailable(name, device, shape.dtype) is None:
            ratios = MEASURED.get((name, shape.dtype)) if as_measured else None
            cost = engines.engine(name).cost(head, shape.tokens, None)
            found.append(Prediction(name, name == auto, cost, ratios))
    return found


def bare_rate(shape: Shape, device: torch.device) -> float:
    """FLOP/s of the head product and its two gradient products together, on a part of the tokens and the vocabulary."""
    # large enough for the rate of large products, small enough for a slow library (fp16 on a CPU): 0.02 to 1 s
    tokens, vocab = (8192, 16384) if device.type == "cuda" else (512, 4096)
    part = shape._replace(tokens=min(shape.tokens, tokens), vocab=min(shape.vocab, vocab))
    hidden = torch.randn(part.tokens, part.hidden, device=device).to(part.dtype)
    weight = torch.randn(part.vocab, part.hidden, device=device).to(part.dtype)
    seconds: list[float] = []
    logits = hidden @ weight.T
    while len(seconds) < 3 or sum(seconds) < 0.2:
        start = perf_counter()
        hidden @ weight.T, logits @ weight, logits.T @ hidden
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    return 3 * part.flop / median(seconds)
