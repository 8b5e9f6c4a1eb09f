"""On-policy distillation beside GRPO, from the same start: held-out accuracy and KL to the teacher by step.

    python -m benchmarks.distillation --out results.json     # about ten minutes on two cores

The runs are those of `examples.distillation`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
from pathlib import Path

from benchmarks.results import machine, record
from examples.distillation import Study

RECORDED = ("held_out_accuracy", "kl", "reward", "entropy")


def main() -> None:
    """Train, print, and put the section `distillation` into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="a toy that only shows that it runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine("cpu")
    runs = []
    for seed in range(given.seeds):
        study = Study(seed=seed, quick=given.quick)
        teacher = study.accuracy(study.teacher)
        for distil in (True, False):
            history = study.train(distil=distil, steps=given.steps)
            rows = [{name: row[name] for name in ("step", *RECORDED) if name in row} for row in history]
            runs.append({"seed": seed, "distil": distil, "teacher_accuracy": teacher, "metrics": rows})
            kind, first, last = "distillation" if distil else "GRPO", rows[0], rows[-1]
            print(
                f"seed {seed}, {kind}: accuracy {first['held_out_accuracy']:.3f} to {last['held_out_accuracy']:.3f} "
                f"(teacher {teacher:.3f})",
                flush=True,
            )
    if given.out is not None:
        record("distillation", {"steps": given.steps, "runs": runs}, out=given.out)


if __name__ == "__main__":
    main()
