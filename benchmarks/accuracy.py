"""Errors of log-probs, ratios and gradients against float64 by size of the logits: ours and the peers', same tensors.

    python -m benchmarks.accuracy --out results.json                  # about two minutes on two cores
    python -m benchmarks.accuracy --dtypes bfloat16 --max-logits 32   # a part of it

`benchmarks.accuracy_problem` makes the problems. A token's ratio needs two log-probs. The study takes the old one in
three ways: exact, computed by the provider itself (its rounding cancels only while the policy does not change), and
computed by a head that rounds its logits, as a rollout engine may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.accuracy_problem import OLD_NOISE, Case, Shape, make_case
from benchmarks.problem import EPSILON, clear, loss_from_logps
from benchmarks.providers import PROVIDERS, eager_logps, fused_loss
from benchmarks.results import Device
from benchmarks.study import Section, main
from grpo_fused import engines
from grpo_fused.testing import LOGP_BOUND, Problem, frobenius_error

Dtype = Literal["bfloat16", "float16", "float32"]
MAX_LOGITS: dict[Dtype, tuple[float, ...]] = {
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
    runnable = {
        impl: ours(impl)
        for impl in ("native", "triton", "chunked")
        if engines.unavailable(impl, torch.device(device), dtype) is None
    }
    runnable["eager"] = peer(PROVIDERS["eager"].logps)
    if device == "cpu" and dtype == torch.float16:  # z^T h in fp16: 40 s for the default shape
        runnable["eager"] = runnable["eager"]._replace(train=None)
    if PROVIDERS["trl"].unavailable(device) is None:
        runnable["TRL"] = peer(PROVIDERS["trl"].logps)
    if PROVIDERS["liger"].unavailable(device) is None:
        runnable["Liger"] = Provider(liger_logps, liger_loss)
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        runnable["linear_cross_entropy"] = peer(torch_logps)
    return runnable


def ours(impl: str) -> Provider:
    def train(p: Problem) -> tuple[Tensor, Tensor]:
        out = fused_loss(p, impl)
        return out.loss, out.per_token_logps

    return Provider(lambda p: p.score(impl), train)


def peer(logps: Callable[[Problem], Tensor]) -> Provider:
    """A provider of log-probs, completed by the formula of the loss in plain torch."""

    def train(p: Problem) -> tuple[Tensor, Tensor]:
        scored = logps(p)
        return loss_from_logps(scored, p), scored.detach()

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
    losses = F.linear_cross_entropy(hidden, p.lm_head_weight, ids, reduction="none", options=options)
    return -losses.float().view(p.completion_ids.shape)


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


def study(max_logits: dict[Dtype, tuple[float, ...]], shape: Shape, device: str) -> Section:
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
                error, flips = row["logp_error"]["max"], row["flipped"]["exact_old"]
                print(f"{dtype} max|z| {size:5.1f} {name:21} dlogp {error:.1e} flipped {flips:6.2%}", flush=True)
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


def run(
    device: Device = "cpu",
    dtypes: tuple[Dtype, ...] = tuple(MAX_LOGITS),
    max_logits: Annotated[tuple[float, ...], "default: more of them in bfloat16"] = (),
    shape: Annotated[tuple[int, ...], "B, T, H, V"] = Shape(),
) -> Iterator[Section]:
    """The section `accuracy`."""
    yield study({dtype: max_logits or MAX_LOGITS[dtype] for dtype in dtypes}, Shape(*shape), device)


if __name__ == "__main__":
    main("accuracy")
