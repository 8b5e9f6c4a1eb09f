"""Recipes and command lines that are wrong: each ends with one line that says where and why."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from guards import processor_seconds

from grpo_fused.__main__ import main
from grpo_fused.trainer import GRPOTrainer
from grpo_fused.trainer.cli import read_recipe
from grpo_fused.trainer.recipe import Reward
from grpo_fused.trainer.tiny import tiny_tokenizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-generations", "1"], "command line: num_generations must be at least 2; got 1"),
        (["--loss.beta", "-1"], "beta"),
        (["--learning-rates", "1"], "command line: unknown option 'learning_rates'; did you mean 'learning_rate'?"),
        (["--r", "4"], "command line: unknown option 'r'; did you mean 'lora.r'?"),
        (["--rewards", "[]"], "at least one reward function"),
        (["--rewards", '[{"name": "format", "model": "x"}]'], "exactly one of name, function and model"),
        (["--task", "chess"], "chess"),
        (["--dtype", "int8"], "int8"),
        (["--rollout", "vllm", "--loss.loss_type", "gmpo"], "must be null with loss_type gmpo"),
        (
            ["--rollout", "vllm", "--loss", "{loss_type: vespo, epsilon: 0.2}"],
            "by token (token_mask, token_truncate) or null with vespo",
        ),
        (["--rollout", "vllm", "--repetition-penalty", "1.1"], "got repetition_penalty 1.1"),
        (["--dataset", "a.py:rows", "--split", "test"], "split must come with a `datasets` name, no file or function"),
        (["--dataset", "a.py:rows", "--subset", "x"], "subset must come with a `datasets` name, no file or function"),
        (["--subset", "x"], "subset must come with a `datasets` name, no file or function"),
        (["--dataset", "a.py:rows", "--eval-split", "test"], "eval_split must come with held-out rows of a `datasets`"),
        (
            ["--eval-split", "train"],
            "eval_split must come with held-out rows of a `datasets` name, no file or function",
        ),
        (["--eval-limit", "2"], "eval_limit must come with held-out rows (eval_dataset, eval_split); got 2 without"),
        (["--eval-samples", "2"], "eval_samples must come with held-out rows"),
        (["--eval-steps", "2"], "eval_steps must come with held-out rows"),
        (["--vllm-options.max_model_len", "128"], "vllm_options must come with rollout vllm"),
        (["--chat", "false"], "chat must come with a task"),
        (["--rewards", "[format]"], "rewards: an entry must be a mapping of options; got 'format'"),
        (["--run-name", "a"], "run_name must come with a tracker in report_to"),
        (["--project", "a"], "project must come with a tracker in report_to"),
        (["--importance-sampling", "token_mask"], "importance_sampling must come with rollout vllm"),
        (["--importance-sampling-clip", "2"], "importance_sampling_clip must come with rollout vllm"),
        (["--rollout", "vllm", "--generation-batch-size", "2"], "generation_batch_size must come with rollout hf"),
        (["--logging-steps", "0", "--sample-steps", "2"], "sample_steps must come with logging_steps of at least 1"),
        (["--report-to", "tensorboard", "--run-name", "a"], "run_name must come with a tracker in report_to that has"),
        (["--seed", "5000000000"], "seed must be in [0, 4294967295]; got 5000000000"),
        (["--output-dir", ""], "command line: output_dir must be a folder; got ''"),
        (["--output-dir", __file__], "command line: output_dir must be a folder; got '"),
    ],
    ids=[
        "group-of-one",
        "beta",
        "misspelt",
        "nested",
        "no-rewards",
        "two-kinds",
        "task",
        "dtype",
        "gmpo-vllm",
        "vespo-vllm",
        "penalty-vllm",
        "split",
        "subset",
        "subset-of-file",
        "eval-split",
        "eval-split-of-file",
        "eval-limit",
        "eval-samples",
        "eval-steps",
        "vllm-options",
        "chat",
        "rewards-entry",
        "run-name",
        "project",
        "importance-sampling",
        "importance-sampling-clip",
        "batches-vllm",
        "samples-unprinted",
        "run-name-unused",
        "seed",
        "no-output",
        "output-file",
    ],
)
def test_wrong_recipes_end_with_the_reason(
    recipe: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(recipe), *arguments])
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("grpo-fused train: error: ")
    assert error.count("\n") == 1
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 2", "stepss: 2", "7: unknown option 'stepss'; did you mean 'steps'?"),
        ("steps: 2", "max_steps: 2", "7: unknown option 'max_steps'; did you mean 'steps'?"),
        ("steps: 2", "lr: 1", "7: unknown option 'lr'; did you mean 'learning_rate'?"),
        ("steps: 2", "kl_loss_coef: 1", "7: unknown option 'kl_loss_coef'; did you mean 'loss.beta'?"),
        ("beta: 0.04", "clip_ratio: 0.2", "12: unknown option 'loss.clip_ratio'; did you mean 'loss.epsilon'?"),
        ("steps: 2", "steps: 2\nsteps: 1", "8: steps is given twice, first in line 7"),
        ("{name: length", "{weight: 1, weight: 2, name: length", "6: weight is given twice, first in line 6"),
        ("steps: 2", "steps: ten", "7: steps must be an integer; got 'ten'"),
        ("steps: 2", "steps: 010", "7: steps must be an integer; got '010'"),
        ("steps: 2", "steps: 1:30", "7: steps must be an integer; got '1:30'"),
        ("steps: 2", "steps: 0x10", "7: steps must be an integer; got '0x10'"),
        ("steps: 2", "steps: 0", "7: steps must be at least 1; got 0"),
        ("steps: 2", "gradient_checkpointing: 3", "7: gradient_checkpointing must be true or false; got 3"),
        ("steps: 2", "dtype: int8", "7: dtype must be one of float32, bfloat16, auto; got 'int8'"),
        ("steps: 2", "lora: {r: x}", "7: lora.r must be an integer; got 'x'"),
        ("steps: 2", "lora: yes", "7: lora must be a mapping of options or null; got True"),
        ("beta: 0.04", "bta: 0.04", "12: unknown option 'loss.bta'; did you mean 'loss.beta'?"),
        ("beta: 0.04", "beta: 1:30.5", "12: loss.beta must be a number; got '1:30.5'"),
        ("beta: 0.04", "beta: low", "12: loss.beta must be a number; got 'low'"),
        ("beta: 0.04", "beta: -1", "12: loss.beta must be at least 0; got -1.0"),
        ("loss: {", "impl: native\nloss: {kl_estimator: exact, ", "13: kl_estimator='exact' runs with"),
        ("{name: length", "{nam: length", "6: unknown option 'rewards.nam'; did you mean 'rewards.name'?"),
        ("{name: length", "{weight: x, name: length", "6: rewards.weight must be a number; got 'x'"),
        ("{name: length", "{model: m, name: length", "5: rewards must each have exactly one of name, function and"),
    ],
)
def test_an_error_names_the_line_and_the_option(
    recipe: Path, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text().replace(old, new, 1))
    with pytest.raises(SystemExit, match="2"):
        read_recipe(["--config", str(recipe)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"grpo-fused train: error: {recipe}:{message}")


def test_errors_of_the_command_itself(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_text, a_list = tmp_path / "no_text.yaml", tmp_path / "a_list.yaml"
    no_text.write_bytes(b"\xff\xfe")
    a_list.write_text("[1, 2]")
    for arguments, message in (
        (["train"], "the following arguments are required: model, rewards"),
        (["train", str(recipe)], f"unrecognized arguments: {recipe}; did you mean --config {recipe}.$"),
        (["train", "--config", "nowhere.yaml"], "a file that exists; got .*nowhere.yaml"),
        (["train", "--config", str(recipe), "--steps"], "argument --steps: expected one argument"),
        (["train", "--config", str(no_text)], "'utf-8' codec can't decode"),
        (["train", "--config", str(a_list)], "a_list.yaml: a recipe must be a mapping of options to values"),
        (["trian"], "command must be one of train, plot, trl, doctor, check; got 'trian'; did you mean train.$"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(f"error: .*{message}", line)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("grpo-fused ")
    main([])
    assert "train a language model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rewards", '[{"function": "mine.py:raises"}]'], r"'raises' raised ZeroDivisionError: .* \(.*mine.py:2\)"),
        (
            ["--rewards", '[{"function": "mine.py:one"}]'],
            "'one' must return one reward for each of 4 completions; got 1",
        ),
        (["--impl", "cuda"], "impl='cuda' cannot run on cpu: .*"),
        (["--rollout", "vllm"], "this recipe needs the package vllm: pip install vllm"),
        (["--report-to", "wandbb"], "report_to must name trackers of accelerate, .*; got 'wandbb'"),
        (["--model", "./nowhere"], "model must be a path or name that can be loaded; got './nowhere': .*"),
        (["--model", "./mine.py"], r"got './mine.py': there is no folder './mine.py' .*, and it is not a name of .*"),
        (["--rewards", "[{model: ./no}]"], r"rewards.model must be a path or name that can be loaded; got './no': .*"),
        (["--model", "cut"], "model must be a path or name that can be loaded; got 'cut': .*header.*"),
    ],
    ids=["raises", "count", "engine", "vllm", "tracker", "model", "file", "reward-model", "cut-model"],
)
def test_expected_failures_are_one_line(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def raises(**_):\n    return 1 / 0\n\ndef one(**_):\n    return [1.0]\n")
    shutil.copytree("model", "cut")
    os.truncate("cut/model.safetensors", 100)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(recipe), *arguments])
    assert re.fullmatch(f"grpo-fused train: error: .*{message}", str(ended.value.code))  # printed by Python, status 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "chat.jsonl"], "row 0 of train_dataset: chat messages need .*; chat_template is not set.*"),
        (["--dataset", "new.jsonl"], "row 0 of train_dataset: token ids must be less than .*, the token '<new>'"),
        (["--dataset", "mine.py:late"], r"token ids must be less than .*, the token '<new>'"),
        (["--rewards", '[{"function": "mine.py:silent"}]'], "a reward function must judge some .* step 1; got None .*"),
        (
            ["--learning-rate", "1e30", "--save-steps", "1", "--rewards", '[{"function": "mine.py:place"}]'],
            "diverged at step 2: .*checkpoint-000001 is kept",
        ),
    ],
    ids=["template", "token", "late-token", "no-reward", "diverged"],
)
def test_what_a_run_cannot_go_on_with_is_one_line(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_tokens(["<new>"])
    (tmp_path / "model" / "chat_template.jinja").unlink()
    tokenizer.save_pretrained("model")
    chat = [{"role": "user", "content": "1+1?"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": chat}) + "\n" + json.dumps({"prompt": chat}))
    (tmp_path / "new.jsonl").write_text('{"prompt": "<new>"}\n{"prompt": "x"}')
    (tmp_path / "mine.py").write_text(
        "def silent(completions, **_):\n    return [None] * len(completions)\n\n"
        "def place(completions, **_):\n    return [float(i) for i in range(len(completions))]\n\n"
        "def late():\n    return lambda index: {'prompt': '<new>' if index == 3 else 'x'}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(recipe), *arguments])
    assert re.fullmatch(f"grpo-fused train: error: .*{message}", str(ended.value.code))


def test_a_defect_keeps_its_traceback(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: GRPOTrainer) -> dict[str, float]:
        raise IndexError("a defect")

    monkeypatch.setattr(GRPOTrainer, "step", step)
    with pytest.raises(IndexError, match="a defect"):
        main(["train", "--config", str(recipe)])


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "at most 20000 values with aliases expanded"),
        (BOMB + "rewards: *a29\n", "at most 20000 values with aliases expanded"),
        ("vllm_options: " + "[" * 10_000, "must not be nested deeply"),
        ("vllm_options: " + "{a: " * 10_000, "must not be nested deeply"),
        ("vllm_options: &a {b: *a}", "alias of itself"),
        ("model: [" + "x, " * 30_000 + "]", "at most 20000 values"),
        ("model: *nothing", "undefined alias"),
        ("model: [", "line 13 must be valid YAML"),
        ("learning-rate: 1", "13: unknown option 'learning-rate'; did you mean 'learning_rate'"),
        ("? [a]\n: 1", "line 13 must be valid YAML; found unhashable key"),
        ("seed: !!int ten", "each value must be one of its YAML tag; .*'ten'"),
        ("chat: !!bool maybe", "each value must be one of its YAML tag; 'maybe'"),
        ("seed: !!timestamp today", "each value must be one of its YAML tag; "),
        ("seed: " + "9" * 5000, "each value must be one of its YAML tag; .*4300"),
        ("seed: !!python/name:os.system", "line 13 must be valid YAML; could not determine a constructor for the tag"),
    ],
    ids=[
        "unused-bomb",
        "bomb",
        "lists",
        "objects",
        "cycle",
        "long",
        "unknown-alias",
        "no-yaml",
        "dash",
        "list",
        "int",
        "bool",
        "timestamp",
        "digits",
        "tag",
    ],
)
def test_hostile_recipes_are_refused_at_once(
    recipe: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text() + text)
    with processor_seconds(10), pytest.raises(SystemExit):  # milliseconds, after imports; a bomb takes hours
        main(["train", "--config", str(recipe)])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "data/trian.jsonl"], "data/trian.jsonl"),
        (["--rewards", '[{"name": "exact_answr"}]'], "exact_answr"),
        (["--dataset", "some/questions", "--rewards", '[{"name": "exact_answr"}]'], "exact_answr"),
        (["--rewards", '[{"model": "m", "options": {"size": 1}}]'], "unexpected keyword argument 'size'"),
        (["--eval-dataset", "missing.jsonl"], "missing.jsonl"),
        (["--dataset", "trainer.small_trainer:two_rows", "--eval-dataset", "missing.jsonl"], "missing.jsonl"),
        (["--prompts-per-step", "5"], "train_dataset must have at least 5 rows, as many as a step takes; got 4"),
    ],
    ids=["data", "reward", "reward-without-rows", "reward-model", "held-out", "with-function", "rows"],
)
def test_a_dry_run_finds_missing_files_rows_and_options(recipe: Path, arguments: list[str], message: str) -> None:
    """A misspelt file is not treated as the name of a data set."""
    with pytest.raises(SystemExit, match=f"grpo-fused train: error: .*{message}"):
        main(["train", "--config", str(recipe), "--dry-run", *arguments])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": (Reward(name="nice"),)}, "nice"),
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        (
            {"rewards": (Reward(function="nowhere:f"),)},
            "got 'nowhere:f', which raised ModuleNotFoundError: No module named 'nowhere'$",
        ),
    ],
    ids=["reward", "data", "function"],
)
def test_parts_that_cannot_be_loaded_are_named(recipe: Path, change: dict[str, Any], message: str) -> None:
    from grpo_fused.trainer.recipe import build_trainer

    read, _ = read_recipe(["--config", str(recipe)])
    with pytest.raises((ValueError, OSError), match=message):
        build_trainer(replace(read, **change))


def test_a_name_that_does_not_exist_is_asked_for_once(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and datasets would wait between requests, up to a minute."""

    def sleep(seconds: float) -> None:
        pytest.fail(f"waits {seconds} s")

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.chdir(recipe.parent)
    for option in ("model", "dataset"):
        here = f"there is no folder 'nobody/no-such-thing' in {re.escape(str(recipe.parent))}, and the Hugging Face Hub"
        with pytest.raises(SystemExit, match=f"grpo-fused train: error: .*{here}"):
            main(["train", "--config", str(recipe), f"--{option}", "nobody/no-such-thing"])
    with pytest.raises(SystemExit, match="it is not a name of the Hugging Face Hub"):
        main(["train", "--config", str(recipe), "--model", "./modle"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--config", "nowhere.yaml"],
            "--config must be a file that exists; got 'nowhere.yaml' (from {here})",
        ),
        (["train", "--config", "recipe.yaml", "--dataset", "no.jsonl"], "expected a file at 'no.jsonl' (from {here})"),
        (["train", "--config", "recipe.yaml", "--rewards", "[{{function: no.py:f}}]"], "got 'no.py:f' (from {here})"),
        (["plot", "nowhere"], "no file nowhere (from {here})"),
        (
            ["plot", "metrics.jsonl", "--out", "/proc/none/a.png"],
            "error: [Errno 2] No such file or directory: '/proc/none'",
        ),
        (["train", "--config", "recipe.yaml", "--loss.beta=-1"], "command line: loss.beta must be at least 0"),
        (["train", "--config", "recipe.yaml", "--lora.r=0"], "command line: lora.r must be at least 1"),
    ],
    ids=["config", "data", "function", "plot", "image", "loss", "lora"],
)
def test_errors_name_the_folder_or_the_option(
    recipe: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(recipe.parent)
    Path("metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    with pytest.raises(SystemExit) as ended:
        main([word.format() for word in arguments])
    assert message.format(here=recipe.parent) in capsys.readouterr().err + str(ended.value)
