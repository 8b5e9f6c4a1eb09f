"""Any text in any built-in function: a reward in its range, no exception, no long wait."""

from __future__ import annotations

import pytest
from guards import processor_seconds
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.seeds import as_chat

from grpo_fused.rewards import BUILT_INS, built_in

RANGES = {
    "format": {0.0, 1.0},
    "soft_format": {0.0, 0.5, 1.0},
    "tag_count": {0.0, 0.25, 0.5, 0.75, 1.0},
    "reasoning_steps": {0.0, 1 / 3, 2 / 3, 1.0},
    "exact_answer": {0.0, 1.0},
    "math_accuracy": {0.0, 1.0},
    "countdown": {0.0, 1.0},
    "code_format": {0.0, 0.3, 1.0},
}
OPTIONS = {"math_accuracy": {"use_math_verify": False}}  # its formulas are in test_math_accuracy.py

pieces = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "<code>", "</code>", "\\boxed{", "}", "#### ", "Step 1:", "\n- ",
     "8*2-1", "9**9**9", "1/0", "(", ")", "72", "-", " ", "\n", "<", "\x00", "\ud800", "import os", "def f():", "$", "%"]
)  # fmt: skip
texts = st.text(max_size=200) | st.lists(pieces | st.text(max_size=5), max_size=40).map("".join)


def columns(completions: list[object]) -> dict[str, list[object]]:
    number = len(completions)
    return {
        "prompts": ["q <think>", *["q"] * (number - 1)],
        "completions": completions,
        "completion_ids": [[1]] * number,
        "answer": ["72"] * number,
        "target": [15] * number,
        "nums": [[8, 2, 1]] * number,
        "score_answer": [lambda answer: float(answer == "72")] * number,
    }


@pytest.mark.parametrize("name", RANGES)
@given(texts=st.lists(texts, min_size=1, max_size=4))
@settings(deadline=None, max_examples=150)
def test_any_text_is_in_range(name: str, texts: list[str]) -> None:
    reward = built_in(name, **OPTIONS.get(name, {}))
    rewards = reward(**columns(list(texts)))
    assert set(rewards) <= RANGES[name]  # type: ignore[arg-type]
    assert reward(**columns([as_chat(text) for text in texts])) == rewards


@pytest.mark.parametrize("name", [name for name in BUILT_INS if name not in ("length", "relative_length")])
@pytest.mark.parametrize(
    "unit",
    ["<", "<think>", "</answer>", "<think></think><answer>", " ", "\n", "9", "(", "-", "1,", "####", "\\boxed{", "{", "$",
     "Step 1", "\n-", "<code>", "</code>", "a.", "\ud800", "\x00"],
    ids=ascii,
)  # fmt: skip
def test_a_hundred_thousand_characters_of_anything(name: str, unit: str) -> None:
    """Bare, in an answer block, in a code block and in a box; milliseconds each, of 5 s of processor time."""
    text = (unit * 100_000)[:100_000]
    wrapped = [text, f"<think></think><answer>{text}</answer>", f"<code>{text}</code>", f"\\boxed{{{text}}}"]
    with processor_seconds(5):
        rewards = built_in(name)(**columns(list(wrapped)))
    assert all(0.0 <= reward <= 1.0 for reward in rewards)  # type: ignore[operator,union-attr]
