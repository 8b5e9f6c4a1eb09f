"""`python -m examples.arithmetic`: warm up a small model, train it with GRPO, and show the change."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from examples.arithmetic.evaluate import Evaluation, evaluate
from examples.arithmetic.model import build_model, build_tokenizer
from examples.arithmetic.task import split_questions
from examples.arithmetic.warmup import warm_up
from grpo_fused import GRPOLossConfig, engines
from grpo_fused.engines import Impl
from grpo_fused.rewards import exact_answer_reward, format_reward
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig
from grpo_fused.trainer.plot import plot_run

MAX_COMPLETION_LENGTH = 28  # the longest worked answer has 23 tokens
REWARD_WEIGHTS = {"format": 0.2, "exact answer": 1.0}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of a run."""

    demonstrations: int = 3000
    held_out: int = 400
    warmup_steps: int = 300
    warmup_batch_size: int = 64
    steps: int = 80
    prompts_per_step: int = 32
    num_generations: int = 8


FULL = Scale()
QUICK = Scale(
    demonstrations=200,
    held_out=20,
    warmup_steps=5,
    warmup_batch_size=8,
    steps=2,
    prompts_per_step=2,
    num_generations=2,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the demo from the command line."""
    args = parse_arguments(argv)
    scale = QUICK if args.quick else FULL
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    questions = split_questions(scale.demonstrations, scale.held_out)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, quick=args.quick)
    # an engine that cannot run fails here, before the warm-up
    engines.choose(args.impl, model.device, model.dtype, model.config.hidden_size)
    print(
        f"Qwen2 with {sum(parameter.numel() for parameter in model.parameters()):,} parameters; "
        f"{len(questions.demonstrations):,} demonstrations, {len(questions.train):,} questions for GRPO, "
        f"{len(questions.held_out)} held out"
    )
    warm_up(
        model,
        tokenizer,
        questions.demonstrations,
        steps=scale.warmup_steps,
        batch_size=scale.warmup_batch_size,
        learning_rate=2e-3,
        seed=args.seed,
    )

    def answer_held_out() -> Evaluation:
        return evaluate(model, tokenizer, questions.held_out, max_completion_length=MAX_COMPLETION_LENGTH)

    before = answer_held_out()
    trainer = GRPOTrainer(
        model,
        tokenizer,
        [format_reward, exact_answer_reward],
        questions.train,
        GRPOTrainerConfig(
            steps=args.steps or scale.steps,
            prompts_per_step=scale.prompts_per_step,
            num_generations=scale.num_generations,
            num_iterations=2,
            max_completion_length=MAX_COMPLETION_LENGTH,
            learning_rate=3e-4,
            warmup_steps=5,
            lr_scheduler_type="linear",
            eval_steps=10,
            seed=args.seed,
            impl=args.impl,
            loss=GRPOLossConfig(beta=0.001),
        ),
        reward_weights=list(REWARD_WEIGHTS.values()),
        evaluate=lambda: {"held_out_accuracy": answer_held_out().accuracy},
        output_dir=args.out,
        overwrite=True,
    )
    trainer.train()
    after = answer_held_out()

    print_samples(questions.held_out[:5], before, after)
    title = f"GRPO on two-digit arithmetic: {before.accuracy:.0%} to {after.accuracy:.0%} of held-out questions"
    curves = plot_run(args.out, title=title)
    print(f"\nwrote {args.out / 'metrics.jsonl'}, {curves} and a checkpoint")
    print(
        f"held-out accuracy: {before.accuracy:.1%} before GRPO, {after.accuracy:.1%} after "
        f"({len(questions.held_out)} questions, {time.perf_counter() - started:.0f} s, seed {args.seed})"
    )


def print_samples(rows: list[dict[str, str]], before: Evaluation, after: Evaluation) -> None:
    """The same held-out questions, answered by the model before and after GRPO."""
    print("\nheld-out questions before and after GRPO (greedy)")
    for row, old, new in zip(rows, before.completions, after.completions, strict=False):
        marks = ["right" if exact_answer_reward([text], [row["answer"]]) == [1.0] else "wrong" for text in (old, new)]
        print(f"  {row['prompt']}{row['answer']}\n    before, {marks[0]}: {old}\n    after,  {marks[1]}: {new}")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.arithmetic",
        description=(
            "Trains a Qwen2 of half a million parameters, built in code, on two-digit sums and differences. A short "
            "supervised warm-up on demonstrations (all right, but most do not show their work) is followed by GRPO "
            "with a format reward and an exact-answer reward. About three minutes on two CPU cores; no network."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights, the warm-up and the sampling")
    parser.add_argument("--steps", type=positive_int, help=f"GRPO steps; {FULL.steps}, or {QUICK.steps} with --quick")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of metrics.jsonl and curves.png")
    parser.add_argument("--impl", default="auto", choices=get_args(Impl), help="engine of the loss")
    parser.add_argument("--quick", action="store_true", help="a toy run of a few seconds that only shows that it works")
    return parser.parse_args(argv)


def positive_int(text: str) -> int:
    """The type of an option with a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


if __name__ == "__main__":
    main()
