"""A self-test of this installation: every engine that runs here against the eager reference in float64.

    python -m grpo_fused check            # about a minute on two cores
    python -m grpo_fused check --quick    # some seconds

Every engine x dtype x objective is run on padded, packed and poisoned inputs; log-probs and gradients are held to the
bounds of `grpo_fused.accuracy`. Engines that promise the same bits in any batch are held to that.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fused import (
    GRPOLossConfig,
    GRPOLossOutput,
    __version__,
    accuracy,
    engines,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    grpo_loss,
    selective_logprobs,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "luspo": {"loss_type": "luspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gmpo": {"loss_type": "gmpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo-token": {"importance_sampling_level": "sequence_token"},
    "kl-k3": {"beta": 0.1},
    "kl-k1-uncorrected": {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False},
    "gspo-kl-k2": {"importance_sampling_level": "sequence", "beta": 0.1, "kl_estimator": "k2"},
    "entropy-bonus": {"entropy_coef": 0.05},
    "entropy-quantile": {"loss_type": "grpo", "top_entropy_quantile": 0.4},
    "delta": {"delta": 1.5, "epsilon_high": 0.28},
    "dual-clip": {"loss_type": "grpo", "dual_clip": 1.4},
    "off-policy-mask": {"off_policy_mask_threshold": 0.05},
}
"""Every loss type, level, estimator and option once: as they are named in the output, and what sets them."""

QUICK = ("dapo", "gspo-kl-k2", "gmpo", "entropy-bonus")


@dataclass
class Problem:
    """The tensors of a call."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    advantages: Tensor
    mask: Tensor
    head: dict[str, Any]
    """bias, scale, softcap, temperature"""
    loss: dict[str, Any]
    """old log-probs and so on"""

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Problem:
        """With hidden states, weight and bias in `dtype`, everything on `device`."""
        device = device or self.hidden.device
        head, loss = _moved(self.head, device), _moved(self.loss, device)
        if "lm_head_bias" in head:
            head["lm_head_bias"] = head["lm_head_bias"].to(dtype)
        ids, advantages, mask = (x.to(device) for x in (self.ids, self.advantages, self.mask))
        return Problem(self.hidden.to(device, dtype), self.weight.to(device, dtype), ids, advantages, mask, head, loss)

    def run(self, config: GRPOLossConfig, impl: str) -> Result:
        """Loss and gradients."""
        hidden, weight = self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()
        head = dict(self.head)
        bias = head.get("lm_head_bias")
        if bias is not None:
            head["lm_head_bias"] = bias = bias.detach().requires_grad_()
        out = fused_linear_grpo_loss(
            hidden, weight, self.ids, self.advantages, self.mask, config=config, impl=impl, **head,  # type: ignore[arg-type]
            **self.loss_inputs(config),
        )  # fmt: skip
        out.loss.backward()  # type: ignore[no-untyped-call]
        gradients = {"dH": hidden.grad, "dW": weight.grad, "db": None if bias is None else bias.grad}
        return Result(out, {name: x.cpu() for name, x in gradients.items() if x is not None})

    def loss_inputs(self, config: GRPOLossConfig) -> dict[str, Any]:
        """What `config` takes of the loss's inputs."""
        left_out = set()
        if config.beta == 0.0:
            left_out.add("ref_per_token_logps")
        if config.off_policy_mask_threshold is None:
            left_out.add("sampling_per_token_logps")
        return {name: x for name, x in self.loss.items() if name not in left_out}

    def packed(self) -> Problem:
        """The same tokens packed, masked ones of every other sequence left out."""
        keep = self.mask.clone()
        keep[::2] = True
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])
        loss = {name: x[keep] if isinstance(x, Tensor) else x for name, x in self.loss.items()}
        return replace(
            self,
            hidden=self.hidden[keep],
            ids=self.ids[keep],
            mask=self.mask[keep],
            advantages=self.advantages.unsqueeze(1),
            loss={**loss, "cu_seqlens": offsets},
        )


class Result(NamedTuple):
    """What a call gave."""

    out: GRPOLossOutput
    gradients: dict[str, Tensor]


class Check(NamedTuple):
    """An error and its bound."""

    name: str
    errors: dict[str, tuple[float, float]]
    """what was compared, to (error, bound)"""

    @property
    def passed(self) -> bool:
        """Whether every error is within its bound; NaN is not."""
        return all(error <= bound for error, bound in self.errors.values())

    def __str__(self) -> str:
        numbers = [
            f"{name} {error:.0e} ({bound:.0e})" if error or bound else f"{name} 0"
            for name, (error, bound) in self.errors.items()
        ]
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name:46} {'  '.join(numbers)}"


def main(argv: list[str] | None = None) -> None:
    """The command `check`: prints a line for each check, exits with 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_fused check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few objectives in three dtypes, no large vocabulary")
    parser.add_argument("--engines", nargs="*", help="only these (default: all that run here)")
    given = parser.parse_args(argv)
    start, failed, count = time.perf_counter(), [], 0
    print(f"grpo_fused {__version__}, torch {torch.__version__}: errors against float64 (and their bounds)", flush=True)
    for check in run_checks(quick=given.quick, only=given.engines):
        print(check, flush=True)
        count += 1
        if not check.passed:
            failed.append(check.name)
    seconds = time.perf_counter() - start
    if count == 0:
        sys.exit(f"nothing was checked: none of {', '.join(given.engines or ['the engines'])} runs here")
    if failed:
        sys.exit(f"{len(failed)} of {count} checks failed: " + "; ".join(failed))
    print(f"all {count} checks passed ({seconds:.0f} s)")


def run_checks(*, quick: bool = False, only: list[str] | None = None) -> Iterator[Check]:
    """All checks of the engines that run here, one after another."""
    for engine, device in _engines_here():
        if only is not None and engine not in only:
            continue
        dtypes = [dtype for dtype in DTYPES if engines.unavailable(engine, device, dtype) is None]
        for dtype in dtypes[-3:] if quick else dtypes:
            yield from _engine_checks(engine, device, dtype, quick=quick)
        if engine in accuracy.BITWISE:
            for dtype in dtypes:
                yield _bitwise(engine, device, dtype)
        else:
            yield _company(engine, device)


def _engines_here() -> list[tuple[str, torch.device]]:
    cpu, found = torch.device("cpu"), []
    if engines.unavailable("native", cpu, torch.float32) is None:
        found.append(("native", cpu))
    found.append(("chunked", cpu))
    if torch.cuda.is_available():
        cuda = torch.device("cuda")
        found.append(("chunked", cuda))
        # what TRITON_INTERPRET runs is not what a chip runs
        if engines.unavailable("triton", cuda, torch.float32) is None and os.environ.get("TRITON_INTERPRET") != "1":
            found.append(("triton", cuda))
    return found


def _engine_checks(engine: str, device: torch.device, dtype: torch.dtype, *, quick: bool) -> Iterator[Check]:
    where = f"{engine} on {device.type} {str(dtype).removeprefix('torch.')}"
    for name in QUICK if quick else OBJECTIVES:
        config = GRPOLossConfig(**OBJECTIVES[name])
        yield _accuracy(f"{where} {name}", engine, device, make_problem(dtype), config)
    for name, problem in _variants(dtype):
        for objective in ("dapo",) if quick else ("dapo", "gspo", "entropy-bonus"):
            config = GRPOLossConfig(**OBJECTIVES[objective])
            yield _accuracy(f"{where} {name} {objective}", engine, device, problem, config)
    if not quick:
        problem = make_problem(dtype, B=4, T=16, H=256, V=32003, logit_std=4.8)
        yield _accuracy(f"{where} V = 32003", engine, device, problem, GRPOLossConfig())
    yield _nothing_active(f"{where} nothing active", engine, device, dtype)


def _variants(dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """Heads and layouts."""
    V = 1003
    bias = torch.linspace(-2, 2, V, dtype=torch.float64)
    yield "bias", make_problem(dtype, V=V, lm_head_bias=bias)
    yield "scale, softcap", make_problem(dtype, V=V, logit_scale=1.3, softcap=8.0)
    yield "temperatures", make_problem(dtype, V=V, temperature=torch.linspace(0.6, 1.5, 4, dtype=torch.float64))
    yield "packed", make_problem(dtype, V=V).packed()


def make_problem(
    dtype: torch.dtype,
    *,
    B: int = 4,
    T: int = 20,
    H: int = 72,
    V: int = 1003,
    logit_std: float = 3.0,
    drift: float = 0.3,
    **head: Any,
) -> Problem:
    """Random tokens whose ratios spread around 1 by `drift`, one sequence empty, masked positions poisoned."""
    g = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, weight = randn(B, T, H).to(dtype), (randn(V, H) * logit_std / H**0.5).to(dtype)
    if "lm_head_bias" in head:
        head["lm_head_bias"] = head["lm_head_bias"].to(dtype)
    ids = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) >= 0.25
    mask[1] = False
    problem = Problem(hidden, weight, ids, randn(B), mask, head, {})
    logps = score(problem.to(torch.float64), "reference")
    # log-ratios on a grid that no clip bound lies on, so that rounding cannot carry a token across one
    log_ratios = (randn(B, T) * drift * 50).round() / 50 + 0.007
    problem.loss = {
        "old_per_token_logps": logps - log_ratios,
        "ref_per_token_logps": logps + 2 * drift * randn(B, T),
        "sampling_per_token_logps": logps + drift * randn(B, T),
    }
    problem.hidden = torch.where(mask.unsqueeze(-1), problem.hidden, torch.nan)
    problem.ids = torch.where(mask, problem.ids, -100)
    for name, x in problem.loss.items():
        problem.loss[name] = torch.where(mask, x, torch.nan)
    return problem


def score(problem: Problem, impl: str, rows: Tensor | None = None) -> Tensor:
    """Log-probs of all tokens, or of some of them in the order of `rows`."""
    hidden, ids = problem.hidden, problem.ids
    if rows is not None:
        hidden, ids = hidden.flatten(0, 1)[rows], ids.flatten()[rows]
    mask = problem.mask if rows is None else problem.mask.flatten()[rows]
    with torch.no_grad():
        return fused_linear_logprobs(hidden, problem.weight, ids, mask, impl=impl, **problem.head).logps  # type: ignore[arg-type]


def _accuracy(name: str, engine: str, device: torch.device, problem: Problem, config: GRPOLossConfig) -> Check:
    """Log-probs, loss and gradients against the reference on the same inputs in float64."""
    dtype, exact = problem.weight.dtype, problem.to(torch.float64)
    want, got = exact.run(config, "reference"), problem.to(dtype, device).run(config, engine)
    rounded, products = _rounding(exact, config, dtype)
    logp = accuracy.logp_bound(float(products.abs().max())) if dtype != torch.float64 else 1e-10
    errors = {"logp": (_largest(got.out.per_token_logps.cpu().double() - want.out.per_token_logps), logp)}
    if got.out.entropies is not None and want.out.entropies is not None:
        errors["entropy"] = (_largest(got.out.entropies.cpu().double() - want.out.entropies), logp)
    off = got.out.loss.detach().cpu().double() - want.out.loss.detach()
    errors["loss"] = (_largest(off), _loss_bound(want, exact, config, logp))
    for part, gradient in want.gradients.items():
        errors[part] = (accuracy.frobenius_error(got.gradients[part], gradient), rounded[part])
    masked = got.gradients["dH"][~exact.mask]
    errors["masked"] = (_largest(masked) if masked.numel() else 0.0, 0.0)
    return Check(name, errors)


def _rounding(exact: Problem, config: GRPOLossConfig, dtype: torch.dtype) -> tuple[dict[str, float], Tensor]:
    """Bounds of the gradients' errors, and the exact products [N, V]."""
    hidden = torch.where(exact.mask.unsqueeze(-1), exact.hidden, 0.0).flatten(0, -2)
    products = hidden @ exact.weight.T
    if dtype in accuracy.GRADIENT_BOUND:
        return dict.fromkeys(("dH", "dW", "db"), accuracy.GRADIENT_BOUND[dtype]), products
    dlogits = _logit_gradient(products.view(*exact.ids.shape, -1), exact, config).view(products.shape)
    best = accuracy.rounding_errors(dlogits, hidden, exact.weight, dtype)
    # a sum of dlogits that may have been rounded, and rounded itself
    db = accuracy.ROUNDINGS * torch.finfo(dtype).eps
    return {
        "dH": accuracy.ROUNDINGS * best["dhidden"], "dW": accuracy.ROUNDINGS * best["dweight"], "db": db,
    }, products  # fmt: skip


def _logit_gradient(products: Tensor, exact: Problem, config: GRPOLossConfig) -> Tensor:
    """dL/d(product), by autograd through the head's transform and the reference loss."""
    products = products.detach().requires_grad_()
    bias, scale, softcap = (exact.head.get(name) for name in ("lm_head_bias", "logit_scale", "softcap"))
    z = products if bias is None else products + bias
    z = z if scale is None else scale * z
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    temperature = exact.head.get("temperature", 1.0)
    scores = selective_logprobs(z, exact.ids, exact.mask, temperature=temperature, with_entropy=True, impl="reference")
    out = grpo_loss(
        scores.logps, exact.advantages, exact.mask, entropies=scores.entropies, config=config, impl="reference",
        **exact.loss_inputs(config),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(out.loss, products)
    return gradient


def _loss_bound(want: Result, exact: Problem, config: GRPOLossConfig, logp: float) -> float:
    """What errors of log-probs and entropies can do to the loss: their bound times sum |dL/dlogp| + sum |dL/dH|."""
    logps = want.out.per_token_logps.detach().requires_grad_()
    entropies = None if want.out.entropies is None else want.out.entropies.detach().requires_grad_()
    loss = grpo_loss(
        logps, exact.advantages, exact.mask, entropies=entropies, config=config, impl="reference",
        **exact.loss_inputs(config),
    ).loss  # fmt: skip
    inputs = [logps] if entropies is None else [logps, entropies]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    slope = sum(float(g.abs().sum()) for g in gradients if g is not None)
    return logp * slope + 1e-6 * max(1.0, _largest(loss.detach()))  # and the loss itself is fp32


def _nothing_active(name: str, engine: str, device: torch.device, dtype: torch.dtype) -> Check:
    """A batch without an active token: a loss of 0, gradients of 0."""
    problem = make_problem(dtype)
    problem.mask = torch.zeros_like(problem.mask)
    got = problem.to(dtype, device).run(GRPOLossConfig(), engine)
    errors = {part: (_largest(gradient), 0.0) for part, gradient in got.gradients.items()}
    return Check(name, {"loss": (_largest(got.out.loss.detach()), 0.0), **errors})


def _bitwise(engine: str, device: torch.device, dtype: torch.dtype) -> Check:
    """The same bits twice; a token's score the same in any company, order, number of threads, and in training."""
    problem = make_problem(dtype, B=4, T=90, V=3001).to(dtype, device)
    config = GRPOLossConfig(entropy_coef=0.01)
    first, second = problem.run(config, engine), problem.run(config, engine)
    differing = sum(int((a != second.gradients[name]).sum()) for name, a in first.gradients.items())
    differing += int(first.out.loss != second.out.loss)
    whole = score(problem, engine).flatten()
    order = torch.randperm(whole.shape[0], generator=torch.Generator().manual_seed(0)).to(device)
    moved = int((score(problem, engine, order) != whole[order]).sum())
    for part in torch.arange(whole.shape[0], device=device).split([1, 30, 64, 100, 165]):
        moved += int((score(problem, engine, part) != whole[part]).sum())
    if device.type == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        moved += int((score(problem, engine).flatten() != whole).sum())
        torch.set_num_threads(threads)
    trained = int((first.out.per_token_logps.flatten() != whole).sum())
    counts = {"differ twice": differing, "differ in company": moved, "differ in training": trained}
    name = f"{engine} on {device.type} {str(dtype).removeprefix('torch.')} bitwise"
    return Check(name, {what: (float(count), 0.0) for what, count in counts.items()})


def _company(engine: str, device: torch.device) -> Check:
    """A score may change by so much with the tokens it is computed with."""
    problem = make_problem(torch.bfloat16, B=4, T=90, V=3001).to(torch.bfloat16, device)
    whole = score(problem, engine).flatten()
    parts = torch.arange(whole.shape[0], device=device).split([1, 30, 64, 100, 165])
    apart = torch.cat([score(problem, engine, part) for part in parts])
    error = _largest(apart - whole)
    return Check(f"{engine} on {device.type} bfloat16 company", {"logp": (error, accuracy.COMPANY_BOUND)})


def _moved(tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in tensors.items()}


def _largest(x: Tensor) -> float:
    """max |x|; NaN counts as infinite."""
    return float(x.abs().nan_to_num(nan=torch.inf).max()) if x.numel() else 0.0
