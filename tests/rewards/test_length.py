"""Length and reasoning steps."""

from __future__ import annotations

import pytest
from guards import processor_seconds
from rewards.seeds import as_chat

from grpo_fused.rewards import length_reward, reasoning_steps_reward, relative_length_reward


def test_distance_to_the_target_length() -> None:
    completions = ["a" * 20, "a" * 15, as_chat("a" * 23), ""]
    assert length_reward(completions) == [0.0, -5.0, -3.0, -20.0]
    assert length_reward(completions, target_length=0) == [-20.0, -15.0, -23.0, 0.0]


def test_no_target_rewards_the_longest() -> None:
    assert length_reward(["aaa", "", as_chat("a")], target_length=None) == [3.0, 0.0, 1.0]


def test_tokens_are_counted_in_the_ids() -> None:
    ids = [[1, 2, 3], [], [1]]
    assert length_reward(["a", "b", "c"], ids, target_length=2, unit="tokens") == [-1.0, -2.0, -1.0]
    assert relative_length_reward(["a", "b"], [[1, 2, 3], [4]], unit="tokens") == [1.5, 0.5]


def test_longer_than_the_batch_average() -> None:
    assert relative_length_reward(["aaaa", as_chat("aa"), "aaa"]) == pytest.approx([4 / 3, 2 / 3, 1.0])
    assert relative_length_reward(["", ""]) == [0.0, 0.0]
    assert relative_length_reward([]) == []


def test_wrong_options_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match="target_length must be at least 0; got -1"):
        length_reward(["a"], target_length=-1)
    with pytest.raises(ValueError, match="unit must be one of characters, tokens; got 'words'"):
        length_reward(["a"], unit="words")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs completion_ids; got none"):
        length_reward(["a"], unit="tokens")
    with pytest.raises(ValueError, match="one of 'completion_ids' for each of 1 completions; got 2"):
        relative_length_reward(["a"], [[1], [2]], unit="tokens")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param("Step 1: add. Step 2: carry. Step 3: done.", 3, id="steps"),
        pytest.param("First, add. Second, carry. Next, check. Finally, answer.", 4, id="words"),
        pytest.param("1. add\n2. carry", 2, id="numbered"),
        pytest.param("so\n- add\n* carry", 2, id="bullets"),
        pytest.param("It is 3.5, first of all - really", 0, id="none"),
        pytest.param("", 0, id="empty"),
    ],
)
def test_reasoning_steps(completion: str, expected: int) -> None:
    assert reasoning_steps_reward([completion, as_chat(completion)]) == [min(1.0, expected / 3)] * 2


@pytest.mark.parametrize(
    "hostile", ["Step 1" * 100_000, "1" * 1_000_000, "\n" * 1_000_000, "Step " + "1" * 1_000_000, "\n-" * 500_000]
)
def test_hostile_input_takes_linear_time(hostile: str) -> None:
    with processor_seconds(5):
        assert 0.0 <= reasoning_steps_reward([hostile])[0] <= 1.0
