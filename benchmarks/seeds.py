"""Runs of a small policy over many seeds, for the studies of learning.

Every run is a line of `WORK/runs.jsonl`; a program continues after the last one. With `--seeds 0` it trains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from benchmarks.results import machine
from benchmarks.small_policy import Recipe, accuracy, start
from benchmarks.study import Section

Seeds = Annotated[int, "0, 1, ..., of each arm"]
Work = Annotated[Path, "folder of runs.jsonl"]
Line = dict[str, Any]
Arm = dict[str, str]
"""Fields of a line that tell an arm from the others."""


def each_run(
    work: Path,
    begin: Callable[[int], tuple[Any, float]],
    arms: list[tuple[Arm, int]],
    trained: Callable[[Arm, int, Any], Line],
    section_of: Callable[[list[Line]], Section],
) -> Iterator[Section]:
    """A section after each run that `runs.jsonl` lacks, and one of all.

    Args:
        work: Folder of `runs.jsonl`.
        begin: A seed to the model with which all its arms begin, and the accuracy of that.
        arms: Each with its number of seeds, which begin at 0.
        trained: An arm, a seed and the model where it begins to the results of a run.
        section_of: Lines to a section.
    """
    work.mkdir(parents=True, exist_ok=True)
    file = work / "runs.jsonl"
    for seed in range(max(number for _, number in arms)):
        done = [run for run in read_runs(file) if run["seed"] == seed]
        todo = [a for a, number in arms if seed < number and not any(a.items() <= run.items() for run in done)]
        if not todo:
            continue
        model, before = begin(seed)
        for arm in todo:
            line = {"seed": seed, **arm, "commit": machine()["commit"], "before": before, **trained(arm, seed, model)}
            with file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")
            print({name: value for name, value in line.items() if not isinstance(value, list)}, flush=True)
            yield section_of(read_runs(file))
    yield section_of(read_runs(file))


def warmed_up(recipe: Recipe) -> Callable[[int], tuple[Any, float]]:
    """A seed to the policy after the recipe's warm-up, and its accuracy."""

    def begin(seed: int) -> tuple[Any, float]:
        model = start(recipe.task, seed, recipe.warmup)
        return model, accuracy(model, recipe)

    return begin


def read_runs(file: Path) -> list[Line]:
    """The runs that a file of JSON lines has; none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
