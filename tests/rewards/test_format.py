"""The format rewards: strict and soft formats, and hostile text."""

from __future__ import annotations

import pytest
from guards import processor_seconds
from rewards.seeds import COMPLETIONS, FORMAT_REWARDS, PROMPTS, as_chat

from grpo_fused.rewards import format_reward, parse_completion, soft_format_reward, tag_count_reward

RIGHT = "<think>7+8=15</think><answer>95</answer>"
LONG = "<think>7+8=15, and then 3+5+1=9</think><answer>95</answer>"


def test_cases_of_the_countdown_exercise() -> None:
    completions = list(COMPLETIONS.values())
    assert format_reward(PROMPTS, completions, target=["15"] * 6) == FORMAT_REWARDS
    assert format_reward(None, completions, think_opened=True) == FORMAT_REWARDS
    assert format_reward(PROMPTS, [as_chat(text) for text in completions]) == FORMAT_REWARDS


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
def test_strict(completion: str, expected: bool) -> None:
    assert format_reward(["q"], [completion]) == [float(expected)]
    assert format_reward(["q"], [as_chat(completion)]) == [float(expected)]
    assert (parse_completion(completion) is not None) is expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param(LONG, 1.0, id="right"),
        pytest.param(f"Well: {LONG} I hope it helps", 1.0, id="text-around"),
        pytest.param(RIGHT, 0.5, id="short-thought"),
        pytest.param("<think>" + "a" * 20 + "</think><answer>1</answer>", 0.5, id="twenty-characters"),
        pytest.param("<think>" + "a" * 21 + "</think><answer>1</answer>", 1.0, id="twenty-one-characters"),
        pytest.param("<think>7+8=15, and then 3+5+1=9</think>\n<answer> </answer>", 0.5, id="empty-answer"),
        pytest.param("<think>7+8=15, and then 3+5+1=9</think> so <answer>95</answer>", 0.0, id="text-between"),
        pytest.param("<answer>95</answer><think>7+8=15, and then 3+5+1=9</think>", 0.0, id="wrong-order"),
        pytest.param("<answer>95</answer>" + LONG, 1.0, id="after-another-answer"),
        pytest.param("", 0.0, id="empty"),
    ],
)
def test_soft(completion: str, expected: float) -> None:
    assert soft_format_reward([completion]) == [expected]
    assert soft_format_reward([as_chat(completion)], prompts=["q"]) == [expected]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param(RIGHT, 1.0, id="all-four"),
        pytest.param("</answer><answer></think><think>", 1.0, id="in-any-order"),
        pytest.param(RIGHT + "<think>", 0.75, id="one-twice"),
        pytest.param(RIGHT * 2, 0.0, id="all-twice"),
        pytest.param("<answer>95</answer>", 0.5, id="answer-only"),
        pytest.param("< think > <Answer>", 0.0, id="no-tags"),
    ],
)
def test_tag_count(completion: str, expected: float) -> None:
    assert tag_count_reward([completion]) == [expected]


@pytest.mark.parametrize(
    ("prompt", "options", "opened"),
    [
        pytest.param("q <think>\n", {}, True, id="text"),
        pytest.param("q", {}, False, id="text-without"),
        pytest.param([], {}, False, id="no-messages"),
        pytest.param([{"role": "user", "content": "q"}, *as_chat("<think>")], {}, True, id="assistant-prefix"),
        pytest.param([{"role": "user", "content": "open with <think>"}], {}, False, id="user-mentions-it"),
        pytest.param([*as_chat("<think>"), {"role": "user", "content": "q"}], {}, False, id="assistant-before-user"),
        pytest.param([{"role": "user", "content": "q"}], {"think_opened": True}, True, id="template-opens-it"),
        pytest.param("q <think>", {"think_opened": False}, False, id="option-says-closed"),
    ],
)
def test_whether_the_prompt_opened_the_think_block(prompt: object, options: dict[str, bool], opened: bool) -> None:
    rest = "7+8=15, and then 3+5+1=9</think><answer>95</answer>"
    for reward in (format_reward, soft_format_reward, tag_count_reward):
        inside, whole = reward(prompts=[prompt] * 2, completions=[rest, "<think>" + rest], **options)  # type: ignore[operator]
        assert (inside == 1.0) is opened
        if reward is not soft_format_reward:  # which accepts the format anywhere
            assert (whole == 1.0) is not opened


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
    """A megabyte takes milliseconds; a pattern that backtracks would take hours (5 s of processor time are allowed)."""
    with processor_seconds(5):
        assert format_reward(["q"], [hostile]) == [0.0]
        assert 0.0 <= soft_format_reward([hostile])[0] <= 0.5
        assert 0.0 <= tag_count_reward([hostile])[0] <= 0.5


def test_wrong_calls_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match="one of 'prompts' for each of 2 completions; got 1"):
        format_reward(["q"], ["a", "b"])
    with pytest.raises(TypeError, match="think_opened must be True, False or None .*; got 'yes'"):
        tag_count_reward(["a"], think_opened="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a str or a list of chat messages; got int"):
        format_reward(["q"], [7])  # type: ignore[list-item]
