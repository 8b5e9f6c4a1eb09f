"""On-policy distillation beside GRPO, from the same start: held-out accuracy and KL to the teacher by step.

    python -m benchmarks.distillation --out results.json     # about ten minutes on two cores

The runs are those of `examples.distillation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from benchmarks.study import Section, main
from examples.distillation import Study

RECORDED = ("held_out_accuracy", "kl", "reward", "entropy")


def run(
    seeds: int = 3, steps: int = 40, quick: Annotated[bool, "a toy that only shows that it runs"] = False
) -> Iterator[Section]:
    """The section `distillation`, after each run."""
    runs = []
    for seed in range(seeds):
        study = Study(seed=seed, quick=quick)
        teacher = study.accuracy(study.teacher)
        for distil in (True, False):
            history = study.train(distil=distil, steps=steps)
            rows = [{name: row[name] for name in ("step", *RECORDED) if name in row} for row in history]
            runs.append({"seed": seed, "distil": distil, "teacher_accuracy": teacher, "metrics": rows})
            yield {"steps": steps, "runs": runs}


if __name__ == "__main__":
    main("distillation")
