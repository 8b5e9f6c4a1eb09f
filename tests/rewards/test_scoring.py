"""The arguments of reward functions, and checks of their results."""

from __future__ import annotations

import copy
import functools
import json
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from grpo_fused.rewards import RewardError, built_in
from grpo_fused.rewards.calling import arguments_for
from grpo_fused.trainer.scoring import reward_names, score_completions

ROWS = [{"prompt": "p0", "answer": "1"}, {"prompt": "p1", "answer": "2"}]
COMPLETIONS = ["<answer>1</answer>", "<answer>1</answer>"]
IDS = [[1, 2], [3]]


def score(function: Any, **options: Any) -> list[float]:
    return score_completions({"mine": function}, ROWS, COMPLETIONS, IDS, **options)[:, 0].tolist()


def test_trls_calling_convention() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0, 2.0]

    assert score(spy) == [1.0, 2.0]
    assert seen == {"prompts": ["p0", "p1"], "completions": COMPLETIONS, "completion_ids": IDS, "answer": ["1", "2"]}


def test_functions_without_names_are_refused() -> None:
    with pytest.raises(TypeError, match="reward_functions must be a mapping of names to functions; got list"):
        score_completions([built_in("exact_answer")], ROWS, COMPLETIONS)  # type: ignore[arg-type]


def test_columns_are_functions_and_none_is_nan() -> None:
    functions = {"exact": built_in("exact_answer"), "some": lambda **_: (None, 3)}
    rewards = score_completions(functions, ROWS, COMPLETIONS, IDS)
    assert rewards.dtype == torch.float32
    assert rewards.nan_to_num(nan=-1.0).tolist() == [[1.0, -1.0], [0.0, 3.0]]


def test_chat_formatted_completions_and_prompts() -> None:
    rows = [{"prompt": [{"role": "user", "content": "1?"}], "answer": "1"}]
    completions = [[{"role": "assistant", "content": "<answer>1</answer>"}]]
    functions = {
        name: built_in(name) for name in ("exact_answer", "math_accuracy", "format", "soft_format", "tag_count")
    }
    assert score_completions(functions, rows, completions).tolist() == [[1.0, 1.0, 0.0, 0.0, 0.5]]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda completions: [1.0] * len(completions), id="completions-only"),
        pytest.param(lambda answer, completion_ids: [1.0] * len(answer), id="columns-only"),
        pytest.param(functools.partial(lambda scale, completions: [scale] * len(completions), 1.0), id="partial"),
        pytest.param(lambda completions, level=1.0: [level] * len(completions), id="default"),
        pytest.param(lambda *, completions: [1.0] * len(completions), id="keyword-only"),
    ],
)
def test_a_function_without_columns_gets_its_parameters(function: Any) -> None:
    assert score(function) == [1.0, 1.0]


def test_a_callable_without_a_signature_gets_the_whole_batch() -> None:
    batch = {"prompts": ["p"], "answer": ["1"]}
    assert arguments_for("mine", dict, batch) == batch


def test_functions_cannot_change_each_others_input() -> None:
    def vandal(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        completions.clear()
        answer.clear()
        return [0.0, 0.0]

    functions = {"vandal": vandal, "exact": built_in("exact_answer")}
    assert score_completions(functions, ROWS, COMPLETIONS)[:, 1].tolist() == [1.0, 0.0]


def test_functions_cannot_change_a_row() -> None:
    """Its completions share it: a reward that strikes off numbers would find fewer of them the second time."""

    def strikes_off(nums: list[list[int]], prompts: Any, completion_ids: Any, meta: Any, **_: Any) -> list[float]:
        prompts[0][0]["content"] += "!"
        completion_ids[0].clear()
        meta[0]["tries"] += 1
        return [float(given.pop()) for given in nums]

    row = {"prompt": [{"role": "user", "content": "q"}], "nums": [1, 2], "meta": {"tries": 0}}
    kept, ids = copy.deepcopy(row), [[1], [2]]
    answers: Any = [[{"role": "assistant", "content": "a"}]] * 2
    assert score_completions({"mine": strikes_off}, [row] * 2, answers, ids)[:, 0].tolist() == [2.0, 2.0]
    assert (row, ids) == (kept, [[1], [2]])


def test_missing_columns_are_named() -> None:
    with pytest.raises(ValueError, match=r"'mine' needs 'target' and 'nums'; .* data set's columns \['answer'\]"):
        score(built_in("countdown"))
    with pytest.raises(RewardError, match=r"'mine' raised ValueError: expected a column \"answer\" or \"solution\""):
        score_completions({"mine": built_in("math_accuracy")}, [{"prompt": "p", "right": "1"}], ["a"])


@pytest.mark.parametrize(("error", "text"), [(KeyError("weights"), ": 'weights'"), (StopIteration(), "")])
def test_a_function_that_raises_is_named_and_its_error_kept(error: Exception, text: str) -> None:
    def broken(**_: Any) -> list[float]:
        raise error

    message = rf"^reward function 'mine' raised {type(error).__name__}{text} \({__file__}:\d+\)$"
    with pytest.raises(RewardError, match=message) as caught:
        score(broken)
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, RuntimeError)


def test_an_error_in_a_library_has_the_line_that_called_it() -> None:
    def parses(**_: Any) -> list[float]:
        return [json.loads("no")]

    with pytest.raises(RewardError, match=rf"raised JSONDecodeError: .* \({__file__}:\d+\)$"):
        score(parses)
    with pytest.raises(RewardError, match=rf"\({__file__}:{parses.__code__.co_firstlineno + 1}\)$"):
        score(lambda **_: parses())
    with pytest.raises(RewardError, match=r"raised TypeError: .* \(.*json.__init__.py:\d+\)$"):
        score(functools.partial(json.loads, "no"))


def test_a_keyboard_interrupt_propagates() -> None:
    def interrupted(**_: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        pytest.param([1.0], ValueError, "one reward for each of 2 completions; got 1", id="too-short"),
        pytest.param([1.0] * 3, ValueError, "one reward for each of 2 completions; got 3", id="too-long"),
        pytest.param("11", TypeError, "a list of 2 floats .*; got str", id="string"),
        pytest.param(1.0, TypeError, "a list of 2 floats .*; got float", id="number"),
        pytest.param(None, TypeError, "a list of 2 floats .*; got NoneType", id="nothing"),
        pytest.param({0: 1.0, 1: 1.0}, TypeError, "a list of 2 floats .*; got dict", id="dict"),
        pytest.param(torch.ones(2), TypeError, "a list of 2 floats .*; got Tensor", id="tensor"),
        pytest.param([1.0, "1"], TypeError, "floats or None; got '1' for completion 1", id="string-inside"),
        pytest.param([1.0, [1.0]], TypeError, r"floats or None; got \[1.0\] for completion 1", id="list-inside"),
        pytest.param([1.0, 1j], TypeError, "floats or None; got 1j for completion 1", id="complex"),
        pytest.param([float("nan"), 1.0], ValueError, "finite rewards .*; got nan for completion 0", id="nan"),
        pytest.param([1.0, float("inf")], ValueError, "finite rewards .*; got inf for completion 1", id="inf"),
        pytest.param([1.0, -float("inf")], ValueError, "finite rewards .*; got -inf for completion 1", id="minus-inf"),
        pytest.param([1.0, 1e39], ValueError, "that fp32 can hold .*; got 1e[+]39 for completion 1", id="beyond-fp32"),
        pytest.param([1.0, 10**5000], ValueError, "got int beyond fp64 for completion 1", id="beyond-fp64"),
    ],
)
def test_bad_returns_are_named(returned: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"reward function 'mine' must return .*{message}"):
        score(lambda **_: returned)


def test_numbers_of_other_types_are_rewards() -> None:
    assert score(lambda **_: [True, Fraction(1, 4)]) == [1.0, 0.25]
    assert score(lambda **_: [-0.0, 3]) == [0.0, 3.0]


@pytest.mark.parametrize(
    ("rows", "completions", "ids", "message"),
    [
        pytest.param(ROWS, ["a"], None, "one row for each of 1 completions; got 2", id="rows"),
        pytest.param(ROWS, [], None, "one row for each of 0 completions; got 2", id="no-completions"),
        pytest.param(ROWS, COMPLETIONS, [[1]], "completion_ids for each of 2 completions; got 1", id="ids"),
        pytest.param(
            [ROWS[0], {"prompt": "p"}],
            COMPLETIONS,
            None,
            r"row 1 .* \['answer', 'prompt'\], as row 0; got \['prompt'\]",
            id="uneven",
        ),
        pytest.param(
            [{"answer": "1"}],
            ["a"],
            None,
            r'must have a column "prompt"; got the columns \[\'answer\'\]',
            id="no-prompt",
        ),
        pytest.param(
            [{"prompt": "p", "completions": 1}], ["a"], None, r"get anyway; got \['completions'\]", id="taken"
        ),
    ],
)
def test_wrong_batches(rows: Any, completions: list[str], ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_completions({"mine": lambda **_: [1.0]}, rows, completions, ids)


def test_nothing_to_score() -> None:
    assert score_completions({"exact": built_in("exact_answer")}, [], []).shape == (0, 1)
    assert score_completions({}, ROWS, COMPLETIONS).shape == (2, 0)


def with_name(name: str) -> Any:
    def f(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    f.__name__ = name
    return f


def test_names() -> None:
    length = built_in("length")
    assert reward_names([length, built_in("format"), length]) == ["length", "format", "length_2"]
    taken = [with_name(x) for x in ("a_2", "a", "a", "a_3", "a")]
    assert reward_names(taken) == ["a_2", "a", "a_3", "a_3_3", "a_4"]
    with pytest.raises(TypeError, match="reward function 0 must be callable; got 'format'"):
        reward_names(["format"])  # type: ignore[list-item]
    model = nn.Linear(1, 1)
    model.config = object()
    with pytest.raises(TypeError, match=r"got the model Linear: wrap it as RewardModel\(model, tokenizer\)"):
        reward_names([model])
