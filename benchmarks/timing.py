"""Timing: warm-up, interleaved rounds, medians, and the machine's own rates in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_fused.engines.products import has_products_in

MIB = 2**20
Calls = dict[str, Callable[[], object]]


def time_once(call: Callable[[], object], device: str, flush: Callable[[], object] | None = None) -> float:
    """Milliseconds of one call, after everything before it has finished; `flush` runs first, outside the time."""
    if device != "cuda":
        if flush is not None:
            flush()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if flush is not None:
        flush()  # not waited for: the host launches the call meanwhile
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event)


def cache_flush(device: str) -> Callable[[], object] | None:
    """Writes twice the L2 cache of a GPU, so that no call reads cached data of the call before it.

    In training, a head's weight and hidden states come from memory. On a CPU nothing is flushed: each call streams a
    weight several times its caches.
    """
    if device != "cuda":
        return None
    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return lambda: buffer.fill_(1)


def busy_gpu(device: str) -> Callable[[], object] | None:
    """Products that take an H100 12 ms, then `cache_flush`; nothing on a CPU.

    As after a model's forward pass: the host is ahead of the device, and the device has the clocks that it has under
    load. After a rest it runs products faster for a moment: an H100 by 12 %, where `bare` followed a call that left it
    idle.
    """
    flush = cache_flush(device)
    if flush is None:
        return None
    size = 64 * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    a = torch.randn(size, size, device=device).bfloat16()
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(8):
            torch.mm(a, a, out=out)
        flush()

    return work


def times_by_round(
    calls: Calls, device: str, *, rounds: int, warmup: int = 1, before: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each call, a list of one value for each round; what runs before each call is not in the time.

    The calls take turns, so that drift affects all equally. `before` runs before each; default `busy_gpu`.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup):
        for call in calls.values():
            call()
    before = before or busy_gpu(device)
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_once(call, device, before))
    return times


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, p20 and p80."""
    x = torch.tensor(values, dtype=torch.float64)
    return {name: float(x.quantile(q)) for name, q in (("median", 0.5), ("p20", 0.2), ("p80", 0.8))}


def with_ratios(times: dict[str, list[float]], base: str) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of each call, and the ratio to `base` in each round."""
    return {
        name: {
            "ms": summary(values),
            "times_bare": summary([value / own for value, own in zip(values, times[base], strict=True)]),
        }
        for name, values in times.items()
    }


def bare_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """What the library multiplies fastest in place of `dtype`: fp32 on a CPU without instructions for it.

    Measured with AVX2 (Zen 3, 2 cores, V = 15194): 106 GFLOP/s in fp32; 18, 0.9 and 7 in bf16, by layout.
    """
    return dtype if has_products_in(dtype, torch.device(device)) else torch.float32


def bare_gemms(N: int, H: int, V: int, dtype: torch.dtype, device: str) -> Calls:
    """The head product (`bare-1`), and with its two gradient products (`bare-3`); see `bare_products`."""
    one, *others = bare_products(N, H, V, dtype, device)
    return {"bare-1": one, "bare-3": lambda: (one(), *(product() for product in others))}


def bare_products(N: int, H: int, V: int, dtype: torch.dtype, device: str) -> list[Callable[[], Tensor]]:
    """The head product and those of dH and dW, each in its fastest layout and dtype.

    The fastest layout of the operands is found by timing on the data, on a CPU on 512 of its tokens. Each call makes
    new results, [N, V] among them, as a loop in PyTorch does.
    """
    dtype = bare_dtype(dtype, device)
    hidden, weight, logits = (torch.randn(size, device=device).to(dtype) for size in (N * H, V * H, N * V))

    def products(n: int) -> list[list[Callable[[], Tensor]]]:
        few_hidden, few_logits = hidden[: n * H], logits[: n * V]
        return [
            _layouts(few_hidden, weight, (n, H, V)),
            _layouts(few_logits, weight, (n, V, H)),
            _layouts(few_logits, few_hidden, (V, n, H)),
        ]

    few = products(N if device == "cuda" else min(N, 512))
    best = [min(range(4), key=lambda i, forms=forms: _shortest(forms[i], device)) for forms in few]
    return [forms[i] for forms, i in zip(products(N), best, strict=True)]


def _layouts(a: Tensor, b: Tensor, shape: tuple[int, int, int]) -> list[Callable[[], Tensor]]:
    """[m, k] x [k, n] with each operand by rows and by columns; the data are random, so any view works."""
    m, k, n = shape
    return [
        lambda left=left, right=right: left @ right
        for left in (a.view(m, k), a.view(k, m).T)
        for right in (b.view(k, n), b.view(n, k).T)
    ]


def _shortest(call: Callable[[], object], device: str) -> float:
    call()
    return min(time_once(call, device) for _ in range(2))


def copy_bandwidth(device: str, size: int) -> float:
    """TB/s of a copy (read + write) of `size` bytes of random numbers."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    times = [time_once(lambda: target.copy_(source), device) for _ in range(5)]
    return 2 * source.nbytes / (sorted(times)[2] * 1e-3) / 1e12
