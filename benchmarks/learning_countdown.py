"""The comparison of `benchmarks.learning` on a task and a verifier that are not ours: reasoning-gym's Countdown.

    python -m benchmarks.learning_countdown --work runs/countdown --out results.json

The policy is a small Llama from random weights; the arms are our trainer and stock TRL.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.learning import measure
from benchmarks.seeds import Seeds, Work
from benchmarks.small_policy import Recipe
from benchmarks.study import Section, main

COUNTDOWN = Recipe(task="countdown", warmup=600, steps=80, max_completion_length=12, learning_rate=4e-4)


def run(seeds: Seeds = 5, work: Work = Path("runs/countdown")) -> Iterator[Section]:
    """The section `learning_countdown`."""
    yield from measure(COUNTDOWN, dict.fromkeys(("ours", "trl"), seeds), work)


if __name__ == "__main__":
    main("learning_countdown")
