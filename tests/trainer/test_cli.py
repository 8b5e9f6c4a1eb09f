"""The command line: recipes are read, run and refused; every recipe of the repository goes through a dry run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import processor_seconds

from grpo_fused.__main__ import main
from grpo_fused.trainer.cli import read_recipe
from grpo_fused.trainer.dry_run import dry_run
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
    """A recipe file with a model and data beside it."""
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
    (metrics,) = [row for row in dry_run(recipe) if row["step"] == 1]
    assert "reward" in metrics
    assert len([name for name in metrics if name.startswith("rewards/")]) == len(recipe.rewards)


def test_the_file_the_command_line_and_both_spellings(recipe: Path) -> None:
    read, switches = read_recipe(
        ["--config", str(recipe), "--learning-rate", "2e-6", "--loss.epsilon_high=0.5", "--lora.r", "4", "--dry-run"]
    )
    assert read.learning_rate == 2e-6
    assert (read.loss.beta, read.loss.epsilon, read.loss.epsilon_high) == (0.04, 0.3, 0.5)
    assert read.rewards == (Reward(name="length", options={"target_length": 3}),)
    assert read.lora == LoRA(r=4)
    assert switches == {"resume": False, "overwrite": False, "dry_run": True}


def test_a_run_from_the_command_line(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--config", str(recipe), "--steps", "1", "--sample-steps", "1", "--report-to", '["tensorboard"]'])
    out = tmp_path / "out"
    assert "completions of step 1" in capsys.readouterr().out
    assert (out / "checkpoint-000001" / "model.safetensors").exists()
    assert list(out.rglob("events.out.tfevents*"))
    with pytest.raises(SystemExit, match="error: .*must not hold a run"):
        main(["train", "--config", str(recipe)])
    main(["train", "--config", str(recipe), "--resume"])
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
        (["--num-generations", "1"], "num_generations must be at least 2 and finite; got 1"),
        (["--loss.beta", "-1"], "beta"),
        (["--learning-rates", "1"], "learning_rates"),
        (["--rewards", "[]"], "at least one reward function"),
        (["--rewards", '[{"name": "format", "model": "x"}]'], "exactly one of name, function and model"),
        (["--task", "chess"], "chess"),
        (["--dtype", "int8"], "int8"),
        (["--rollout", "vllm", "--loss.loss_type", "gmpo"], "must be null with loss_type gmpo"),
        (
            ["--rollout", "vllm", "--loss", "{loss_type: vespo, epsilon: 0.2}"],
            "by token (token_mask, token_truncate) or null with vespo",
        ),
        (["--rollout", "vllm", "--top-p", "0.9"], "importance_sampling must be null unless"),
        (["--rollout", "vllm", "--top-k", "50", "--min-p", "0.1"], "got top_k 50, min_p 0.1"),
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
        "top-p-vllm",
        "top-k-vllm",
        "penalty-vllm",
    ],
)
def test_wrong_recipes_end_with_the_reason(
    recipe: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(recipe), *arguments])
    assert message in capsys.readouterr().err + str(ended.value)
    assert ended.value.code != 0


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "at most 20000 values, aliases written out"),
        (BOMB + "rewards: *a29\n", "at most 20000 values, aliases written out"),
        ("vllm_options: " + "[" * 10_000, "must not be nested deeply"),
        ("vllm_options: " + "{a: " * 10_000, "must not be nested deeply"),
        ("vllm_options: &a {b: *a}", "alias of what it stands in"),
        ("model: [" + "x, " * 30_000 + "]", "at most 20000 values"),
        ("model: *nothing", "undefined alias"),
        ("model: [", "Problems parsing config"),
    ],
    ids=["unused-bomb", "bomb", "lists", "objects", "cycle", "long", "unknown-alias", "no-yaml"],
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
def test_a_dry_run_finds_what_is_not_there(recipe: Path, arguments: list[str], message: str) -> None:
    """A misspelt file is not taken for the name of a data set."""
    with pytest.raises(SystemExit, match=f"grpo-fused train: error: .*{message}"):
        main(["train", "--config", str(recipe), "--dry-run", *arguments])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": (Reward(name="nice"),)}, "nice"),
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"rewards": (Reward(function="nowhere:f"),)}, "got 'nowhere:f' .*ModuleNotFoundError"),
    ],
    ids=["reward", "data", "function"],
)
def test_what_cannot_be_loaded_is_named(recipe: Path, change: dict[str, Any], message: str) -> None:
    from dataclasses import replace

    from grpo_fused.trainer.recipe import build_trainer

    read, _ = read_recipe(["--config", str(recipe)])
    with pytest.raises((ValueError, OSError), match=message):
        build_trainer(replace(read, **change))


def test_truncated_sampling_is_allowed_where_its_log_probs_are_not_used(recipe: Path) -> None:
    """`generate` gives none: old and new log-probs are both the policy's own."""
    vllm = ["--rollout", "vllm", "--importance-sampling", "null"]
    for arguments in (["--top-p", "0.9"], ["--top-p", "0.9", *vllm]):
        assert read_recipe(["--config", str(recipe), *arguments])[0].top_p == 0.9
    with pytest.raises(SystemExit):
        read_recipe(["--config", str(recipe), "--top-p", "0.9", *vllm, "--loss.off_policy_mask_threshold", "0.5"])


def test_the_seed_draws_the_adapter(recipe: Path) -> None:
    def adapter(seed: int, before: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(before)
        model = load_parts(read_recipe(["--config", str(recipe), "--lora.r", "2", "--seed", str(seed)])[0]).model
        return {name: value for name, value in model.named_parameters() if "lora_A" in name}

    one, again, other = adapter(0, before=1), adapter(0, before=2), adapter(5, before=1)
    for name, value in one.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])


def test_functions_are_found_by_place(tmp_path: Path) -> None:
    assert load_function("grpo_fused.rewards:format_reward").__name__ == "format_reward"
    with pytest.raises(ValueError, match='must be "module:function"'):
        load_function("format_reward")
    (tmp_path / "x.py").write_text("value = 3\n")
    with pytest.raises(ValueError, match=r"x.py:other' \(KeyError: 'other'"):
        load_function(f"{tmp_path / 'x.py'}:other")


def test_a_module_of_the_folder_that_it_is_called_in(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def one(completions, **_):\n    return [1.0] * len(completions)\n")
    of_mine = recipe.read_text().replace("{name: length, options: {target_length: 3}}", "function: rewards_of_mine:one")
    recipe.write_text(of_mine)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as a console script's
    monkeypatch.chdir(tmp_path)
    main(["train", "--config", str(recipe), "--dry-run"])
    assert "the dry run went through" in capsys.readouterr().out


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


def test_plot_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: .*metrics.jsonl"):
        main(["plot", str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="at least one step"):
        main(["plot", str(tmp_path)])
