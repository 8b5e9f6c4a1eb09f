"""Whether a small policy learns as well in our trainers as in stock TRL: many seeds, and an equivalence test.

    python -m benchmarks.learning --work runs/learning --out results.json    # 20 minutes on one core

Four arms: our trainer, `FusedGRPOTrainer`, TRL's `GRPOTrainer` after `patch_trl()`, and stock. The arms of a seed begin
with the same weights and get the same problems in the same order; each samples with its own generator
(`benchmarks.small_policy`, `benchmarks.seeds`).

`replay` checks the options: our trainer gets the completions that stock TRL sampled, and must take the same steps.
A schedule, a normaliser, a clip or a decay that differs shows there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmarks.equivalence import statistics_of
from benchmarks.seeds import Arm, Line, Seeds, Work, each_run, warmed_up
from benchmarks.small_policy import ARMS, Recipe, accuracy, data_of, train, weights
from benchmarks.study import Section, main

BOUND = 0.02
"""The smallest difference in accuracy that counts."""
REPLAYED_SEEDS, REPLAYED_STEPS = 3, 10


def measure(recipe: Recipe, seeds: dict[str, int], work: Path) -> Iterator[Section]:
    """A section after each run; `seeds` has the number of each arm."""

    def trained(arm: Arm, seed: int, model: Any) -> Line:
        if arm["arm"] == "replay":
            return {"difference": replay(recipe, seed, model)}
        found = train(arm["arm"], recipe, seed, model)
        return {
            "after": accuracy(found.model, recipe),
            "rewards": [round(value, 4) for value in found.rewards],
            "lengths": [round(value, 2) for value in found.lengths],
        }

    numbers = seeds | {"replay": min(REPLAYED_SEEDS, max(seeds.values()))}
    arms = [({"arm": arm}, number) for arm, number in numbers.items()]
    yield from each_run(work, warmed_up(recipe), arms, trained, partial(section_of, recipe))


def replay(recipe: Recipe, seed: int, model: Any) -> float:
    """How far our steps on stock TRL's completions are from its own, relative to the way that its weights went."""
    short = Recipe(**asdict(recipe) | {"steps": REPLAYED_STEPS})
    theirs = train("trl", short, seed, model)
    ours = train("ours", short, seed, model, replay=theirs.completion_ids)
    if ours.rewards != theirs.rewards:
        raise RuntimeError(f"the rewards of a replay must be the recorded ones {theirs.rewards}; got {ours.rewards}")
    way = weights(theirs.model) - weights(model)
    return float((weights(ours.model) - weights(theirs.model)).norm() / way.norm())


def section_of(recipe: Recipe, runs: list[dict[str, Any]]) -> Section:
    """The runs and their statistics."""
    return {
        "recipe": asdict(recipe), "held_out": len(data_of(recipe.task).held_out),
        "replay": [run["difference"] for run in runs if "difference" in run], "replayed_steps": REPLAYED_STEPS,
        **statistics_of([run for run in runs if "after" in run], BOUND),
    }  # fmt: skip


def run(
    seeds: Seeds = 20,
    most: Annotated[int, "of our trainer and of stock TRL, which differ in how they sample"] = 40,
    work: Work = Path("runs/learning"),
) -> Iterator[Section]:
    """The section `learning`."""
    every = dict.fromkeys(ARMS, seeds) | dict.fromkeys(("ours", "trl"), max(seeds, most))
    yield from measure(Recipe(), every, work)


if __name__ == "__main__":
    main("learning")
