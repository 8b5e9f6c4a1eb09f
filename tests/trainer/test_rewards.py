"""The rule-based rewards: what counts as the format, what counts as the answer, and text written to break them."""

from __future__ import annotations

import time

import pytest

from grpo_fused.rewards import exact_answer_reward, extract_answer, format_reward, parse_completion

RIGHT = "<think>7+8=15</think><answer>95</answer>"

# The cases of the countdown exercise, whose chat template opens the think block in the prompt.
REASONED = "Let's use 4, 8, 2 and 1 to get 15.\nWe can try: 8 * 2 - 1 = 15... </think>\n<answer> 8 * 2 - 1 </answer>"
ELLIPSIS = " ... </think>\n<answer> 8 * 2 - 1 </answer>"
NO_TAGS = "Using 4, 8, 2, 1, make 15: 8 * 2 - 1 = 15"
WRONG_ORDER = "<answer> 8 + 4 + 2 + 1 </answer>\n<think> This should equal 15 </think>"
WRONG_RESULT = " ... </think>\n<answer> 8 + 4 - 2 </answer>"


def test_format_of_the_countdown_cases() -> None:
    completions = [REASONED, ELLIPSIS, NO_TAGS, WRONG_ORDER, WRONG_RESULT]
    rewards = format_reward(["make 15 <think>\n"] * 5, completions, target=["15"] * 5)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_answers_of_the_countdown_cases() -> None:
    completions = [REASONED, ELLIPSIS, NO_TAGS, WRONG_ORDER, WRONG_RESULT]
    rewards = exact_answer_reward(completions=completions, answer=["8 * 2 - 1"] * 5, prompts=["make 15 <think>"] * 5)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param(RIGHT, True, id="right"),
        pytest.param("  <think>a</think>\n\n<answer>b</answer>\n", True, id="white-space-around"),
        pytest.param("<think></think><answer></answer>", True, id="empty-blocks"),
        pytest.param("<think>if a<b then c>d</think><answer>1</answer>", True, id="angle-brackets"),
        pytest.param("", False, id="empty"),
        pytest.param("7+8=15</think><answer>95</answer>", False, id="think-not-opened"),
        pytest.param("<think>a</think><answer>95", False, id="cut-off"),
        pytest.param("<think>a</think>so<answer>95</answer>", False, id="text-between"),
        pytest.param("<think>a</think><answer>95</answer>!", False, id="text-after"),
        pytest.param("hm <think>a</think><answer>95</answer>", False, id="text-before"),
        pytest.param(RIGHT + RIGHT, False, id="twice"),
        pytest.param("<think><think>a</think></think><answer>95</answer>", False, id="nested"),
        pytest.param("<think>a<answer>95</answer></think><answer>95</answer>", False, id="answer-inside-think"),
        pytest.param("<think>a</think><answer><think>95</answer>", False, id="tag-inside-answer"),
        pytest.param("<THINK>a</THINK><answer>95</answer>", False, id="upper-case"),
    ],
)
def test_format(completion: str, expected: bool) -> None:
    assert format_reward(["q"], [completion]) == [float(expected)]
    assert (parse_completion(completion) is not None) is expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param(RIGHT, "95", id="right"),
        pytest.param("no format at all <answer> 95\n</answer> bye", "95", id="lenient-about-the-rest"),
        pytest.param("<answer>94</answer><answer>95</answer>", None, id="two-guesses"),
        pytest.param("<answer>94<answer>95</answer>", None, id="opened-twice"),
        pytest.param("</answer>95<answer>", None, id="reversed"),
        pytest.param("<answer><think>95</think></answer>", None, id="tag-inside"),
        pytest.param("<answer>95", None, id="cut-off"),
    ],
)
def test_extract_answer(completion: str, expected: str | None) -> None:
    assert extract_answer(completion) == expected


def test_answers_are_text_and_are_not_evaluated() -> None:
    wrong = ["90+5", "95.0", "095", "__import__('os')", "95 or 96"]
    completions = [f"<answer>{text}</answer>" for text in wrong]
    assert exact_answer_reward(completions=completions, answer=["95"] * len(wrong)) == [0.0] * len(wrong)


def test_integers_and_missing_answers() -> None:
    completions = ["<answer> 95 </answer>"] * 3
    assert exact_answer_reward(completions=completions, answer=[95, " 95 ", None]) == [1.0, 1.0, None]


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param("<think>" * 100_000, id="open-tags"),
        pytest.param("<think>" + "<" * 1_000_000, id="angle-brackets"),
        pytest.param("<think>" + " \n" * 500_000 + "</think>", id="white-space"),
        pytest.param("<think></think>" * 50_000 + "<answer></answer>" * 50_000, id="many-blocks"),
        pytest.param("<answer>" + "</answe" * 150_000, id="half-tags"),
    ],
)
def test_hostile_input_takes_linear_time(hostile: str) -> None:
    """A megabyte takes milliseconds; a pattern that backtracks would take hours (5 s allows for a loaded machine)."""
    started = time.perf_counter()
    assert format_reward(["q"], [hostile]) == [0.0]
    assert exact_answer_reward(completions=[hostile], answer=["1"]) == [0.0]
    assert time.perf_counter() - started < 5


def test_wrong_calls_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match="as many prompts as completions; got 1 and 2"):
        format_reward(["q"], ["a", "b"])
    with pytest.raises(ValueError, match="as many answers as completions; got 1 and 2"):
        exact_answer_reward(completions=["a", "b"], answer=["1"])
    with pytest.raises(TypeError, match=r"completion must be a str .* got list"):
        format_reward(["q"], [[{"role": "assistant", "content": RIGHT}]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="str, int or None; got float"):
        exact_answer_reward(completions=[RIGHT], answer=[95.0])  # type: ignore[list-item]
