"""ms-swift's command line, GRPO with a plugin file: our head against its own, losses, metrics and weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("swift")

from program_runs import assert_same_run, logged, run_in

from grpo_fused.integrations.swift import patch_swift, unpatch_swift
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer

REWARD = """
from swift.rewards import ORM, orms

class Ones(ORM):
    def __call__(self, completions, **kwargs):
        return [len(text) % 5 / 4 + 0.1 * text.count("1") for text in completions]

orms["ones"] = Ones
"""
OURS = """
from grpo_fused.integrations.swift import patch_swift
from grpo_fused.integrations.trl import FusedLogProbFunction

class Told(FusedLogProbFunction):
    @classmethod
    def apply(cls, *args):
        print("SCORED", flush=True)
        return super().apply(*args)

patch_swift(Told)
"""
OPTIONS = {
    "rlhf_type": "grpo", "model": "model", "model_type": "qwen2", "template": "chatml", "tuner_type": "full",
    "torch_dtype": "float32", "dataset": "train.jsonl", "reward_funcs": "ones", "num_generations": 4,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 8, "max_steps": 4,
    "learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_ratio": 0, "optim": "sgd", "logging_steps": 1,
    "save_strategy": "steps", "save_steps": 4, "save_only_model": "true", "num_iterations": 2, "seed": 0,
    "attn_impl": "sdpa", "report_to": "none", "use_hf": "true", "load_from_cache_file": "false",
    "gradient_checkpointing": "false", "split_dataset_ratio": 0,
}  # fmt: skip
TIMES = ("runtime", "per_second", "time", "memory", "speed", "percentage", "global_step")


@pytest.fixture
def folder(tmp_path):
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"{i} + {i}"}]} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stock.py").write_text(REWARD)
    (tmp_path / "ours.py").write_text(REWARD + OURS)
    return tmp_path


def train(folder: Path, plugin: str, **options: object) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], str]:
    """The logged lines, the weights, and all output."""
    options = {**OPTIONS, **options, "external_plugins": f"{plugin}.py", "output_dir": plugin}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = run_in(folder, str(Path(sys.executable).parent / "swift"), "rlhf", *words)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    (weights,) = (folder / plugin).glob("*/checkpoint-4/model.safetensors")
    return logged(output, "loss", TIMES), load_file(weights), output


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "beta": 0.04, "log_entropy": "true"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0},
    ],
    ids=lambda options: options["loss_type"],
)
def test_a_run_is_ms_swifts_own(options, folder):
    initial = load_file(folder / "model" / "model.safetensors")
    got, mine, output = train(folder, "ours", **options)
    want, theirs, other = train(folder, "stock", **options)
    assert "SCORED" in output
    assert "SCORED" not in other
    assert len(got) == len(want) == 4
    assert_same_run(got, want, mine, theirs, initial)


def test_patch_and_unpatch():
    from swift.rlhf_trainers import grpo_trainer

    names = ("selective_log_softmax", "entropy_from_logits")
    before = [vars(grpo_trainer)[name] for name in names]
    own = grpo_trainer.GRPOTrainer._get_per_token_logps_and_entropies
    patch_swift()
    patch_swift()
    assert all(vars(grpo_trainer)[name] is not function for name, function in zip(names, before, strict=True))
    assert grpo_trainer.GRPOTrainer._get_per_token_logps_and_entropies is not own
    divided = SimpleNamespace(template=SimpleNamespace(sequence_parallel_size=2))
    with pytest.raises(ValueError, match="whole sequences; sequence_parallel_size is 2"):
        grpo_trainer.GRPOTrainer._get_logps_via_sp(divided, None)
    unpatch_swift()
    assert [vars(grpo_trainer)[name] for name in names] == before
    assert grpo_trainer.GRPOTrainer._get_per_token_logps_and_entropies is own
