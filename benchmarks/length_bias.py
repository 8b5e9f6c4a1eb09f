"""Dr. GRPO's length bias (arXiv 2503.20783): the weight of a token by the length of its completion, and what it does.

    python -m benchmarks.length_bias --work runs/length --out results.json

`weights` is measured on the fused loss: all tokens of a batch are alike but for the length of their completion, so
that the norms of their gradients are in the proportion of their weights.

`runs` trains a small policy whose completions give an answer and may then go on for as long as they like: only the
answer is judged. A loss that divides by the length of the completion punishes a wrong one less for each token if it is
long, and rewards a right one more if it is short. A loss with one divisor for all does neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.equivalence import compare, describe
from benchmarks.seeds import Arm, Line, Seeds, Work, each_run, warmed_up
from benchmarks.small_policy import Recipe, train
from benchmarks.study import Section, main
from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss

RECIPE = Recipe(task="answer_first", warmup=150, max_completion_length=20)
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": RECIPE.max_completion_length},
}
LENGTHS = (1, 2, 4, 8, 16)
LAST = 10
"""Rollouts at the end of a run whose lengths are averaged. The first one is the same for all losses of a seed."""
BOUND = 1.0
"""The smallest difference in length that counts, in tokens."""


def token_weights(loss: dict[str, Any]) -> list[float]:
    """The weight of a token in completions of `LENGTHS`, relative to that in the shortest one."""
    rows, width, hidden, vocab = len(LENGTHS), max(LENGTHS), 16, 32
    g = torch.Generator().manual_seed(0)
    state = torch.randn(hidden, generator=g).expand(rows, width, hidden).clone().requires_grad_()
    fused_linear_grpo_loss(
        state,
        torch.randn(vocab, hidden, generator=g),
        torch.zeros(rows, width, dtype=torch.int64),
        torch.ones(rows),
        torch.arange(width) < torch.tensor(LENGTHS)[:, None],
        config=GRPOLossConfig(**loss),
    ).loss.backward()
    norms = state.grad[:, 0].norm(dim=-1)
    return (norms / norms[0]).tolist()


def change(values: list[float | None]) -> float | None:
    """How much longer the completions of the last rollouts are than those of the first one; None if either has none."""
    first, last = values[0], [value for value in values[-LAST:] if value is not None]
    return None if first is None or not last else fmean(last) - first


def section_of(runs: list[dict[str, Any]]) -> Section:
    """Weights, runs, and the change of the lengths of right and wrong completions against Dr. GRPO's."""
    section: Section = {
        "recipe": asdict(RECIPE), "lengths": LENGTHS, "weights": {loss: token_weights(LOSSES[loss]) for loss in LOSSES},
        "runs": runs, "bound": BOUND, "last": LAST,
    }  # fmt: skip
    for kind in ("right", "wrong"):
        changes = {(run["seed"], run["loss"]): change(run[kind]) for run in runs}
        seeds = sorted({seed for seed, _ in changes if all(changes.get((seed, loss)) is not None for loss in LOSSES)})
        if len(seeds) > 1:
            values = {loss: [changes[seed, loss] or 0.0 for seed in seeds] for loss in LOSSES}
            section[kind] = {
                "seeds": seeds,
                "change": {
                    loss: describe(values[loss]) | compare(values[loss], [0.0] * len(seeds), BOUND) for loss in LOSSES
                },
                "against_dr_grpo": {
                    loss: compare(values[loss], values["dr_grpo"], BOUND) for loss in LOSSES if loss != "dr_grpo"
                },
            }
    return section


def trained(arm: Arm, seed: int, model: Any) -> Line:
    """Our trainer with a loss."""
    found = train("ours", replace(RECIPE, loss=LOSSES[arm["loss"]]), seed, model)
    return {"rewards": found.rewards, "right": found.lengths_right, "wrong": found.lengths_wrong}


def run(seeds: Seeds = 10, work: Work = Path("runs/length")) -> Iterator[Section]:
    """The section `length_bias`, after each run."""
    yield from each_run(work, warmed_up(RECIPE), [({"loss": loss}, seeds) for loss in LOSSES], trained, section_of)


if __name__ == "__main__":
    main("length_bias")
