"""What a call is expected to take on this machine: scratch by the engines' own rules, time by measured ratios.

A time is the machine's rate of bare head products, measured now on a part of the vocabulary, times the ratio of an
engine to bare products that a benchmark measured before, perhaps on another machine. It is a prediction.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from grpo_fused import engines
from grpo_fused.engines.base import Cost
from grpo_fused.engines.products import Head

ENGINES = ("native", "chunked", "triton")


class Shape(NamedTuple):
    """A dense call."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype

    @property
    def flop(self) -> int:
        """Of one head product."""
        return 2 * self.tokens * self.hidden * self.vocab

    def head(self, device: torch.device) -> Head:
        """A head of this shape whose weight takes no memory."""
        weight = torch.empty(1, dtype=self.dtype, device=device).expand(self.vocab, self.hidden)
        return Head(weight, None, 1.0, None, self.dtype)


class Ratios(NamedTuple):
    """An engine's time over that of bare products, from low to high."""

    training: tuple[float, float]
    """over the head product and its two gradient products"""
    scoring: tuple[float, float]
    """over one product"""


class Prediction(NamedTuple):
    """What is expected of an engine."""

    engine: str
    is_auto: bool
    cost: Cost
    ratios: Ratios | None
    """None where none was measured"""


MEASURED = {
    ("native", torch.bfloat16): Ratios((0.98, 1.22), (0.79, 0.94)),
    ("native", torch.float32): Ratios((0.85, 0.98), (0.59, 0.87)),
    ("chunked", torch.bfloat16): Ratios((1.71, 2.30), (2.42, 3.42)),
    ("chunked", torch.float32): Ratios((1.05, 1.36), (1.11, 1.60)),
}
"""On the CPU, from the lowest p20 to the highest p80 of the dense cases of `MEASURED_IN`: 128 to 4096 tokens, V = 32000
and 151936, H = 896 and 2048; 2 cores of an AMD EPYC with AVX512-BF16, torch 2.13. No GPU has been measured. A test
holds it against that file."""

MEASURED_IN = "benchmarks/results/amd-epyc-2-cores/2026-11-21-94bf6d3.json"


def predict(shape: Shape, device: torch.device) -> list[Prediction]:
    """What each engine that runs on `device` is expected to take."""
    auto, head, found = engines.choose("auto", device, shape.dtype), shape.head(device), []
    for name in ENGINES:
        if engines.unavailable(name, device, shape.dtype) is None:
            ratios = MEASURED.get((name, shape.dtype)) if device.type == "cpu" else None
            cost = engines.engine(name).cost(head, shape.tokens, None)
            found.append(Prediction(name, name == auto, cost, ratios))
    return found


def bare_rate(shape: Shape, device: torch.device) -> float:
    """FLOP/s of the head product and its two gradient products together, on a part of the vocabulary; about 0.3 s."""
    part = shape._replace(
        tokens=min(shape.tokens, 8192 if device.type == "cuda" else 512), vocab=min(shape.vocab, 1024)
    )
    wanted = int(part.vocab * 0.05 / max(_seconds_of_products(part, device), 1e-6))  # a part that takes 0.05 s
    part = part._replace(vocab=min(shape.vocab, max(wanted, 1024), 2**28 // max(part.tokens, part.hidden)))
    seconds = sorted(_seconds_of_products(part, device) for _ in range(3))[1]
    return 3 * part.flop / seconds


def _seconds_of_products(shape: Shape, device: torch.device) -> float:
    """Of the three products, warm."""
    hidden = torch.randn(shape.tokens, shape.hidden, device=device).to(shape.dtype)
    weight = torch.randn(shape.vocab, shape.hidden, device=device).to(shape.dtype)
    logits = hidden @ weight.T
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = 0.0
    for _ in range(2):
        synchronize()
        start = time.perf_counter()
        _ = hidden @ weight.T, logits @ weight, logits.T @ hidden
        synchronize()
        seconds = time.perf_counter() - start
    return seconds
