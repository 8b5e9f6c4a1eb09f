"""Timing done right: warm-up, interleaved rounds, medians, and what the machine itself can do in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


def time_once(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call, after everything before it has finished."""
    if device != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event)


def interleave(
    calls: dict[str, Callable[[], object]], device: str, *, rounds: int, warmup: int = 1
) -> dict[str, dict[str, float]]:
    """Median, p20 and p80 in milliseconds of each call, taken round by round so that drift hits all alike."""
    return {name: summary(t) for name, t in times_by_round(calls, device, rounds=rounds, warmup=warmup).items()}


def times_by_round(
    calls: dict[str, Callable[[], object]], device: str, *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each call, a list of one value for each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup):
        for call in calls.values():
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_once(call, device))
    return times


def summary(values: list[float]) -> dict[str, float]:
    """Median, p20 and p80."""
    x = torch.tensor(values, dtype=torch.float64)
    return {"median": float(x.median()), "p20": float(x.quantile(0.2)), "p80": float(x.quantile(0.8))}


def bare_gemms(N: int, H: int, V: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], object]]:
    """The head product and its two gradient products alone, each operand as it lies in the engines."""
    hidden = torch.randn(N, H, device=device).to(dtype)
    weight = torch.randn(V, H, device=device).to(dtype)
    logits = torch.randn(N, V, device=device).to(dtype)

    def one() -> Tensor:
        return hidden @ weight.T

    def three() -> tuple[Tensor, Tensor, Tensor]:
        return one(), logits @ weight, logits.T @ hidden

    return {"bare-1": one, "bare-3": three}


def copy_bandwidth(device: str, size: int) -> float:
    """TB/s of a copy (read + write) of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [time_once(lambda: target.copy_(source), device) for _ in range(5)]
    return 2 * size / (sorted(times)[2] * 1e-3) / 1e12
