"""On-policy distillation beside GRPO, from the same start: held-out accuracy and KL to the teacher by step.

    python -m benchmarks.distillation --out results.json     # about ten minutes on two cores

The runs are those of `examples.distillation`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.study import Section, main
from examples.distillation import Study

STEPS = 40
RECORDED = ("held_out_accuracy", "kl", "reward", "entropy")


def run(seeds: int = 3) -> Iterator[Section]:
    """The section `distillation`, after each run."""
    runs = []
    for seed in range(seeds):
        study = Study(seed=seed)
        teacher = study.accuracy(study.teacher)
        for distil in (True, False):
            history = study.train(distil=distil, steps=STEPS)
            rows = [{name: row[name] for name in ("step", *RECORDED) if name in row} for row in history]
            runs.append({"seed": seed, "distil": distil, "teacher_accuracy": teacher, "metrics": rows})
            yield {"steps": STEPS, "runs": runs}


if __name__ == "__main__":
    main("distillation")
