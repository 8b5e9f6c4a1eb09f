"""Divergence between two heads: time and memory, compared with TRL's and Liger's kernels on the same tensors.

    python -m benchmarks.divergence --out results.json       # bf16, N = 1024, H = 896, V = 151936
    python -m benchmarks.divergence --quick                  # a small shape

Forward + backward of the mean divergence. TRL and Liger call their limits of the JSD by beta = 0 (forward KL) and 1
(reverse KL). Losses and dH are compared with float64 on some tokens before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from benchmarks.exact import worst
from benchmarks.results import Device
from benchmarks.side_by_side import SHAPES, scratch_bytes, step
from benchmarks.study import Section, main
from benchmarks.timing import bare_gemms, times_by_round, with_ratios
from grpo_fused import fused_linear_divergence
from grpo_fused.testing import frobenius_error

QUICK = (64, 128, 8192)
Kind = Literal["forward_kl", "jsd", "reverse_kl"]
BETAS: dict[Kind, float] = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
ERROR_BOUNDS = {"grpo_fused": 0.01, "trl": 0.5, "liger": 0.5}
"""Relative errors of loss and dH above which nothing is timed; logits that are rounded to bf16 cost up to 0.3."""


class Problem:
    """A bf16 policy and a teacher that differs by a few percent."""

    def __init__(self, N: int, H: int, V: int, device: str) -> None:
        g = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(N, H, generator=g), torch.randn(V, H, generator=g) * (2.0 / H**0.5)
        self.other = (hidden + 0.2 * torch.randn(N, H, generator=g)).to(device, torch.bfloat16)
        self.hidden = hidden.to(device, torch.bfloat16).requires_grad_()
        self.weight = weight.to(device, torch.bfloat16).requires_grad_()
        self.other_weight = self.weight.detach().clone()
        self.labels = torch.ones(N, dtype=torch.int64, device=device)

    def tensors(self, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Policy and teacher, of some tokens."""
        return self.hidden[:rows], self.weight, self.other[:rows], self.other_weight


def ours(problem: Problem, kind: str, rows: int | None = None) -> Tensor:
    """grpo_fused."""
    return fused_linear_divergence(*problem.tensors(rows), kind=kind).loss


def trl(problem: Problem, kind: str, rows: int | None = None) -> Tensor:
    """TRL."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, weight, other, other_weight = problem.tensors(rows)
    per_token, _ = ChunkedDivergenceFunction.apply(hidden, weight, None, other, other_weight, None, BETAS[kind])
    return per_token.mean()


def liger(problem: Problem, kind: str, rows: int | None = None) -> Tensor:
    """Liger with its defaults, without compilation."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    hidden, weight, other, other_weight = problem.tensors(rows)
    module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETAS[kind], compiled=False)
    return module(hidden, weight, other, other_weight, problem.labels[:rows])


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"grpo_fused": ours, "trl": trl, "liger": liger}


def errors(problem: Problem, loss: Callable[..., Tensor], kind: str, rows: int = 8) -> dict[str, float]:
    """Relative errors of the loss and of dH on some tokens, against float64."""
    got = loss(problem, kind, rows)
    (dhidden,) = torch.autograd.grad(got, problem.hidden)
    hidden, weight, other, other_weight = (x.detach().double() for x in problem.tensors(rows))
    hidden.requires_grad_()
    want = fused_linear_divergence(hidden, weight, other, other_weight, kind=kind, impl="reference").loss
    (exact,) = torch.autograd.grad(want, hidden)
    error = frobenius_error(dhidden[:rows], exact)
    return {"loss": abs(float(got.detach().double() / want.detach()) - 1.0), "dhidden": error}


def run(
    device: Device = "cpu", kinds: tuple[Kind, ...] = tuple(BETAS), rounds: int = 5, quick: bool = False
) -> Iterator[Section]:
    """The section `divergence`."""
    N, H, V = QUICK if quick else SHAPES["cpu"]
    problem = Problem(N, H, V, device)
    section: Section = {"N": N, "H": H, "V": V, "errors": {}}
    calls: dict[str, Callable[[], object]] = {}
    for kind in kinds:
        for name, loss in IMPLEMENTATIONS.items():
            key = f"{name} {kind}"
            section["errors"][key] = off = errors(problem, loss, kind)
            if not worst(*off.values()) <= ERROR_BOUNDS[name]:
                raise SystemExit(f"{key} is wrong: relative errors {off}; nothing is timed")
            calls[key] = lambda loss=loss, kind=kind: step(loss(problem, kind), problem.hidden, problem.weight)
    section["scratch_bytes"] = scratch_bytes(calls, device, lambda _: problem.hidden.nbytes + problem.weight.nbytes)
    calls = bare_gemms(N, H, V, torch.bfloat16, device) | calls
    yield section | {"calls": with_ratios(times_by_round(calls, device, rounds=rounds), "bare-3")}


if __name__ == "__main__":
    main("divergence")
