"""The number puzzle: the given numbers, each as often as given, and exactly the target."""

from __future__ import annotations

import pytest
import torch
from guards import processor_seconds
from rewards.seeds import COMPLETIONS, COUNTDOWN_REWARDS, NUMS, PROMPTS, TARGET, as_chat

from grpo_fused.rewards import countdown_reward


def judge(answer: str, target: object = 15, nums: object = (4, 8, 2, 1), **options: bool) -> float | None:
    """The reward of one answer in the right format."""
    return countdown_reward([f"<think></think><answer>{answer}</answer>"], [target], [nums], **options)[0]  # type: ignore[list-item]


def test_cases_of_the_countdown_exercise() -> None:
    completions = list(COMPLETIONS.values())
    assert countdown_reward(completions, TARGET, NUMS, PROMPTS) == COUNTDOWN_REWARDS
    assert countdown_reward(completions, TARGET, NUMS, think_opened=True) == COUNTDOWN_REWARDS
    assert countdown_reward([as_chat(text) for text in completions], TARGET, NUMS, PROMPTS) == COUNTDOWN_REWARDS


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param("8 * 2 - 1", 1.0, id="subset"),
        pytest.param("8 + 4 + 2 + 1", 1.0, id="all"),
        pytest.param("(8 - 1) * 2 + 1", 0.0, id="a-number-twice"),
        pytest.param("15", 0.0, id="not-given"),
        pytest.param("8 * 2 - 1 = 15", 0.0, id="equation"),
        pytest.param("8 * 2 - 2", 0.0, id="wrong-and-twice"),
        pytest.param("48/4", 0.0, id="digits-joined"),
        pytest.param("8.0 * 2 - 1", 1.0, id="decimal-of-the-same-value"),
        pytest.param("-(1 - 8 * 2)", 1.0, id="minus"),
        pytest.param("9**9**9", 0.0, id="power"),
        pytest.param("__import__('os').system('true')", 0.0, id="python"),
        pytest.param("", 0.0, id="empty"),
    ],
)
def test_answers(answer: str, expected: float) -> None:
    assert judge(answer) == expected


def test_division_is_exact() -> None:
    assert judge("8 / (3 - 8/3)", 24, [3, 3, 8, 8]) == 1.0  # 23.999999999999996 in floats
    assert judge("1/3", "0.33333333", [1, 3]) == 0.0
    assert judge("1/100000", 1e-5, [1, 100_000]) == 1.0  # printed as 1e-05


def test_a_negative_number_is_written_with_a_minus() -> None:
    assert judge("-3 * (2 - 7)", 15, [-3, 2, 7]) == 1.0
    assert judge("2 - 7 * 3", -19, [-3.0, "-7", 2], use_all=True) == 1.0
    assert judge("-3 * (2 - 7) + 3", 18, [-3, 2, 7]) == 0.0


def test_use_all() -> None:
    assert judge("8 * 2 - 1", use_all=True) == 0.0
    assert judge("8 + 4 + 2 + 1", use_all=True) == 1.0
    assert judge("8 + 4 + 2 + 1 * 1", use_all=True) == 0.0


def test_without_the_format_one_answer_block_is_needed() -> None:
    completions = ["so <answer>8*2-1</answer>", "8*2-1", "<answer>8*2-1</answer><answer>8+4+2+1</answer>"]
    columns = {"target": [15] * 3, "nums": [[4, 8, 2, 1]] * 3}
    assert countdown_reward(completions, **columns, require_format=False) == [1.0, 0.0, 0.0]  # type: ignore[arg-type]
    assert countdown_reward(completions, **columns) == [0.0, 0.0, 0.0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "nums"),
    [
        pytest.param(15.0, (4, 8, 2, 1), id="float-and-tuple"),
        pytest.param("15", ["4", "8", "2", "1"], id="text"),
        pytest.param(torch.tensor(15), torch.tensor([4, 8, 2, 1]), id="tensors"),
    ],
)
def test_kinds_of_numbers(target: object, nums: object) -> None:
    assert judge("8 * 2 - 1", target, nums) == 1.0
    assert judge("8 * 2 + 1", target, nums) == 0.0


def test_samples_of_another_task_are_not_judged() -> None:
    assert judge("8 * 2 - 1", None) is None
    assert judge("8 * 2 - 1", 15, None) is None


def test_wrong_columns_say_what_was_expected() -> None:
    with pytest.raises(TypeError, match="target column must hold numbers; got 'many'"):
        judge("nothing", "many")
    with pytest.raises(TypeError, match="nums column must hold numbers; got 'x'"):
        judge("1", 1, ["x"])
    with pytest.raises(TypeError, match="nums column must hold lists of numbers or None; got '1 2'"):
        judge("1", 1, "1 2")
    with pytest.raises(TypeError, match="target column must hold numbers; got nan"):
        judge("1", float("nan"))
    with pytest.raises(ValueError, match="one of 'nums' for each of 1 completions; got 2"):
        countdown_reward(["a"], [1], [[1], [2]])


@pytest.mark.parametrize("answer", ["(" * 100_000, "9*" * 100_000, "9**9**9**9", "-" * 100_000 + "1", "1" * 100_000])
def test_hostile_answers_take_no_time(answer: str) -> None:
    with processor_seconds(2):
        assert judge(answer) == 0.0
