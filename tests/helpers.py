"""Cases to compute, and configurations to compute them with; tolerances come from `grpo_fused.accuracy`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fused import GRPOLossConfig, GRPOLossOutput, fused_linear_grpo_loss
from grpo_fused.accuracy import GRADIENT_BOUND, frobenius_error, rounding_errors

LEVELS = ("token", "sequence", "sequence_token")
PPO = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def config_id(config: GRPOLossConfig) -> str:
    """`dapo-sequence-beta=0.1`: the loss type, its level, and what else differs from the defaults."""
    names = [config.loss_type]
    if config.importance_sampling_level != "token":
        names.append(config.importance_sampling_level)
    base = GRPOLossConfig(**_required(config.loss_type))
    for name in ("beta", "kl_estimator", "use_bias_correction_kl", "delta", "dual_clip", "off_policy_mask_threshold",
                 "top_entropy_quantile", "entropy_coef"):  # fmt: skip
        if getattr(config, name) != getattr(base, name):
            names.append(f"{name}={getattr(config, name)}")
    return "-".join(names)


def _required(loss_type: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"loss_type": loss_type}
    if loss_type == "cispo":
        extra["epsilon_high"] = 1.3
    if loss_type == "dr_grpo":
        extra["max_completion_length"] = 11
    return extra


def make_config(loss_type: str = "dapo", **options: Any) -> GRPOLossConfig:
    """A configuration with what its loss type requires."""
    return GRPOLossConfig(**{**_required(loss_type), **options})


def covering_configs() -> list[GRPOLossConfig]:
    """Every loss type, level and option at least once, and the pairs of them that share code."""
    configs = [make_config(t) for t in (*PPO, "cispo", "sapo", "vespo", "gmpo")]
    for loss_type, level in itertools.product(("grpo", "dapo", "luspo", "cispo", "sapo", "vespo"), LEVELS[1:]):
        configs.append(make_config(loss_type, importance_sampling_level=level))
        configs.append(make_config(loss_type, importance_sampling_level=level, beta=0.1))
    for estimator, corrected in itertools.product(("k1", "k2", "k3"), (True, False)):
        kl: dict[str, Any] = {"beta": 0.2, "kl_estimator": estimator, "use_bias_correction_kl": corrected}
        configs += [make_config("dapo", **kl), make_config("bnpo", importance_sampling_level="sequence", **kl)]
    for level in LEVELS:
        configs.append(make_config("dapo", importance_sampling_level=level, delta=1.5, epsilon_high=0.28))
        configs.append(make_config("grpo", importance_sampling_level=level, dual_clip=1.4, epsilon=0.1,
                                   epsilon_high=0.3))  # fmt: skip
        configs.append(make_config("dapo", importance_sampling_level=level, off_policy_mask_threshold=0.05))
        configs.append(make_config("grpo", importance_sampling_level=level, top_entropy_quantile=0.4, beta=0.1))
        configs.append(make_config("dapo", importance_sampling_level=level, entropy_coef=0.05))
    for loss_type in ("cispo", "sapo", "vespo", "gmpo"):
        configs.append(make_config(loss_type, beta=0.1, kl_estimator="k2"))
        configs.append(make_config(loss_type, top_entropy_quantile=0.5, entropy_coef=0.02))
    for loss_type in ("cispo", "sapo", "vespo"):
        configs.append(make_config(loss_type, off_policy_mask_threshold=0.05))
    configs.append(make_config("dapo", delta=0.9, epsilon_high=0.4))
    return list(dict.fromkeys(configs))


def all_configs() -> Iterator[GRPOLossConfig]:
    """The whole grid of objectives and options."""
    grid = itertools.product(
        (*PPO, "cispo", "sapo", "vespo", "gmpo"),
        LEVELS,
        (0.0, 0.1),
        ("k1", "k2", "k3"),
        (True, False),
        ({}, {"delta": 1.4}, {"dual_clip": 1.3}, {"off_policy_mask_threshold": 0.05}),
        ({}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.05}, {"top_entropy_quantile": 0.3, "entropy_coef": 0.1}),
    )
    for loss_type, level, beta, estimator, corrected, clip, entropy in grid:
        if beta == 0.0 and (estimator != "k3" or not corrected):
            continue
        if loss_type == "gmpo" and (level != "token" or "off_policy_mask_threshold" in clip):
            continue
        if loss_type not in PPO and ("delta" in clip or "dual_clip" in clip):
            continue
        yield make_config(
            loss_type, importance_sampling_level=level, beta=beta, kl_estimator=estimator,
            use_bias_correction_kl=corrected, **clip, **entropy,
        )  # fmt: skip


@dataclass
class Case:
    """The tensors of a call, and what is passed beside them."""

    hidden_states: Tensor
    lm_head_weight: Tensor
    completion_ids: Tensor
    advantages: Tensor
    completion_mask: Tensor | None
    options: dict[str, Any]
    """further keyword arguments of `fused_linear_grpo_loss`"""

    def to(self, dtype: torch.dtype) -> Case:
        """The same case with the head's tensors widened or rounded to `dtype`."""
        bias = self.options.get("lm_head_bias")
        options = {**self.options, "lm_head_bias": None if bias is None else bias.to(dtype)}
        return replace(
            self,
            hidden_states=self.hidden_states.to(dtype),
            lm_head_weight=self.lm_head_weight.to(dtype),
            options=options,
        )

    def run(self, config: GRPOLossConfig, *, upstream: float = 1.0, **options: Any) -> Result:
        """Loss and gradients."""
        hidden = self.hidden_states.detach().requires_grad_()
        weight = self.lm_head_weight.detach().requires_grad_()
        options = {**self.options, **options}
        bias = options.pop("lm_head_bias", None)
        bias = None if bias is None else bias.detach().requires_grad_()
        if config.beta == 0.0:
            options.pop("ref_per_token_logps", None)
        if config.off_policy_mask_threshold is None:
            options.pop("sampling_per_token_logps", None)
        if config.loss_type == "gmpo":
            options.pop("importance_sampling_ratio", None)
        if config.loss_type not in ("dapo", "cispo", "vespo"):
            options.pop("num_items_in_batch", None)
        out = fused_linear_grpo_loss(
            hidden, weight, self.completion_ids, self.advantages, self.completion_mask, lm_head_bias=bias,
            config=config, **options,
        )  # fmt: skip
        (out.loss * upstream).backward()
        return Result(out, hidden.grad, weight.grad, None if bias is None else bias.grad)


@dataclass
class Result:
    """What a call gave."""

    out: GRPOLossOutput
    dhidden: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None

    def gradients(self) -> dict[str, Tensor]:
        """Those that exist, by name."""
        named = {"dhidden": self.dhidden, "dweight": self.dweight, "dbias": self.dbias}
        return {name: value for name, value in named.items() if value is not None}


def make_case(
    seed: int = 0,
    *,
    B: int = 4,
    T: int = 7,
    H: int = 12,
    V: int = 29,
    dtype: torch.dtype = torch.float64,
    logit_std: float = 1.5,
    drift: float = 0.25,
    per_token_advantages: bool = False,
    masked: float = 0.3,
    extras: bool = True,
    **options: Any,
) -> Case:
    """A padded case whose ratios spread around 1 by `drift`, with an empty sequence when B >= 3."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden = randn(B, T, H)
    weight = randn(V, H) * (logit_std / H**0.5)
    ids = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) >= masked
    if B >= 3:
        mask[1] = False
    if mask.numel():
        mask[0, 0] = True
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    scale = options.get("logit_scale", 1.0)
    logits = hidden.double() @ weight.double().T * scale
    logp = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    given: dict[str, Any] = {"old_per_token_logps": logp + drift * randn(B, T)}
    if extras:
        given["ref_per_token_logps"] = logp + 2 * drift * randn(B, T)
        given["sampling_per_token_logps"] = logp + drift * randn(B, T)
    advantages = randn(B, T) if per_token_advantages else randn(B)
    return Case(hidden, weight, ids, advantages, mask, {**given, **options})


class Precision(NamedTuple):
    """How exactly an engine is held against the float64 reference."""

    dtype: torch.dtype
    """the widest that it takes"""
    tol: float


PRECISION = {
    impl: Precision(dtype, GRADIENT_BOUND[dtype])
    for dtype, impls in ((torch.float64, ("reference", "chunked")), (torch.float32, ("native", "triton")))
    for impl in impls
}


def assert_engine_matches(impl: str, case: Case, config: GRPOLossConfig, *, variants: list[dict[str, Any]]) -> Result:
    """The engine, in its widest dtype and with each of the options, gives what the float64 reference gives for it."""
    dtype, tol = PRECISION[impl]
    case = case.to(dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    for options in variants:
        assert_same(case.run(config, impl=impl, **options), want, tol=tol)
    return want


def pack(case: Case) -> Case:
    """The same tokens packed: masked ones are dropped from some sequences and kept, masked, in others."""
    assert case.completion_mask is not None
    keep = case.completion_mask.clone()
    keep[::2] = True  # every other sequence keeps its masked tokens
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])

    def packed(x: Any) -> Any:
        if isinstance(x, Tensor) and x.shape[: keep.dim()] == keep.shape:
            return x[keep]
        return x

    options = {name: packed(value) for name, value in case.options.items()}
    temperature = options.get("temperature")
    if isinstance(temperature, Tensor) and temperature.dim() == 2:
        options["temperature"] = temperature.reshape(-1)
    advantages = packed(case.advantages)
    if case.advantages.dim() == 1 and advantages.shape[0] == int(offsets[-1]):
        advantages = advantages.unsqueeze(1)  # as many tokens as sequences: [S] would look like one for each token
    return Case(
        packed(case.hidden_states),
        case.lm_head_weight,
        packed(case.completion_ids),
        advantages,
        packed(case.completion_mask),
        {**options, "cu_seqlens": offsets},
    )


def assert_same(got: Result, want: Result, *, tol: float, scale: float = 1.0) -> None:
    """Loss, scores, metrics and gradients agree within `tol`, relative to the size of what is wanted."""
    torch.testing.assert_close(got.out.loss, want.out.loss, rtol=tol, atol=tol, check_dtype=False)
    torch.testing.assert_close(got.out.per_token_logps, want.out.per_token_logps, rtol=tol, atol=tol, check_dtype=False)
    if got.out.entropies is not None and want.out.entropies is not None:
        torch.testing.assert_close(got.out.entropies, want.out.entropies, rtol=tol, atol=tol, check_dtype=False)
    metric_tol = max(tol, 1e-6)  # metrics are fp32
    assert got.out.metrics.keys() == want.out.metrics.keys()
    for name in got.out.metrics.keys() - {"gradient_tokens"}:
        torch.testing.assert_close(
            got.out.metrics[name], want.out.metrics[name], rtol=metric_tol, atol=metric_tol, equal_nan=True, msg=name
        )
    assert got.gradients().keys() == want.gradients().keys()
    for name, gradient in want.gradients().items():
        error = frobenius_error(got.gradients()[name], gradient)
        assert error <= tol * scale, f"{name}: relative error {error:.3g} > {tol * scale:.3g}"


def rounding_error_of_gradients(exact: Case, config: GRPOLossConfig, dtype: torch.dtype) -> dict[str, float]:
    """`rounding_errors` of the dlogits that the float64 reference has."""
    hidden = exact.hidden_states.reshape(-1, exact.hidden_states.shape[-1])
    weight = exact.lm_head_weight
    logits = hidden @ weight.T
    case = Case(logits.view(*exact.completion_ids.shape, -1), torch.eye(weight.shape[0], dtype=logits.dtype),
                exact.completion_ids, exact.advantages, exact.completion_mask, exact.options)  # fmt: skip
    dlogits = case.run(config, impl="reference").dhidden
    assert dlogits is not None
    return rounding_errors(dlogits.reshape(logits.shape), hidden, weight, dtype)
