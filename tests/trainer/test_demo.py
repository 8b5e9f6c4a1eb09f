"""The arithmetic example: its questions, and a toy run from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.__main__ import main
from examples.arithmetic.model import EOS, UNK
from examples.arithmetic.task import demonstrate, split_questions
from examples.distillation import main as distil
from examples.distillation import worked
from grpo_fused.rewards import exact_answer_reward, format_reward


def test_questions_are_disjoint_and_demonstrations_right() -> None:
    split = split_questions(3000, 400)
    parts = [{row["prompt"] for row in part} for part in split]
    assert [len(part) for part in parts] == [3000, 12_195 - 3400, 400]
    assert len(set.union(*parts)) == 12_195
    completions = [row["completion"] for row in split.demonstrations]
    answers = [row["answer"] for row in split.demonstrations]
    assert set(exact_answer_reward(completions=completions, answer=answers)) == {1.0}
    for row in split.demonstrations:
        a, b = (int(number) for number in row["prompt"][:-1].replace("-", "+").split("+"))
        assert int(row["answer"]) == (a - b if "-" in row["prompt"] else a + b)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ((37, "+", 58), "<think>7+8=15,3+5+1=9</think><answer>95</answer>"),
        ((41, "+", 12), "<think>1+2=3,4+1=5</think><answer>53</answer>"),
        ((62, "-", 35), "<think>12-5=7,6-3-1=2</think><answer>27</answer>"),
        ((65, "-", 32), "<think>5-2=3,6-3=3</think><answer>33</answer>"),
        ((20, "-", 15), "<think>10-5=5,2-1-1=0</think><answer>5</answer>"),
    ],
    ids=["carry", "no-carry", "borrow", "no-borrow", "one-digit-answer"],
)
def test_worked_demonstrations(question: tuple[int, str, int], expected: str) -> None:
    assert demonstrate(*question, worked=True) == expected
    assert format_reward([""], [expected]) == [1.0]
    assert demonstrate(*question, worked=False) in expected


def test_tokenizer_keeps_the_tags_and_drops_the_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<think>12-5=7,6-3-1=2</think><answer>27</answer>"
    ids = tokenizer(text + EOS).input_ids
    assert len(ids) == len("12-5=7,6-3-1=2") + len("27") + 4 + 1
    assert tokenizer.convert_tokens_to_ids(UNK) not in ids
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.filterwarnings("error::UserWarning")
def test_quick_run_writes_both_files_without_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--out", str(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("held-out accuracy: ")
    assert "warning" not in (printed.out + printed.err).lower()


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(option in text for option in ("--seed", "--steps", "--out", "--impl", "--quick"))


@pytest.mark.parametrize("program", [main, distil], ids=["arithmetic", "distillation"])
def test_a_run_of_no_steps_is_refused(program: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program(["--quick", "--steps", "0"])
    assert "must be at least 1; got 0" in capsys.readouterr().err


def test_quick_distillation_of_some_steps_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distil(["--quick", "--steps", "3", "--out", str(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["kl"] > 0 for line in lines[1:])
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "after 3 steps: held-out accuracy" in capsys.readouterr().out


def test_all_demonstrations_of_the_teacher_are_worked() -> None:
    split = split_questions(50, 10)
    for row in worked(split.demonstrations):
        assert row["completion"].startswith("<think>")
        assert exact_answer_reward(completions=[row["completion"]], answer=[row["answer"]]) == [1.0]
