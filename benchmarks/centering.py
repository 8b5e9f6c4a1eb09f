"""Does score centering help where the sampler is not the policy? Exact biases, and a small policy that learns.

    python -m benchmarks.centering --work runs/centering --out results.json    # again: it continues

`bias` takes random policies and samplers over a small vocabulary, and sums the update over all tokens that the sampler
may draw: its relative error against the gradient of the policy's expected reward, with no noise of sampling.

`runs` trains the policy of `benchmarks.learning` by REINFORCE with truncated importance sampling, with and without
centering, on rollouts of a sampler whose weights are 4 or 16 optimizer steps old, or rounded to fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.equivalence import describe, paired, values_of
from benchmarks.learning import BOUND
from benchmarks.seeds import Arm, Line, Seeds, Work, each_run, warmed_up
from benchmarks.small_policy import Recipe, accuracy, data_of, train
from benchmarks.study import Section, main
from grpo_fused import objectives

CAP = 2.0
RECIPE = Recipe(num_iterations=1, learning_rate=5e-4)
SAMPLERS: dict[str, dict[str, Any]] = {"lag_4": {"lag": 4}, "lag_16": {"lag": 16}, "fp8": {"fp8": True}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tis": {"name": "reinforce", "options": {"high": CAP}},
    "centered": {"name": "score_centered_tis", "options": {"support": "top_k", "cap": CAP}},
}
MEASURES = ("after", "reward")
"""Held-out accuracy after the run, and the mean reward of its rollouts."""

VOCAB, DRAWS, SPREAD = 16, 1000, 1.5
"""Tokens; pairs of a policy and a sampler; the standard deviation of the policy's logits."""
MISMATCHES = (0.1, 0.3, 1.0)
"""Standard deviations of what the sampler's logits have in addition."""
CAPS = (1.0, CAP, 1e6)
"""The last is no bound."""


def bias(mismatch: float, cap: float) -> dict[str, dict[str, float]]:
    """Mean relative errors of expected updates in the logits, uncentered (also with a baseline) and centered.

    The rewards of the tokens are 0 or 1, not all equal; the baseline is their mean under the sampler.
    """
    g = torch.Generator().manual_seed(0)
    z, noise, reward = (torch.randn(DRAWS, VOCAB, generator=g, dtype=torch.float64) for _ in range(3))
    reward = (reward > reward.mean(1, keepdim=True)).double()
    z = (SPREAD * z).requires_grad_()
    log_p = z.log_softmax(1)
    log_q = (z.detach() + mismatch * noise).log_softmax(1)
    q = log_q.exp()
    (exact,) = torch.autograd.grad((log_p.exp() * reward).sum(), z, retain_graph=True)
    plain, centered = objectives.reinforce(high=cap), objectives.score_centered_tis(cap=cap)
    every = torch.arange(0, VOCAB * log_p.numel() + 1, VOCAB)
    others = {
        "alternative_logps": log_p.repeat_interleave(VOCAB, 0).reshape(-1), "alternative_offsets": every,
        "sampling_alternative_logps": log_q.repeat_interleave(VOCAB, 0).reshape(-1),
    }  # fmt: skip

    def errors(objective: Callable[..., Tensor], advantages: Tensor, **more: Tensor) -> dict[str, float]:
        losses = objective(
            log_p.reshape(-1), None, advantages=advantages.reshape(-1),
            sampling_per_token_logps=log_q.reshape(-1), **more,
        )  # fmt: skip
        (update,) = torch.autograd.grad(-(q.reshape(-1) * losses).sum(), z, retain_graph=True)
        return describe(((update - exact).norm(dim=1) / exact.norm(dim=1)).tolist())

    less_mean = reward - (q * reward).sum(1, keepdim=True)
    return {
        "tis": errors(plain, reward), "tis_baseline": errors(plain, less_mean),
        "centered": errors(centered, reward, **others),
    }  # fmt: skip


def section_of(runs: list[dict[str, Any]]) -> Section:
    """The biases, the runs, and the differences of centered from uncentered runs of a sampler and a seed."""
    arms: dict[str, Any] = {}
    against: dict[str, Any] = {}
    for sampler in SAMPLERS:
        rows = [run for run in runs if run["sampler"] == sampler]
        values = {m: values_of(rows, "objective", m) for m in (*MEASURES, "sampler_kl")}
        arms[sampler] = {
            name: {m: describe(list(by_name[name].values())) for m, by_name in values.items()}
            for name in OBJECTIVES
            if name in values["after"]
        }
        pairs = {m: paired(values[m], {"centered": "tis"}, BOUND) for m in MEASURES}
        if all(pairs.values()):
            against[sampler] = {m: pair["centered"] for m, pair in pairs.items()}
    return {
        "recipe": asdict(RECIPE), "held_out": len(data_of(RECIPE.task).held_out), "bound": BOUND, "cap": CAP,
        "before": describe(list({run["seed"]: run["before"] for run in runs}.values())) if runs else None,
        "bias": {"vocab": VOCAB, "draws": DRAWS, "spread": SPREAD, "rows": [
            {"mismatch": mismatch, "cap": cap} | bias(mismatch, cap) for mismatch in MISMATCHES for cap in CAPS
        ]},
        "arms": arms, "against_tis": against, "runs": runs,
    }  # fmt: skip


def trained(arm: Arm, seed: int, model: Any) -> Line:
    """Our trainer with a sampler and an objective."""
    recipe = replace(RECIPE, objective=OBJECTIVES[arm["objective"]], **SAMPLERS[arm["sampler"]])
    found = train("ours", recipe, seed, model)
    kl = [step["sampler_kl"] for step in found.metrics]
    return {
        "after": accuracy(found.model, recipe), "reward": fmean(found.rewards), "sampler_kl": fmean(kl),
        "rewards": found.rewards, "kl": kl,
    }  # fmt: skip


def run(seeds: Seeds = 5, work: Work = Path("runs/centering")) -> Iterator[Section]:
    """The section `centering`, after each run."""
    arms = [({"sampler": sampler, "objective": name}, seeds) for sampler in SAMPLERS for name in OBJECTIVES]
    yield from each_run(work, warmed_up(RECIPE), arms, trained, section_of)


if __name__ == "__main__":
    main("centering")
