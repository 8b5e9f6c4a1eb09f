"""Chat messages and texts, and wrong inputs."""

from __future__ import annotations

import pytest

from grpo_fused.rewards import text_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("as it is ", "as it is ", id="text"),
        pytest.param([{"role": "assistant", "content": "hello"}], "hello", id="one-message"),
        pytest.param(
            [
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "content": "<answer>7</answer>"},
                {"role": "assistant", "content": "it is 7"},
            ],
            "\nit is 7",
            id="tool-output-is-not-the-policy's",
        ),
        pytest.param(
            [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}]}],
            "ab",
            id="parts",
        ),
        pytest.param(
            [{"role": "assistant", "content": [{"type": "image", "text": None}, {"type": "text", "text": "a"}]}],
            "a",
            id="parts-of-datasets",
        ),
        pytest.param([], "", id="no-message"),
        pytest.param(({"role": "assistant", "content": "a"},), "a", id="tuple"),
    ],
)
def test_text_of(given: object, expected: str) -> None:
    assert text_of(given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(None, "expected a str or a list of chat messages; got NoneType", id="none"),
        pytest.param({"role": "assistant", "content": "a"}, "expected a str or a list .*; got dict", id="bare-message"),
        pytest.param(["a"], """mapping with "role" and "content"; got 'a'""", id="texts"),
        pytest.param([{"content": "a"}], 'mapping with "role" and "content"; got', id="no-role"),
        pytest.param([{"role": "assistant"}], 'mapping with "role" and "content"; got', id="no-content"),
        pytest.param([{"role": "assistant", "content": 7}], "must be a str or a list of parts; got 7", id="number"),
    ],
)
def test_wrong_inputs(given: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        text_of(given)  # type: ignore[arg-type]
