"""Rows that live in Python: the task reasoning_gym, functions as data sets, and the verifiers of rows."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer.small_trainer import SMALL
from transformers import PreTrainedTokenizerFast

from grpo_fused.rewards import built_in, score_answer_reward
from grpo_fused.rollouts.errors import PromptError
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig
from grpo_fused.trainer.data import Stream
from grpo_fused.trainer.dry_run import dry_run
from grpo_fused.trainer.recipe import Recipe, Reward, is_function
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer

TASK: dict[str, Any] = {
    "task": "reasoning_gym",
    "dataset": "chain_sum",
    "dataset_options": {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3},
}


def recipe(**options: Any) -> Recipe:
    return Recipe(model="m", rewards=(Reward(name="score_answer"),), **options)


@pytest.fixture
def gym() -> Any:
    return pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")


def test_a_row_brings_its_verifier() -> None:
    completions = ["<answer> 12 </answer>", "<answer>7</answer>", "12", "<answer>12</answer>", "x"]
    verifiers: list[Any] = ["12".__eq__, "12".__eq__, "12".__eq__, lambda answer: 0.25, None]
    assert score_answer_reward(completions, verifiers) == [1.0, 0.0, 0.0, 0.25, None]
    assert score_answer_reward([" 12\n"], verifiers[2:3], tagged=False) == [1.0]
    with pytest.raises(TypeError, match="must hold functions or None; got str"):
        score_answer_reward(["<answer>1</answer>"], ["1"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="tagged must be True or False; got 'no'"):
        built_in("score_answer", tagged="no")


def test_problems_have_prompts_and_the_verifiers_of_the_package(gym: Any) -> None:
    rows = recipe(**TASK, limit=3).train_rows()
    for row in islice(rows, 3):  # type: ignore[call-overload]
        assert row.keys() == {"prompt", "answer", "metadata", "score_answer"}
        system, user = row["prompt"]
        assert "<answer>" in system["content"]
        assert row["metadata"]["expression"] in user["content"]
        assert int(row["answer"]) == eval(row["metadata"]["expression"])
        right, wrong = f"so <answer>{row['answer']}</answer>", f"<answer>{int(row['answer']) + 1}</answer>"
        assert score_answer_reward([right, wrong], [row["score_answer"]] * 2) == [1.0, 0.0]
    plain = recipe(**TASK, limit=1, chat=False, system_prompt="").train_rows()
    assert plain[0]["prompt"] == f"User: {rows[0]['prompt'][1]['content']}\nAssistant:"  # type: ignore[index]


def test_problems_never_repeat_and_held_out_ones_are_others(gym: Any) -> None:
    """The package seeds problem i with `seed + i`: its data sets of neighbouring seeds share their problems."""
    questions = {}
    for seed in (0, 1):
        rows: Any = recipe(**TASK, seed=seed, eval_limit=20)
        make = rows.train_rows()
        questions[seed] = [make(index)["metadata"]["expression"] for index in range(490, 510)]  # over two chunks
        questions["held out", seed] = [row["metadata"]["expression"] for row in rows.eval_rows()]
        assert [make(index)["metadata"]["expression"] for index in range(490, 510)] == questions[seed]
    assert questions["held out", 0] == questions["held out", 1]
    together = questions[0] + questions[1] + questions["held out", 0]
    assert len(set(together)) == 60
    seeds = [gym.create_dataset("chain_sum", seed=seed, size=9, **TASK["dataset_options"]) for seed in (0, 1)]
    assert seeds[0][1]["question"] == seeds[1][0]["question"]  # what the seeds above avoid


def test_problems_do_not_depend_on_global_generators(gym: Any) -> None:
    """`list_functions` draws from Python's, and `pool_matrix` seeds NumPy's."""
    for name in ("list_functions", "pool_matrix"):
        found = []
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            make: Any = recipe(task="reasoning_gym", dataset=name).train_rows()
            found.append([make(index)["prompt"] for index in range(8)])
            states = random.random(), np.random.random()
            random.seed(seed)
            np.random.seed(seed)
            assert states == (random.random(), np.random.random())
        assert found[0] == found[1]


def test_a_composite_of_data_sets(gym: Any) -> None:
    sets = [{"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "letter_counting")]
    rows = recipe(task="reasoning_gym", dataset="composite", dataset_options={"datasets": sets}, limit=20).train_rows()
    assert {row["metadata"]["source_dataset"] for row in islice(rows, 20)} == {"chain_sum", "letter_counting"}  # type: ignore[call-overload]


def test_a_verifier_that_cannot_read_an_answer_gives_nothing(gym: Any) -> None:
    row = recipe(task="reasoning_gym", dataset="prime_factorization", limit=1).train_rows()[0]  # type: ignore[index]
    assert row["score_answer"]("((((") == 0.0
    assert row["score_answer"](row["answer"]) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"dataset": None}, "dataset must name a data set of reasoning-gym.*; got none", id="no-name"),
        pytest.param(
            {"subset": "x"}, "subset must come with a task other than reasoning_gym .*; got 'x' without", id="subset"
        ),
        pytest.param({"task": None}, "dataset_options must come with task reasoning_gym or a", id="options"),
    ],
)
def test_wrong_recipes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**(TASK | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"dataset": "chain_sun"}, "got 'chain_sun'; did you mean 'chain_sum'", id="name"),
        pytest.param(
            {"dataset_options": {"terms": 2}}, "options of chain_sum are .*min_terms.*; got terms", id="option"
        ),
        pytest.param({"dataset_options": {"seed": 2}}, "options of chain_sum are .*; got seed", id="seed"),
        pytest.param({"dataset_options": {"min_terms": -1}}, r"got {'min_terms': -1} \(AssertionError", id="value"),
        pytest.param({"dataset_options": {"min_terms": "a"}}, r"got {'min_terms': 'a'} \(TypeError", id="type"),
    ],
)
def test_wrong_names_and_options_are_refused(gym: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**(TASK | options)).train_rows()


FUNCTIONS = '''
def rows(count=3):
    """Rows with their verifiers."""
    return ({"prompt": f"{n} + 1 = ", "score_answer": str(n + 1).__eq__} for n in range(count))


def endless(start=0):
    return lambda index: {"prompt": f"question {start + index}", "score_answer": lambda answer: 1.0}
'''


def test_a_function_makes_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    rows: Any = recipe(dataset=f"{file}:rows", dataset_options={"count": 5}, limit=4).train_rows()
    assert [row["prompt"] for row in rows] == [f"{n} + 1 = " for n in range(4)]
    assert rows[2]["score_answer"]("3")
    endless = recipe(dataset=f"{file}:endless", dataset_options={"start": 7}, system_prompt="Say:")
    make: Any = endless.train_rows()
    assert [make(index)["prompt"] for index in (0, 9)] == ["Say:\n\nquestion 7", "Say:\n\nquestion 16"]
    held_out = recipe(dataset=f"{file}:rows", eval_dataset=f"{file}:endless", eval_limit=2).eval_rows()
    assert held_out is not None
    assert [row["prompt"] for row in held_out] == ["question 0", "question 1"]
    with pytest.raises(ValueError, match="eval_limit must be given for an eval_dataset .* without end"):
        recipe(dataset=f"{file}:rows", eval_dataset=f"{file}:endless").eval_rows()
    with pytest.raises(ValueError, match=r'dataset must be "module:function" .*mine.py:nothing'):
        recipe(dataset=f"{file}:nothing").train_rows()
    assert "rewards/score_answer" in dry_run(endless)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a.b:c", True),
        ("x/y.py:f", True),
        ("openai/gsm8k", False),
        (None, False),
        ("C:\\data.jsonl", False),
        (":f", False),
    ],
)
def test_a_place_of_a_function(source: str | None, expected: bool) -> None:
    assert is_function(source) is expected


def test_a_stream_goes_on_from_its_state() -> None:
    def fits(row: Any) -> bool:
        return int(row["prompt"]) % 3 > 0

    stream = Stream(lambda index: {"prompt": str(index)}, 2, fits, seed=4)
    assert [[row["prompt"] for row in batch] for batch in islice(stream, 2)] == [["1", "2"], ["4", "5"]]
    resumed = Stream(stream.row, 3, fits, seed=4)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert [row["prompt"] for row in next(resumed)] == ["7", "8", "10"]
    for wrong in ({"position": -1}, {"seed": 5}, {"epoch": 0}, {"position": None}):
        with pytest.raises(ValueError, match="must be a place in a stream of rows with seed 4"):
            stream.load_state_dict(stream.state_dict() | wrong)
    with pytest.raises(ValueError, match="must make rows with prompts that fit; got none in 1000"):
        next(Stream(stream.row, 1, lambda row: False))


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (lambda: {"question": "?"}, r"row 0 of train_dataset\(2\) must have a column"),
        (lambda: {"prompt": 3}, r"row 0 of train_dataset\(2\): expected a prompt that is a str"),
        (lambda: {"prompt": "?", "answer": "1"}, r"row 2 of the rows from train_dataset\(0\) on must have the columns"),
        (lambda: [][0], r"train_dataset\(2\) raised IndexError: list index out of range \(.*\.py:\d+\)$"),
        (lambda: next(iter(())), r"train_dataset\(2\) raised StopIteration \(.*\.py:\d+\)$"),
    ],
    ids=["columns", "prompt", "other-columns", "raises", "stops"],
)
def test_a_stream_names_the_row_that_fails(third: Callable[[], Any], message: str) -> None:
    with pytest.raises(PromptError, match=f"^{message}"):
        next(Stream(lambda index: third() if index == 2 else {"prompt": "?"}, 3))


def make(folder: Path, tokenizer: PreTrainedTokenizerFast, *, resume: bool = False, **options: Any) -> GRPOTrainer:
    """A trainer on the prompts "0", "1", ..., most of which are short enough."""
    config = GRPOTrainerConfig(**(SMALL | {"steps": 4, "max_prompt_length": 4} | options))

    def row(index: int) -> dict[str, Any]:
        return {"prompt": "x" * (index % 3 + 3), "score_answer": lambda answer: float(len(answer) % 2)}

    return GRPOTrainer(
        tiny_model(tokenizer), tokenizer, [built_in("score_answer", tagged=False)], row, config,
        output_dir=folder, resume=resume,
    )  # fmt: skip


def test_a_run_on_a_stream_resumes_bit_exactly_also_with_more_steps(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    whole = make(tmp_path / "whole", tokenizer)
    whole.train()
    half = make(tmp_path / "half", tokenizer, steps=2)
    half.train()
    torch.manual_seed(99)
    random.seed(99)
    resumed = make(tmp_path / "half", tokenizer, resume=True)
    assert resumed.steps_done == 2
    resumed.train()
    assert resumed.batches.state_dict() == whole.batches.state_dict()
    assert whole.batches.state_dict()["position"] == 11  # eight that fit, three that do not
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_recipe_resumes_bit_exactly(gym: Any, tmp_path: Path) -> None:
    """Ctrl-C in the first step of a run on reasoning-gym, through the whole of the recipe."""
    from grpo_fused.trainer.recipe import build_trainer

    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {**TASK, **SMALL, "eval_limit": 2, "max_completion_length": 8}

    def trainer(name: str, **more: Any) -> GRPOTrainer:
        length = Reward(name="length", options={"target_length": 3})
        rewards = (Reward(name="score_answer", options={"tagged": False}), length)
        folder = str(tmp_path / name)
        return build_trainer(
            Recipe(model=str(tmp_path / "model"), rewards=rewards, output_dir=folder, **options), **more
        )

    whole, stopped = trainer("whole"), trainer("stopped")
    whole.train()
    step = stopped.step

    def interrupted() -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    stopped.step = interrupted  # type: ignore[method-assign]
    stopped.train()
    assert stopped.steps_done == 1
    torch.manual_seed(99)
    resumed = trainer("stopped", resume=True)
    resumed.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
