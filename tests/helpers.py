"""Configurations for the problems of `grpo_fused.testing`, and comparisons of results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from grpo_fused import CandidateSets, GRPOLossConfig, fused_linear_logprobs
from grpo_fused.testing import GRADIENT_BOUND, ROUNDINGS, Problem, Result, frobenius_error, make_problem

Case, make_case, pack = Problem, make_problem, Problem.packed

ENGINES = ["chunked", "native", "triton"]
LEVELS = ("token", "sequence", "sequence_token")
PPO = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def config_id(config: GRPOLossConfig) -> str:
    """`dapo-sequence-beta=0.1`: the loss type, its level, and other options that differ from the defaults."""
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
    """A configuration with the options that its loss type requires."""
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
        bounds = {"epsilon": 0.1, "epsilon_high": 0.3} if loss_type == "gmpo" else {}
        configs.append(make_config(loss_type, beta=0.1, kl_estimator="k2", **bounds))
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


def with_sets(case: Case, *, sizes: tuple[int, ...] = (1, 2, 3, 8), whole: float = 0.0, seed: int = 0) -> Case:
    """The case with random sets that hold the targets, some of them the whole vocabulary; log-probs are of the sets."""
    g = torch.Generator().manual_seed(seed)
    ids, V = case.completion_ids.reshape(-1), case.lm_head_weight.shape[0]
    mask = torch.zeros(len(ids), V, dtype=torch.bool)
    for n, target in enumerate(ids.tolist()):
        size = min(sizes[int(torch.randint(len(sizes), (1,), generator=g))], V)
        mask[n, torch.randperm(V, generator=g)[:size]] = True
        if not mask[n, target]:
            mask[n, mask[n].nonzero()[0]] = False
            mask[n, target] = True
        mask[n] |= torch.rand((), generator=g) < whole
    sets = CandidateSets.from_mask(mask)
    problem = replace(case, options={**case.options, "candidates": sets})
    logp = set_scores(problem, "reference").double()
    alone = (sets.sizes == 1).view(logp.shape)

    def near(spread: float) -> torch.Tensor:
        return torch.where(alone, 0.0, logp + spread * torch.randn(logp.shape, generator=g, dtype=torch.float64))

    given = {name: near(0.25) for name in problem.options if name.endswith("_logps")}
    return replace(problem, options={**problem.options, **given})


def set_scores(case: Case, impl: Any) -> torch.Tensor:
    """Log-probs of a case that may have candidate sets."""
    names = ("lm_head_bias", "temperature", "logit_scale", "softcap", "candidates")
    options = {name: x for name, x in case.options.items() if name in names}
    hidden, weight = case.hidden_states, case.lm_head_weight
    with torch.no_grad():
        return fused_linear_logprobs(
            hidden, weight, case.completion_ids, case.completion_mask, impl=impl, **options
        ).logps


class Precision(NamedTuple):
    """The precision of the comparison of an engine with the float64 reference."""

    dtype: torch.dtype
    """the widest dtype that it takes"""
    tol: float


PRECISION = {
    impl: Precision(dtype, GRADIENT_BOUND[dtype])
    for dtype, impls in ((torch.float64, ("reference", "chunked")), (torch.float32, ("native", "triton")))
    for impl in impls
}


def assert_engine_matches(impl: str, case: Case, config: GRPOLossConfig, *, variants: list[dict[str, Any]]) -> Result:
    """The engine, in its widest dtype and with each of the options, agrees with the float64 reference."""
    dtype, tol = PRECISION[impl]
    case = case.to(dtype)
    want = case.to(torch.float64).run(config, impl="reference")
    of_frozen = want._replace(dweight=None, dbias=None)
    for options in variants:
        assert_same(case.run(config, impl=impl, **options), of_frozen if options.get("frozen") else want, tol=tol)
    return want


def assert_same(got: Result, want: Result, *, tol: float, scale: float = 1.0) -> None:
    """Loss, scores, metrics and gradients agree within `tol`, relative to the size of the expected result."""
    torch.testing.assert_close(got.out.loss, want.out.loss, rtol=tol, atol=tol, check_dtype=False)
    torch.testing.assert_close(got.out.per_token_logps, want.out.per_token_logps, rtol=tol, atol=tol, check_dtype=False)
    if got.out.entropies is not None and want.out.entropies is not None:
        torch.testing.assert_close(got.out.entropies, want.out.entropies, rtol=tol, atol=tol, check_dtype=False)
    metric_tol = max(tol, 1e-6)  # metrics are fp32
    assert got.out.metrics.keys() == want.out.metrics.keys()
    assert {x.dtype for x in (*got.out.metrics.values(), *want.out.metrics.values())} == {torch.float32}
    for name in got.out.metrics.keys() - {"gradient_tokens"}:
        torch.testing.assert_close(
            got.out.metrics[name], want.out.metrics[name], rtol=metric_tol, atol=metric_tol, equal_nan=True, msg=name
        )
    assert got.gradients().keys() == want.gradients().keys()
    for name, gradient in want.gradients().items():
        error = frobenius_error(got.gradients()[name], gradient)
        assert error <= tol * scale, f"{name}: relative error {error:.3g} > {tol * scale:.3g}"


def rounding_error_of_gradients(exact: Case, config: GRPOLossConfig, dtype: torch.dtype) -> dict[str, float]:
    """Errors of the best gradients that `dtype` allows, of which `Problem.bounds` are a multiple."""
    bounds = exact.bounds(config, dtype)
    return {name: bounds[name] / ROUNDINGS for name in ("dhidden", "dweight")}
