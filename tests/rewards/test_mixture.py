"""One data set, several tasks, each with its reward."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

import pytest

from grpo_fused.rewards import built_in, only_for
from grpo_fused.trainer.scoring import score_completions

ROWS = [
    {"prompt": "1+1", "task": "math", "answer": "2"},
    {"prompt": "add", "task": "code", "answer": None},
    {"prompt": "2+2", "task": "math", "answer": "4"},
]
COMPLETIONS = ["<answer>2</answer>", "<code>a + b</code>", "<answer>5</answer>"]


def test_each_function_judges_its_task() -> None:
    functions = {"exact_answer": built_in("exact_answer"), "code_format": only_for(built_in("code_format"), "code")}
    judged = score_completions(functions, ROWS, COMPLETIONS).nan_to_num(nan=-1.0)
    assert judged.tolist() == [[1.0, -1.0], [-1.0, 1.0], [0.0, -1.0]]


def test_the_name_of_a_reward_is_no_function() -> None:
    with pytest.raises(TypeError, match="function must be a reward function; got 'code_format'"):
        only_for("code_format", "code")  # type: ignore[arg-type]


def test_a_function_gets_only_its_samples() -> None:
    def spy(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str]
    ) -> list[float]:
        assert prompts == ["1+1", "2+2"]
        assert completions == [COMPLETIONS[0], COMPLETIONS[2]]
        assert completion_ids == [[1], [3]]
        assert answer == ["2", "4"]
        return [0.5, 0.25]

    function = only_for(spy, "math")
    assert function.__name__ == "spy"  # type: ignore[attr-defined]
    judged = score_completions({"spy": function}, ROWS, COMPLETIONS, [[1], [2], [3]])
    assert judged[[0, 2], 0].tolist() == [0.5, 0.25]
    assert math.isnan(judged[1, 0])


def test_async_functions_and_further_arguments_of_a_trainer() -> None:
    async def later(completions: list[str], trainer_state: object, loggers: object, **columns: Any) -> list[float]:
        assert (trainer_state, loggers) == ("state", ["a logger"])
        return [1.0] * len(completions)

    rewards = only_for(later, "code", column="kind")(
        completions=["a", "b"], kind=["text", "".join(["co", "de"])], trainer_state="state", loggers=["a logger"]
    )
    assert asyncio.run(rewards) == [None, 1.0]  # type: ignore[arg-type]


def test_a_wrapped_async_function_is_declared_async() -> None:
    """TRL awaits no other; it then does so also for a batch without samples of the task."""

    async def later(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    class Judge:
        async def __call__(self, completions: list[str]) -> list[float]:
            return await later(completions)

    for function in (later, Judge()):
        wrapped: Any = only_for(function, "code")
        assert inspect.iscoroutinefunction(wrapped)
        assert asyncio.run(wrapped(completions=["a", "b"], task=["math", "code"])) == [None, 1.0]
        assert asyncio.run(wrapped(completions=["a"], task=["math"])) == [None]


def test_no_call_without_samples_of_the_task() -> None:
    assert only_for(lambda **_: pytest.fail("called"), "chess")(completions=["a"], task=["math"]) == [None]


def test_wrong_calls_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"a column 'task', .*; got \['prompts'\]"):
        only_for(built_in("format"), "math")(completions=["a"], prompts=["q"])
    with pytest.raises(ValueError, match="one reward for each of 1 samples of the task; got 2"):
        only_for(lambda **_: [1.0, 2.0], "math")(completions=["a", "b"], task=["math", "code"])


def test_a_reward_model_can_be_moved() -> None:
    places: list[str] = []

    class Model:
        __name__ = "model"

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

        def to(self, device: str) -> None:
            places.append(device)

    wrapped: Any = only_for(Model(), "math")
    wrapped.to("meta")
    assert places == ["meta"]
    assert not hasattr(only_for(len, "math"), "to")
