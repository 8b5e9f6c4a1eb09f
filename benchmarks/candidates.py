"""Candidate sets: the cost of a loss that reads only the kept rows of the weight, compared with dense losses.

    python -m benchmarks.candidates --out results.json                  # about two minutes on two cores
    python -m benchmarks.candidates --device cuda --out results.json

Two parts. `published`: set sizes drawn as measured in a rollout with top_p = 0.97 (46 % of one token, median 2, mean 8,
p99 82 to 100; prime-rl issue 2979), with the bare products, the dense loss, the masked dense loss that frameworks use
(all logits, those outside the set at -inf), and filling a fresh dW, which no implementation with a dense dW can avoid.
`growth`: all sets of one size, which shows from which size on the dense loss is faster.

Log-probs are compared with float64 before anything is timed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads that spin would take another call's time

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import blocks_given_back, peak_bytes
from benchmarks.results import machine, record
from benchmarks.timing import bare_gemms, times_by_round, with_ratios
from grpo_fused import CandidateSets, engines, fused_linear_grpo_loss, fused_linear_logprobs

SHAPES = {"cpu": (1024, 896, 151936), "cuda": (8192, 4096, 151936)}
SIZES = (1, 2, 8, 32, 128, 512, 2048)
GROWTH_TOKENS = {"cpu": 256, "cuda": 2048}


class Problem:
    """Hidden states, a bf16 head, and sets whose first token is the target."""

    def __init__(self, sizes: Tensor, H: int, V: int, device: str) -> None:
        g = torch.Generator().manual_seed(0)
        N = len(sizes)
        self.hidden = torch.randn(1, N, H, generator=g).to(device, torch.bfloat16).requires_grad_()
        self.weight = (0.03 * torch.randn(V, H, generator=g)).to(device, torch.bfloat16).requires_grad_()
        ids = torch.cat([torch.randperm(V, generator=g)[:size] for size in sizes.tolist()])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        self.targets = ids[offsets[:-1]].view(1, N).to(device)
        self.sets = CandidateSets(ids, offsets).to(device)
        self.advantages = torch.randn(1, generator=g).to(device)

    def loss(self, impl: str, *, sets: bool = True, frozen: bool = False) -> None:
        """Forward and backward."""
        self.hidden.grad = self.weight.grad = None
        weight = self.weight.detach() if frozen else self.weight
        given = self.sets if sets else None
        fused_linear_grpo_loss(
            self.hidden,
            weight,
            self.targets,
            self.advantages,
            candidates=given,
            impl=impl,  # type: ignore[arg-type]
        ).loss.backward()

    @torch.no_grad()
    def score(self, impl: str) -> Tensor:
        """Log-probs."""
        return fused_linear_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            candidates=self.sets,
            impl=impl,  # type: ignore[arg-type]
        ).logps

    def masked_dense(self, chunk: int = 128) -> None:
        """As in frameworks: logits, a mask, a log-softmax in fp32; in chunks, since it would not fit otherwise."""
        self.hidden.grad = self.weight.grad = None
        N = self.targets.shape[1]
        for start in range(0, N, chunk):
            rows = torch.arange(start, min(start + chunk, N), device=self.hidden.device)
            logits = (self.hidden[0, rows] @ self.weight.T).float()
            logits = logits.masked_fill(~self.sets.select(rows).to_mask(logits.shape[1]), -torch.inf)
            logps = logits.log_softmax(-1).gather(1, self.targets[0, rows].unsqueeze(1))
            (-(logps - logps.detach()).exp() * self.advantages / N).sum().backward()

    def check(self, impl: str, tokens: int = 64) -> float:
        """Largest error of log-probs against float64, of some tokens."""
        rows = torch.arange(min(tokens, self.targets.shape[1]))
        few, hidden = self.sets.select(rows.to(self.hidden.device)).to("cpu"), self.hidden[0].detach().cpu().double()
        weight, got = self.weight.detach().cpu(), self.score(impl)[0].cpu().double()
        worst = 0.0
        for n in rows.tolist():
            z = weight[few.ids[few.offsets[n] : few.offsets[n + 1]]].double() @ hidden[n]
            worst = max(worst, abs(float(z.log_softmax(0)[0] - got[n])))
        if worst > 1e-4:
            raise SystemExit(f"{impl}: log-probs are off by {worst}: nothing is timed")
        return worst


def published_sizes(N: int) -> Tensor:
    """[N]: drawn from the measured distribution of a rollout."""
    g = torch.Generator().manual_seed(1)
    alone = torch.rand(N, generator=g) < 0.46
    others = torch.exp(1.25 * torch.randn(N, generator=g) + 1.75).clamp(2, 512)
    return torch.where(alone, torch.ones(N), others).to(torch.int64)


def published(device: str, impls: list[str], rounds: int) -> dict[str, Any]:
    """Times, ratios to the bare products, errors and memory at the published set sizes."""
    N, H, V = SHAPES[device]
    problem = Problem(published_sizes(N), H, V, device)
    sizes = problem.sets.sizes.double()
    errors = {impl: problem.check(impl) for impl in impls}
    memory = {}
    with blocks_given_back():
        for impl in impls:
            gradients = problem.hidden.nbytes + problem.weight.nbytes

            def call(impl: str = impl) -> None:
                problem.loss(impl)
                problem.hidden.grad = problem.weight.grad = None

            memory[impl] = peak_bytes(call, device) - gradients
    calls: dict[str, Callable[[], object]] = dict(bare_gemms(N, H, V, torch.bfloat16, device))
    calls["fill dW"] = lambda: torch.full((V, H), 1.0, dtype=torch.bfloat16, device=device)
    for impl in impls:
        calls[f"{impl} loss"] = partial(problem.loss, impl)
        calls[f"{impl} loss, frozen head"] = partial(problem.loss, impl, frozen=True)
        calls[f"{impl} scoring"] = partial(problem.score, impl)
    calls[f"{impls[0]} dense loss"] = partial(problem.loss, impls[0], sets=False)
    calls["masked dense loss"] = problem.masked_dense
    return {
        "N": N, "H": H, "V": V,
        "set_sizes": {"mean": sizes.mean().item(), "median": sizes.median().item(),
                      "p99": sizes.quantile(0.99).item(), "alone": (sizes == 1).double().mean().item()},
        "logp_error": errors, "scratch_bytes": memory,
        "calls": with_ratios(times_by_round(calls, device, rounds=rounds), "bare-3"),
    }  # fmt: skip


def growth(device: str, impl: str, rounds: int) -> list[dict[str, Any]]:
    """Forward and backward with all sets of one size, and of the dense loss, with a frozen head."""
    _, H, V = SHAPES[device]
    N = GROWTH_TOKENS[device]
    points = []
    for size in SIZES:
        problem = Problem(torch.full((N,), size), H, V, device)
        problem.check(impl, tokens=4)
        calls = {"sets": partial(problem.loss, impl, frozen=True)}
        calls["dense"] = partial(problem.loss, impl, sets=False, frozen=True)
        points.append({"size": size, **with_ratios(times_by_round(calls, device, rounds=rounds), "dense")})
    return points


def main() -> None:
    """Measure, print, and put the section `candidates` into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine(given.device)
    device = torch.device(given.device)
    names = ("native", "chunked") if given.device == "cpu" else ("triton", "chunked")
    impls = [name for name in names if engines.unavailable(name, device, torch.bfloat16) is None]
    found = {"published": published(given.device, impls, given.rounds), "growth": growth(given.device, impls[0], 3)}
    for name, call in found["published"]["calls"].items():  # type: ignore[call-overload]
        print(f"{name:32s} {call['ms']['median']:9.1f} ms  {call['times_bare']['median']:.4f} x bare")
    for point in found["growth"]:
        sets, dense = point["sets"], point["dense"]  # type: ignore[index]
        print(f"sets of {point['size']:5d}  {sets['ms']['median']:9.1f} ms; dense {dense['ms']['median']:.1f} ms")  # type: ignore[index]
    if given.out is not None:
        record("candidates", found, out=given.out, device=given.device)


if __name__ == "__main__":
    main()
