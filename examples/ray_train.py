"""The trainer as the loop of a Ray `TorchTrainer`: metrics and checkpoints go to Ray; after a lost worker it resumes.

    pip install 'ray[train]'
    python -m examples.ray_train --workers 2 --storage runs/ray    # a toy model, a minute on two CPU cores

Ray starts the processes and their process group; `GRPOTrainer` finds both, as under torchrun.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from accelerate import Accelerator
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from examples.arithmetic.model import build_model, build_tokenizer
from examples.arithmetic.task import split_questions
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig


class RayGRPOTrainer(GRPOTrainer):
    """Reports to Ray, which needs a report of every worker."""

    def step(self) -> dict[str, float]:
        """One step; its metrics are reported. If Ray will take a node away, the run stops with a checkpoint."""
        self.reported = {"step": self.steps_done + 1} | super().step()
        ray.train.report(self.reported)
        if ray.train.get_preemption_info() is not None:
            self.stop()
        return self.reported

    def save(self) -> Path | None:
        """A checkpoint in `output_dir`, and a copy of it in Ray's storage."""
        path = super().save()
        if path is not None:
            whole = Checkpoint.from_directory(path) if self.accelerator.is_main_process else None
            ray.train.report(self.reported, checkpoint=whole)
        return path


def digits(completions: list[str], **columns: object) -> list[float]:
    """The share of digits, a reward that an untrained model can increase."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def build(options: dict[str, Any], trainer: type[GRPOTrainer]) -> GRPOTrainer:
    """The run, the same for Ray and torchrun."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = GRPOTrainerConfig(
        steps=options["steps"],
        prompts_per_step=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-3,
        save_steps=1,
    )
    # output_dir: on storage that all nodes share. After a failure Ray starts the loop again, and it goes on from there
    return trainer(
        build_model(tokenizer, quick=True), tokenizer, [digits], split_questions(1, 1).train[:64], config,
        output_dir=options["output_dir"], resume=True, accelerator=Accelerator(cpu=not torch.cuda.is_available()),
    )  # fmt: skip


def train_loop(options: dict[str, Any]) -> None:
    """Runs in each worker."""
    build(options, RayGRPOTrainer).train()


def main() -> None:
    """Runs the example from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="folder of checkpoints; a new one")
    arguments = parser.parse_args()
    storage = arguments.storage.resolve()
    result = TorchTrainer(
        train_loop,
        train_loop_config={"steps": arguments.steps, "output_dir": str(storage / "output")},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(name="ray", storage_path=str(storage), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(f"step {result.metrics['step']}: reward {result.metrics['reward']:.3f}; {result.checkpoint.path}")


if __name__ == "__main__":
    main()
