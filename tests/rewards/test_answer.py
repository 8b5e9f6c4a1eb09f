"""The exact-answer reward, and finding the answer."""

from __future__ import annotations

import pytest
from rewards.seeds import COMPLETIONS, PROMPTS, as_chat

from grpo_fused.rewards import exact_answer_reward, extract_answer

RIGHT = "<think>7+8=15</think><answer>95</answer>"


def test_answers_of_the_countdown_cases() -> None:
    rewards = exact_answer_reward(list(COMPLETIONS.values()), ["8 * 2 - 1"] * 6, prompts=PROMPTS)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param(RIGHT, "95", id="right"),
        pytest.param("no format at all <answer> 95\n</answer> bye", "95", id="lenient-about-the-rest"),
        pytest.param("<answer>94</answer><answer>95</answer>", None, id="two-guesses"),
        pytest.param("<answer>94<answer>95</answer>", None, id="opened-twice"),
        pytest.param("<answer>94</answer>95</answer>", None, id="closed-twice"),
        pytest.param("</answer>95<answer>", None, id="reversed"),
        pytest.param("<answer><think>95</think></answer>", None, id="tag-inside"),
        pytest.param("<answer>95", None, id="cut-off"),
    ],
)
def test_extract_answer(completion: str, expected: str | None) -> None:
    assert extract_answer(completion) == expected
    assert extract_answer(as_chat(completion)) == expected


def test_answers_are_text_and_are_not_evaluated() -> None:
    wrong = ["90+5", "95.0", "095", "__import__('os')", "95 or 96"]
    completions = [f"<answer>{text}</answer>" for text in wrong]
    assert exact_answer_reward(completions=completions, answer=["95"] * len(wrong)) == [0.0] * len(wrong)


def test_integers_and_missing_answers() -> None:
    completions = ["<answer> 95 </answer>", as_chat("<answer> 95 </answer>"), "<answer> 95 </answer>"]
    assert exact_answer_reward(completions=completions, answer=[95, " 95 ", None]) == [1.0, 1.0, None]


def test_wrong_calls_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match="one of 'answer' for each of 2 completions; got 1"):
        exact_answer_reward(completions=["a", "b"], answer=["1"])
    with pytest.raises(TypeError, match="str, int or None; got float"):
        exact_answer_reward(completions=[RIGHT], answer=[95.0])  # type: ignore[list-item]
