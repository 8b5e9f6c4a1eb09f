"""`python -m examples.distillation`: a small policy learns from a better one, on its own samples.

The policy and the task are those of `examples.arithmetic`. The teacher is the same model after a longer supervised
training on worked answers. On-policy distillation needs no reward: the policy samples answers, and the loss is the KL
to the teacher over the whole vocabulary at each of their tokens. Source: GKD (arXiv 2306.13649).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see examples/arithmetic

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from examples.arithmetic.__main__ import positive_int
from examples.arithmetic.evaluate import evaluate
from examples.arithmetic.model import build_model, build_tokenizer
from examples.arithmetic.task import Split, demonstrate, split_questions
from examples.arithmetic.warmup import warm_up
from grpo_fused import GRPOLossConfig
from grpo_fused.rewards import exact_answer_reward, format_reward
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig
from grpo_fused.trainer.plot import plot_run

MAX_COMPLETION_LENGTH = 28


def worked(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The demonstrations, each with its calculation."""
    shown = []
    for row in rows:
        operator = "+" if "+" in row["prompt"] else "-"
        a, b = row["prompt"].removesuffix("=").split(operator)
        shown.append({**row, "completion": demonstrate(int(a), operator, int(b), worked=True)})
    return shown


class Study:
    """A teacher, and policies that learn from it or from rewards, all from the same start."""

    def __init__(self, *, seed: int = 0, quick: bool = False) -> None:
        self.seed, self.quick = seed, quick
        self.questions: Split = split_questions(200 if quick else 3000, 20 if quick else 400)
        self.tokenizer = build_tokenizer()
        demonstrations = self.questions.demonstrations
        self.start = self._supervised(demonstrations, steps=5 if quick else 300)
        self.teacher = self._supervised(worked(demonstrations), steps=5 if quick else 900)

    def _supervised(self, demonstrations: list[dict[str, str]], *, steps: int) -> Qwen2ForCausalLM:
        torch.manual_seed(self.seed)
        model = build_model(self.tokenizer, quick=self.quick)
        batch = 8 if self.quick else 64
        warm_up(
            model, self.tokenizer, demonstrations, steps=steps, batch_size=batch, learning_rate=2e-3, seed=self.seed
        )
        return model

    def accuracy(self, model: Any) -> float:
        """Of greedy answers to held-out questions."""
        return evaluate(
            model, self.tokenizer, self.questions.held_out, max_completion_length=MAX_COMPLETION_LENGTH
        ).accuracy

    def train(self, *, distil: bool, steps: int, out: Path | None = None) -> list[dict[str, Any]]:
        """Metrics of a run by distillation, or by rewards as in `examples.arithmetic`."""
        model = build_model(self.tokenizer, quick=self.quick)
        model.load_state_dict(self.start.state_dict())
        loss = GRPOLossConfig(beta=1.0, kl_estimator="exact") if distil else GRPOLossConfig(beta=0.001)
        config = GRPOTrainerConfig(
            steps=steps, prompts_per_step=4 if self.quick else 32, num_generations=2 if self.quick else 8,
            num_iterations=2, max_completion_length=MAX_COMPLETION_LENGTH, learning_rate=3e-4, warmup_steps=5,
            lr_scheduler_type="linear", eval_steps=max(steps // 8, 1), seed=self.seed, loss=loss,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, self.tokenizer, [format_reward, exact_answer_reward], self.questions.train, config,
            reward_weights=[0.0, 0.0] if distil else [0.2, 1.0],  # with weights of 0 rewards are only recorded
            evaluate=lambda: {"held_out_accuracy": self.accuracy(model)},
            reference_model=self.teacher if distil else None, output_dir=out, overwrite=True,
        )  # fmt: skip
        return trainer.train()


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the teacher and the policy, and draws the policy's curves."""
    parser = argparse.ArgumentParser(prog="python -m examples.distillation", description=__doc__)
    parser.add_argument("--steps", type=positive_int, help="default 40, or 2 with --quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--quick", action="store_true", help="a toy that only shows that it runs")
    given = parser.parse_args(argv)
    steps = given.steps or (2 if given.quick else 40)
    study = Study(seed=given.seed, quick=given.quick)
    print(f"held-out accuracy: policy {study.accuracy(study.start):.1%}, teacher {study.accuracy(study.teacher):.1%}")
    history = study.train(distil=True, steps=steps, out=given.out)
    last = history[-1]
    curves = plot_run(given.out, title="On-policy distillation on two-digit arithmetic")
    print(f"after {last['step']} steps: held-out accuracy {last['held_out_accuracy']:.1%}, KL {last['kl']:.4f}")
    print(f"wrote {given.out / 'metrics.jsonl'} and {curves}")


if __name__ == "__main__":
    main()
