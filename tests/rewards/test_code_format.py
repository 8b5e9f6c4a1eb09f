"""The code format: judged from the syntax tree, never run."""

from __future__ import annotations

import warnings

import pytest
from guards import processor_seconds
from hypothesis import given
from hypothesis import strategies as st
from rewards.seeds import as_chat

from grpo_fused.rewards import code_format_reward


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        pytest.param("<code>\ndef add(a, b):\n    return a + b\n</code>", 1.0, id="function"),
        pytest.param("text <code>x = 1</code> text <code>(</code>", 1.0, id="the-first-block-counts"),
        pytest.param("<code>class A:\n    def __init__(self):\n        super().__init__()</code>", 1.0, id="class"),
        pytest.param("<code>print('import os; eval(1)')  # open</code>", 1.0, id="words-in-strings-and-comments"),
        pytest.param("<code>if __name__ == '__main__':\n    print(1)</code>", 1.0, id="main"),
        pytest.param("<code>def f(:</code>", 0.3, id="syntax-error"),
        pytest.param("<code>x = '\x00'</code>", 0.3, id="null-byte"),
        pytest.param("<code>x = '\ud800'</code>", 0.3, id="lone-surrogate"),
        pytest.param("x = 1", 0.0, id="no-block"),
        pytest.param("<code>x = 1", 0.0, id="not-closed"),
        pytest.param("</code>x = 1<code>", 0.0, id="reversed"),
        pytest.param("<code>  \n </code>", 0.0, id="empty"),
        pytest.param("<code># nothing</code>", 0.0, id="no-statement"),
        pytest.param("<code>import math</code>", 0.0, id="import"),
        pytest.param("<code>from math import sqrt</code>", 0.0, id="from-import"),
        pytest.param("<code>def f():\n    import math</code>", 0.0, id="inner-import"),
        pytest.param("<code>eval('1')</code>", 0.0, id="eval"),
        pytest.param("<code>open('f')</code>", 0.0, id="open"),
        pytest.param("<code>e = exec</code>", 0.0, id="alias"),
        pytest.param("<code>ｅｖａｌ('1')</code>", 0.0, id="unicode-spelling"),
        pytest.param("<code>__import__('os')</code>", 0.0, id="dunder-import"),
        pytest.param("<code>().__class__.__bases__[0].__subclasses__()</code>", 0.0, id="dunder-attributes"),
        pytest.param("<code>getattr(x, 'y')</code>", 0.0, id="getattr"),
        pytest.param("<code>def f(open): pass</code>", 0.0, id="argument"),
        pytest.param("<code>def f():\n    global sys</code>", 0.0, id="global"),
        pytest.param("<code>def open(): pass</code>", 0.0, id="definition"),
        pytest.param("<code>import os; def (</code>", 0.0, id="dangerous-and-broken"),
        pytest.param("<code>import math; def (</code>", 0.0, id="import-and-broken"),
        pytest.param(f"<code>{'x' * 20_000}</code>", 1.0, id="longest"),
        pytest.param(f"<code>{'x' * 20_001}</code>", 0.0, id="too-long"),
    ],
)
def test_code(completion: str, expected: float) -> None:
    assert code_format_reward([completion, as_chat(completion)], prompts=["q"] * 2) == [expected] * 2


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("x" * 1_000_000, id="long"),
        pytest.param("-" * 19_000 + "1", id="minus"),
        pytest.param("not " * 4_000 + "1", id="not"),
        pytest.param("lambda:" * 2_800 + "1", id="lambda"),
        pytest.param("a" + ".b" * 9_900, id="attributes"),
        pytest.param("a" + "[a" * 190, id="open-subscripts"),
        pytest.param("(" * 19_000, id="parentheses"),
        pytest.param("[" * 190 + "]" * 190, id="nested-lists"),
        pytest.param("{" * 99, id="open-braces"),
        pytest.param("{" * 99 + ":", id="open-braces-colon"),
        pytest.param("f(" * 190, id="open-calls"),
        pytest.param("(lambda " * 190, id="open-lambdas"),
        pytest.param("with " + "(" * 99 + "a", id="with"),
        pytest.param("for x in " + "(" * 99, id="for"),
        pytest.param("f'" + "{f'" * 90, id="f-strings"),
        pytest.param("match x:\n case " + "(" * 99, id="match"),
        pytest.param("if 1:\n" * 50, id="if"),
        pytest.param("x = (" + "a, " * 6_000, id="open-tuple"),
        pytest.param("1 if " * 3_900, id="conditionals"),
        pytest.param("a:" * 9_900, id="annotations"),
        pytest.param("9" * 19_000, id="digits"),
        pytest.param("9**9**9**9", id="power"),
        pytest.param("\\\n" * 9_900, id="continuations"),
    ],
)
def test_hostile_code_ends_soon(code: str) -> None:
    with processor_seconds(5):
        assert code_format_reward([f"<code>{code}</code>"])[0] in (0.0, 0.3, 1.0)


def test_invalid_escapes_give_no_warning() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert code_format_reward([r"<code>x = '\d'</code>"]) == [1.0]
    assert not seen


@given(st.text(max_size=300) | st.text(alphabet="()[]{}:=,.+-*/ \n'\"abf0123lambda", max_size=300))
def test_no_code_makes_it_raise(code: str) -> None:
    assert code_format_reward([f"<code>{code}</code>"])[0] in (0.0, 0.3, 1.0)
