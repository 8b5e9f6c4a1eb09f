"""Evaluation: greedy answers, pass@k, and processes in step."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer.small_trainer import count_ones, make_trainer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused.trainer import GRPOTrainerConfig, Sampling
from grpo_fused.trainer.evaluation import evaluate, pass_at_k


def test_evaluation_is_greedy_and_pass_at_k(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    def first_is_one(completions: list[str], **columns: object) -> list[float]:
        return [float(text.startswith("1")) for text in completions]

    trainer = make_trainer(
        model, tokenizer, rows, [count_ones, first_is_one], reward_weights=[0.1, 1.0], eval_dataset=rows, eval_samples=8,
        eval_steps=1,
    )  # fmt: skip
    metrics = trainer.evaluate()
    greedy = [
        tokenizer.decode(model.generate(torch.tensor([tokenizer(row["prompt"]).input_ids]), max_new_tokens=4, do_sample=False,
                                        eos_token_id=1, pad_token_id=0)[0, len(tokenizer(row["prompt"]).input_ids):],
                         skip_special_tokens=True)
        for row in rows
    ]  # fmt: skip
    assert metrics["eval/first_is_one"] == pytest.approx(sum(text.startswith("1") for text in greedy) / len(rows))
    assert metrics["eval/count_ones"] == pytest.approx(sum(text.count("1") for text in greedy) / len(rows))
    assert 0 <= metrics["eval/pass@1"] <= metrics["eval/pass@8"] <= 1
    steps = [row["step"] for row in trainer.train() if "eval/pass@1" in row]
    assert steps == [0, 1, 2]


def test_the_first_evaluation_depends_on_the_seed_alone(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """Whatever was drawn before the run."""
    sampled: list[list[str]] = []

    def recording(completions: list[str], **columns: object) -> list[float]:
        sampled.append(completions)
        return [float(position) for position in range(len(completions))]

    for drawn, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(drawn)
        options = {"eval_dataset": rows[:2], "eval_samples": 8, "steps": 1, "seed": seed}
        make_trainer(model, tokenizer, rows, [recording], learning_rate=1e-12, **options).train()
    first, second, other = sampled[1::5]
    assert len(first) == 16
    assert first == second != other


def test_the_heaviest_reward_decides_and_unjudged_rows_do_not_count(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    def always(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    def of_some(completions: list[str], answer: list[str]) -> list[float | None]:
        return [0.25 if right == "3" else None for right in answer]  # one row of six

    given = {"reward_weights": [0.1, 1.0], "eval_dataset": rows, "eval_samples": 2}
    metrics = make_trainer(model, tokenizer, rows, [always, of_some], **given).evaluate()
    assert metrics == {"eval/always": 1.0, "eval/of_some": 0.25, "eval/pass@1": 0.0, "eval/pass@2": 0.0}
    given["reward_weights"] = [1.0, 0.1]
    assert make_trainer(model, tokenizer, rows, [always, of_some], **given).evaluate()["eval/pass@1"] == 1.0


def test_own_metrics_do_not_replace_those_of_a_step(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    names = ["eval/count_ones", "kl", "reward", "rewards/count_ones", "step"]
    options = {"evaluate": lambda: dict.fromkeys(["accuracy", *names], 1.0), "eval_dataset": rows[:1]}
    trainer = make_trainer(model, tokenizer, rows, **options)
    with pytest.raises(ValueError, match=f"names of its own; got {re.escape(str(names))}, which a step has"):
        trainer.train()
    assert trainer.steps_done == 0


def test_rows_that_nobody_judged_are_left_out_of_pass_at_k(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    def of_some(completions: list[str], answer: list[str]) -> list[float | None]:
        return [0.75 if right == "3" else None for right in answer]  # one row of six

    metrics = make_trainer(model, tokenizer, rows, [of_some], eval_dataset=rows, eval_samples=2).evaluate()
    assert metrics == {"eval/of_some": 0.75, "eval/pass@1": 1.0, "eval/pass@2": 1.0}


def test_a_half_is_no_success_and_some_samples_may_be_unjudged() -> None:
    """Two rows of two samples: 0.5 and none, 1 and none."""
    rewards = {1: torch.tensor([[0.5], [1.0]]), 2: torch.tensor([[0.5], [math.nan], [1.0], [math.nan]])}
    accelerator = SimpleNamespace(
        process_index=0, num_processes=1, device=torch.device("cpu"), reduce=lambda sums, how: sums
    )
    sampler: Any = SimpleNamespace(
        peers=SimpleNamespace(accelerator=accelerator),
        reward_functions={"number": None},
        sample=lambda rows, sampling: (None, rewards[sampling.num_generations]),
        sampling=Sampling(num_generations=4, max_completion_length=2),
    )
    config = GRPOTrainerConfig(prompts_per_step=2, eval_samples=2)
    metrics = evaluate(sampler, [{"prompt": "a"}, {"prompt": "b"}], config, success=0)
    assert metrics == {"eval/number": 0.75, "eval/pass@1": 0.25, "eval/pass@2": 0.5}


@pytest.mark.parametrize(
    ("samples", "right", "k", "chance"), [(4, 0, 1, 0.0), (4, 4, 2, 1.0), (4, 1, 2, 0.5), (5, 2, 3, 0.9)]
)
def test_pass_at_k(samples: int, right: int, k: int, chance: float) -> None:
    """1 - C(n - c, k) / C(n, k): of 5 with 2 right, 1 of the 10 triples has none."""
    assert pass_at_k(samples, right, k) == pytest.approx(chance)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("prompts_per_step", "samples"), [(6, [3, 6]), (4, [2, 4, 1, 2])], ids=["at once", "batches"])
def test_processes_evaluate_in_step(process: int, prompts_per_step: int, samples: list[int]) -> None:
    """Five rows for two processes, three or two at a time: both sample the same number of completions."""
    asked: list[int] = []

    def sample(rows: Any, sampling: Sampling) -> tuple[None, Tensor]:
        asked.append(len(rows) * sampling.num_generations)
        numbers = [[float(row["prompt"])] for row in rows for _ in range(sampling.num_generations)]
        return None, torch.tensor(numbers)

    accelerator = SimpleNamespace(
        process_index=process, num_processes=2, device=torch.device("cpu"), reduce=lambda sums, how: sums
    )
    sampler: Any = SimpleNamespace(
        peers=SimpleNamespace(accelerator=accelerator),
        reward_functions={"number": None},
        sample=sample,
        sampling=Sampling(num_generations=4, max_completion_length=2),
    )
    rows = [{"prompt": str(number)} for number in (0, 1, 0, 1, 0)]
    config = GRPOTrainerConfig(prompts_per_step=prompts_per_step, eval_samples=2)
    metrics = evaluate(sampler, rows, config, success=0)
    assert asked == samples
    assert metrics == {"eval/number": process, "eval/pass@1": process, "eval/pass@2": process}
