"""How far log-probs, ratios and gradients are from float64 as logits grow: ours and the peers', on the same tensors.

    python -m benchmarks.accuracy --out results.json                  # about two minutes on two cores
    python -m benchmarks.accuracy --dtypes bfloat16 --max-logits 32   # a part of it

Token ids are sampled from the policy, as a rollout's are, and old log-probs are float64's of a slightly different one.
The data are random: logits are normal, and the vocabulary of 32000 makes their policy nearly uniform at max |z| = 4 and
nearly certain at 128.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.providers import EPSILON, Problem, eager_logps, installed, liger, loss_from_logps, trl_logps
from benchmarks.study import record
from grpo_fused import GRPOLossConfig, engines, fused_linear_grpo_loss, fused_linear_logprobs

MAX_LOGITS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
DTYPES = ("bfloat16", "float16", "float32")
PROMISED_ERROR, PROMISED_UP_TO = 1e-4, 32.0
"""max |Δlogp| of our engines in nats, while max |z| is below the second; beyond, it may grow in proportion."""

OLD_NOISE = 0.1
"""Standard deviation in nats of old - new log-probs: the policy has moved a little since the rollout."""

NOISE_DRAWS = 64
"""Old policies that the share of flipped clip decisions is averaged over: head errors do not depend on them."""

CLEARANCE = 1e-4
"""No token of the gradient's comparison is nearer to a clip bound (nats): there float64 itself decides by chance."""

HISTOGRAM_AT = 32.0
RATIO_BINS = torch.linspace(0.9, 1.1, 82, dtype=torch.float64)
"""Edges; the first and the last bin also count what lies beyond."""

ROWS_AT_A_TIME = 128
"""Tokens whose float64 logits are held at a time."""


class Shape(NamedTuple):
    """Sequences, tokens of each, width and vocabulary of the problem."""

    B: int = 4
    T: int = 128
    H: int = 512
    V: int = 32000


class Provider(NamedTuple):
    """One implementation, as a rollout is scored and as the policy is trained."""

    score: Callable[[Problem], Tensor]
    """[B, T] log-probs"""
    train: Callable[[Problem], tuple[Tensor, Tensor]]
    """the loss, and the log-probs [B, T] that it has used"""


def providers(device: str, dtype: torch.dtype) -> dict[str, Provider]:
    """Those that can run here."""
    found = {
        impl: ours(impl)
        for impl in ("native", "triton", "chunked")
        if engines.unavailable(impl, torch.device(device), dtype) is None
    }
    found["eager"] = peer(lambda p: eager_logps(p.hidden, p.weight, p.ids))
    if installed("trl"):
        found["TRL"] = peer(trl_logps)
    if installed("liger_kernel"):
        found["Liger"] = Provider(liger_logps, liger_loss)
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        found["linear_cross_entropy"] = peer(torch_logps)
    return found


def ours(impl: str) -> Provider:
    def score(p: Problem) -> Tensor:
        return fused_linear_logprobs(p.hidden, p.weight, p.ids, p.mask, impl=impl).logps

    def train(p: Problem) -> tuple[Tensor, Tensor]:
        config = GRPOLossConfig(epsilon=EPSILON)
        out = fused_linear_grpo_loss(
            p.hidden, p.weight, p.ids, p.advantages, p.mask, old_per_token_logps=p.old, config=config, impl=impl
        )
        return out.loss, out.per_token_logps

    return Provider(score, train)


def peer(logps: Callable[[Problem], Tensor]) -> Provider:
    """A provider of log-probs, completed by the formula of the loss in plain torch."""

    def train(p: Problem) -> tuple[Tensor, Tensor]:
        found = logps(p)
        return loss_from_logps(found, p), found.detach()

    return Provider(logps, train)


def liger_logps(p: Problem) -> Tensor:
    """What `LigerFusedLinearGRPOLoss` makes its loss of."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(p.hidden, p.weight, p.ids, bias=None, temperature=1.0)


def liger_loss(p: Problem) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logps = liger_logps(p)
    return liger(p), logps


def torch_logps(p: Problem) -> Tensor:
    """PyTorch's own fused head, chunked and with the accumulation that it chooses for the dtype."""
    options = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(p.hidden.flatten(0, 1), p.weight, p.ids.flatten(), reduction="none", options=options)
    return -loss.float().view(p.ids.shape)


class Exact(NamedTuple):
    """What float64 gives on the same inputs."""

    logps: Tensor  # [B, T]
    dhidden: Tensor  # [B, T, H]
    dweight: Tensor  # [V, H]
    max_logit: float
    logit_std: float
    entropy: float
    """mean, in nats"""


def make_problem(max_logit: float, dtype: torch.dtype, shape: Shape, device: str) -> tuple[Problem, Exact]:
    """A problem whose largest |logit| is about `max_logit`, ids sampled from its own policy."""
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape.B, shape.T, shape.H, generator=g, device=device)
    weight = torch.randn(shape.V, shape.H, generator=g, device=device)
    largest = max(float((rows @ weight.T).abs().max()) for rows in hidden.flatten(0, 1).split(ROWS_AT_A_TIME))
    hidden, weight = hidden.to(dtype), (weight * (max_logit / largest)).to(dtype)
    ids, logps, facts = _sample(hidden.double().flatten(0, 1), weight.double(), g)
    noise = OLD_NOISE * torch.randn(logps.shape, generator=g, device=device, dtype=torch.float64)
    bounds = torch.tensor([1 - EPSILON, 1 + EPSILON], dtype=torch.float64, device=device).log()
    noise[((-noise)[:, None] - bounds).abs().min(1).values < CLEARANCE] = 0.0
    problem = Problem(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        ids.view(shape.B, shape.T),
        torch.ones(shape.B, shape.T, dtype=torch.bool, device=device),
        torch.randn(shape.B, generator=g, device=device),
        (logps + noise).float().view(shape.B, shape.T),
    )
    return problem, Exact(logps.view(shape.B, shape.T), *_gradients(problem), *facts)


def _sample(hidden: Tensor, weight: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, tuple[float, float, float]]:
    """Ids [N] from the policy, their log-probs [N], and largest |logit|, standard deviation and mean entropy."""
    ids, logps, largest, squares, entropies = [], [], 0.0, 0.0, []
    for rows in hidden.split(ROWS_AT_A_TIME):
        z = rows @ weight.T
        largest, squares = max(largest, float(z.abs().max())), squares + float(z.square().sum())
        log_p = z.log_softmax(-1)
        p = log_p.exp()
        chosen = torch.multinomial(p, 1, generator=g)
        ids.append(chosen)
        logps.append(log_p.gather(1, chosen))
        entropies.append(-(p * log_p).sum(1))
    std = (squares / (hidden.shape[0] * weight.shape[0])) ** 0.5
    return torch.cat(ids).squeeze(1), torch.cat(logps).squeeze(1), (largest, std, float(torch.cat(entropies).mean()))


def _gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """dL/dhidden and dL/dweight of the loss in float64, by autograd over some tokens at a time."""
    total = problem.ids.numel()
    weight = problem.weight.detach().double().requires_grad_()
    dhidden = []
    for b, t in ((b, t) for b in range(problem.ids.shape[0]) for t in range(0, problem.ids.shape[1], ROWS_AT_A_TIME)):
        part = (slice(b, b + 1), slice(t, t + ROWS_AT_A_TIME))
        hidden = problem.hidden.detach()[part].double().requires_grad_()
        some = Problem(
            hidden, weight, problem.ids[part], problem.mask[part], problem.advantages[part[0]].double(),
            problem.old[part].double(),
        )  # fmt: skip
        loss = loss_from_logps(eager_logps64(some), some)
        (loss * (some.ids.numel() / total)).backward()
        assert hidden.grad is not None
        dhidden.append(hidden.grad.flatten(0, 1))
    assert weight.grad is not None
    return torch.cat(dhidden).view(problem.hidden.shape), weight.grad


def eager_logps64(p: Problem) -> Tensor:
    return (p.hidden @ p.weight.T).log_softmax(-1).gather(-1, p.ids.unsqueeze(-1)).squeeze(-1)


def measure(problem: Problem, exact: Exact, provider: Provider) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Errors of a provider, and its on-policy ratios [B, T] by where the old log-probs come from.

    Ratios: `own` has the rollout scored by the provider itself, each sequence alone; `exact` by float64; `rounded` by
    a head that rounds its logits to the dtype of the problem, as most rollout engines do.
    """
    problem.clear()
    loss, trained = provider.train(problem)
    loss.backward()
    assert problem.hidden.grad is not None
    assert problem.weight.grad is not None
    with torch.no_grad():
        scored = torch.cat([provider.score(sequence) for sequence in _sequences(problem)])
        rounded = eager_logps(problem.hidden, problem.weight, problem.ids)
    trained = trained.double()
    error = (trained - exact.logps).abs()
    ratios = {
        "own": (trained - scored.double()).exp(),
        "exact": (trained - exact.logps).exp(),
        "rounded": (trained - rounded.double()).exp(),
    }
    row = {
        "logp_error": {"max": float(error.max()), "mean": float(error.mean())},
        "ratio_error": float((ratios["exact"] - 1).abs().max()),
        "gradient_error": {
            "hidden": _relative(problem.hidden.grad, exact.dhidden),
            "weight": _relative(problem.weight.grad, exact.dweight),
        },
        "flipped": flipped_share(trained, exact.logps),
        "on_policy": {
            old: {"exactly_one": float((r == 1).double().mean()), "max_deviation": float((r - 1).abs().max())}
            for old, r in ratios.items()
        },
    }
    problem.clear()
    return row, ratios


def _sequences(p: Problem) -> list[Problem]:
    """Each sequence as a batch of its own."""
    parts = [slice(b, b + 1) for b in range(p.ids.shape[0])]
    return [Problem(p.hidden[b], p.weight, p.ids[b], p.mask[b], p.advantages[b], p.old[b]) for b in parts]


def _relative(got: Tensor, want: Tensor) -> float:
    """Frobenius."""
    return float((got.double() - want).norm() / want.norm())


def flipped_share(logps: Tensor, exact: Tensor) -> float:
    """Share of tokens that lie on another side of a clip bound than they do in float64."""
    g = torch.Generator(exact.device).manual_seed(1)
    noise = OLD_NOISE * torch.randn((NOISE_DRAWS, *exact.shape), generator=g, dtype=exact.dtype, device=exact.device)
    bounds = torch.tensor([1 - EPSILON, 1 + EPSILON], dtype=exact.dtype, device=exact.device)
    sides = [torch.bucketize((x - (exact + noise)).exp(), bounds) for x in (logps.to(exact.dtype), exact)]
    return float((sides[0] != sides[1]).double().mean())


def histogram(ratios: Tensor) -> list[int]:
    """Counts by `RATIO_BINS`."""
    inside = ratios.flatten().cpu().clamp(float(RATIO_BINS[0]), float(RATIO_BINS[-1]))
    return torch.histogram(inside, RATIO_BINS).hist.int().tolist()


def study(max_logits: tuple[float, ...], dtypes: tuple[str, ...], shape: Shape, device: str) -> dict[str, Any]:
    """The section `accuracy`: a row for each dtype, size of logits and provider, and ratio histograms of one size."""
    rows, histograms = [], {}
    at = min(max_logits, key=lambda z: abs(z - HISTOGRAM_AT))
    for dtype in dtypes:
        histograms[dtype] = counts = {}
        for max_logit in max_logits:
            problem, exact = make_problem(max_logit, getattr(torch, dtype), shape, device)
            for name, provider in providers(device, problem.hidden.dtype).items():
                row, ratios = measure(problem, exact, provider)
                about = {"dtype": dtype, "provider": name, "max_logit": exact.max_logit, "logit_std": exact.logit_std}
                rows.append(about | {"entropy": exact.entropy} | row)
                print_row(rows[-1])
                if max_logit == at:
                    counts[name] = {old: histogram(r) for old, r in ratios.items()}
    return {
        "device": device,
        "shape": shape._asdict(),
        "clip": [1 - EPSILON, 1 + EPSILON],
        "old_noise": OLD_NOISE,
        "promise": {"logp_error": PROMISED_ERROR, "up_to": PROMISED_UP_TO},
        "rows": rows,
        "histograms": {"max_logit": at, "edges": RATIO_BINS.tolist(), "counts": histograms},
    }


def print_row(row: dict[str, Any]) -> None:
    own, dlogp, gradient = row["on_policy"]["own"], row["logp_error"], row["gradient_error"]
    print(
        f"{row['dtype']:9} max|z| {row['max_logit']:5.1f}  {row['provider']:21} dlogp {dlogp['max']:.1e} "
        f"(mean {dlogp['mean']:.1e})  ratio {row['ratio_error']:.1e}  dhidden {gradient['hidden']:.1e} "
        f"dweight {gradient['weight']:.1e}  flipped {row['flipped']:7.3%}  own ratio 1: {own['exactly_one']:.1%}"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the study, print its table, write its section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--max-logits", nargs="+", type=float, default=MAX_LOGITS)
    parser.add_argument("--shape", nargs=4, type=int, default=Shape(), metavar=("B", "T", "H", "V"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    data = study(tuple(given.max_logits), tuple(given.dtypes), Shape(*given.shape), given.device)
    record("accuracy", data, given.out)
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
