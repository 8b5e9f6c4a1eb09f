"""Errors of log-probs, ratios and gradients against float64 by size of the logits: ours and the peers', same tensors.

    python -m benchmarks.accuracy --out results.json                  # about two minutes on two cores
    python -m benchmarks.accuracy --dtypes bfloat16 --max-logits 32   # a part of it

`benchmarks.accuracy_problem` makes the problems. A token's ratio needs two log-probs. The study takes the old one in
three ways: exact, computed by the provider itself (its rounding cancels only while the policy does not change), and
computed by a head that rounds its logits, as a rollout engine may do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.accuracy_problem import OLD_NOISE, Case, Shape, make_case
from benchmarks.problem import EPSILON, clear, loss_from_logps, old_of
from benchmarks.providers import PROVIDERS, eager_logps
from benchmarks.results import machine, record
from grpo_fused import GRPOLossConfig, engines, fused_linear_grpo_loss
from grpo_fused.testing import LOGP_BOUND, Problem, frobenius_error

MAX_LOGITS = {
    "bfloat16": (4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    "float16": (8.0, 32.0, 128.0),
    "float32": (8.0, 32.0, 128.0),
}
"""Largest |logit| of each case."""

GRADIENTS_AT = {"bfloat16": (8.0, 32.0, 128.0), "float16": (32.0,), "float32": (32.0,)}
"""Cases in which gradients and on-policy ratios are computed too; they take most of the time."""

HISTOGRAM_AT = 32.0

PROMISED_ERROR, PROMISED_UP_TO = LOGP_BOUND, 32.0
"""max |Δlogp| of our engines in nats, while max |z| is below the second; beyond, it may grow in proportion."""

NOISE_DRAWS = 64
"""Old policies that the share of flipped clip decisions is averaged over: head errors do not depend on them."""

DECODED = 8
"""First positions, which a rollout scores one at a time, in a batch of one token of each sequence."""

RATIO_BINS = torch.linspace(0.9, 1.1, 82, dtype=torch.float64)
"""Edges; the first and the last bin also count values outside."""


class Provider(NamedTuple):
    """One implementation: scoring of a rollout, and training."""

    score: Callable[[Problem], Tensor]
    """[B, T] log-probs"""
    train: Callable[[Problem], tuple[Tensor, Tensor]] | None
    """the loss, and the log-probs [B, T] that it has used; None if that takes minutes"""


def providers(device: str, dtype: torch.dtype) -> dict[str, Provider]:
    """The providers that can run here."""
    found = {
        impl: ours(impl)
        for impl in ("native", "triton", "chunked")
        if engines.unavailable(impl, torch.device(device), dtype) is None
    }
    found["eager"] = peer(lambda p: eager_logps(p.hidden_states, p.lm_head_weight, p.completion_ids))
    if device == "cpu" and dtype == torch.float16:  # z^T h in fp16: 40 s for the default shape
        found["eager"] = found["eager"]._replace(train=None)
    if PROVIDERS["trl"].unavailable(device) is None:
        found["TRL"] = peer(PROVIDERS["trl"].logps)
    if PROVIDERS["liger"].unavailable(device) is None:
        found["Liger"] = Provider(liger_logps, liger_loss)
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        found["linear_cross_entropy"] = peer(torch_logps)
    return found


def ours(impl: str) -> Provider:
    def train(p: Problem) -> tuple[Tensor, Tensor]:
        config = GRPOLossConfig(epsilon=EPSILON)
        out = fused_linear_grpo_loss(
            p.hidden_states,
            p.lm_head_weight,
            p.completion_ids,
            p.advantages,
            p.completion_mask,
            old_per_token_logps=old_of(p),
            config=config,
            impl=impl,
        )
        return out.loss, out.per_token_logps

    return Provider(lambda p: p.score(impl), train)


def peer(logps: Callable[[Problem], Tensor]) -> Provider:
    """A provider of log-probs, completed by the formula of the loss in plain torch."""

    def train(p: Problem) -> tuple[Tensor, Tensor]:
        found = logps(p)
        return loss_from_logps(found, p), found.detach()

    return Provider(logps, train)


def liger_logps(p: Problem) -> Tensor:
    """The log-probs that `LigerFusedLinearGRPOLoss` uses."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(
        p.hidden_states, p.lm_head_weight, p.completion_ids, bias=None, temperature=1.0
    )


def liger_loss(p: Problem) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logps = liger_logps(p)
    return PROVIDERS["liger"].loss(p), logps


def torch_logps(p: Problem) -> Tensor:
    """PyTorch's own fused head, chunked and with the accumulation that it chooses for the dtype."""
    options = torch.nn.LinearCrossEntropyOptions()
    hidden, ids = p.hidden_states.flatten(0, 1), p.completion_ids.flatten()
    return (
        -F.linear_cross_entropy(hidden, p.lm_head_weight, ids, reduction="none", options=options)
        .float()
        .view(p.completion_ids.shape)
    )


def measure(case: Case, provider: Provider) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Errors of a provider, and its on-policy ratios [B, T] by where the old log-probs come from.

    If the case has gradients, the log-probs are those of training, and there are ratios: for `own` the provider itself
    scores the rollout in another batch, for `exact` float64 does, for `rounded` an eager head in the dtype.
    """
    problem, ratios, row = case.problem, {}, {}
    with torch.no_grad():
        logps = provider.score(problem).double()
        moved = provider.score(case.moved).double()
    if case.exact is not None and provider.train is not None:
        clear(problem)
        loss, trained = provider.train(problem)
        loss.backward()
        logps = trained.double()
        row["gradient_error"] = {
            "hidden": frobenius_error(problem.hidden_states.grad, case.exact.dhidden),
            "weight": frobenius_error(problem.lm_head_weight.grad, case.exact.dweight),
        }
        clear(problem)
    if case.exact is not None:
        ratios = {old: (logps - its).exp() for old, its in old_logps(case, provider).items()}
        row["on_policy"] = {
            old: {"exactly_one": float((r == 1).double().mean()), "max_deviation": float((r - 1).abs().max())}
            for old, r in ratios.items()
        }
    error = (logps - case.logps).abs()
    row |= {
        "logp_error": {"max": float(error.max()), "mean": float(error.mean())},
        "ratio_error": float((logps - case.logps).expm1().abs().max()),
        "flipped": {
            "exact_old": flipped_by_exact_old(logps, case.logps),
            "own_old": flipped_by_own_old(logps, moved, case),
        },
    }
    return row, ratios


@torch.no_grad()
def old_logps(case: Case, provider: Provider) -> dict[str, Tensor]:
    """[B, T] log-probs (fp32, stored as float64) that a rollout may have recorded for the policy that is trained."""
    p = case.problem
    parts = [slice(t, t + 1) for t in range(min(DECODED, p.completion_ids.shape[1]))] + [slice(DECODED, None)]
    own = [provider.score(p.per_token(lambda x, t=t: x[:, t])) for t in parts if p.completion_ids[:, t].numel()]
    rounded = eager_logps(p.hidden_states, p.lm_head_weight, p.completion_ids)
    return {"own": torch.cat(own, dim=1).double(), "exact": case.logps.float().double(), "rounded": rounded.double()}


def flipped_by_exact_old(logps: Tensor, exact: Tensor) -> float:
    """Share of tokens on another side of a clip bound than in float64, old log-probs being float64's + OLD_NOISE."""
    g = torch.Generator(exact.device).manual_seed(1)
    noise = OLD_NOISE * torch.randn((NOISE_DRAWS, *exact.shape), generator=g, dtype=exact.dtype, device=exact.device)
    return flipped(logps - exact - noise, -noise)


def flipped_by_own_old(logps: Tensor, moved: Tensor, case: Case) -> float:
    """The same if the provider has scored the old policy too; each of the two policies is the old one once."""
    got, want = logps - moved, case.logps - case.moved_logps
    return flipped(torch.stack([got, -got]), torch.stack([want, -want]))


def flipped(log_ratios: Tensor, exact: Tensor) -> float:
    """Share of log-ratios that are on another side of a clip bound than the exact ones."""
    bounds = torch.tensor([1 - EPSILON, 1 + EPSILON], dtype=exact.dtype, device=exact.device)
    return float((torch.bucketize(log_ratios.exp(), bounds) != torch.bucketize(exact.exp(), bounds)).double().mean())


def histogram(ratios: Tensor) -> list[int]:
    """Counts by `RATIO_BINS`."""
    inside = ratios.flatten().cpu().double().clamp(float(RATIO_BINS[0]), float(RATIO_BINS[-1]))
    return torch.histogram(inside, RATIO_BINS).hist.int().tolist()


def study(max_logits: dict[str, tuple[float, ...]], shape: Shape, device: str) -> dict[str, Any]:
    """The section `accuracy`: a row for each dtype, size of logits and provider, and ratio histograms of one size."""
    rows, histograms = [], {}
    for dtype, sizes in max_logits.items():
        histograms[dtype] = counts = {}
        for size in sizes:
            case = make_case(size, getattr(torch, dtype), shape, device, with_gradients=size in GRADIENTS_AT[dtype])
            about = {"dtype": dtype, "max_logit": case.max_logit, "logit_std": case.logit_std, "entropy": case.entropy}
            for name, provider in providers(device, case.problem.hidden_states.dtype).items():
                row, ratios = measure(case, provider)
                rows.append(about | {"provider": name} | row)
                print_row(rows[-1])
                if size == HISTOGRAM_AT:
                    counts[name] = {old: histogram(r) for old, r in ratios.items()}
    return {
        "device": device,
        "shape": shape._asdict(),
        "clip": [1 - EPSILON, 1 + EPSILON],
        "old_noise": OLD_NOISE,
        "promise": {"logp_error": PROMISED_ERROR, "up_to": PROMISED_UP_TO},
        "rows": rows,
        "histograms": {"max_logit": HISTOGRAM_AT, "edges": RATIO_BINS.tolist(), "counts": histograms},
    }


def print_row(row: dict[str, Any]) -> None:
    text = f"{row['dtype']:9} max|z| {row['max_logit']:5.1f}  {row['provider']:21} dlogp {row['logp_error']['max']:.1e}"
    text += f" (mean {row['logp_error']['mean']:.1e})  flipped {row['flipped']['exact_old']:6.2%}"
    text += f" (own old {row['flipped']['own_old']:6.2%})"
    if "gradient_error" in row:
        text += "  dhidden {hidden:.1e} dweight {weight:.1e}".format(**row["gradient_error"])
    if "on_policy" in row:
        shares = (f"{old} {found['exactly_one']:.1%}" for old, found in row["on_policy"].items())
        text += f"  on-policy ratio is 1: {', '.join(shares)}"
    print(text, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the study, print its table, write its section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtypes", nargs="+", default=list(MAX_LOGITS), choices=list(MAX_LOGITS))
    parser.add_argument("--max-logits", nargs="+", type=float, help="default: more of them in bfloat16")
    parser.add_argument("--shape", nargs=4, type=int, default=Shape(), metavar=("B", "T", "H", "V"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    machine(given.device)  # reads the load before this program adds to it
    sizes = {dtype: tuple(given.max_logits or MAX_LOGITS[dtype]) for dtype in given.dtypes}
    record("accuracy", study(sizes, Shape(*given.shape), given.device), out=given.out, device=given.device)
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
