"""Whether a small policy learns as well in our trainers as in stock TRL: many seeds, and an equivalence test.

    python -m benchmarks.learning --work runs/learning --out results.json    # 20 minutes on one core

Four arms: our trainer, `FusedGRPOTrainer`, TRL's `GRPOTrainer` after `patch_trl()`, and stock. The arms of a seed begin
with the same weights and get the same problems in the same order; each samples with its own generator
(`benchmarks.small_policy`). Every run is a line of `WORK/runs.jsonl`; the program continues after the last one.

`replay` checks the options: our trainer gets the completions that stock TRL sampled, and must take the same steps.
A schedule, a normaliser, a clip or a decay that differs shows there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from benchmarks.equivalence import statistics_of
from benchmarks.results import machine
from benchmarks.small_policy import ARMS, Recipe, accuracy, add_run, data_of, read_runs, start, train, weights
from benchmarks.study import Section, main

BOUND = 0.02
"""The smallest difference in accuracy that counts."""
REPLAYED_SEEDS, REPLAYED_STEPS = 3, 10


def measure(recipe: Recipe, seeds: dict[str, int], work: Path, first: int, missing: bool) -> Iterator[Section]:
    """A section after each run.

    Args:
        recipe: Of all runs.
        seeds: Arm to its number of seeds, which begin at 0.
        work: Folder of `runs.jsonl`.
        first: Seeds below are left to another process.
        missing: Whether to train what `runs.jsonl` lacks.
    """
    work.mkdir(parents=True, exist_ok=True)
    file = work / "runs.jsonl"
    for seed in range(first, max(seeds.values()) if missing else 0):
        done = {(run["seed"], run["arm"]) for run in read_runs(file)}
        todo = [arm for arm, number in seeds.items() if seed < number and (seed, arm) not in done]
        if seed < REPLAYED_SEEDS and (seed, "replay") not in done:
            todo.append("replay")
        if not todo:
            continue
        model = start(recipe.task, seed, recipe.warmup)
        before = accuracy(model, recipe)
        for arm in todo:
            if arm == "replay":
                result: dict[str, Any] = {"difference": replay(recipe, seed, model)}
            else:
                trained = train(arm, recipe, seed, model)
                result = {
                    "before": before, "after": accuracy(trained.model, recipe),
                    "rewards": [round(value, 4) for value in trained.rewards],
                    "lengths": [round(value, 2) for value in trained.lengths],
                }  # fmt: skip
            add_run(file, {"seed": seed, "arm": arm, "commit": machine()["commit"], **result})
            print(f"{recipe.task}, seed {seed}, {arm}: {result.get('after', result.get('difference'))}", flush=True)
            yield section_of(recipe, read_runs(file))
    yield section_of(recipe, read_runs(file))


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
    seeds: Annotated[int, "0, 1, ..., of all arms"] = 20,
    most: Annotated[int, "of our trainer and of stock TRL, which differ in how they sample"] = 40,
    first: Annotated[int, "the first seed; those below are left to another process"] = 0,
    missing: Annotated[bool, "train what runs.jsonl lacks"] = True,
    work: Annotated[Path, "folder of runs.jsonl"] = Path("runs/learning"),
) -> Iterator[Section]:
    """The section `learning`."""
    every = dict.fromkeys(ARMS, seeds) | dict.fromkeys(("ours", "trl"), max(seeds, most))
    yield from measure(Recipe(), every, work, first, missing)


if __name__ == "__main__":
    main("learning")
