"""`python -m grpo_fused trl ...`: TRL's own command line and scripts, patched in the processes that accelerate starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("trl")

from integrations.trl_runs import dataset

from grpo_fused.integrations.trl import cli
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer

REWARD = """
import sys
import trl
from trl.trainer import utils

def reward(completions, **_):
    print("THE TRAINER IS", trl.GRPOTrainer.__name__, "THE HEAD IS", utils._ChunkedLogProbFunction.__module__)
    return [len(text) % 5 for text in completions]
"""


def run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.full
def test_grpo_through_accelerate_launch(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dataset()))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    options = {
        "model_name_or_path": "model", "dataset_name": "data", "reward_funcs": "my_rewards.reward", "output_dir": "out",
        "max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6,
        "use_cpu": "true", "bf16": "false", "report_to": "none", "logging_steps": 1, "dtype": "float32",
    }  # fmt: skip
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    found = run(tmp_path, "-m", "grpo_fused", "trl", "grpo", *flags, "--num_processes", "1")
    assert found.returncode == 0, found.stderr[-3000:]
    lines = [line for line in found.stdout.splitlines() if line.startswith("THE TRAINER")]
    assert lines == ["THE TRAINER IS FusedGRPOTrainer THE HEAD IS grpo_fused.integrations.trl.head"]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_launches_the_patch_in_place_of_the_script(monkeypatch):
    from trl.cli import accelerate_launcher

    launched = []
    options = ["--model_name_or_path", "m", "--dataset_name", "d", "--use_cpu", "true", "--bf16", "false"]
    own = accelerate_launcher.launch_training_script
    monkeypatch.setattr(accelerate_launcher, "launch_command", launched.append)
    with pytest.raises(SystemExit) as end:
        cli.main(["sft", *options, "--num_processes", "2"])
    assert end.value.code == 0
    (args,) = launched
    assert (args.module, args.training_script, args.num_processes) == (True, "grpo_fused.integrations.trl.cli", 2)
    script, *rest = args.training_script_args
    assert script.endswith("trl/scripts/sft.py")
    assert rest == options
    assert accelerate_launcher.launch_training_script is own


def test_unknown_release(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpo_fused.integrations.trl", None)
    with pytest.raises(SystemExit, match="grpo-fused trl: "):
        cli.main(["grpo"])
