"""Test problems: made from a seed, run by any engine, compared with float64 within the documented tolerances.

    problem = make_problem(seed=0, H=64, V=1000, dtype=torch.bfloat16)
    config = GRPOLossConfig()
    for name, (error, bound) in problem.compare(config, impl="chunked").items():
        assert error <= bound, name

Bounds: a fixed one for log-probs; for gradients the error of a float64 computation that rounds once what a narrow
dtype must round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fused.api.from_logits import grpo_loss, selective_logprobs
from grpo_fused.api.fused_linear import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.outputs import GRPOLossOutput
from grpo_fused.engines import Impl
from grpo_fused.engines.accuracy import LOGP_BOUND as LOGP_BOUND
from grpo_fused.engines.accuracy import logp_bound as logp_bound

GRADIENT_BOUND = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Relative Frobenius error of gradients; in bf16 and fp16 it is `ROUNDINGS` times the error of rounding."""

ROUNDINGS = 2.0
"""Multiple of the smallest error that a narrow dtype allows (`rounding_errors`)."""

BATCH_BOUND = 1e-5
"""Nats by which a score may change with the other tokens of the batch."""

BITWISE = ("native", "triton")
"""Engines whose scores (without an adapter) are bitwise independent of the other tokens, and all results bitwise the
same in each run."""

_HEAD_OPTIONS = ("lm_head_bias", "logit_scale", "softcap", "temperature", "candidates")


class Result(NamedTuple):
    """The results of a call."""

    out: GRPOLossOutput
    dhidden: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None

    def gradients(self) -> dict[str, Tensor]:
        """Those that exist, by name."""
        named = {"dhidden": self.dhidden, "dweight": self.dweight, "dbias": self.dbias}
        return {name: value for name, value in named.items() if value is not None}


@dataclass
class Problem:
    """The tensors of a call, and its other arguments."""

    hidden_states: Tensor
    """[B, T, H], or packed [N, H]"""
    lm_head_weight: Tensor
    """[V, H]"""
    completion_ids: Tensor
    advantages: Tensor
    completion_mask: Tensor | None
    options: dict[str, Any]
    """further keyword arguments of `fused_linear_grpo_loss`"""

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Problem:
        """With `change(name, tensor)` in place of every tensor."""

        def changed(name: str, x: Any) -> Any:
            if isinstance(x, CandidateSets):
                return CandidateSets(change(name, x.ids), change(name, x.offsets))
            if isinstance(x, dict):
                return {name: changed(name, value) for name, value in x.items()}
            return change(name, x) if isinstance(x, Tensor) else x

        return Problem(**changed("", vars(self)))

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Problem:
        """With hidden states, weight and bias in `dtype`, all tensors on `device`."""
        rounded = ("hidden_states", "lm_head_weight", "lm_head_bias")
        return self.map(lambda name, x: x.to(device=device, dtype=dtype if name in rounded else x.dtype))

    def per_token(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """With `change(tensor)` in place of every tensor that has a value, or a row, for each token."""
        shape = self.completion_ids.shape
        return self.map(lambda name, x: change(x) if name != "lm_head_weight" and x.shape[: len(shape)] == shape else x)

    def packed(self) -> Problem:
        """The same tokens packed: masked ones are dropped from some sequences and kept, masked, in others."""
        assert self.completion_mask is not None
        keep = self.completion_mask.clone()
        keep[::2] = True  # every other sequence keeps its masked tokens
        offsets = torch.cat([keep.new_zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])
        packed = self.per_token(lambda x: x[keep])
        packed.options["cu_seqlens"] = offsets
        if sets := self.options.get("candidates"):
            packed.options["candidates"] = sets.select(keep.reshape(-1).nonzero().squeeze(1))
        if self.advantages.dim() == 1 and len(self.advantages) == int(offsets[-1]):
            packed.advantages = self.advantages.unsqueeze(1)  # [S] would look like one for each token
        return packed

    def poisoned(self) -> Problem:
        """The same with NaN, and an invalid id, at masked positions."""
        assert self.completion_mask is not None
        masked = ~self.completion_mask

        def poison(x: Tensor) -> Tensor:
            if x.dtype == torch.bool:
                return x
            where = masked.view(*masked.shape, *(1,) * (x.dim() - masked.dim()))
            return x.masked_fill(where, torch.nan if x.is_floating_point() else -100)

        return self.per_token(poison)

    def inputs(self, config: GRPOLossConfig, **options: Any) -> dict[str, Any]:
        """The problem's options and `options`, without the tensors that `config` does not use."""
        left_out = {
            "ref_per_token_logps": config.beta == 0.0,
            "sampling_per_token_logps": config.off_policy_mask_threshold is None,
            "importance_sampling_ratio": config.kind.takes_ratio is None,
            "num_items_in_batch": config.kind.average != "items",
        }
        return {name: x for name, x in {**self.options, **options}.items() if not left_out.get(name, False)}

    def run(self, config: GRPOLossConfig, *, upstream: float = 1.0, frozen: bool = False, **options: Any) -> Result:
        """Loss and gradients, with `frozen` that of hidden states alone; `options` override the problem's own."""
        hidden = self.hidden_states.detach().requires_grad_()
        weight = self.lm_head_weight.detach().requires_grad_(not frozen)
        given = self.inputs(config, **options)
        bias = given.pop("lm_head_bias", None)
        bias = None if bias is None else bias.detach().requires_grad_(not frozen)
        out = fused_linear_grpo_loss(
            hidden, weight, self.completion_ids, self.advantages, self.completion_mask, lm_head_bias=bias,
            config=config, **given,
        )  # fmt: skip
        (out.loss * upstream).backward()
        return Result(out, hidden.grad, weight.grad, None if bias is None else bias.grad)

    @torch.no_grad()
    def score(self, impl: Impl) -> Tensor:
        """Log-probs of all tokens."""
        head = {name: x for name, x in self.options.items() if name in _HEAD_OPTIONS}
        return fused_linear_logprobs(
            self.hidden_states, self.lm_head_weight, self.completion_ids, self.completion_mask, impl=impl, **head
        ).logps

    def compare(
        self, config: GRPOLossConfig, *, device: torch.device | str | None = None, **options: Any
    ) -> dict[str, tuple[float, float]]:
        """(error, bound) of log-probs, entropies, loss and gradients against the reference in float64."""
        dtype, exact = self.lm_head_weight.dtype, self.to(torch.float64)
        want, got = exact.run(config, impl="reference"), self.to(dtype, device).run(config, **options)
        bounds = exact.bounds(config, dtype)
        pairs = {
            "logp": (got.out.per_token_logps, want.out.per_token_logps),
            "entropy": (got.out.entropies, want.out.entropies),
            "loss": (got.out.loss, want.out.loss),
        }
        found = {
            name: (largest(a.detach().cpu().double() - b.detach()), bounds[name])
            for name, (a, b) in pairs.items()
            if a is not None and b is not None
        }
        if self.completion_mask is not None and got.dhidden is not None:
            found["masked"] = (largest(got.dhidden[~self.completion_mask.to(got.dhidden.device)]), 0.0)
        given = got.gradients()
        return found | {n: (frobenius_error(given[n].cpu(), x), bounds[n]) for n, x in want.gradients().items()}

    def bounds(self, config: GRPOLossConfig, dtype: torch.dtype) -> dict[str, float]:
        """Error bounds for an engine that computes this problem, itself in float64, from inputs of `dtype`."""
        hidden, ids, mask = self.hidden_states, self.completion_ids, self.completion_mask
        hidden = hidden if mask is None else hidden.masked_fill(~mask.bool().unsqueeze(-1), 0.0)
        given = self.inputs(config)
        bias, softcap, sets = (given.pop(name, None) for name in ("lm_head_bias", "softcap", "candidates"))
        scale, temperature = given.pop("logit_scale", 1.0), given.pop("temperature", 1.0)
        products = (hidden @ self.lm_head_weight.T).requires_grad_()
        z = (products if bias is None else products + bias) * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        if sets is not None:
            z = z.masked_fill(~sets.to_mask(z.shape[-1]).view(z.shape), -torch.inf)
        scores = selective_logprobs(z, ids, mask, temperature=temperature, with_entropy=True, impl="reference")

        def loss_at(logps: Tensor) -> Tensor:
            return grpo_loss(
                logps, self.advantages, mask, entropies=scores.entropies, config=config, impl="reference", **given
            ).loss

        loss = loss_at(scores.logps)
        assert scores.entropies is not None
        dlogits, *slopes = torch.autograd.grad(loss, (products, scores.logps, scores.entropies), allow_unused=True)
        logp = GRADIENT_BOUND[dtype] if dtype == torch.float64 else logp_bound(largest(products))
        # the effect of errors of log-probs and entropies on the loss; and the loss itself is fp32
        slope = sum(float(g.abs().sum()) for g in slopes if g is not None)
        # weights without a gradient change the loss too, those of vespo by 40 a nat of all tokens; the mean error of a
        # token is far below the largest one
        shift = max(largest(loss_at(scores.logps.detach() + sign * logp / 10) - loss) for sign in (-1, 1))
        found = {"logp": logp, "entropy": logp, "loss": max(logp * slope, shift) + 1e-6 * max(1.0, largest(loss))}
        if dtype in GRADIENT_BOUND:
            return found | dict.fromkeys(("dhidden", "dweight", "dbias"), GRADIENT_BOUND[dtype])
        best = rounding_errors(dlogits.flatten(0, -2), hidden.flatten(0, -2), self.lm_head_weight, dtype)
        best["dbias"] = torch.finfo(dtype).eps  # a sum of dlogits that may have been rounded, and rounded itself
        return found | {name: ROUNDINGS * error for name, error in best.items()}


def make_problem(
    seed: int = 0, *, B: int = 4, T: int = 7, H: int = 12, V: int = 29, dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu", logit_std: float = 1.5, drift: float = 0.25, grid: float = 0.0,
    masked: float = 0.3, kept: float = 1.0, per_token_advantages: bool = False, extras: bool = True,
    scored_by: Impl = "reference", **options: Any,
) -> Problem:  # fmt: skip
    """A padded problem, with an empty sequence where B >= 3.

    Args:
        seed: of all random numbers.
        B, T, H, V: sequences, tokens of each, width, vocabulary.
        dtype: of hidden states and weight.
        device: of all tensors.
        logit_std: standard deviation of the logits.
        drift: standard deviation of log(policy / old policy), nats.
        grid: with 0.02, log-ratios are 0.02 apart and at none of the usual clip bounds: rounding moves none across.
        masked: share of masked tokens.
        kept: below 1: the share of the vocabulary that is in the candidate set of each token, beside the token itself.
        per_token_advantages: advantages of `[B, T]`, not `[B]`.
        extras: with reference and sampling log-probs.
        scored_by: what scores the old policy: `reference` in float64; or an engine, in the problem's dtype, if all
            logits would not fit in memory.
        options: of the head, and other keywords of `fused_linear_grpo_loss`.
    """
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype, device=device)

    drawn = torch.float64 if scored_by == "reference" else torch.float32  # for large problems
    hidden, weight = randn(B, T, H, dtype=drawn), randn(V, H, dtype=drawn) * (logit_std / H**0.5)
    ids = torch.randint(0, V, (B, T), generator=g, device=device)
    mask = torch.rand(B, T, generator=g, device=device) >= masked
    if B >= 3:
        mask[1] = False
    if mask.numel() and masked < 1.0:
        mask[0, 0] = True
    if kept < 1.0:
        is_kept = torch.rand(B, T, V, generator=g, device=device) < kept
        options["candidates"] = CandidateSets.from_mask(is_kept.scatter(2, ids.unsqueeze(2), True))
    problem = Problem(hidden, weight, ids, ids, None, options).to(dtype, device)
    logp = (problem.to(torch.float64) if scored_by == "reference" else problem).score(scored_by).double()
    noise = drift * randn(B, T)
    if grid > 0.0:
        noise = -grid * ((noise / grid).round() + 0.35)
    given = {"old_per_token_logps": logp + noise}
    if extras:
        given["ref_per_token_logps"] = logp + 2 * drift * randn(B, T)
        given["sampling_per_token_logps"] = logp + drift * randn(B, T)
    advantages = randn(B, T) if per_token_advantages else randn(B)
    return replace(problem, advantages=advantages, completion_mask=mask, options=given | problem.options)


def largest(x: Tensor) -> float:
    """max |x|; NaN counts as infinite."""
    return float(x.detach().abs().nan_to_num(nan=torch.inf).max()) if x.numel() else 0.0


def frobenius_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, or |got| if |want| is 0."""
    norm = want.double().norm()
    difference = (got.double() - want.double()).norm()
    return float(difference if norm == 0 else difference / norm)


def rounding_errors(dlogits: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Relative Frobenius errors of the best gradients that `dtype` allows: dlogits and results rounded once.

    Args:
        dlogits: `[N, V]` fp64, the exact gradient of the head products; in fp16 it is multiplied by a power of two
            before it is rounded, as the engines do.
        hidden: `[N, H]` fp64.
        weight: `[V, H]` fp64.
        dtype: bf16 or fp16.

    Returns:
        Errors by the names `dhidden` and `dweight`.
    """
    scale = 2.0 ** (8 - dlogits.abs().max().clamp(min=2.0**-100).log2().floor()) if dtype == torch.float16 else 1.0
    rounded = (dlogits * scale).to(dtype).double() / scale
    exact = {"dhidden": dlogits @ weight, "dweight": dlogits.T @ hidden}
    best = {"dhidden": (rounded @ weight).to(dtype), "dweight": (rounded.T @ hidden).to(dtype)}
    return {name: frobenius_error(best[name], exact[name]) for name in best}
