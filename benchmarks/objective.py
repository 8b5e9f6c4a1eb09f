"""Forms of the same step, side by side: the built-in dapo, a custom objective, and the KL penalty by two estimators.

    python -m benchmarks.objective --out results.json        # bf16, N = 1024, H = 896, V = 151936
    python -m benchmarks.objective --quick

Forward + backward of the loss. A step with the k3 estimator also scores the tokens under the reference; one with the
exact KL does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.problem import EPSILON, loss_problem, old_of, train
from benchmarks.study import Section, main
from benchmarks.timing import Calls, bare_gemms, times_by_round, with_ratios
from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss, fused_linear_logprobs, fused_linear_objective, objectives

BETA = 0.04


def calls_of(B: int, T: int, H: int, V: int) -> tuple[Calls, dict[str, float]]:
    """The calls, and their losses."""
    p = loss_problem(B, T, H, V, torch.bfloat16, "cpu")
    hidden, weight, ids, mask = p.hidden_states, p.lm_head_weight, p.completion_ids, p.completion_mask
    old = old_of(p)
    reference = (hidden.detach() + 0.05 * torch.randn_like(hidden), weight.detach().clone())
    advantages = p.advantages.reshape(-1, 1).expand(B, T).contiguous()
    inputs = {"advantages": advantages, "old_per_token_logps": old, "weights": objectives.token_weights(mask, "dapo")}

    def loss(**options: Any) -> torch.Tensor:
        return fused_linear_grpo_loss(hidden, weight, ids, p.advantages, mask, old_per_token_logps=old, **options).loss

    def custom() -> torch.Tensor:
        function = objectives.vanilla(epsilon=EPSILON, dual_clip=None)
        return fused_linear_objective(hidden, weight, ids, function, mask, inputs=inputs).loss

    def k3() -> torch.Tensor:
        with torch.no_grad():
            ref = fused_linear_logprobs(*reference, ids, mask).logps
        return loss(ref_per_token_logps=ref, config=GRPOLossConfig(beta=BETA))

    def exact() -> torch.Tensor:
        config = GRPOLossConfig(beta=BETA, kl_estimator="exact")
        return loss(ref_hidden_states=reference[0], ref_lm_head_weight=reference[1], config=config)

    forms = {"built-in": loss, "custom": custom, "k3": k3, "exact KL": exact}

    def step(form: Any) -> float:
        return float(train(p, lambda _: form()))

    calls = {name: partial(step, form) for name, form in forms.items()}
    return calls, {name: call() for name, call in calls.items()}


def run(rounds: int = 9, quick: bool = False) -> Iterator[Section]:
    """The section `objective`."""
    B, T, H, V = (2, 32, 64, 2000) if quick else (4, 256, 896, 151936)
    forms, losses = calls_of(B, T, H, V)
    if not abs(losses["custom"] - losses["built-in"]) <= 1e-5:
        raise SystemExit(f"the custom objective must be the built-in one; got {losses}; nothing is timed")
    calls = bare_gemms(B * T, H, V, torch.bfloat16, "cpu") | forms
    times = times_by_round(calls, "cpu", rounds=rounds)
    ratios = [custom / built_in for custom, built_in in zip(times["custom"], times["built-in"], strict=True)]
    yield {
        "N": B * T, "H": H, "V": V, "losses": losses, "calls": with_ratios(times, "bare-3"),
        "custom_over_built_in": float(torch.tensor(ratios).median()),
    }  # fmt: skip


if __name__ == "__main__":
    main("objective")
