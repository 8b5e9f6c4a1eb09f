"""What a call is expected to take on this machine: scratch by the engines' own rules, time by measured ratios.

A time is the machine's rate of bare head products, measured now on a part of the vocabulary, times the ratio of an
engine to bare products that a benchmark measured before, perhaps on another machine. It is a prediction.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class Measurement(NamedTuple):
    """The ratios of an engine on one case of a result file."""

    engine: str
    device: str
    dtype: torch.dtype
    sizes: tuple[int, int, int]
    """tokens, H, V"""
    ratios: Ratios
    date: str
    source: str


class Prediction(NamedTuple):
    """What is expected of an engine."""

    engine: str
    is_auto: bool
    cost: Cost
    training_ratio: tuple[float, float] | None
    scoring_ratio: tuple[float, float] | None
    training: tuple[float, float] | None
    """seconds; None where no rate or no ratio is known"""
    scoring: tuple[float, float] | None
    source: str
    """where the ratios come from"""


MEASURED = {
    ("native", torch.bfloat16): Ratios((0.92, 0.92), (0.84, 0.84)),
    ("native", torch.float32): Ratios((0.76, 0.92), (0.67, 0.72)),
    ("chunked", torch.bfloat16): Ratios((2.02, 2.21), (2.9, 3.08)),
    ("chunked", torch.float32): Ratios((1.12, 1.23), (1.33, 1.55)),
}
"""For installations without `benchmarks/results`: p20 to p80 of its quiet run of 2026-11-21 (1713), 1024 tokens,
H = 896, V = 151936, 2 cores of an AMD EPYC with AVX512-BF16, torch 2.13. No GPU has been measured."""

FROM_TABLE = "of 2 cores of an AMD EPYC with AVX512-BF16 (grpo_fused.predictions.MEASURED)"


def predict(shape: Shape, device: torch.device, rate: float | None) -> list[Prediction]:
    """What each engine that runs on `device` is expected to take; `rate` is that of bare products, FLOP/s."""
    auto = engines.choose("auto", device, shape.dtype)
    head, found = shape.head(device), []
    for name in ENGINES:
        if engines.unavailable(name, device, shape.dtype) is not None:
            continue
        ratios, source = ratios_of(name, shape, device)
        cost = engines.engine(name).cost(head, shape.tokens, None)
        found.append(
            Prediction(
                name,
                name == auto,
                cost,
                None if ratios is None else ratios.training,
                None if ratios is None else ratios.scoring,
                None if ratios is None or rate is None else _scaled(ratios.training, 3 * shape.flop / rate),
                None if ratios is None or rate is None else _scaled(ratios.scoring, shape.flop / rate),
                source,
            )
        )
    return found


def ratios_of(engine: str, shape: Shape, device: torch.device) -> tuple[Ratios | None, str]:
    """Ratios for this engine and dtype: the newest of the case nearest in shape; and where they come from."""
    near = [m for m in _measurements() if (m.engine, m.device, m.dtype) == (engine, device.type, shape.dtype)]
    if near:

        def distance(m: Measurement) -> float:
            wanted = (shape.tokens, shape.hidden, shape.vocab)
            return sum(abs(math.log(a / b)) for a, b in zip(m.sizes, wanted, strict=True))

        nearest = min(near, key=distance)  # the first of several is the newest
        return nearest.ratios, nearest.source
    known = MEASURED.get((engine, shape.dtype)) if device.type == "cpu" else None
    if known is not None:
        return known, FROM_TABLE
    return None, f"no ratio is known for {engine} in {str(shape.dtype).removeprefix('torch.')} on {device.type}"


def bare_rate(shape: Shape, device: torch.device) -> float:
    """FLOP/s of the head product and its two gradient products together, on a part of the vocabulary; about 0.3 s."""
    tokens, vocab = min(shape.tokens, 8192 if device.type == "cuda" else 512), min(shape.vocab, 1024)
    seconds, flop = _seconds_of_products(tokens, shape.hidden, vocab, shape.dtype, device)
    wanted = int(vocab * 0.05 / max(seconds, 1e-6))  # a part that takes 0.05 s
    vocab = min(shape.vocab, max(wanted, 1024), 2**28 // max(tokens, shape.hidden))
    times = [_seconds_of_products(tokens, shape.hidden, vocab, shape.dtype, device) for _ in range(3)]
    seconds, flop = sorted(times)[1]
    return flop / seconds


def _seconds_of_products(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, int]:
    """(seconds, FLOP) of the three products, warm."""
    hidden = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.randn(vocab, width, device=device).to(dtype)
    logits = hidden @ weight.T
    seconds = 0.0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        _ = hidden @ weight.T, logits @ weight, logits.T @ hidden
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds, 3 * 2 * tokens * width * vocab


def _measurements() -> list[Measurement]:
    """Dense cases of all result files in a checkout, the newest run first."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "setup.py").exists():
        return []
    found = []
    for path in sorted((root / "benchmarks" / "results").glob("*/*.json")):
        report = json.loads(path.read_text())
        read = {1: _schema_1, 2: _schema_2}.get(report.get("schema"))
        if read is not None:
            found += list(read(report, f"{path.parent.name}/{path.name}"))
    return sorted(found, key=lambda m: m.date, reverse=True)


def _schema_1(report: dict[str, Any], source: str) -> Iterator[Measurement]:
    if not source.split("/")[1].startswith("cpu-"):
        return
    for name, case in report["cases"].items():
        shape, date = case["shape"], report["machine"]["date"]
        sizes = (shape["B"] * shape["T"], shape["H"], shape["V"])
        for engine in ENGINES:
            if not shape["masked"] and engine in case["forward_backward"] and engine in case["scoring"]:
                ratios = Ratios(*(_range(case[what][engine]["ratio"]) for what in ("forward_backward", "scoring")))
                dtype = getattr(torch, shape["dtype"].removeprefix("torch."))
                yield Measurement(engine, "cpu", dtype, sizes, ratios, date, f"{source}, {name}")


def _schema_2(report: dict[str, Any], source: str) -> Iterator[Measurement]:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    machine = report["machine"]
    for name, case in report["sections"].get("loss", {}).get("cases", {}).items():
        shape = case["shape"]
        sizes = (shape["N"], shape["H"], shape["V"])
        for engine in ENGINES:
            row = case["providers"].get(engine, {})
            if shape["pattern"] == "dense" and "forward_backward" in row and "scoring" in row:
                ratios = Ratios(*(_range(row[what]["times_bare"]) for what in ("forward_backward", "scoring")))
                where = machine["device"], dtypes[shape["dtype"]]
                yield Measurement(engine, *where, sizes, ratios, machine["date"], f"{source}, {name}")


def _range(ratio: dict[str, float]) -> tuple[float, float]:
    return min(ratio.values()), max(ratio.values())


def _scaled(pair: tuple[float, float], factor: float) -> tuple[float, float]:
    return pair[0] * factor, pair[1] * factor
