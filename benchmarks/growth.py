"""Time and memory of the loss by tokens, vocabulary, width and share of active tokens.

    python -m benchmarks.growth --out results.json                  # about three minutes on two cores
    python -m benchmarks.growth --device cuda --out results.json    # up to 131072 tokens

One dimension is varied at a time around a base. The bare products (no loss, all tokens) run in the same rounds. On the
CPU the memory is also predicted, from the engines' own rules (`Engine.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.memory import blocks_given_back, peak_bytes, release
from benchmarks.problem import clear, loss_problem, train
from benchmarks.providers import PROVIDERS
from benchmarks.results import Device
from benchmarks.side_by_side import engines_of
from benchmarks.study import Section, main
from benchmarks.timing import Calls, bare_gemms, summary, times_by_round
from grpo_fused import engines
from grpo_fused.engines.base import Cost
from grpo_fused.testing import Problem
from grpo_fused.tools import predictions

DTYPE = torch.bfloat16
MOST_BARE_BYTES = 32 * 2**30
"""The bare products hold all logits: they are left out if these would take more."""


class Shape(NamedTuple):
    """A call."""

    N: int
    """tokens, active or not"""
    H: int
    V: int
    active: float = 1.0
    """share of the tokens that are not masked"""

    @property
    def tokens(self) -> int:
        """Active tokens; nothing is computed for the others."""
        return round(self.N * self.active)


class Grid(NamedTuple):
    """The base and the values that each dimension takes."""

    base: Shape
    values: dict[str, tuple[float, ...]]

    def shapes(self) -> list[Shape]:
        """Every shape once, the base first."""
        varied = [self.base._replace(**{name: v}) for name, values in self.values.items() for v in values]
        return list(dict.fromkeys([self.base, *varied]))


_ACTIVE = (0.25, 0.5, 1.0)
GRIDS = {
    "cpu": Grid(
        Shape(512, 512, 65536),
        {
            "N": (128, 256, 512, 1024, 2048, 4096),
            "V": (32768, 65536, 131072, 262144),
            "H": (256, 512, 1024, 2048),
            "active": _ACTIVE,
        },
    ),
    "cuda": Grid(
        Shape(8192, 2048, 151936),
        {
            "N": (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
            "V": (32768, 65536, 151936, 262144),
            "H": (896, 2048, 4096, 8192),
            "active": _ACTIVE,
        },
    ),
}


def problem_of(shape: Shape, device: str) -> Problem:
    """Its tensors."""
    B = math.gcd(shape.N, 8)
    return loss_problem(B, shape.N // B, shape.H, shape.V, DTYPE, device, masked=1.0 - shape.active)


def cost_of(engine: str, shape: Shape) -> Cost:
    """By the engine's own rules."""
    head = predictions.Shape(shape.tokens, shape.H, shape.V, DTYPE).head(torch.device("cpu"))
    return engines.engine(engine).cost(head, shape.tokens, None)


def scratch_bytes(engine: str, shape: Shape) -> int:
    """Predicted peak of a loss with both gradients, beyond inputs and gradients."""
    at_work = cost_of(engine, shape).scratch_bytes + shape.tokens * shape.H * DTYPE.itemsize  # gathered states
    # all tokens decide whether dW needs its own sum; the gradient that it becomes does not exist yet
    sums = cost_of(engine, shape._replace(active=1.0)).accumulator_bytes
    return max(at_work + sums - shape.V * shape.H * DTYPE.itemsize, sums) if sums else at_work


def measure_memory(shape: Shape, device: str) -> dict[str, float | None]:
    """Bytes beyond inputs and gradients of each engine that can run; None if memory is too small."""
    problem = problem_of(shape, device)

    def peak(engine: str) -> float | None:
        def from_nothing() -> None:
            train(problem, PROVIDERS[engine].loss)
            clear(problem)

        try:
            return peak_bytes(from_nothing, device) - problem.hidden_states.nbytes - problem.lm_head_weight.nbytes
        except torch.OutOfMemoryError:
            return None

    return {engine: peak(engine) for engine in engines_of(device)}


def measure_time(shape: Shape, device: str, rounds: int, memory: dict[str, float | None]) -> list[dict[str, Any]]:
    """A point for each engine with a figure in `memory`, and one for the bare products."""
    problem = problem_of(shape, device)
    fits = [engine for engine, found in memory.items() if found is not None]
    timed: Calls = {engine: partial(train, problem, PROVIDERS[engine].loss) for engine in fits}
    if 2 * shape.N * shape.V * DTYPE.itemsize <= MOST_BARE_BYTES:
        timed["bare"] = bare_gemms(shape.N, shape.H, shape.V, DTYPE, device)["bare-3"]
    times = times_by_round(timed, device, rounds=rounds)
    points = [
        {**shape._asdict(), "dtype": "bfloat16", "engine": engine,
         "seconds": summary([1e-3 * ms for ms in values]), "bytes": memory.get(engine)}
        for engine, values in times.items()
    ]  # fmt: skip
    for point in points:
        if device == "cpu" and point["engine"] != "bare":
            point["predicted_bytes"] = scratch_bytes(point["engine"], shape)
    return points


def study(grid: Grid, device: str, rounds: int) -> dict[str, Any]:
    """The section `growth`."""
    cases = grid.shapes()
    with blocks_given_back():  # which takes time, so times are measured afterwards
        memory = []
        for case in cases:
            memory.append(measure_memory(case, device))
            release(device)
    points: list[dict[str, Any]] = []
    for case, its_memory in zip(cases, memory, strict=True):
        timed = measure_time(case, device, rounds, its_memory)
        release(device)
        print(case, {point["engine"]: f"{point['seconds']['median']:.3f} s" for point in timed}, flush=True)
        points += timed
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "base": grid.base._asdict(),
        "varied": {name: list(values) for name, values in grid.values.items()},
        "points": points,
    }


def run(device: Device = "cpu", rounds: int = 3) -> Iterator[Section]:
    """The section `growth`."""
    yield study(GRIDS[device], device, rounds)


if __name__ == "__main__":
    main("growth")
