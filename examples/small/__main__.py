"""`python -m examples.small countdown`: prepare a small model, train it by a recipe, draw its curves."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.small.prepare import prepare
from grpo_fused.__main__ import main as grpo_fused
from grpo_fused.trainer.metrics import read_jsonl

HERE = Path(__file__).parent
RECIPES = sorted(path.stem for path in HERE.glob("*.yaml"))


def main(argv: list[str] | None = None) -> None:
    """Runs one recipe, or all."""
    parser = argparse.ArgumentParser(prog="python -m examples.small", description=__doc__)
    parser.add_argument("recipe", choices=[*RECIPES, "all"])
    arguments = parser.parse_args(argv)
    folder = Path("runs/small")
    prepare(folder)
    for name in RECIPES if arguments.recipe == "all" else [arguments.recipe]:
        grpo_fused(["train", "--config", str(HERE / f"{name}.yaml"), "--overwrite"])
        grpo_fused(["plot", str(folder / name)])
        rewards = [row["reward"] or 0.0 for row in read_jsonl(folder / name / "metrics.jsonl") if "reward" in row]
        print(
            f"{name}: reward {sum(rewards[:5]) / 5:.3f} in the first five steps, "
            f"{sum(rewards[-5:]) / 5:.3f} in the last"
        )


if __name__ == "__main__":
    main()
