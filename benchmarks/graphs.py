"""Small batches, whose time is the host's: forward + backward as called, without compaction, and in a CUDA graph.

    python -m benchmarks.graphs --out r.json           # N = 256 and 1024 at H = 896, V = 151936
    python -m benchmarks.graphs --small --out r.json   # a small problem

Each result is checked against float64, that of a graph after a replay on other advantages than those of the capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.exact import Exact, judged
from benchmarks.measure import Small
from benchmarks.problem import DTYPES, Case, clear, train
from benchmarks.providers import PROVIDERS, fused_loss
from benchmarks.results import Device, Run, where
from benchmarks.study import Section, main
from benchmarks.tables import grid, ms, paragraphs, taken, title
from benchmarks.timing import Calls, bare_gemms, cache_flush, summary, times_by_round, with_ratios
from grpo_fused.testing import Problem

CASES = [Case(4, N // 4, 896, 151936) for N in (256, 1024)]
SMALL = [Case(2, 4, 64, 300)]
ENGINES = ("chunked", "cuda", "triton")
WAYS = {"eager": True, "not compacted": False, "graph": False}
"""Name to whether tokens are compacted, which waits for the device."""


def run(small: Small = False, rounds: int = 20, device: Device = "cuda") -> Iterator[Section]:
    """The section `graphs`, after each case."""
    cases: list[dict[str, Any]] = []
    for case in SMALL if small else CASES:
        cases.append({"shape": case.describe(), **measure(case, device, rounds)})
        yield {"rounds": rounds, "cases": cases}


def measure(case: Case, device: str, rounds: int) -> dict[str, Any]:
    """Errors and milliseconds of each engine and way, on the device and until the call returns on the host."""
    problem = case.problem(device)
    rows: dict[str, Any] = {}
    calls: Calls = {"bare": bare_gemms(case.N, case.H, case.V, DTYPES[case.dtype], device)["bare-3"]}

    def errors(engine: str, way: str) -> dict[str, float]:
        step = step_of(problem, engine, WAYS[way])
        calls[f"{engine}, {way}"] = call = captured(step) if way == "graph" else step
        problem.advantages.neg_()
        exact, loss = Exact.of(problem), call()
        return {"loss": exact.loss_error(loss), **exact.gradient_errors(problem)}

    for engine in ENGINES:
        for way in WAYS if PROVIDERS[engine].unavailable(device) is None else ():
            rows[f"{engine}, {way}"] = row = judged(partial(errors, engine, way), DTYPES[case.dtype], ours=True)
            if "not_timed" in row:
                calls.pop(f"{engine}, {way}", None)
    idle = cache_flush(device)  # no work is queued, so that the host's time counts
    times = with_ratios(times_by_round(calls, device, rounds=rounds, warmup=2, before=idle), "bare")
    for name, row in rows.items():
        if name in times:
            row |= times[name] | {"host_ms": host_ms(calls[name], rounds)}
    clear(problem)
    return {"bare_ms": times["bare"]["ms"], "ways": rows}


def step_of(problem: Problem, engine: str, compact: bool) -> Callable[[], Tensor]:
    """Forward and backward; the loss."""
    return partial(train, problem, lambda p: fused_loss(p, engine, compact=compact).loss)


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as a CUDA graph, whose replay writes to the loss and the gradients of the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled before the capture, the library makes its workspace
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def host_ms(call: Callable[[], object], rounds: int) -> float:
    """Median time until the call returns, with an idle device before it."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return summary(times)["median"]


def table(section: Section, run: Run) -> str:
    """A row for each engine and way."""
    rows = []
    for case in section["cases"]:
        rows.append([title(case["shape"]), "bare products", ms(case["bare_ms"]["median"]), "1", ""])
        for name, row in case["ways"].items():
            if "ms" not in row:
                rows.append(["", name, f"not timed: {row['not_timed']}", "", ""])
                continue
            rows.append(["", name, *taken(row), ms(row["host_ms"])])
    return paragraphs(grid("| problem | | forward + backward | × bare | host |", rows), f"{where(run)}.")


if __name__ == "__main__":
    main("graphs")
