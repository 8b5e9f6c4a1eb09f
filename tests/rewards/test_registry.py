"""The built-in functions by name, with their options."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from rewards.seeds import COMPLETIONS, COUNTDOWN_REWARDS, NUMS, TARGET

from grpo_fused.rewards import BUILT_INS, built_in
from grpo_fused.rewards.registry import bind
from grpo_fused.trainer.scoring import score_completions


@pytest.mark.parametrize("name", BUILT_INS)
def test_every_built_in_is_called_by_trls_convention(name: str) -> None:
    function = built_in(name)
    assert function.__name__ == name  # type: ignore[attr-defined]
    rewards = function(
        prompts=["q"] * 2,
        completions=["<answer>7</answer>", [{"role": "assistant", "content": "<answer>7</answer>"}]],
        completion_ids=[[1, 2], [3]],
        answer=["7", "7"],
        target=[7, 7],
        nums=[[7], [7]],
        unit=["kg", "kg"],  # the name of an option of the length reward
        task=["a", "b"],
        score_answer=[len, len],
    )
    assert isinstance(rewards, list)
    assert all(isinstance(reward, (int, float)) for reward in rewards)


def test_options_are_bound() -> None:
    closer = built_in("length", target_length=3, unit="tokens")
    assert closer(completions=["a"], completion_ids=[[1]], target=["15"], unit=["kg"]) == [-2.0]
    countdown = built_in("countdown", think_opened=True)
    assert countdown(completions=list(COMPLETIONS.values()), target=TARGET, nums=NUMS) == COUNTDOWN_REWARDS
    assert countdown.__name__ == "countdown"  # type: ignore[attr-defined]


def test_a_column_does_not_set_an_option_of_any_function() -> None:
    def short(completions: list[str], target: int, **columns: object) -> list[float]:
        assert "target" not in columns
        return [float(len(text) - target) for text in completions]

    bound = bind(short, {"target": 1})
    assert score_completions({"short": bound}, [{"prompt": "q", "target": 7}], ["abc"]).tolist() == [[2.0]]
    others = {"prompt": "q", "function": 1, "taken": 2, "options": 3}
    assert score_completions({"short": bound}, [others], ["abc"]).tolist() == [[2.0]]
    assert bound.__name__ == "short"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="needs 'target'"):
        score_completions({"short": short}, [{"prompt": "q"}], ["abc"])


def test_an_option_that_a_function_does_not_take_is_refused_at_once() -> None:
    def short(completions: list[str], *, target: int = 0) -> list[float]:
        return [float(target)] * len(completions)

    with pytest.raises(TypeError, match=r"of the reward function 'short': .* 'targt'; got {'targt': 1}"):
        bind(short, {"targt": 1})


def test_a_bound_function_can_be_sent_to_another_process() -> None:
    again = pickle.loads(pickle.dumps(built_in("length", target_length=3)))
    assert again(completions=["aaaa"]) == [-1.0]
    assert again.__name__ == "length"


def test_errors_list_names_and_options() -> None:
    with pytest.raises(ValueError, match="built-in rewards are format, soft_format, .*, score_answer; got 'fromat'"):
        built_in("fromat")
    with pytest.raises(TypeError, match="options of the length reward are target_length, unit; got target"):
        built_in("length", target=3)
    with pytest.raises(TypeError, match=r"options of the code_format reward are \(none\); got strict"):
        built_in("code_format", strict=True)
    with pytest.raises(ValueError, match="unit must be one of characters, tokens; got 'words'"):
        built_in("length", unit="words")
    with pytest.raises(TypeError, match="think_opened must be True, False or None"):
        built_in("countdown", think_opened=1)
    for name, flag in (
        ("countdown", "use_all"), ("countdown", "require_format"), ("math_accuracy", "use_math_verify"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{flag} must be True or False; got 'no'"):
            built_in(name, **{flag: "no"})


def test_a_bound_reward_model_moves_to_a_device() -> None:
    """As one that a recipe names as `judge.py:judge`."""

    class Judge:
        moved_to: str | None = None

        def to(self, device: str) -> None:
            self.moved_to = device

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    judge = Judge()
    bound: Any = bind(judge, {})
    bound.to("meta")
    assert judge.moved_to == "meta"
    assert not hasattr(bind(len, {}), "to")
