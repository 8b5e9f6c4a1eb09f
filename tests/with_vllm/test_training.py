"""Training on rollouts of vLLM: the first step is on-policy, rewards rise, a resumed run is the unbroken one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import torchrun
from with_vllm.models import build_policy, save

from grpo_fused.rollouts import vllm as integration
from grpo_fused.rollouts.vllm import SyncError
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, VLLMEngine, cli
from grpo_fused.trainer.tiny import tiny_tokenizer

ROWS = [{"prompt": prompt} for prompt in ("1+1=", "Hello", "abc", "x")]
OPTIONS: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 2,
    "num_generations": 8,
    "max_completion_length": 8,
    "learning_rate": 5e-3,
}
RATIO = "sampling/importance_sampling_ratio"


def low_tokens(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """The share of the first half of the vocabulary."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def make_trainer(model: Any, engine: VLLMEngine | None, folder: Path | None = None, **options: Any) -> GRPOTrainer:
    resume = options.pop("resume", False)
    config = GRPOTrainerConfig(**(OPTIONS | options))
    return GRPOTrainer(
        model, tiny_tokenizer(), [low_tokens], ROWS, config, engine=engine, output_dir=folder, resume=resume
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 8}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.05}],
    ids=lambda o: " ".join(o) or "all",
)
def test_the_importance_ratio_of_the_first_step_is_one(engine: VLLMEngine, options: dict[str, float]) -> None:
    metrics = make_trainer(build_policy(1), engine, **options).step()
    assert metrics["grad_norm"] > 0
    for name in ("mean", "min", "max"):
        assert metrics[f"{RATIO}/{name}"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("adapter", [False, True], ids=["all-weights", "lora"])
def test_rewards_rise(engine: VLLMEngine, adapter: bool) -> None:
    model: Any = build_policy(2)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    history = make_trainer(model, engine, steps=12, num_iterations=2, learning_rate=5e-2 if adapter else 1e-2).train()
    first, *_, previous, last = (metrics["reward"] for metrics in history)
    # of 0 to 1; by `generate`, the adapter gains 0.32 to 0.52 with five seeds
    assert (previous + last) / 2 > first + 0.2
    for metrics in history:
        assert metrics[f"{RATIO}/mean"] == pytest.approx(1, abs=1e-3)  # vLLM has each step's weights


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_tied_head_that_is_one_step_old_is_noticed(
    engine_of: Callable[..., VLLMEngine], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The packed copy stays that of the first sync; a step changes log-probs by less than a thousandth of a nat."""
    trainer = make_trainer(build_policy(seed, tied=True), engine_of("float32", True), steps=3, learning_rate=1e-4)
    trainer.step()
    monkeypatch.setattr(integration, "_pack_tied_head", lambda model: None)
    with pytest.raises(SyncError, match="differ by"):
        trainer.step()


def test_a_run_in_bf16_is_not_refused(engine_of: Callable[..., VLLMEngine]) -> None:
    model, options = build_policy(2), {"steps": 10, "mixed_precision": "bf16", "learning_rate": 1e-2}
    history = make_trainer(model, engine_of("bfloat16"), **options).train()
    assert history[-1]["reward"] > history[0]["reward"]


@pytest.mark.parametrize("adapter", [False, True], ids=["all-weights", "lora"])
def test_a_resumed_run_is_the_unbroken_one(engine: VLLMEngine, tmp_path: Path, adapter: bool) -> None:
    def policy() -> Any:
        if not adapter:
            return build_policy(3)
        from peft import LoraConfig, get_peft_model

        return get_peft_model(build_policy(3), LoraConfig(r=4, target_modules="all-linear"))

    unbroken = make_trainer(policy(), engine, tmp_path / "a", steps=4, save_steps=2)
    history = unbroken.train()
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "checkpoint-000002", tmp_path / "b" / "checkpoint-000002")
    resumed = make_trainer(policy(), engine, tmp_path / "b", steps=4, save_steps=2, resume=True)
    assert resumed.steps_done == 2
    assert [row["loss"] for row in resumed.train()] == [row["loss"] for row in history[2:]]
    weights = unbroken.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def recipe(folder: Path) -> list[str]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = json.dumps({"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 32})
    return [
        *("--model", save(build_policy(), folder / "policy"), "--dataset", str(rows), "--rollout", "vllm"),
        *("--vllm-options", options, "--output-dir", str(folder / "run"), "--rewards", '[{"name": "length"}]'),
        *("--steps", "2", "--prompts-per-step", "2", "--num-generations", "4", "--max-completion-length", "8"),
    ]


def test_the_command_line(tmp_path: Path) -> None:
    cli.main(recipe(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row[f"{RATIO}/mean"] == pytest.approx(1, abs=1e-3) for row in rows)


def launch(*program: str) -> None:
    """The program as two processes."""
    # V1: what interprets the other runner is in this process
    settings = {"ACCELERATE_USE_CPU": "true", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    done = torchrun("-m", *program, timeout=400, **settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_two_processes_train_together(tmp_path: Path) -> None:
    """vLLM starts before the trainer, and would make a process group of its own in each process."""
    launch("grpo_fused", "train", *recipe(tmp_path))
    state = json.loads((tmp_path / "run" / "checkpoint-000002" / "state.json").read_text())
    assert state["processes"] == 2
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_sharded_weights_are_gathered(tmp_path: Path) -> None:
    launch("with_vllm.sharded", save(build_policy(), tmp_path / "policy"), str(tmp_path))
    assert len(list(tmp_path.glob("synced-*"))) == 2
