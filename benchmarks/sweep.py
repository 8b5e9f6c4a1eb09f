"""A bounded sweep on one machine: ours and the peers, side by side on the same tensors, into one JSON file.

    python -m benchmarks.sweep --device cuda --out results.json      # the shapes of a GPU, under 8 minutes
    python -m benchmarks.sweep --device cpu --small --out r.json     # the same program on a small problem

A provider whose result is wrong (against float64) is reported with its error and not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.providers import PROVIDERS, SCORERS, Problem, installed, make_problem
from benchmarks.timing import bare_gemms, copy_bandwidth, interleave

SCHEMA = 1
PATTERNS = {"dense": {}, "half-padded": {"masked": 0.5}, "zero-advantage-40": {"zero_advantages": 0.4}}
GPU_SHAPES = [(16, 512, 4096, 151936), (16, 512, 2048, 151936), (16, 512, 896, 151936)]
SMALL_SHAPES = [(4, 16, 64, 2048)]
LOSS_TOLERANCE = 0.02
"""Relative error of the loss's gradient above which a result counts as wrong: bf16 heads reach 1e-2."""


def main() -> None:
    """Run the sweep and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--small", action="store_true", help="one small shape, to see that the program works")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=450, help="stop starting new shapes after this")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    device = arguments.device
    started = time.monotonic()
    report: dict[str, Any] = {"schema": SCHEMA, "machine": machine(device), "dtype": arguments.dtype, "results": []}
    report["copy_tb_per_s"] = copy_bandwidth(device, 2**30 if device == "cuda" else 2**26)
    for B, T, H, V in SMALL_SHAPES if arguments.small else GPU_SHAPES:
        for pattern, options in PATTERNS.items():
            if time.monotonic() - started > arguments.seconds:
                report["stopped_early"] = True
                break
            problem = make_problem(B, T, H, V, dtype, device, **options)
            row = {"B": B, "T": T, "H": H, "V": V, "pattern": pattern}
            row |= measure(problem, device, arguments.rounds, with_scoring=pattern == "dense")
            report["results"].append(row)
            print_row(row)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            del problem
            release(device)
    report["seconds"] = time.monotonic() - started
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(problem: Problem, device: str, rounds: int, *, with_scoring: bool) -> dict[str, Any]:
    """Errors, times and peak memory of every provider on one problem, with the bare products in the same rounds."""
    B, T, H = problem.hidden.shape
    V = problem.weight.shape[0]
    want = exact_gradient(problem)
    errors: dict[str, Any] = {}
    calls: dict[str, Callable[[], object]] = dict(bare_gemms(B * T, H, V, problem.hidden.dtype, device))
    memory: dict[str, float] = {}
    for name, (provider, package) in PROVIDERS.items():
        if not installed(package):
            errors[name] = f"{package} is not installed, or cannot run here"
            continue

        def call(provider: Callable[[Problem], torch.Tensor] = provider) -> None:
            problem.clear()
            provider(problem).backward()

        try:
            memory[name] = peak_mib(call, device)
            errors[name] = relative_error(problem.hidden.grad, want, problem.mask)
        except torch.OutOfMemoryError:
            errors[name] = "out of memory"
            continue
        if errors[name] <= LOSS_TOLERANCE:
            calls[name] = call
        release(device)
    times = interleave(calls, device, rounds=rounds)
    row: dict[str, Any] = {"gradient_error": errors, "peak_mib": memory, "forward_backward_ms": times}
    row["times_bare_3"] = {name: t["median"] / times["bare-3"]["median"] for name, t in times.items()}
    if with_scoring:
        scorers = {
            name: (lambda scorer=scorer: scorer(problem))
            for name, (scorer, package) in SCORERS.items()
            if installed(package)
        }
        bare_one = {"bare-1": calls["bare-1"]}
        row["scoring_ms"] = interleave(bare_one | scorers, device, rounds=rounds)
    problem.clear()
    return row


def exact_gradient(problem: Problem) -> torch.Tensor:
    """d(loss)/d(hidden) in float64 for the first sequences (as many as keep its logits below 4 GiB), flattened."""
    from benchmarks.providers import EPSILON, TEMPERATURE

    V, T = problem.weight.shape[0], problem.ids.shape[1]
    rows = max(1, min(problem.ids.shape[0], 2**32 // (8 * V * T)))
    hidden = problem.hidden[:rows].detach().double().requires_grad_()
    logits = hidden @ problem.weight.detach().double().T / TEMPERATURE
    logps = logits.log_softmax(-1).gather(-1, problem.ids[:rows].unsqueeze(-1)).squeeze(-1)
    ratio = (logps - problem.old[:rows].double()).exp()
    advantages = problem.advantages[:rows].double().unsqueeze(1)
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    ((loss * problem.mask[:rows]).sum() / problem.mask.sum()).backward()
    assert hidden.grad is not None
    return hidden.grad


def relative_error(got: torch.Tensor | None, want: torch.Tensor, mask: torch.Tensor) -> float:
    """Frobenius, over the sequences that `want` covers."""
    assert got is not None
    got = got[: want.shape[0]].double() * mask[: want.shape[0]].unsqueeze(-1)
    norm = want.norm()
    return float((got - want).norm() / norm) if norm > 0 else float(got.norm())


def peak_mib(call: Callable[[], None], device: str) -> float:
    """Peak memory of a call beyond what was allocated before, gradients included; nan where it cannot be read."""
    if device != "cuda":
        call()
        return float("nan")
    call()
    release(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def release(device: str) -> None:
    """Give cached memory back, so that a peak is a provider's own."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def machine(device: str) -> dict[str, str]:
    """Where and with what this ran."""
    names = ("torch", "triton", "transformers", "trl", "liger-kernel")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "threads": str(torch.get_num_threads()),
        **{name: _version(name) for name in names},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def print_row(row: dict[str, Any]) -> None:
    """One line a provider."""
    print(f"B={row['B']} T={row['T']} H={row['H']} V={row['V']} {row['pattern']}")
    for name, error in row["gradient_error"].items():
        if name in row["forward_backward_ms"]:
            ms, ratio = row["forward_backward_ms"][name]["median"], row["times_bare_3"][name]
            print(f"  {name:14} {ms:9.2f} ms  {ratio:5.2f} x bare  {row['peak_mib'][name]:8.0f} MiB  error {error:.1e}")
        else:
            print(f"  {name:14} not timed: {error}")
    for name, t in row.get("scoring_ms", {}).items():
        print(f"  score {name:8} {t['median']:9.2f} ms")


if __name__ == "__main__":
    main()
