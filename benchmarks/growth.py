"""Time and memory of the loss by tokens, vocabulary, width and share of active tokens.

    python -m benchmarks.growth --out results.json                  # about three minutes on two cores
    python -m benchmarks.growth --device cuda --out results.json    # up to 131072 tokens

One dimension is varied at a time around a base. The bare products (no loss, all tokens) run in the same rounds. On the
CPU the memory is also predicted, from the engines' own rules (`Engine.cost`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.cost import Shape, scratch_bytes
from benchmarks.memory import blocks_given_back, peak_bytes
from benchmarks.problem import clear, loss_problem
from benchmarks.providers import PROVIDERS
from benchmarks.results import Device
from benchmarks.study import Section, main
from benchmarks.timing import bare_gemms, summary, times_by_round
from grpo_fused import engines

MOST_BARE_BYTES = 32 * 2**30
"""The bare products hold all logits: they are left out if these would take more."""


class Grid(NamedTuple):
    """The base and the values that each dimension takes."""

    base: Shape
    values: dict[str, tuple[float, ...]]

    def shapes(self) -> list[Shape]:
        """Every shape once, the base first."""
        varied = [self.base._replace(**{name: v}) for name, values in self.values.items() for v in values]  # type: ignore[arg-type]
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
ENGINES = {"cpu": ("native", "chunked"), "cuda": ("triton", "chunked")}


class Calls:
    """Forward + backward of every engine that can run, on one problem."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        B = math.gcd(shape.N, 8)
        self.problem = loss_problem(B, shape.N // B, shape.H, shape.V, dtype, device, masked=1.0 - shape.active)
        self.device = device
        self.engines = [e for e in ENGINES[device] if engines.unavailable(e, torch.device(device), dtype) is None]

    def train(self, engine: str) -> None:
        clear(self.problem)
        PROVIDERS[engine].loss(self.problem).backward()

    def peak_bytes(self, engine: str) -> float | None:
        """Bytes beyond inputs and gradients; None if memory is too small."""

        def from_nothing() -> None:
            self.train(engine)
            clear(self.problem)

        try:
            peak = peak_bytes(from_nothing, self.device)
        except torch.OutOfMemoryError:
            return None
        return peak - self.problem.hidden_states.nbytes - self.problem.lm_head_weight.nbytes


def measure_memory(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, float | None]:
    """Bytes of each engine."""
    calls = Calls(shape, dtype, device)
    return {engine: calls.peak_bytes(engine) for engine in calls.engines}


def measure_time(
    shape: Shape, dtype: torch.dtype, device: str, rounds: int, memory: dict[str, float | None]
) -> list[dict[str, Any]]:
    """A point for each engine with a figure in `memory`, and one for the bare products."""
    calls = Calls(shape, dtype, device)
    timed: dict[str, Callable[[], object]] = {
        engine: partial(calls.train, engine) for engine in calls.engines if memory[engine] is not None
    }
    if 2 * shape.N * shape.V * dtype.itemsize <= MOST_BARE_BYTES:
        timed["bare"] = bare_gemms(shape.N, shape.H, shape.V, dtype, device)["bare-3"]
    times = times_by_round(timed, device, rounds=rounds)
    points = [
        {**shape._asdict(), "dtype": str(dtype).removeprefix("torch."), "engine": engine,
         "seconds": summary([1e-3 * ms for ms in values]), "bytes": memory.get(engine)}
        for engine, values in times.items()
    ]  # fmt: skip
    for point in points:
        if device == "cpu" and point["engine"] != "bare":
            point["predicted_bytes"] = scratch_bytes(point["engine"], shape, dtype)
    return points


def study(grid: Grid, dtypes: tuple[str, ...], device: str, rounds: int) -> dict[str, Any]:
    """The section `growth`."""
    cases = [(shape, getattr(torch, dtype)) for dtype in dtypes for shape in grid.shapes()]
    with blocks_given_back():  # which takes time, so times are measured afterwards
        memory = [released(measure_memory, *case, device) for case in cases]
    points: list[dict[str, Any]] = []
    for case, its_memory in zip(cases, memory, strict=True):
        timed = released(measure_time, *case, device, rounds, its_memory)
        print(case[0], {point["engine"]: f"{point['seconds']['median']:.3f} s" for point in timed}, flush=True)
        points += timed
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "base": grid.base._asdict(),
        "varied": {name: list(values) for name, values in grid.values.items()},
        "points": points,
    }


def released(measure: Callable[..., Any], *arguments: Any) -> Any:
    """`measure(*arguments)`; its memory is freed."""
    result = measure(*arguments)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def run(
    device: Device = "cpu",
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16",),
    rounds: int = 3,
) -> Iterator[Section]:
    """The section `growth`."""
    yield study(GRIDS[device], dtypes, device, rounds)


if __name__ == "__main__":
    main("growth")
