"""GSM8K and countdown: raw rows to prompts and columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_fused.trainer.data import check_rows, load_rows
from grpo_fused.trainer.recipe import Recipe, Reward, with_system_prompt
from grpo_fused.trainer.tasks import TASKS, final_answer, format_rows

FILES = Path(__file__).parent / "files"
RAW_GSM8K = {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}


def test_gsm8k_from_a_file() -> None:
    raw = load_rows(FILES / "gsm8k.jsonl")
    rows = format_rows(TASKS["gsm8k"], raw)
    check_rows(rows, 3)
    assert [row["answer"] for row in rows] == ["48", "1250", "-5"]
    system, user = rows[0]["prompt"]  # type: ignore[misc]
    assert system == {"role": "system", "content": TASKS["gsm8k"].default_system_prompt}
    assert user == {"role": "user", "content": raw[0]["question"]}
    assert "####" not in str(rows)  # the worked answer is not in the prompt


def test_countdown_from_a_file() -> None:
    rows = format_rows(TASKS["countdown"], load_rows(FILES / "countdown.json"))
    check_rows(rows, 3)
    assert [(row["target"], row["nums"]) for row in rows] == [
        (98, [44, 19, 35]),
        (64, [63, 95, 96]),
        (28, [95, 11, 56, 12]),
    ]
    user = rows[2]["prompt"][-1]["content"]  # type: ignore[index]
    assert "numbers [95, 11, 56, 12], create an equation that equals 28" in user


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_rows_of_their_task(name: str) -> None:
    task = TASKS[name]
    assert task.name == name
    check_rows(format_rows(task, task.examples), 2)
    check_rows(format_rows(task, task.examples, chat=False), 2)


@pytest.mark.parametrize("name", TASKS)
def test_the_default_system_prompt_names_the_tags(name: str) -> None:
    """The rewards of `grpo_fused.rewards` read them."""
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in TASKS[name].default_system_prompt


@pytest.mark.parametrize(
    ("system_prompt", "chat", "expected"),
    [
        pytest.param(
            "Be brief.",
            True,
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}],
            id="chat",
        ),
        pytest.param("", True, [{"role": "user", "content": "What is 1 + 1?"}], id="chat-without"),
        pytest.param("Be brief.\n", False, "Be brief.\nUser: What is 1 + 1?\nAssistant:", id="text"),
        pytest.param("", False, "User: What is 1 + 1?\nAssistant:", id="text-without"),
    ],
)
def test_system_prompts(system_prompt: str, chat: bool, expected: Any) -> None:
    assert format_rows(TASKS["gsm8k"], [RAW_GSM8K], system_prompt, chat=chat) == [{"prompt": expected, "answer": "2"}]


def test_a_second_system_message_is_refused() -> None:
    rows = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "1+1"}]
    with pytest.raises(ValueError, match="must be left out where rows have a system message; got .*Be long"):
        with_system_prompt({"prompt": rows}, "Be brief.")
    assert with_system_prompt({"prompt": rows[1:]}, "Be long.") == {"prompt": rows}


@pytest.mark.parametrize(
    ("worked", "final"),
    [
        pytest.param("so\n#### 72", "72", id="plain"),
        pytest.param("#### 1,234,567 ", "1234567", id="commas"),
        pytest.param("#### -3.5", "-3.5", id="negative"),
        pytest.param("#### 3\nno, wait\n####4", "4", id="last-marker"),
    ],
)
def test_final_answers(worked: str, final: str) -> None:
    assert final_answer(worked) == final


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        pytest.param("gsm8k", {"question": "q", "answer": "72"}, "ends in \"#### \" .*; got '72'", id="no-marker"),
        pytest.param("gsm8k", {"question": "q", "answer": "72 ####"}, "got '72 ####'", id="nothing-after"),
        pytest.param("gsm8k", {"question": "q"}, "KeyError: 'answer'; got {'question': 'q'}", id="no-answer"),
        pytest.param("gsm8k", {"question": " ", "answer": "#### 1"}, "a question that is not blank", id="blank"),
        pytest.param("gsm8k", {"question": "q", "answer": 72}, "got {'question': 'q', 'answer': 72}", id="number"),
        pytest.param("gsm8k", {"question": 7, "answer": "#### 1"}, "got {'question': 7", id="number-asked"),
        pytest.param("gsm8k", "text", "TypeError: .*; got 'text'", id="no-mapping"),
        pytest.param("countdown", {"nums": [1, 2]}, "KeyError: 'target'", id="no-target"),
        pytest.param("countdown", {"nums": [], "target": 1}, "a list of ints.* got {'nums': \\[\\]", id="no-numbers"),
        pytest.param("countdown", {"nums": "[1, 2]", "target": 3}, "a list of ints.* got {'nums': '", id="text"),
        pytest.param("countdown", {"nums": [1, 2.5], "target": 3}, "a list of ints.* got .*2.5", id="float"),
        pytest.param("countdown", {"nums": [1, 2], "target": True}, "target, an int; got .*True", id="bool"),
    ],
)
def test_rows_of_another_shape_are_named(task: str, row: Any, message: str) -> None:
    good = TASKS[task].examples[0]
    with pytest.raises(ValueError, match=f"row 1 is not a row of the task '{task}': .*{message}"):
        format_rows(TASKS[task], [good, row])


def test_a_recipe_forms_the_rows_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(
        model="m", rewards=(Reward(name="exact_answer"),), task="gsm8k", dataset=str(FILES / "gsm8k.jsonl"), limit=2,
        system_prompt="Be brief.", chat=False,
    )  # fmt: skip
    raw = load_rows(FILES / "gsm8k.jsonl", limit=2)
    assert recipe.train_rows() == format_rows(TASKS["gsm8k"], raw, "Be brief.", chat=False)

    asked: list[Any] = []
    monkeypatch.setattr(
        "grpo_fused.trainer.recipe.load_rows", lambda source, **options: asked.append((source, options)) or [RAW_GSM8K]
    )
    rows = replace(recipe, dataset=None, limit=None, system_prompt=None, chat=True).train_rows()
    other = replace(recipe, dataset=None, subset="socratic", eval_split="test", eval_limit=1)
    other.train_rows()
    other.eval_rows()
    replace(recipe, split="dev", eval_dataset="someone/others").eval_rows()
    replace(
        recipe, task=None, system_prompt=None, chat=True, dataset="a.py:rows", subset="x", eval_dataset="someone/others"
    ).eval_rows()
    assert asked == [
        ("openai/gsm8k", {"subset": "main", "split": "train", "limit": None}),
        ("openai/gsm8k", {"subset": "socratic", "split": "train", "limit": 2}),
        ("openai/gsm8k", {"subset": "socratic", "split": "test", "limit": 1}),
        ("someone/others", {"subset": None, "split": "dev", "limit": None}),
        ("someone/others", {"subset": "x", "split": "train", "limit": None}),
    ]
    assert rows == format_rows(TASKS["gsm8k"], [RAW_GSM8K])


def test_a_system_prompt_comes_before_a_prompt() -> None:
    user = {"role": "user", "content": "q"}
    assert with_system_prompt({"prompt": "q", "a": 1}, "Be brief.") == {"prompt": "Be brief.\n\nq", "a": 1}
    assert with_system_prompt({"prompt": [user]}, "Be brief.") == {
        "prompt": [{"role": "system", "content": "Be brief."}, user]
    }


def test_an_unknown_task_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="task must be one of gsm8k, countdown, reasoning_gym; got 'gsm'"):
        Recipe(model="m", rewards=(Reward(name="format"),), task="gsm")  # type: ignore[arg-type]
    assert list(TASKS) == ["gsm8k", "countdown"]
