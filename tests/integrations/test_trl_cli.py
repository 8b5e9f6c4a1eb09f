"""`python -m grpo_fused trl ...`: TRL's own command line and scripts, patched in the processes that accelerate starts."""

from __future__ import annotations

import ast
import json
import re
import sys

import pytest

pytest.importorskip("trl")

import trl
from integrations.trl_runs import dataset
from program_runs import run_in

from grpo_fused.integrations.trl import FusedGRPOTrainer, FusedLogProbFunction, cli, unpatch_trl
from grpo_fused.integrations.trl.head import active_head
from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE, SCRIPTS
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer

needs_scripts = pytest.mark.skipif(RELEASE < SCRIPTS, reason="TRL 1.0 has the command line")

REWARD = """
import os
import sys
import trl
from integrations.trl_runs import sampled_from
from trl.trainer import grpo_trainer, utils

own = trl.GRPOTrainer._generate_and_score_completions

def say(line):
    sys.stdout.write(line + "\\n")  # at once: two processes write here
    sys.stdout.flush()

def checked(self, inputs):
    batch = own(self, inputs)
    _, log_q = sampled_from(self, batch, top_p=0.8)
    mask = batch["completion_mask"] != 0
    error = (batch["old_per_token_logps"] - log_q)[mask].abs().max().item()
    sets = [sets.ids.tolist() for sets in batch["candidates"]]
    say(f"RANK {self.accelerator.process_index}: { {'error': error, 'sets': sets} }")
    return batch

def end(self):
    # on a CPU with two processes TRL's script does not return from here, with its own trainer neither
    sys.stdout.flush()
    os._exit(0)

trl.GRPOTrainer._generate_and_score_completions = checked
trl.GRPOTrainer.end = end

def reward(completions, **_):
    new = hasattr(utils, "add_fused_lm_head")
    head = utils._ChunkedLogProbFunction.__module__ if new else grpo_trainer.selective_log_softmax.__globals__["__name__"]
    say(f"THE TRAINER IS {trl.GRPOTrainer.__name__} THE HEAD IS {head}")
    return [len(text) % 5 for text in completions]
"""
OPTIONS = {
    "model_name_or_path": "model", "dataset_name": "data", "reward_funcs": "my_rewards.reward", "output_dir": "out",
    "max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6,
    "use_cpu": "true", "bf16": "false", "report_to": "none", "logging_steps": 1, "dtype": "float32", "top_p": 0.8,
    "num_iterations": 2,
}  # fmt: skip
PLAIN = ["--model_name_or_path", "m", "--dataset_name", "d", "--use_cpu", "true", "--bf16", "false"]
FLAGS = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def folder(tmp_path):
    """A model, prompts and rewards for TRL's script."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dataset()))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    return tmp_path


def run(folder, *arguments):
    found = run_in(folder, sys.executable, *arguments, timeout=280)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@needs_scripts
@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_grpo_through_accelerate_launch(processes, folder):
    launch = ["--num_processes", str(processes), *["--multi_gpu"] * (processes > 1)]  # which a CPU allows
    output = run(folder, "-m", "grpo_fused", "trl", "grpo", *FLAGS, "--exact_truncation", *launch)
    lines = {line for line in output.splitlines() if line.startswith("THE TRAINER")}
    module = "head" if RELEASE >= FUSED_HEAD else "logits"
    assert lines == {f"THE TRAINER IS FusedGRPOTrainer THE HEAD IS grpo_fused.integrations.trl.{module}"}
    assert (folder / "out" / "model.safetensors").exists()
    ranks = {rank: ast.literal_eval(found) for rank, found in re.findall(r"RANK (\d): ({.*?})", output)}
    assert len(ranks) == processes
    assert max(rank["error"] for rank in ranks.values()) < 1e-4
    assert len({str(rank["sets"]) for rank in ranks.values()}) == processes  # each has its own completions


def launched(argv, monkeypatch):
    """The command line of the one script that accelerate would start."""
    from trl.cli import accelerate_launcher

    found = []
    own = accelerate_launcher.launch_training_script, trl.GRPOConfig
    monkeypatch.setattr(accelerate_launcher, "launch_command", found.append)
    with pytest.raises(SystemExit) as end:
        cli.main([*argv, "--num_processes", "2"])
    assert end.value.code == 0
    assert (accelerate_launcher.launch_training_script, trl.GRPOConfig) == own
    (args,) = found
    assert (args.module, args.training_script, args.num_processes) == (True, "grpo_fused.integrations.trl.cli", 2)
    return args.training_script_args


@needs_scripts
@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_launches_the_patch_in_place_of_the_script(command, monkeypatch):
    script, *rest = launched([command, *PLAIN], monkeypatch)
    assert script.endswith(f"trl/scripts/{command}.py")
    assert rest == PLAIN


@needs_scripts
@pytest.mark.parametrize("where", ["command-line", "file"])
def test_options_of_the_fused_trainer_reach_it(where, tmp_path, monkeypatch):
    """What the launcher passes on is parsed again by the script, in its own process."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "w1"}\n')
    (tmp_path / "cfg.yaml").write_text("exact_truncation: true\nimpl: chunked\nmax_scratch_bytes: 4096\n")
    flags = ["--exact-truncation", "--impl", "chunked", "--max_scratch_bytes", "4096"]
    options = flags if where == "command-line" else ["--config", str(tmp_path / "cfg.yaml")]
    path, *arguments = launched(["grpo", *PLAIN, "--dataset_name", str(tmp_path), *options], monkeypatch)

    given = {}

    def reached(self, **options):
        given.update(options, head=active_head())
        raise KeyboardInterrupt

    monkeypatch.setattr(FusedGRPOTrainer, "__init__", reached)
    for name in ("GRPOTrainer", "GRPOConfig"):
        monkeypatch.setattr(trl, name, getattr(trl, name))
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(KeyboardInterrupt):
        cli.run_script(path, arguments)
    unpatch_trl()
    assert (given["exact_truncation"], given["impl"], given["max_scratch_bytes"]) == (True, "chunked", 4096)
    assert given["args"].use_cpu  # its other options go to TRL's trainer
    assert given["head"] is FusedLogProbFunction  # old and reference log-probs of a subclass, too


@needs_scripts
def test_help_lists_the_options_of_the_fused_trainer(capsys):
    with pytest.raises(SystemExit):
        cli.main(["grpo", "--help"])
    told = capsys.readouterr().out
    assert all(option in told for option in ("--exact_truncation", "--impl {auto,", "--max_scratch_bytes"))


@needs_scripts
def test_options_of_another_trainer(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["sft", *PLAIN, "--exact_truncation"])
    assert "unrecognized arguments: --exact_truncation" in capsys.readouterr().err


@needs_scripts
@pytest.mark.parametrize("command", ["grpo", "sft"])
def test_a_config_that_does_not_exist(command):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--config", "nowhere.yaml"])
    assert end.value.code == "grpo-fused trl: error: --config must be a YAML file; got 'nowhere.yaml', which is none"


def test_a_release_without_it(monkeypatch):
    monkeypatch.setattr("grpo_fused.integrations.trl.release.RELEASE", (0, 29))
    with pytest.raises(SystemExit, match="needs trl 1.0 or later"):
        cli.main(["grpo"])


@pytest.mark.parametrize(
    ("command", "told"), [("sft", True), *((name, False) for name in ("grpo", "rloo", "dpo", "kto"))]
)
def test_scripts_that_stay_trls_are_named(command, told, monkeypatch, capsys):
    monkeypatch.setattr("grpo_fused.integrations.trl.release.RELEASE", (1, 14))
    with pytest.raises(SystemExit):
        cli.main([command, "--config", "nowhere.yaml"])
    assert ("only grpo, rloo, dpo and kto run on our head" in capsys.readouterr().err) == told


def test_unknown_release(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpo_fused.integrations.trl", None)
    with pytest.raises(SystemExit, match="grpo-fused trl: "):
        cli.main(["grpo"])
