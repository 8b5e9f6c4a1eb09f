"""Times the head kernel's configurations on this GPU: the shipped one and its candidates, against the library's GEMM.

    python -m benchmarks.tune --out tuned.json          # H = 896, 2048, 4096 at V = 151936
    python -m benchmarks.tune --small --out tuned.json  # a small problem; also under TRITON_INTERPRET=1 on a CPU

A configuration whose log-probs are wrong is reported with its error and not timed. The fastest ones belong
in `kernels/head_configs.py`, with the figures as their reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch

from benchmarks.exact import worst
from benchmarks.measure import Small
from benchmarks.results import Device
from benchmarks.study import Section, main
from benchmarks.timing import Calls, bare_gemms, times_by_round, with_ratios

SHAPES = [(8192, 896, 151936), (8192, 2048, 151936), (8192, 4096, 151936)]
SMALL_SHAPES = [(40, 64, 300)]
LOGP_TOLERANCE = 1e-3
"""Above this a result is wrong, not inexact: tensor cores may truncate partial sums, by 1e-4 in all at H = 4096."""


DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    small: Small = False,
    rounds: int = 7,
    device: Device = DEVICE,
    candidates: Annotated[bool, "or the shipped configuration only"] = True,
) -> Iterator[Section]:
    """The section `tune`, after each shape."""
    shapes: list[dict[str, Any]] = []
    for N, H, V in SMALL_SHAPES if small else SHAPES:
        shapes.append({"N": N, "H": H, "V": V, "configurations": tune(N, H, V, device, rounds, candidates=candidates)})
        yield {"shapes": shapes}


def tune(N: int, H: int, V: int, device: str, rounds: int, *, candidates: bool = True) -> list[dict[str, Any]]:
    """Every configuration at one shape: error, milliseconds of scoring and of storing, ratio to the library."""
    from grpo_fused.kernels.head_configs import CANDIDATES, HEAD_CONFIGS, architecture
    from grpo_fused.kernels.head_launch import Exponentials, head_scores
    from grpo_fused.kernels.row_types import Transform

    g = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(N, H, generator=g, device=device).bfloat16()
    weight = (torch.randn(V, H, generator=g, device=device) * (4.0 / H**0.5)).bfloat16()
    targets = torch.randint(0, V, (N,), generator=g, device=device)
    few = slice(0, min(N, 256))
    logits = hidden[few].double() @ weight.double().T
    want = logits.log_softmax(-1).gather(1, targets[few].unsqueeze(1)).squeeze(1)
    transform = Transform()
    arch = architecture(torch.device(device))

    entries: list[dict[str, Any]] = []
    calls: Calls = {"library": bare_gemms(N, H, V, torch.bfloat16, device)["bare-1"]}
    for number, config in enumerate([HEAD_CONFIGS[arch].plain, *(CANDIDATES.get(arch, ()) if candidates else ())]):
        entry: dict[str, Any] = {"name": "shipped" if number == 0 else f"candidate-{number - 1}", **config._asdict()}
        entries.append(entry)
        room = Exponentials.empty(N, weight, torch.bfloat16, config)
        score = partial(head_scores, hidden, weight, targets, transform, with_entropy=True, config=config)
        store = partial(score, exponentials=room)
        try:
            entry["max_logp_error"] = worst(*((f().logp[few] - want).abs().max().item() for f in (score, store)))
        except Exception as error:  # a compiler may refuse a shape; the others are still measured
            entry["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if entry["max_logp_error"] <= LOGP_TOLERANCE:
            calls[f"{entry['name']}/score"], calls[f"{entry['name']}/store"] = score, store
    times = with_ratios(times_by_round(calls, device, rounds=rounds), "library")
    for entry in entries:
        entry |= {
            what: times[f"{entry['name']}/{what}"] for what in ("score", "store") if f"{entry['name']}/{what}" in times
        }
    return entries


if __name__ == "__main__":
    main("tune")
