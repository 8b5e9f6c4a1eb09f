"""The bounded evaluator: exact, small, and safe for hostile input."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest
from guards import processor_seconds
from hypothesis import given
from hypothesis import strategies as st

from grpo_fused.rewards import evaluate_arithmetic


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        pytest.param("8 * 2 - 1", 15, (8, 2, 1), id="precedence"),
        pytest.param(" (1 +\n\t2) * 3\r\n", 9, (1, 2, 3), id="white-space"),
        pytest.param("-(2 - 5)", 3, (2, 5), id="minus"),
        pytest.param("--4", 4, (4,), id="minus-minus"),
        pytest.param("1/3 + 1/3 + 1/3", 1, (1, 3, 1, 3, 1, 3), id="thirds"),
        pytest.param("0.1 + .2", Fraction(3, 10), (Fraction(1, 10), Fraction(1, 5)), id="decimals"),
        pytest.param("3. * 2", 6, (3, 2), id="bare-point"),
        pytest.param("9" * 512, int("9" * 512), (int("9" * 512),), id="longest"),
    ],
)
def test_values_are_exact(text: str, value: Fraction | int, numbers: tuple[Fraction | int, ...]) -> None:
    assert evaluate_arithmetic(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("9**9**9", id="power"),
        pytest.param("7 // 2", id="floor-division"),
        pytest.param("7 % 2", id="remainder"),
        pytest.param("1 / 0", id="zero-division"),
        pytest.param("1 / (2 - 2)", id="hidden-zero-division"),
        pytest.param("+1", id="plus"),
        pytest.param("1e9", id="exponent"),
        pytest.param("1_000", id="underscore"),
        pytest.param("07", id="leading-zero"),
        pytest.param("1, 2", id="tuple"),
        pytest.param("1 2", id="two-numbers"),
        pytest.param("1(2)", id="call"),
        pytest.param("()", id="empty-tuple"),
        pytest.param("...", id="ellipsis"),
        pytest.param("1.2.3", id="two-points"),
        pytest.param("8*2-1 = 15", id="equation"),
        pytest.param("8 × 2", id="unicode-operator"),
        pytest.param("٣+٤", id="arabic-digits"),
        pytest.param("__import__('os')", id="python"),
        pytest.param("", id="empty"),
        pytest.param("\x00", id="null"),
        pytest.param("9" * 513, id="too-long"),
        pytest.param("(" * 256 + ")" * 256, id="deep-and-empty"),
        pytest.param("(" * 255 + "1" + ")" * 255, id="deep"),
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert evaluate_arithmetic(text) is None


@pytest.mark.parametrize(
    "text", ["-" * 511 + "1", "1" + "-1" * 255, "1/3" + "*1/7" * 120, "9*" * 255 + "9", "(" * 10**6]
)
def test_long_chains_end_soon(text: str) -> None:
    with processor_seconds(2):
        evaluate_arithmetic(text)


class Known(NamedTuple):
    """An expression with its value, None where it divides by zero."""

    text: str
    value: Fraction | None


def combine(parts: tuple[Known, str, Known]) -> Known:
    left, operator, right = parts
    value = None
    if left.value is not None and right.value is not None and not (operator == "/" and right.value == 0):
        apply = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}
        value = apply[operator](left.value, right.value)
    return Known(f"({left.text} {operator} {right.text})", value)


expressions = st.recursive(
    st.sampled_from(["0", "1", "2", "7", "48", "999", "0.5", "12.25", ".1"]).map(
        lambda text: Known(text, Fraction(text))
    ),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(combine)
        | inner.map(lambda known: Known(f"-{known.text}", None if known.value is None else -known.value))
    ),
    max_leaves=12,
)


@given(expressions)
def test_agrees_with_fractions(known: Known) -> None:
    result = evaluate_arithmetic(known.text)
    assert (None if result is None else result.value) == known.value


@given(st.text(alphabet="0123456789.+-*/() \n", max_size=600) | st.text(max_size=600))
def test_no_text_makes_it_raise(text: str) -> None:
    result = evaluate_arithmetic(text)
    assert result is None or isinstance(result.value, Fraction)
