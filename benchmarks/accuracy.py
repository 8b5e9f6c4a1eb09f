"""Errors of log-probs and ratios against float64 by size of the logits, in bf16: ours and the peers', same tensors.

    python -m benchmarks.accuracy --out results.json    # a minute on two cores

Hidden states and weight are normal, so logits are too: with a vocabulary of 32000 the policy is nearly uniform at
max |z| = 4 and nearly certain at 128. Ids are sampled from it, as a rollout's are. The old log-probs of a ratio are
float64's, of the policy itself (then the ratio should be 1) or of one that is 0.1 nats away. `benchmarks.cpu` has the
errors of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.problem import EPSILON
from benchmarks.providers import PROVIDERS
from benchmarks.results import Device
from benchmarks.side_by_side import engines_of
from benchmarks.study import Section, main
from grpo_fused.testing import LOGP_BOUND, Problem, largest, make_problem

MAX_LOGITS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Largest |logit| of each case."""

HISTOGRAM_AT = 32.0

PROMISED_ERROR, PROMISED_UP_TO = LOGP_BOUND, 32.0
"""max |Δlogp| of our engines in nats, while max |z| is below the second; beyond, it may grow in proportion."""

OLD_NOISE = 0.1
"""Standard deviation in nats of old - new log-probs: the policy has moved a little since the rollout."""

NOISE_DRAWS = 64
"""Old policies that the share of flipped clip decisions is averaged over: head errors do not depend on them."""

PEERS = {"eager": "eager", "TRL": "trl", "Liger": "liger", "linear_cross_entropy": "torch-lce-chunked"}
"""Name to the provider that it is of."""

RATIO_BINS = torch.linspace(0.9, 1.1, 82, dtype=torch.float64)
"""Edges; the first and the last bin also count values outside."""


class Shape(NamedTuple):
    """Sequences, tokens of each, width and vocabulary of a problem."""

    B: int = 4
    T: int = 128
    H: int = 512
    V: int = 32000


class Case(NamedTuple):
    """A problem and its exact results."""

    problem: Problem
    logps: Tensor  # [B, T] float64
    max_logit: float


def make_case(max_logit: float, shape: Shape, device: str) -> Case:
    """A case in bf16 whose largest |logit| is about `max_logit`; the same random numbers for every size."""
    p = make_problem(0, **shape._asdict(), dtype=torch.float32, device=device, masked=0.0, extras=False)
    g = torch.Generator(device).manual_seed(1)
    p.lm_head_weight *= max_logit / largest(p.hidden_states @ p.lm_head_weight.T)
    p = replace(p, completion_mask=torch.ones_like(p.completion_ids, dtype=torch.bool)).to(torch.bfloat16)
    z = p.hidden_states.double() @ p.lm_head_weight.double().T
    log_p = z.log_softmax(-1)
    p.completion_ids = torch.multinomial(log_p.exp().flatten(0, 1), 1, generator=g).view(shape.B, shape.T)
    logps = log_p.gather(-1, p.completion_ids.unsqueeze(-1)).squeeze(-1)
    return Case(p, logps, largest(z))


def providers(device: str) -> dict[str, Callable[[Problem], Tensor]]:
    """The log-probs [B, T] of those that can run here."""
    runnable: dict[str, Callable[[Problem], Tensor]] = {
        impl: lambda p, impl=impl: p.score(impl) for impl in engines_of(device)
    }
    peers = {name: PROVIDERS[provider] for name, provider in PEERS.items()}
    return runnable | {name: p.logps or liger_logps for name, p in peers.items() if p.unavailable(device) is None}


def liger_logps(p: Problem) -> Tensor:
    """The log-probs that `LigerFusedLinearGRPOLoss` uses."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(
        p.hidden_states, p.lm_head_weight, p.completion_ids, bias=None, temperature=1.0
    )


def measure(case: Case, logps: Tensor) -> dict[str, Any]:
    """Errors of log-probs [B, T] in float64, of decisions, and of ratios that should be 1."""
    error, ratios = (logps - case.logps).abs(), on_policy_ratios(case, logps)
    return {
        "logp_error": {"max": float(error.max()), "mean": float(error.mean())},
        "on_policy": {"exact": {"max_deviation": float((ratios - 1).abs().max())}},
        "flipped": {"exact_old": flipped_by_exact_old(logps, case.logps)},
    }


def on_policy_ratios(case: Case, logps: Tensor) -> Tensor:
    """[B, T]: the old log-probs are the exact ones, stored in fp32."""
    return (logps - case.logps.float().double()).exp()


def flipped_by_exact_old(logps: Tensor, exact: Tensor) -> float:
    """Share of tokens on another side of a clip bound than in float64, old log-probs being float64's + OLD_NOISE."""
    g = torch.Generator(exact.device).manual_seed(1)
    noise = OLD_NOISE * torch.randn((NOISE_DRAWS, *exact.shape), generator=g, dtype=exact.dtype, device=exact.device)
    return flipped(logps - exact - noise, -noise)


def flipped(log_ratios: Tensor, exact: Tensor) -> float:
    """Share of log-ratios that are on another side of a clip bound than the exact ones."""
    bounds = torch.tensor([1 - EPSILON, 1 + EPSILON], dtype=exact.dtype, device=exact.device)
    return float((torch.bucketize(log_ratios.exp(), bounds) != torch.bucketize(exact.exp(), bounds)).double().mean())


def outside(new: Tensor, old: Tensor) -> float:
    """Share of ratios outside [0.9, 1.1], from log-probs."""
    ratio = (new - old).exp()
    return float(((ratio < 0.9) | (ratio > 1.1)).double().mean())


def quantiles(values: Tensor) -> dict[str, float]:
    """Mean and quantiles."""
    names = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"mean": float(values.mean())} | {name: float(values.quantile(q)) for name, q in names.items()}


def histogram(ratios: Tensor) -> list[int]:
    """Counts by `RATIO_BINS`."""
    inside = ratios.flatten().cpu().double().clamp(float(RATIO_BINS[0]), float(RATIO_BINS[-1]))
    return torch.histogram(inside, RATIO_BINS).hist.int().tolist()


def study(sizes: tuple[float, ...], shape: Shape, device: str) -> Section:
    """The section `accuracy`: a row for each size of logits and provider, and ratio histograms of one size."""
    rows, counts = [], {}
    for size in sizes:
        case = make_case(size, shape, device)
        for name, score in providers(device).items():
            with torch.no_grad():
                logps = score(case.problem).double()
            rows.append(
                {"dtype": "bfloat16", "max_logit": case.max_logit, "provider": name, **(row := measure(case, logps))}
            )
            error, flips = row["logp_error"]["max"], row["flipped"]["exact_old"]
            print(f"max|z| {size:5.1f} {name:21} dlogp {error:.1e} flipped {flips:6.2%}", flush=True)
            if size == HISTOGRAM_AT:
                counts[name] = {"exact": histogram(on_policy_ratios(case, logps))}
    return {
        "device": device,
        "shape": shape._asdict(),
        "clip": [1 - EPSILON, 1 + EPSILON],
        "old_noise": OLD_NOISE,
        "promise": {"logp_error": PROMISED_ERROR, "up_to": PROMISED_UP_TO},
        "rows": rows,
        "histograms": {"max_logit": HISTOGRAM_AT, "edges": RATIO_BINS.tolist(), "counts": {"bfloat16": counts}},
    }


def run(device: Device = "cpu") -> Iterator[Section]:
    """The section `accuracy`."""
    yield study(MAX_LOGITS, Shape(), device)


if __name__ == "__main__":
    main("accuracy")
