"""Training on rollouts by top-p, with the candidate sets and without: rewards, clip ratios, importance ratios.

    python -m benchmarks.truncation --out results.json    # about five minutes on two cores

A small policy learns which operator gives a target from two numbers (`examples.small`, recipe `countdown`). It samples
with top-p and takes two optimizer steps on each rollout. The sampler's own log-probs correct the loss, like those of a
rollout engine. With the sets the policy is scored by the distribution that was sampled, so the ratios between the
two are 1. Without, they are those of another distribution.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.study import Section, main
from examples.small.prepare import make_puzzles, prepare
from grpo_fused.rewards import built_in
from grpo_fused.trainer import Generation, GRPOTrainer, GRPOTrainerConfig, HuggingFaceEngine, Sampling, roll_out

RATIO = "sampling/importance_sampling_ratio"
RECORDED = ("reward", "clip_ratio/region_mean", "entropy", f"{RATIO}/min", f"{RATIO}/mean", f"{RATIO}/max")


class WithLogprobs(HuggingFaceEngine):
    """`generate`, with its sampling log-probs, as other rollout engines return them."""

    trainer: GRPOTrainer
    keep_sets = True

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `HuggingFaceEngine`."""
        generation = super().generate(prompts, sampling)
        if sampling.greedy:
            return generation
        rollout = roll_out(_Given(generation), prompts, sampling)
        logps = self.trainer.policy.score(rollout, torch.arange(len(rollout.completion_ids)))
        return generation._replace(sampling_logps=logps, candidates=generation.candidates if self.keep_sets else None)


class _Given:
    """An engine that returns a given result."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """The given result."""
        return self.generation

    def sync_weights(self, model: Any) -> None:
        """Nothing."""


def train(folder: Path, *, seed: int, steps: int, top_p: float, keep_sets: bool) -> list[dict[str, float]]:
    """The metrics of a run."""
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    engine = WithLogprobs(model, tokenizer)
    engine.keep_sets = keep_sets
    config = GRPOTrainerConfig(
        steps=steps, prompts_per_step=16, num_generations=8, max_completion_length=24, learning_rate=3e-4,
        warmup_steps=3, num_iterations=2, top_p=top_p, seed=seed, importance_sampling="token_truncate",
        logging_steps=10**6,
    )  # fmt: skip
    rewards = [built_in("format"), built_in("countdown", use_all=True)]
    trainer = GRPOTrainer(model, tokenizer, rewards, make_puzzles(), config, reward_weights=[0.2, 1.0], engine=engine)
    engine.trainer = trainer
    return [{name: row[name] for name in ("step", *RECORDED) if name in row} for row in trainer.train() if row["step"]]


def run(seeds: int = 3, steps: int = 40, top_p: float = 0.9) -> Iterator[Section]:
    """The section `truncation`."""
    runs = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for seed in range(seeds):
            for sets in (True, False):
                rows = train(Path(name), seed=seed, steps=steps, top_p=top_p, keep_sets=sets)
                runs.append({"seed": seed, "sets": sets, "metrics": rows})
                print(f"seed {seed}, {'with' if sets else 'without'} sets: {rows[0]} to {rows[-1]}", flush=True)
    yield {"top_p": top_p, "steps": steps, "runs": runs}


if __name__ == "__main__":
    main("truncation")
