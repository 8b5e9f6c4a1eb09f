"""The command line: recipes are read and run; every recipe of the repository goes through a dry run."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fused import GRPOLossConfig
from grpo_fused.__main__ import main
from grpo_fused.trainer import GRPOTrainer, plot
from grpo_fused.trainer.cli import read_recipe
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.dry_run import dry_run
from grpo_fused.trainer.metrics import RunLog, append_jsonl, format_row, format_samples, read_jsonl, summary_of
from grpo_fused.trainer.objective import ObjectiveOptions
from grpo_fused.trainer.plot import draw_panel, moving_average, panels_of, plot_run
from grpo_fused.trainer.recipe import LoRA, Recipe, Reward, load_function, load_parts
from grpo_fused.trainer.tiny import tiny_reward_model, tiny_tokenizer

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_takes_a_step(path: Path) -> None:
    recipe, _ = read_recipe(["--config", str(path)])
    if recipe.is_generated:
        pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    few = replace(recipe, num_generations=2)  # eight take three times as long, and show no more
    metrics = dry_run(few)
    assert "reward" in metrics
    assert len([name for name in metrics if name.startswith("rewards/")]) == len(recipe.rewards) + 1  # the stand-in
    assert metrics["grad_norm"] > 0
    assert metrics["zero_std_groups"] == 0
    assert metrics["loss"] != 0


def test_a_date_is_a_text(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "system_prompt: 2026-11-27\n")
    assert read_recipe(["--config", str(recipe)])[0].system_prompt == "2026-11-27"


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
        "--report-to",
        "wandb",
        "--vllm-options.b",
        "1e-3",
        "--rollout",
        "vllm",
    ]
    read, switches = read_recipe(["--config", str(recipe), "--vllm-options", "{a: [x]}", *words, "--loss.beta", "-0"])
    assert (read.mixed_precision, read.learning_rate, read.run_name) == ("no", 2e-6, "7")
    assert (repr(read.loss.beta), repr(read.loss.epsilon)) == ("0.0", "1.0")
    assert read.lora == LoRA(alpha=8)
    assert read.vllm_options == {"a": ["x"], "b": 1e-3}
    assert switches["resume"]
    assert not read_recipe(["--config", str(later), "--config", str(recipe), "--resume=false"])[1]["resume"]


def test_null_lists_of_words_and_merged_mappings(recipe: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("task: null\nloss: {<<: {beta: 0.1, epsilon: 0.4}, epsilon: 0.25}\n")
    words = ["--task", "gsm8k", "--config", str(later), "--lora.target-modules", "[q_proj, v_proj]"]
    words += ["--eval-dataset", "null", "--dataset", "rows:make", "--dataset-options.seed", ""]
    read, _ = read_recipe(["--config", str(recipe), *words])
    assert read.dataset_options == {"seed": None}
    assert read.task is None
    assert read.eval_dataset is None
    assert (read.loss.beta, read.loss.epsilon) == (0.1, 0.25)
    assert read.lora == LoRA(target_modules=("q_proj", "v_proj"))
    read, _ = read_recipe(["--config", str(recipe), "--lora.target-modules", "[qv]_proj"])
    assert read.lora == LoRA(target_modules="[qv]_proj")


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
    image = tmp_path / "new" / "curves.png"
    main(["plot", str(out), "--title", "a run", "--out", str(image)])
    assert image.read_bytes().startswith(b"\x89PNG")
    assert str(image) in capsys.readouterr().out


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
    metrics = json.loads(line)
    names = {name: value for name, value in metrics.items() if name.startswith("rewards/")}
    assert names.pop("rewards/half") == 0.25
    (judged,) = names.values()
    assert abs(judged) > 0.01
    assert metrics["reward"] == pytest.approx(0.25 + 0.5 * judged)


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
    assert re.fullmatch("dapo, engine .*, on cpu, 1 process", facts["loss"])
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


@pytest.mark.parametrize("option", ["--model", "--reference-model"])
def test_a_model_without_a_head_is_refused(recipe: Path, tmp_path: Path, option: str) -> None:
    tokenizer = tiny_tokenizer()
    tiny_reward_model(tokenizer).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    name = option[2:].replace("-", "_")
    with pytest.raises(SystemExit, match=f"{name} must be a causal language model; got .* no weights for lm_head"):
        main(["train", "--config", str(recipe), option, str(tmp_path / "judge"), "--loss.beta", "0.1"])


def test_columns_keep_their_order() -> None:
    first = {"step": 1, "reward": 0.5, "loss": 0.0, "grad_norm": 0.0, "tokens_per_second": 9.0}
    titles, _ = format_row(first | {"entropy": 0.1, "clip_ratio/region_mean": 0.0}, titles=True).splitlines()
    assert titles.split() == ["step", "reward", "loss", "entropy", "clipped", "grad", "norm", "tokens/s"]


def test_a_single_reward_is_shown_where_it_is_not_the_sum() -> None:
    row = {"step": 1, "reward": 0.5, "rewards/part": 0.5}
    assert "part" not in format_row(row)
    assert "part 0.750" in format_row(row | {"rewards/part": 0.75})


def test_rows_stay_aligned_and_short() -> None:
    row = {
        "step": 10, "reward": -1234567.0, "zero_std_groups": 0.0625, "completion_length": 118.25, "loss": float("nan"),
        "kl": 0.000587, "entropy": 0.184, "clip_ratio/region_mean": 0.0123, "grad_norm": 3.2e9,
        "tokens_per_second": 2980.4, "seconds": 3.0,
    }  # fmt: skip
    titles, values = format_row(row, titles=True).splitlines()
    assert len(titles) == len(values) <= 100
    assert values.split() == ["10", "-1.2M", "6%", "118.2", "-", "0.0006", "0.184", "1.2%", "3.2G", "2,980"]
    assert format_row({"step": 1, "reward": 1234.5678}).split() == ["1", "1234.568"]
    assert format_row({"step": 1, "reward": 1e20}).split() == ["1", "100000.0P"]
    many = {"step": 1, "reward": 0.5} | {f"rewards/a_long_name_{i}": 1 / 3 for i in range(12)}
    assert max(map(len, format_row(many).splitlines())) <= 100
    assert format_row(many).count("a_long_name") == format_row(many).count("0.333") == 12


def test_a_recipe_may_have_aliases(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "stop_strings: &stops [a, b]\nreport_to: *stops\n")
    read, _ = read_recipe(["--config", str(recipe)])
    assert read.stop_strings == read.report_to == ("a", "b")


def test_a_dry_run_without_a_gradient_fails(recipe: Path) -> None:
    """With one token to choose from, nothing can be learned."""
    with pytest.raises(SystemExit, match="error: rewards that differ must give a gradient; got 0"):
        main(["train", "--config", str(recipe), "--dry-run", "--top-k", "1", "--loss.beta", "0"])


def test_a_run_ends_with_its_last_row_and_a_summary(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = recipe.parent / "o u t"
    words = ["train", "--config", str(recipe), "--output-dir", str(out)]
    main([*words, "--steps", "3", "--logging-steps", "2"])
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
        "curves": f"grpo-fused plot '{out}'",
    }
    assert not errors  # no progress bars, of libraries neither
    main([*words, "--steps", "1", "--logging-steps", "0", "--overwrite"])
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
    log.finish([], 0.0, None)
    assert not capsys.readouterr().out  # the last row was due


def test_an_evaluation_before_training_is_no_step() -> None:
    history = [{"step": 0.0, "eval/x": 0.25}, {"step": 1.0, "reward": 0.5, "eval/x": 0.25}]
    facts = summary_of(history, 119.7, None, None)
    assert facts == {
        "done": "1 steps in 2 min 0 s", "eval/x": "0.250 at step 0 -> 0.250 at step 1", "reward": "0.500 at step 1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "shown"), [(59.4, "59.4 s"), (119.7, "2 min 0 s"), (2 * 3600 + 29 * 60 + 59, "2 h 29 min")]
)
def test_the_time_of_a_run(seconds: float, shown: str) -> None:
    assert summary_of([{"step": 1.0, "reward": 0.5}], seconds, None, None)["done"] == f"1 steps in {shown}"


def test_only_the_main_process_records_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(GRPOTrainerConfig(logging_steps=1), Accelerator(), tmp_path)
    monkeypatch.setattr(Accelerator, "is_main_process", False)
    log.record({"step": 1, "reward": 1.0})
    log.say("text")
    assert not capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_terminal_without_the_character_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    log = RunLog(GRPOTrainerConfig(logging_steps=1), Accelerator(), None)
    log.samples(1, "caf\u00e9", ["\u221a2", "b"], {"r": [1.0, 0.0]}, [1.0, 0.0])
    out.flush()
    assert {b"caf\xe9", b"\\u221a2"} <= set(out.buffer.getvalue().split())  # type: ignore[attr-defined]


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
    assert format_samples(1, "p\n" * 4, ["a\n" * 4] * 3, {"r": [1.0] * 3}, [1.0] * 3).count("...") == 0
    code = format_samples(1, "p\r\n", ["def f():\n\treturn 1"] * 3, {"r": [1.0] * 3}, [1.0] * 3)
    assert "\ufffd" not in code  # tabs and any kind of line end
    assert "        return 1\n" in code
    two = format_samples(1, "p", ["a", "b"], {"r": [1.0, 0.0]}, [1.0, 0.0])
    assert "2 of 2" in two
    assert "r 1" not in two  # the only reward is the sum


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
    assert dry_run(read)["step"] == 1
    with pytest.raises(OSError, match="reference_model must be a path or name that can be loaded; got '/nowhere'"):
        load_parts(replace(read, reference_model="/nowhere"))


def test_both_models_are_loaded_as_the_recipe_says(recipe: Path) -> None:
    read, _ = read_recipe(["--config", str(recipe)])
    parts = load_parts(replace(read, reference_model=read.model, dtype="bfloat16", attn_implementation="eager"))
    for model in (parts.model, parts.reference_model):
        assert model is not None
        assert model.dtype == torch.bfloat16
        assert model.config._attn_implementation == "eager"


def test_a_recipe_may_go_on_with_an_adapter(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model: <a checkpoint with LoRA>` trains that adapter, and vLLM gets the model under it; a new one beside it is
    refused."""
    from peft import LoraConfig, get_peft_model

    from grpo_fused.trainer.recipe import build_trainer

    read, _ = read_recipe(["--config", str(recipe)])
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(read.model), LoraConfig(r=4))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.5)
    folder, ids = recipe.with_name("adapter"), torch.tensor([[5, 6, 7]])
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(read.model)
    assert load_parts(replace(read, model=str(folder))).tokenizer.chat_template == tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content }}"  # not that of the model under it
    tokenizer.save_pretrained(folder)
    base, read, started = read.model, replace(read, model=str(folder)), []
    trainer = build_trainer(read)
    torch.testing.assert_close(trainer.model(ids).logits, model.eval()(ids).logits)
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == {
        name for name, p in model.named_parameters() if p.requires_grad
    }
    assert trainer.train()[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="model must be a whole model where lora makes a new adapter; got the adapter"):
        load_parts(replace(read, lora=LoRA()))
    monkeypatch.setattr("grpo_fused.trainer.recipe.find_spec", lambda package: package)
    monkeypatch.setattr(
        "grpo_fused.trainer.recipe.VLLMEngine", lambda *args, **options: started.append((args, options))
    )
    parts: Any = load_parts(replace(read, rollout="vllm", vllm_options={"seed": 1}))
    assert parts.tokenizer.chat_template == tokenizer.chat_template
    assert started == [((base,), {"seed": 1})]
    model.peft_config["default"].base_model_name_or_path = ""
    model.save_pretrained(folder)
    with pytest.raises(
        ValueError, match="or an adapter that names the model under it; got '.*base_model_name_or_path ''"
    ):
        load_parts(read)


def test_an_empty_system_prompt_is_none(recipe: Path) -> None:
    read, _ = read_recipe(["--config", str(recipe), "--system-prompt", ""])
    rows: Any = read.train_rows()
    assert rows[0]["prompt"] == "question 0"
    rows = replace(read, system_prompt="Be brief.").train_rows()
    assert rows[0]["prompt"] == "Be brief.\n\nquestion 0"


def test_a_dry_run_says_what_prompts_alone_cannot_show(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = "[{name: length}, {name: exact_answer}]"
    words = ["--dataset", "someone/questions", "--eval-split", "test", "--rewards", rewards, "--dry-run"]
    main(["train", "--config", str(recipe), *words])
    printed = capsys.readouterr().out
    assert "the reward exact_answer (reward function 'exact_answer' needs 'answer'" in printed
    assert "held-out rows\n" in printed
    assert "length -" in printed
    assert "dry run: ok" in printed
    tracked = ["--report-to", "tensorboard", "--project", "b"]
    main(
        ["train", "--config", str(recipe), "--eval-dataset", str(recipe.with_name("data.jsonl")), "--dry-run", *tracked]
    )
    assert "held-out rows" not in capsys.readouterr().out
    other = recipe.with_name("other.jsonl")
    other.write_text('{"question": "a"}\n')
    with pytest.raises(SystemExit, match='row 0 of eval_dataset must have a column "prompt"'):
        main(["train", "--config", str(recipe), "--eval-dataset", str(other), "--dry-run"])


def test_a_dry_run_adapts_layers_that_the_tiny_model_lacks(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--config", str(recipe), "--lora.target-modules", "[c_attn]", "--dry-run"])
    printed = capsys.readouterr().out
    assert "what is learned, whether the model has lora.target_modules" in printed
    assert "dry run: ok" in printed
    main(["train", "--config", str(recipe), "--lora.r", "4", "--dry-run", "--max-completion-length", "4000"])
    printed = capsys.readouterr().out
    assert "target_modules" not in printed
    tokens = re.search(r"completions of each prompt, (\d+) tokens", printed)
    assert tokens is not None
    assert int(tokens[1]) <= 16  # a dry run is short, whatever the recipe samples


def test_a_dry_run_without_the_engine_of_the_loss_says_so(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--config", str(recipe), "--impl", "cuda", "--dry-run"])
    printed = capsys.readouterr().out
    assert "the engine of the loss (impl='cuda' cannot run on cpu: " in printed
    assert "dry run: ok" in printed


def test_options_of_a_data_set_are_not_those_of_another_function(tmp_path: Path) -> None:
    file = tmp_path / "sets.py"
    file.write_text(
        "def train(count):\n    return [{'prompt': 'p'}] * count\n\ndef test():\n    return [{'prompt': 'held out'}]\n"
    )
    functions = {"dataset": f"{file}:train", "dataset_options": {"count": 2}, "eval_dataset": f"{file}:test"}
    read = Recipe(model="m", rewards=(Reward(name="format"),), **functions)
    assert (read.train_rows(), read.eval_rows()) == ([{"prompt": "p"}] * 2, [{"prompt": "held out"}])
    same = replace(read, eval_dataset=read.dataset, eval_limit=1)
    assert same.eval_rows() == [{"prompt": "p"}]


def test_functions_are_found_by_path(tmp_path: Path) -> None:
    assert load_function("grpo_fused.rewards:format_reward").__name__ == "format_reward"
    with pytest.raises(ValueError, match='must be "module:function"'):
        load_function("format_reward")
    file = tmp_path / "x.py"
    for text, message in (
        ("value = 3", "rewards must be .*x.py:value', which has no function 'value'"),
        ("other = 3", "which has no function 'value'"),
        ("import os\nos.environ['NO_KEY']", r"which raised KeyError: 'NO_KEY' \(.*x.py:2\)$"),
        ("import json\n\njson.loads('no')", r"which raised JSONDecodeError: .* \(.*x.py:3\)$"),
        ("import torch\ntorch.nn.Linear(1, 1)(3)", r"which raised TypeError: .* \(.*x.py:2\)$"),
        ("def value() return 3", r"which raised SyntaxError: .* \(x.py, line 1\)$"),
        ("\n\nraise RuntimeError", rf"which raised RuntimeError \({file}:3\)$"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_function(f"{file}:value", "rewards")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "TypeError: 'NoneType' object is not iterable$"), ("yield 1 / 0", "ZeroDivisionError: .*x.py:2"),
        ("return lambda index: 1 / index", "ZeroDivisionError: .*x.py:2"),
    ],
)  # fmt: skip
def test_a_dataset_function_that_fails_is_named(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "x.py").write_text(f"def rows():\n    {body}\n")
    recipe = Recipe(model="m", rewards=(Reward(name="format"),), dataset=f"{tmp_path / 'x.py'}:rows", limit=2)
    with pytest.raises(ValueError, match=f"^dataset '.*x.py:rows' raised {message}"):
        recipe.train_rows()


def test_a_module_of_the_current_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards_of_mine.py").write_text(
        "def one(completions, **_):\n    return [1.0] * len(completions)\n\n"
        "def silent(completions, **_):\n    return [None] * len(completions)\n"
    )
    of_mine = "function: rewards_of_mine:one\n  - function: rewards_of_mine:silent"
    recipe.write_text(recipe.read_text().replace("{name: length, options: {target_length: 3}}", of_mine))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as a console script's
    monkeypatch.chdir(tmp_path)
    main(["train", "--config", str(recipe), "--dry-run"])
    printed = capsys.readouterr().out
    assert "dry run: ok" in printed
    assert len(printed.splitlines()) <= 25
    assert "two of " in printed
    assert "one 1.000" in printed
    assert "what is learned, the reward silent (it judged nothing)\n" in printed
    assert "every_other" not in printed


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rewards.py").write_text("def short(completions): return [0.0]")
    assert Reward(function="~/rewards.py:short").load()([]) == [0.0]
    monkeypatch.setenv("HOME", "/home/ada")
    assert Reward(model="~/judge").model == "/home/ada/judge"
    read = Recipe(model="~/m", reference_model="~/t", output_dir="~/o", rewards=(Reward(name="format"),), dataset="d")
    assert (read.model, read.reference_model, read.output_dir) == ("/home/ada/m", "/home/ada/t", "/home/ada/o")


def test_subset_and_split_are_for_the_rows_that_have_a_name(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    file, named = str(tmp_path / "rows.jsonl"), {"subset": "main", "split": "train[:10]"}
    read = Recipe(model="m", rewards=(Reward(name="format"),), dataset="some/name", eval_dataset=file, **named)
    assert read.eval_rows() == [{"prompt": "p"}]
    assert replace(read, dataset=file, eval_dataset="some/name").train_rows() == [{"prompt": "p"}]


def test_held_out_rows_without_a_prompt_are_named(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"question": "q"}\n')
    read = Recipe(
        model="m", rewards=(Reward(name="format"),), dataset="d", eval_dataset=str(tmp_path / "held.jsonl"),
        system_prompt="Be brief.",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^row 0 of .*held.jsonl must have a column \"prompt\""):
        read.eval_rows()


def test_a_wrong_function_of_held_out_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def rows():\n    return 1 / 0\n")
    read = Recipe(model="m", rewards=(Reward(name="format"),), dataset="d", eval_dataset=f"{tmp_path / 'x.py'}:rows")
    with pytest.raises(ValueError, match="^eval_dataset '.*x.py:rows' raised ZeroDivisionError"):
        read.eval_rows()
    with pytest.raises(ValueError, match="^eval_dataset must be .*x.py:no', which has no function 'no'"):
        replace(read, eval_dataset=f"{tmp_path / 'x.py'}:no").eval_rows()


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


def test_the_title_of_a_plot_is_the_name_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, title, **_: titles.append(title))
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.5})
    monkeypatch.chdir(tmp_path)
    plot_run(Path("metrics.jsonl"))
    assert titles == [tmp_path.name]


def test_the_path_of_a_plot_is_that_of_its_file(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.5})
    (image := tmp_path / "curves").mkdir()
    assert plot_run(tmp_path, image) == tmp_path / "curves.png"
    assert (tmp_path / "curves.png").is_file()


def test_the_axis_of_held_out_rewards_goes_below_zero() -> None:
    from matplotlib.figure import Figure

    lines: list[dict[str, float | None]] = [{"step": step, "eval/x": -step} for step in (1, 2)]
    axes = Figure().subplots()
    draw_panel(axes, *panels_of(lines), lines)
    assert axes.get_ylim()[0] == -2


def test_every_panel_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a last row that is not full."""
    drawn: list[str] = []
    monkeypatch.setattr(plot, "draw_panel", lambda axes, panel, lines: drawn.append(panel.title))
    names = ("reward", "eval/x", "kl", "entropy", "completion_length", "zero_std_groups", "grad_norm")
    for count in (4, 7):
        line: dict[str, float | None] = {"step": 1, **dict.fromkeys(names[:count], 0.5)}
        append_jsonl(tmp_path / "metrics.jsonl", line)  # type: ignore[arg-type]
        plot_run(tmp_path, tmp_path / "new" / "curves.png")
        assert drawn == [panel.title for panel in panels_of([line])]
        assert len(drawn) == count
        drawn.clear()


def test_a_moving_average_is_centred_and_has_fewer_values_at_the_ends() -> None:
    assert moving_average([1.0, 2.0, 6.0, 10.0], 3) == [1.5, 3.0, 6.0, 8.0]


def test_plot_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: .*metrics.jsonl"):
        main(["plot", str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="at least one step"):
        main(["plot", str(tmp_path)])


def test_a_function_in_a_file_is_that_of_a_module(tmp_path, monkeypatch):
    """Two functions share the module, a fork finds it by its name, and a module beside it can be imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("START = 2\n")
    file = tmp_path / "two rewards.py"
    file.write_text(
        "from beside_it import START\ncalls = [START]\n"
        "def first():\n    calls.append(1)\n    return calls\n"
        "def second():\n    return calls\n"
    )
    first, second = (load_function(f"{file}:{name}", "rewards") for name in ("first", "second"))
    first()
    assert second() == [2, 1]
    assert pickle.loads(pickle.dumps(second)) is second
    assert sys.path[-1] == str(tmp_path)  # it hides no other module
    file = tmp_path / "broken.py"
    file.write_text("raise OSError('no disk')")
    for _ in range(2):
        with pytest.raises(ValueError, match="broken.py:first.* which raised OSError: no disk"):
            load_function(f"{file}:first", "rewards")


def test_metrics_that_are_not_finite_are_null(tmp_path):
    for value in (1.5, math.nan, math.inf, -math.inf):
        append_jsonl(tmp_path / "metrics.jsonl", {"step": 1, "x": value})
    assert [row["x"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1.5, None, None, None]


@pytest.mark.parametrize("line", ['{"loss": 0.5}', '{"step": null}', "[1]", "nonsense"])
def test_a_broken_line_of_metrics_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=f"line 2 of .*metrics.jsonl must be a JSON object .*; got {re.escape(line)}"):
        read_jsonl(file)
    file.write_text(f'{{"step": 1}}\n{line}')  # an end that was not written
    assert read_jsonl(file) == [{"step": 1}]


def test_a_tracker_gets_the_options_of_a_run_and_the_step_of_its_metrics() -> None:
    class Memory(GeneralTracker):
        name, requires_logging_directory = "memory", False
        given: tuple[Any, ...] = ()

        @property
        def tracker(self) -> Any:
            return self

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.given += (values,)

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.given += (values, step)

        def finish(self) -> None:
            self.given += ("finished",)

    memory = Memory()
    config = GRPOTrainerConfig(
        report_to=("memory",), loss=GRPOLossConfig(loss_type="grpo"), objective=ObjectiveOptions(name="reinforce")
    )
    log = RunLog(config, Accelerator(log_with=[memory]), None)
    with log.open():
        log.record({"step": 3, "loss": 0.5})
    options, metrics, step, end = memory.given
    assert (options["steps"], options["objective"], options["loss_type"]) == (
        config.steps, config.loss_name, "grpo",
    )  # fmt: skip
    assert options.keys() <= {f.name for f in (*fields(config), *fields(config.loss))}
    assert (metrics, step, end) == ({"step": 3, "loss": 0.5}, 3, "finished")
    with RunLog(GRPOTrainerConfig(), log.accelerator, None).open():  # without report_to they are the caller's
        pass
    assert memory.given[-2:] == (3, "finished")


def test_a_tracker_gets_the_name_of_a_run() -> None:
    given: list[Any] = []
    accelerator: Any = SimpleNamespace(
        log_with=[SimpleNamespace(name="wandb")], trackers=[], init_trackers=lambda *arguments: given.extend(arguments)
    )
    for name in ("a run", None):
        with RunLog(GRPOTrainerConfig(report_to=("wandb",), project="p", run_name=name), accelerator, None).open():
            pass
    assert (given[0], given[2]["wandb"], given[2]["mlflow"]) == ("p", {"name": "a run"}, {"run_name": "a run"})
    assert given[5] == {}


def test_all_trackers_are_those_of_the_accelerator() -> None:
    RunLog(GRPOTrainerConfig(report_to=("all",)), Accelerator(log_with=["all"]), None)
    with pytest.raises(ValueError, match=r"must log with report_to, \['wandb'\]; got \[\]"):
        RunLog(GRPOTrainerConfig(report_to=("wandb",)), Accelerator(), None)


def test_rows_without_an_end_are_taken_up_to_the_limit(tmp_path):
    file = tmp_path / "endless.py"
    file.write_text("import itertools\ndef rows():\n    return ({'prompt': str(i)} for i in itertools.count())\n")
    recipe = Recipe(model="m", rewards=(Reward(name="format"),), dataset=f"{file}:rows", limit=3)
    assert [row["prompt"] for row in recipe.train_rows()] == ["0", "1", "2"]
    file.write_text("def rows():\n    left = iter([{'prompt': '0'}])\n    return lambda index: next(left)\n")
    with pytest.raises(ValueError, match=r"endless.py:rows' raised StopIteration"):  # not a shorter data set
        recipe.train_rows()
