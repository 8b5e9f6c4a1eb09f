"""axolotl's command line, GRPO from a YAML file: our trainer against its own, losses, metrics and weights."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("axolotl")

from integrations.trl_runs import build_tokenizer, dataset, save_small_model
from program_runs import assert_same_run, logged, run_in

OURS = "my_code.Told"
CODE = """
from grpo_fused.integrations.axolotl import FusedAxolotlGRPOTrainer
from integrations.trl_runs import reward

class Told(FusedAxolotlGRPOTrainer):
    def train(self, *args, **kwargs):
        result = super().train(*args, **kwargs)
        print(f"COUNTS {vars(self.loss_counts)}", flush=True)
        return result

def prompts(cfg, *args, **kwargs):
    return lambda example, tokenizer=None: {"prompt": example["prompt"]}
"""
CONFIG: dict[str, Any] = {
    "base_model": "model", "tokenizer_type": "PreTrainedTokenizerFast", "rl": "grpo", "dataset_processes": 1,
    "datasets": [{"path": "train.jsonl", "ds_type": "json", "type": "my_code.prompts", "split": "train"}],
    "sequence_len": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "optimizer": "sgd",
    "learning_rate": 0.003, "lr_scheduler": "constant", "logging_steps": 1, "bf16": False, "fp16": False, "tf32": False,
    "sdp_attention": True, "device_map": "cpu", "save_strategy": "no", "seed": 0, "skip_prepare_dataset": True,
    "val_set_size": 0,
}  # fmt: skip
GRPO = {"reward_funcs": ["my_code.reward"], "max_completion_length": 8, "num_generations": 4, "num_iterations": 2}
TIMES = ("runtime", "per_second", "step_time", "memory")


@pytest.fixture
def folder(tmp_path):
    build_tokenizer().save_pretrained(save_small_model(tmp_path / "model"))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dataset()))
    (tmp_path / "my_code.py").write_text(CODE)
    return tmp_path


def axolotl(folder: Path, name: str, **options: Any) -> subprocess.CompletedProcess[str]:
    (folder / f"{name}.yml").write_text(yaml.safe_dump({**CONFIG, **options, "output_dir": name}))
    settings = {"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"}
    return run_in(folder, sys.executable, "-m", "axolotl.cli.train", f"{name}.yml", **settings)


def train(folder: Path, name: str, **options: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], str]:
    """The logged lines, the weights, and all output."""
    done = axolotl(folder, name, **options)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return logged(output, "loss|train_runtime", TIMES), load_file(folder / name / "model.safetensors"), output


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "beta": 0.04},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0},
    ],
    ids=lambda options: options["loss_type"],
)
def test_a_run_is_axolotls_own(options, folder):
    initial = load_file(folder / "model" / "model.safetensors")
    got, mine, output = train(folder, "ours", trl=GRPO | options, trainer_cls=OURS)
    want, theirs, _ = train(folder, "stock", trl=GRPO | options)
    assert len(got) == len(want) == 5  # the last one is of the run
    assert_same_run(got, want, mine, theirs, initial)
    (counts,) = re.findall(r"COUNTS (\{.*?\})", output)
    assert ast.literal_eval(counts) == {"fused": 8, "recomputed": 0}


def test_asynchronous_grpo_is_refused(folder):
    done = axolotl(folder, "ours", trl=GRPO | {"use_data_producer": True}, trainer_cls=OURS)
    assert done.returncode != 0
    assert "Told does not support async_prefetch and use_data_producer" in done.stderr + done.stdout
