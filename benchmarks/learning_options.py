"""What options of our trainer do to the accuracy of a small policy: each against a baseline, over the same seeds.

    python -m benchmarks.learning_options --work runs/options --out results.json

Policy, task and recipe are those of `benchmarks.learning`; `lora_int8` needs torchao.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.equivalence import describe, paired, values_of
from benchmarks.learning import BOUND
from benchmarks.seeds import Arm, Line, Seeds, Work, each_run, warmed_up
from benchmarks.small_policy import Recipe, accuracy, data_of, train
from benchmarks.study import Section, main

LENGTH = Recipe().max_completion_length
LORA_RATE = 1e-3
"""Of adapters; on seed 0, 5e-4 and 1e-3 gave 68.7 %, 2e-3 64.5 % and all weights at 2e-4 67.3 %."""


class Option(NamedTuple):
    """A row of the table."""

    changes: dict[str, Any]
    """of the recipe"""
    baseline: str | None = "dapo"
    """what it is compared with"""


OPTIONS = {
    "dapo": Option({}, None),
    "grpo": Option({"loss": {"loss_type": "grpo"}}),
    "dr_grpo": Option({"loss": {"loss_type": "dr_grpo", "max_completion_length": LENGTH}}),
    "cispo": Option({"loss": {"loss_type": "cispo", "epsilon_high": 5.0}}),
    "sapo": Option({"loss": {"loss_type": "sapo"}}),
    "gspo": Option({"loss": {"loss_type": "grpo", "importance_sampling_level": "sequence"}}, "grpo"),
    "share_prompts": Option({"share_prompts": True}),
    "bf16": Option({"bf16": True}),
    "lora": Option({"lora": 16, "learning_rate": LORA_RATE}),
    "lora_int8": Option({"lora": 16, "learning_rate": LORA_RATE, "int8_head": True}),
    "sets": Option({"top_p": 0.9}, None),
    "no_sets": Option({"top_p": 0.9, "keeps_sets": False}, "sets"),
}
"""Name to what it changes; `sets` and `no_sets` sample by top-p."""


def section_of(runs: list[dict[str, Any]]) -> Section:
    """The runs; the mean and spread of each option; its differences from its baseline, over the seeds of both."""
    after = values_of(runs, "option")
    baselines = {name: option.baseline for name, option in OPTIONS.items() if option.baseline is not None}
    return {
        "recipe": asdict(Recipe()), "held_out": len(data_of("sums").held_out), "bound": BOUND,
        "options": {name: option._asdict() for name, option in OPTIONS.items()},
        "arms": {name: describe(list(after[name].values())) for name in OPTIONS if name in after},
        "against": paired(after, baselines, BOUND), "runs": runs,
    }  # fmt: skip


def trained(arm: Arm, seed: int, model: Any) -> Line:
    """Our trainer with an option."""
    recipe = replace(Recipe(), **OPTIONS[arm["option"]].changes)
    return {"after": accuracy(train("ours", recipe, seed, model).model, recipe)}


def run(seeds: Seeds = 10, work: Work = Path("runs/options")) -> Iterator[Section]:
    """The section `learning_options`, after each run."""
    arms = [({"option": option}, seeds) for option in OPTIONS]
    yield from each_run(work, warmed_up(Recipe()), arms, trained, section_of)


if __name__ == "__main__":
    main("learning_options")
