"""The command line: recipes are read, run and refused; every recipe of the repository goes through a dry run."""

from __future__ import annotations

import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from guards import processor_seconds

from grpo_fused.__main__ import main
from grpo_fused.trainer import GRPOTrainer
from grpo_fused.trainer.cli import read_recipe
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.dry_run import dry_run
from grpo_fused.trainer.metrics import RunLog, format_row, format_samples, read_jsonl
from grpo_fused.trainer.plot import draw_panel, panels_of
from grpo_fused.trainer.recipe import LoRA, Recipe, Reward, load_function, load_parts
from grpo_fused.trainer.tiny import tiny_model, tiny_reward_model, tiny_tokenizer

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"

BASE = """
model: {model}
dataset: {data}
output_dir: {out}
rewards:
  - {{name: length, options: {{target_length: 3}}}}
steps: 2
prompts_per_step: 2
num_generations: 2
max_completion_length: 4
learning_rate: 1e-6
loss: {{beta: 0.04, epsilon: 0.3}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe file with a model and data next to it."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"question {i}", "answer": str(i)} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "recipe.yaml"
    file.write_text(BASE.format(model=tmp_path / "model", data=tmp_path / "data.jsonl", out=tmp_path / "out"))
    return file


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_takes_a_step(path: Path) -> None:
    recipe, _ = read_recipe(["--config", str(path)])
    if recipe.is_generated:
        pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    (metrics,) = [row for row in dry_run(recipe) if row["step"] == 1]
    assert "reward" in metrics
    assert len([name for name in metrics if name.startswith("rewards/")]) == len(recipe.rewards) + 1  # the stand-in
    assert metrics["grad_norm"] > 0
    assert metrics["zero_std_groups"] == 0
    assert metrics["loss"] != 0


def test_the_file_the_command_line_and_both_spellings(recipe: Path) -> None:
    read, switches = read_recipe(
        ["--config", str(recipe), "--learning-rate", "2e-6", "--loss.epsilon_high=0.5", "--lora.r", "4", "--dry-run"]
    )
    assert read.learning_rate == 2e-6
    assert (read.loss.beta, read.loss.epsilon, read.loss.epsilon_high) == (0.04, 0.3, 0.5)
    assert read.rewards == (Reward(name="length", options={"target_length": 3}),)
    assert read.lora == LoRA(r=4)
    assert switches == {"resume": False, "overwrite": False, "dry_run": True}


def test_later_options_count_and_texts_become_the_type_of_their_option(recipe: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("mixed_precision: no\nlora: null\nlearning_rate: '2e-6'\nloss: {epsilon: 1}\nresume: true\n")
    words = [
        "--lora.r",
        "4",
        "--config",
        str(later),
        "--lora.alpha",
        "8",
        "--run-name",
        "7",
        "--vllm-options.b",
        "1e-3",
    ]
    read, switches = read_recipe(["--config", str(recipe), "--vllm-options", "{a: [x]}", *words, "--loss.beta", "-0"])
    assert (read.mixed_precision, read.learning_rate, read.run_name) == ("no", 2e-6, "7")
    assert (repr(read.loss.beta), repr(read.loss.epsilon)) == ("0.0", "1.0")
    assert read.lora == LoRA(alpha=8)
    assert read.vllm_options == {"a": ["x"], "b": 1e-3}
    assert switches["resume"]


def test_a_run_from_the_command_line(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--config", str(recipe), "--steps", "1", "--sample-steps", "1", "--report-to", "tensorboard"])
    out = tmp_path / "out"
    assert "completions of step 1" in capsys.readouterr().out
    assert (out / "checkpoint-000001" / "model.safetensors").exists()
    assert list((out / "grpo_fused").glob("events.out.tfevents*"))
    with pytest.raises(SystemExit, match="error: .*must not hold a run"):
        main(["train", "--config", str(recipe)])
    capsys.readouterr()
    main(["train", "--config", str(recipe), "--resume"])
    assert capsys.readouterr().out.splitlines()[:6] == [
        f"resumed from {out / 'checkpoint-000001'}, 1 of 2 steps done",
        "options that are not those of the checkpoint:",
        "  steps: 1 -> 2",
        "  sample_steps: 1 -> 0",
        "  report_to: ['tensorboard'] -> []",
        f"model       {tmp_path / 'model'}, 35,296 parameters (35,296 trained)",
    ]
    with pytest.raises(
        SystemExit, match="^grpo-fused train: error: cannot resume .*: steps must be at least 2, .*got 1$"
    ):
        main(["train", "--config", str(recipe), "--resume", "--steps", "1"])
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    main(["plot", str(out), "--title", "a run"])
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "curves.png" in capsys.readouterr().out


def test_rewards_from_a_file_and_a_model(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(completions, by=2, **columns):\n    return [1 / by] * len(completions)\n"
    )
    tokenizer = tiny_tokenizer()
    tiny_reward_model(tokenizer).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    rewards = [
        {"function": f"{tmp_path / 'mine.py'}:half", "options": {"by": 4}},
        {"model": str(tmp_path / "judge"), "weight": 0.5},
    ]
    main(["train", "--config", str(recipe), "--rewards", json.dumps(rewards), "--steps", "1"])
    (line,) = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    names = {name: value for name, value in json.loads(line).items() if name.startswith("rewards/")}
    assert names.pop("rewards/half") == 0.25
    assert len(names) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-generations", "1"], "command line: num_generations must be at least 2 and finite; got 1"),
        (["--loss.beta", "-1"], "beta"),
        (["--learning-rates", "1"], "command line: unknown option 'learning_rates'; did you mean 'learning_rate'?"),
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
    ],
    ids=[
        "group-of-one",
        "beta",
        "misspelt",
        "no-rewards",
        "two-kinds",
        "task",
        "dtype",
        "gmpo-vllm",
        "vespo-vllm",
        "penalty-vllm",
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
        ("steps: 2", "steps: ten", "7: steps must be an integer; got 'ten'"),
        ("steps: 2", "steps: 0", "7: steps must be at least 1 and finite; got 0"),
        ("steps: 2", "gradient_checkpointing: 3", "7: gradient_checkpointing must be true or false; got 3"),
        ("steps: 2", "dtype: int8", "7: dtype must be one of float32, bfloat16, auto; got 'int8'"),
        ("steps: 2", "lora: {r: x}", "7: lora.r must be an integer; got 'x'"),
        ("steps: 2", "lora: yes", "7: lora must be a mapping of options or null; got True"),
        ("beta: 0.04", "bta: 0.04", "12: unknown option 'loss.bta'; did you mean 'loss.beta'?"),
        ("beta: 0.04", "beta: low", "12: loss.beta must be a number; got 'low'"),
        ("beta: 0.04", "beta: -1", "12: loss.beta must be at least 0 and finite; got -1.0"),
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
        (["--rewards", '[{"function": "mine.py:raises"}]'], r"'raises' raised ZeroDivisionError: .* \(mine.py:2\)"),
        (
            ["--rewards", '[{"function": "mine.py:one"}]'],
            "'one' must return one reward for each of 4 completions; got 1",
        ),
        (["--impl", "cuda"], "impl='cuda' cannot run on cpu: .*"),
        (["--rollout", "vllm"], "this recipe needs the package vllm: pip install vllm"),
        (["--report-to", "wandbb"], "report_to must name trackers of accelerate, .*; got 'wandbb'"),
        (["--model", "./nowhere"], "model must be a path or name that can be loaded; got './nowhere': .*"),
    ],
    ids=["raises", "count", "engine", "vllm", "tracker", "model"],
)
def test_expected_failures_are_one_line(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def raises(**_):\n    return 1 / 0\n\ndef one(**_):\n    return [1.0]\n")
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


@pytest.mark.parametrize(
    ("signals", "status", "steps"), [(["SIGINT"], 130, 1), (["SIGTERM"], 143, 1), (["SIGINT"] * 2, 130, 0)]
)
def test_ctrl_c(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[str], status: int, steps: int
) -> None:
    whole = GRPOTrainer.step

    def step(self: GRPOTrainer) -> dict[str, float]:
        for name in signals:
            signal.raise_signal(getattr(signal, name))
        return whole(self)

    monkeypatch.setattr(GRPOTrainer, "step", step)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(recipe)])
    assert ended.value.code == status
    assert (tmp_path / "out" / "checkpoint-000001").exists() == bool(steps)


def test_what_a_run_prints(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = '[{"name": "length", "options": {"target_length": 3}}, {"name": "format"}]'
    main(["train", "--config", str(recipe), "--rewards", rewards, "--logging-steps", "1", "--eval-limit", "2",
          "--eval-dataset", str(tmp_path / "data.jsonl"), "--top-p", "0.9"])  # fmt: skip
    printed, errors = capfd.readouterr()
    lines = printed.splitlines()
    facts = dict(line.split(None, 1) for line in lines[:6])
    assert facts["model"].startswith(str(tmp_path / "model"))
    assert facts["loss"].startswith("dapo, engine ")
    assert facts["step"] == "2 prompts x 2 completions of at most 4 tokens = at most 16 tokens"
    assert facts["sampling"] == "temperature 1.0, top_p 0.9"
    assert facts["trackers"] == "none"
    assert facts["output_dir"] == str(tmp_path / "out")
    titles, first, rewards, second, *_ = lines[8:]
    assert lines[7].split()[:2] == ["0", "eval/length"]
    assert titles.split()[:2] == ["step", "reward"]
    assert (first.split()[0], second.split()[0]) == ("1", "2")
    assert len(first) == len(second) == len(titles)
    assert rewards.split()[0] == "length"
    assert max(map(len, lines[6 : lines.index("", 7)])) <= 100  # paths of the summary may be long
    assert "GRPO" not in errors  # no progress bar if the output is not a terminal


def test_rows_stay_aligned_and_short() -> None:
    row = {
        "step": 10, "reward": -1234567.0, "zero_std_groups": 0.0625, "completion_length": 118.25, "loss": float("nan"),
        "kl": 0.000587, "entropy": 0.184, "clip_ratio/region_mean": 0.0123, "grad_norm": 3.2e9,
        "tokens_per_second": 2980.4, "seconds": 3.0,
    }  # fmt: skip
    titles, values = format_row(row, titles=True).splitlines()
    assert len(titles) == len(values) <= 100
    assert values.split() == ["10", "-1.2M", "6%", "118.2", "-", "0.0006", "0.184", "1.2%", "3.2G", "2,980"]
    many = {"step": 1, "reward": 0.5} | {f"rewards/a_long_name_{i}": 1 / 3 for i in range(12)}
    assert max(map(len, format_row(many).splitlines())) <= 100
    assert format_row(many).count("a_long_name") == format_row(many).count("0.333") == 12


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
    ],
    ids=["unused-bomb", "bomb", "lists", "objects", "cycle", "long", "unknown-alias", "no-yaml", "dash"],
)
def test_hostile_recipes_are_refused_at_once(
    recipe: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text() + text)
    with processor_seconds(10), pytest.raises(SystemExit):  # milliseconds, after imports; a bomb takes hours
        main(["train", "--config", str(recipe)])
    assert re.search(message, capsys.readouterr().err)


def test_a_recipe_may_have_aliases(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "stop_strings: &stops [a, b]\nreport_to: *stops\n")
    read, _ = read_recipe(["--config", str(recipe)])
    assert read.stop_strings == read.report_to == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "data/trian.jsonl"], "data/trian.jsonl"),
        (["--rewards", '[{"name": "exact_answr"}]'], "exact_answr"),
    ],
    ids=["data", "reward"],
)
def test_a_dry_run_finds_missing_files(recipe: Path, arguments: list[str], message: str) -> None:
    """A misspelt file is not treated as the name of a data set."""
    with pytest.raises(SystemExit, match=f"grpo-fused train: error: .*{message}"):
        main(["train", "--config", str(recipe), "--dry-run", *arguments])


def test_a_dry_run_without_a_gradient_fails(recipe: Path) -> None:
    """With one token to choose from, nothing can be learned."""
    with pytest.raises(SystemExit, match="error: rewards that differ must give a gradient; got 0"):
        main(["train", "--config", str(recipe), "--dry-run", "--top-k", "1", "--loss.beta", "0"])


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
        (["train", "--config", "recipe.yaml", "--loss.beta=-1"], "command line: loss.beta must be at least 0"),
        (["train", "--config", "recipe.yaml", "--lora.r=0"], "command line: lora.r must be at least 1"),
    ],
    ids=["config", "data", "function", "plot", "loss", "lora"],
)
def test_errors_name_the_folder_or_the_option(
    recipe: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(recipe.parent)
    with pytest.raises(SystemExit) as ended:
        main([word.format() for word in arguments])
    assert message.format(here=recipe.parent) in capsys.readouterr().err + str(ended.value)


def test_a_run_ends_with_its_last_row_and_a_summary(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = recipe.parent / "out"
    main(["train", "--config", str(recipe), "--steps", "3", "--logging-steps", "2"])
    printed, errors = capfd.readouterr()
    titles, second, third, blank, *summary = printed.splitlines()[7:]
    assert [row.split()[0] for row in (titles, second, third)] == ["step", "2", "3"]
    assert not blank
    rewards = [row["reward"] for row in read_jsonl(out / "metrics.jsonl")]
    facts = dict(re.split("  +", line, maxsplit=1) for line in summary)
    assert re.fullmatch(r"3 steps in [\d.]+ s", facts.pop("done"))
    assert facts == {
        "reward": f"{rewards[0]:.3f} at step 1 -> {rewards[2]:.3f} at step 3",
        "checkpoint": str(out / "checkpoint-000003"),
        "use it": f'AutoModelForCausalLM.from_pretrained("{out / "checkpoint-000003"}")',
        "curves": f"grpo-fused plot {out}",
    }
    assert not errors  # no progress bars, of libraries neither
    main(["train", "--config", str(recipe), "--steps", "1", "--logging-steps", "0", "--overwrite"])
    assert not capfd.readouterr().out


def test_a_step_without_an_update_keeps_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no entropy; titles are repeated for a new column, after completions, and every 20 rows."""
    log = RunLog(GRPOTrainerConfig(logging_steps=1), Accelerator(), None)
    log.record({"step": 1, "reward": 1.0, "loss": 0.5})
    log.record({"step": 2, "reward": 1.0, "entropy": 0.1, "loss": 0.5})
    log.record({"step": 3, "reward": 1.0, "loss": 0.0})
    log.samples(4, "p", ["a"], {"r": [1.0]}, [1.0])
    log.record({"step": 4, "reward": 1.0, "loss": 0.0})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line and "r" not in line.split()[:1]]
    rows = [line for line in lines if line[0] in "1234"]
    assert [row[2:] for row in rows] == [["0.5000"], ["0.5000", "0.100"], ["0.0000", "-"], ["0.0000", "-"]]
    assert [lines.index(row) - 1 in [i for i, line in enumerate(lines) if line[0] == "step"] for row in rows] == [
        True, True, False, True,
    ]  # fmt: skip
    for step in range(5, 30):
        log.record({"step": step, "reward": 1.0, "loss": 0.0})
    titles = [i for i, line in enumerate(capsys.readouterr().out.splitlines()) if "step" in line]
    assert titles == [19]


def test_completions_are_three_of_four_lines() -> None:
    texts = ["worst", "best\n" * 9, "\x07[/b]", "middle " * 99, "x"]
    totals = [-1.0, 9.0, 1.0, 2.0, 0.5]
    rewards = {"rewards/length_reward": totals, "none": [float("nan")] * 5}
    prompt = "system: be good\n\n" + "\n".join(f"line {i}" for i in range(9))
    text = format_samples(7, prompt, texts, {"length_reward": totals, "none": rewards["none"]}, totals)
    assert text.splitlines()[:7] == [
        "", "completions of step 7, 3 of 5", "prompt     ... line 5", "           line 6", "           line 7",
        "           line 8", "reward 9   best",
    ]  # fmt: skip
    assert [line.split()[1] for line in text.splitlines() if line.startswith("reward")] == ["9", "1", "-1"]
    assert text.count("best") == 4
    assert "best ..." in text
    assert "\ufffd[/b]" in text
    assert "length 9, none not judged" in text
    assert max(map(len, text.splitlines())) <= 100
    two = format_samples(1, "p", ["a", "b"], {"r": [1.0, 0.0]}, [1.0, 0.0])
    assert "2 of 2" in two
    assert "r 1" not in two  # the only reward is the sum


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": (Reward(name="nice"),)}, "nice"),
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"rewards": (Reward(function="nowhere:f"),)}, "got 'nowhere:f' .*ModuleNotFoundError"),
    ],
    ids=["reward", "data", "function"],
)
def test_parts_that_cannot_be_loaded_are_named(recipe: Path, change: dict[str, Any], message: str) -> None:
    from grpo_fused.trainer.recipe import build_trainer

    read, _ = read_recipe(["--config", str(recipe)])
    with pytest.raises((ValueError, OSError), match=message):
        build_trainer(replace(read, **change))


def test_truncated_sampling_is_allowed(recipe: Path) -> None:
    """Its candidate sets are recorded, so that log-probs are of the distribution that was sampled."""
    for arguments in (["--top-p", "0.9"], ["--top-p", "0.9", "--rollout", "vllm"]):
        assert read_recipe(["--config", str(recipe), *arguments])[0].top_p == 0.9


def test_the_seed_draws_the_adapter(recipe: Path) -> None:
    def adapter(seed: int, before: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(before)
        model = load_parts(read_recipe(["--config", str(recipe), "--lora.r", "2", "--seed", str(seed)])[0]).model
        return {name: value for name, value in model.named_parameters() if "lora_A" in name}

    one, again, other = adapter(0, before=1), adapter(0, before=2), adapter(5, before=1)
    for name, value in one.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])


def test_a_recipe_may_name_a_reference_model(recipe: Path, tmp_path: Path) -> None:
    """It is loaded like the model, and a dry run has a tiny one."""
    from grpo_fused.trainer.recipe import build_trainer

    read, _ = read_recipe(["--config", str(recipe)])
    read = replace(read, reference_model=read.model, output_dir=str(tmp_path / "run"))
    trainer = build_trainer(read)
    assert trainer.reference is not None
    assert trainer.reference.policy.unwrapped is not trainer.model
    assert len(dry_run(read)) >= 1
    with pytest.raises(OSError, match="reference_model must be a path or name that can be loaded; got '/nowhere'"):
        load_parts(replace(read, reference_model="/nowhere"))


def test_functions_are_found_by_path(tmp_path: Path) -> None:
    assert load_function("grpo_fused.rewards:format_reward").__name__ == "format_reward"
    with pytest.raises(ValueError, match='must be "module:function"'):
        load_function("format_reward")
    (tmp_path / "x.py").write_text("value = 3\n")
    with pytest.raises(ValueError, match=r"x.py:other' \(KeyError: 'other'"):
        load_function(f"{tmp_path / 'x.py'}:other")


def test_a_module_of_the_current_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def one(completions, **_):\n    return [1.0] * len(completions)\n")
    of_mine = recipe.read_text().replace("{name: length, options: {target_length: 3}}", "function: rewards_of_mine:one")
    recipe.write_text(of_mine)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as a console script's
    monkeypatch.chdir(tmp_path)
    main(["train", "--config", str(recipe), "--dry-run"])
    printed = capsys.readouterr().out
    assert "dry run: ok" in printed
    assert len(printed.splitlines()) <= 25
    assert "two of " in printed
    assert "one 1.000" in printed
    assert "every_other" not in printed


def test_held_out_rows_of_a_file_take_no_subset_and_split(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "p"}\n')
    named = {"dataset": "some/name", "subset": "main", "split": "train[:10]"}
    read = Recipe(model="m", rewards=(Reward(name="format"),), eval_dataset=str(tmp_path / "held.jsonl"), **named)
    assert read.eval_rows() == [{"prompt": "p"}]


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    from dataclasses import fields

    for f in fields(Recipe):
        assert f"--{f.name}" in text
    assert "divides the logits" not in text
    assert "Of sampling and of scoring" in text
    assert "coefficient" in text.lower() or "KL" in text


def test_the_plot_has_integer_steps_and_no_empty_panel() -> None:
    from matplotlib.figure import Figure

    flat = {"clip_ratio/region_mean": 0.0, "zero_std_groups": 0.5, "kl": None}
    lines: list[dict[str, float | None]] = [{"step": step, "reward": 1.0, **flat} for step in (1, 2)]
    reward, groups = panels_of(lines)
    assert (reward.title, groups.unit) == ("Reward", "% of groups")
    axes = Figure().subplots()
    draw_panel(axes, groups, lines)
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.yaxis.get_major_formatter()(0.5) == "50%"
    assert not any(line.get_clip_on() for line in axes.lines)
    assert [panel.title for panel in panels_of([line | {"clip_ratio/region_mean": 0.1} for line in lines])][
        1
    ] == "Clip ratio"


def test_the_plot_of_one_step_has_its_values() -> None:
    """On an axis from 0; with one point matplotlib would show a range of a tenth around it."""
    from matplotlib.figure import Figure

    lines: list[dict[str, float | None]] = [{"step": 1, "reward": 0.4, "entropy": -1.25, "eval/x": 0.5}]
    for panel, texts, limits in zip(
        panels_of(lines), ("0.4", "0.5", "-1.25"), ((0, 0.5), (0, 0.625), (-1.5625, 0)), strict=True
    ):
        axes = Figure().subplots()
        draw_panel(axes, panel, lines)
        assert [text.get_text() for text in axes.texts] == [texts]
        low, high = axes.get_ylim()
        assert low == pytest.approx(limits[0])
        assert high == pytest.approx(limits[1] or 1)
        assert axes.get_xlim() == (0, 2)
    more = [*lines, {"step": 2, "reward": 0.5, "eval/x": 0.6}]
    axes = Figure().subplots()
    draw_panel(axes, panels_of(more)[1], more)
    assert not axes.texts
    assert axes.get_ylim()[0] == 0


def test_plot_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: .*metrics.jsonl"):
        main(["plot", str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="at least one step"):
        main(["plot", str(tmp_path)])
