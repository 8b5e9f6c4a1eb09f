"""The loop: what it refuses, what it writes, and that it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.small_model import build_small_model
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused import GRPOLossConfig
from grpo_fused.rewards import exact_answer_reward, format_reward
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig

SMALL = {
    "steps": 2,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 4,
    "learning_rate": 1e-3,
}


def count_ones(completions: list[str], **columns: object) -> list[float]:
    """A reward that an untrained model can climb."""
    return [float(text.count("1")) for text in completions]


def make_trainer(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    rewards: list[Any] | None = None,
    *,
    reward_weights: list[float] | None = None,
    output_dir: Path | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    **options: Any,
) -> GRPOTrainer:
    return GRPOTrainer(
        model,
        tokenizer,
        [count_ones] if rewards is None else rewards,
        rows,
        GRPOTrainerConfig(**(SMALL | options)),
        reward_weights=reward_weights,
        output_dir=output_dir,
        evaluate=evaluate,
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param({"num_generations": 1}, ValueError, "num_generations must be at least 2; got 1", id="one"),
        pytest.param({"steps": 0}, ValueError, "steps must be at least 1; got 0", id="no-steps"),
        pytest.param({"steps": 1.5}, TypeError, "steps must be an int; got 1.5", id="float-steps"),
        pytest.param({"num_iterations": True}, TypeError, "num_iterations must be an int; got True", id="bool"),
        pytest.param({"temperature": 0.0}, ValueError, "temperature must be positive; got 0.0", id="temperature"),
        pytest.param({"learning_rate": float("nan")}, ValueError, "learning_rate must be finite", id="nan"),
        pytest.param({"learning_rate": "1e-3"}, TypeError, "learning_rate must be a float", id="text"),
        pytest.param({"adam_betas": (0.9, 1.0)}, ValueError, "adam_betas", id="betas"),
        pytest.param({"scale_rewards": "std"}, ValueError, "scale_rewards must be .* got 'std'", id="scale"),
        pytest.param({"impl": "fast"}, ValueError, "impl must be one of auto, .* got 'fast'", id="impl"),
        pytest.param({"loss": {"beta": 0.1}}, TypeError, "loss must be a GRPOLossConfig; got dict", id="loss"),
        pytest.param(
            {"loss": GRPOLossConfig(entropy_coef=0.1), "micro_batch_size": 4},
            ValueError,
            "expected micro_batch_size >= 8 .* got 4",
            id="entropy-of-a-micro-batch",
        ),
    ],
)
def test_config_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GRPOTrainerConfig(**(SMALL | options))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        pytest.param(
            [1.0], ValueError, "'broken' must return one reward for each of 8 completions; got 1", id="length"
        ),
        pytest.param(None, TypeError, "'broken' must return a list of 8 floats .* got NoneType", id="none"),
        pytest.param(torch.ones(8), TypeError, "'broken' must return a list .* got Tensor", id="tensor"),
        pytest.param(["good"] * 8, TypeError, "'broken' must return floats or None; got 'good'", id="text"),
        pytest.param([float("nan")] * 8, ValueError, "'broken' must return finite rewards .*; got nan", id="nan"),
        pytest.param([float("inf")] * 8, ValueError, "'broken' must return finite rewards .*; got inf", id="inf"),
    ],
)
def test_broken_reward_functions_are_named(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    answer: object,
    error: type[Exception],
    message: str,
) -> None:
    def broken(**columns: object) -> object:
        return answer

    with pytest.raises(error, match=message):
        make_trainer(model, tokenizer, rows, [count_ones, broken]).step()


def test_wrong_set_ups_are_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    with pytest.raises(TypeError, match="reward function 1 must be callable; got 'format'"):
        make_trainer(model, tokenizer, rows, [count_ones, "format"])
    with pytest.raises(ValueError, match="at least one function"):
        make_trainer(model, tokenizer, rows, [])
    with pytest.raises(ValueError, match="one weight for each of 1 reward functions; got 2"):
        make_trainer(model, tokenizer, rows, reward_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="prompts_per_step = 2 rows; got 1"):
        make_trainer(model, tokenizer, rows[:1])
    with pytest.raises(ValueError, match='row 1 of train_dataset must have a str "prompt"; got None'):
        make_trainer(model, tokenizer, [rows[0], {"question": "1+1="}])
    with pytest.raises(ValueError, match=r"row 1 of train_dataset must have the columns \['answer', 'prompt'\]"):
        make_trainer(model, tokenizer, [rows[0], {"prompt": "1+1="}])
    with pytest.raises(ValueError, match=r"got \['completions'\]"):
        make_trainer(model, tokenizer, [row | {"completions": ""} for row in rows])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs an EOS token"):
        make_trainer(model, tokenizer, rows)


def test_reward_functions_get_their_columns(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    calls: list[dict[str, Any]] = []

    def spy(**columns: Any) -> list[float | None]:
        calls.append(columns)
        return [0.0, None] * 4

    metrics = make_trainer(model, tokenizer, rows, [spy, exact_answer_reward]).step()
    (call,) = calls
    assert set(call) == {"prompts", "completions", "answer"}
    assert len(call["completions"]) == 8
    right = {row["prompt"]: row["answer"] for row in rows}
    assert [right[prompt] for prompt in call["prompts"]] == call["answer"]
    assert call["prompts"] == [prompt for prompt in call["prompts"][::4] for _ in range(4)]  # groups side by side
    assert metrics["rewards/spy"] == 0.0
    assert metrics["unjudged"] == 0  # the other function judged them all


def test_a_sample_that_nobody_judged_is_counted_and_harmless(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    metrics = make_trainer(model, tokenizer, rows, [lambda **columns: [None] * 8]).step()
    assert metrics["unjudged"] == 8
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_metrics_are_written_one_line_a_step(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    rewards = [format_reward, exact_answer_reward]
    loss = GRPOLossConfig(beta=0.01)
    options = {"num_iterations": 2, "loss": loss, "evaluate": lambda: {"accuracy": 0.5}, "eval_steps": 2, "steps": 3}
    for _ in range(2):  # the second run starts the file again
        make_trainer(model, tokenizer, rows, rewards, output_dir=tmp_path, **options).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "accuracy" in line] == [0, 2, 3]
    expected = {
        "reward", "rewards/format_reward", "rewards/exact_answer_reward", "kl", "entropy", "clip_ratio/region_mean",
        "completion_length", "loss", "grad_norm", "zero_std_groups", "seconds",
    }  # fmt: skip
    assert all(expected <= set(line) for line in lines[1:])


def test_a_reference_exists_only_with_beta(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    assert make_trainer(model, tokenizer, rows).reference is None
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(beta=0.1))
    assert trainer.reference is not None
    frozen = {name: value.clone() for name, value in trainer.reference.state_dict().items()}
    trainer.train()
    assert all(torch.equal(value, frozen[name]) for name, value in trainer.reference.state_dict().items())
    assert any(not torch.equal(value, frozen[name]) for name, value in model.state_dict().items())


def test_the_loop_learns(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """From about 0.2 ones in 4 tokens to nearly all; half of that is far beyond chance."""
    options = {"steps": 40, "num_generations": 8, "learning_rate": 1e-2, "num_iterations": 2}
    history = make_trainer(model, tokenizer, rows, **options).train()
    assert history[0]["reward"] < 1.0
    assert history[-1]["reward"] > 2.0


def test_the_same_seed_gives_the_same_run(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    def run(seed: int) -> list[dict[str, float]]:
        trainer = make_trainer(build_small_model(len(tokenizer)), tokenizer, rows, seed=seed, steps=3)
        history = trainer.train()
        return [{name: value for name, value in line.items() if name != "seconds"} for line in history]

    assert run(0) == run(0)
    assert run(0) != run(1)
