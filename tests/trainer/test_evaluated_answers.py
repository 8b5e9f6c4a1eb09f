"""Answers that a verifier would evaluate as Python: no code of the policy's runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from guards import processor_seconds
from hypothesis import given
from hypothesis import strategies as st

from grpo_fused.trainer.evaluated_answers import is_harmless
from grpo_fused.trainer.reasoning_gym import _score


@pytest.mark.parametrize(
    "answer",
    [
        "_ _ Q _\nQ _ _ _", "9 1 -6 3", "1 0\n0 1", "DACEDD", "['D', 'A']", "[['_', 'Q'], ['Q', '_']]", "[[0, -1], [1, 2]]",
        "6*(98 - 54) - 34 - 66", " 1*3*5 + 9\n", "-665614*y**8 + 623128*y**6", "2*x**(3/2)/3 + C", "x**(-1)", "",
        "x**2*exp(3*x)/3 - sin(2*x)*cos(x) + log(x**2 + 1)",
        " + ".join(f"{99 * n}*x**{n}*y**{100 - n}" for n in range(50)), str([[1] * 40] * 40), "sqrt(x)*atan(x/2)",
    ],
)  # fmt: skip
def test_answers_of_the_data_sets_are_scored(answer: str) -> None:
    assert is_harmless(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')", "open('f')", "print (1)", "exec\t('1')", "().__class__", "x.y", "x[0]", "f'{x}'",
        "[x for x in 'a']", "lambda: 1", "(x := 1)", "sin('1+1')", "['1+1']", "sin(*x)", "sin(x=1)", "sin(x)(1)",
        "9**9**9", "((9**99)**99)**9", "sin(" + "*".join(["9e99**9"] * 12) + ")", "((x+y)**99)**99", "2**x", "9**1000",
        "10**10*[1]", "'a'*10**9", "1e999999999", "9!", "factorial(9)", "exp(exp(9))", "sin(exp(99))", "sin(sinh(1e8))",
        "tan(1 + cosh(1e8))", "1 << 99", "9 if 1 else 2", "b'a'", "1j", "x\x00(", "(" * 9000, "1" * 10_001,
    ],
)  # fmt: skip
def test_other_answers_are_not(answer: str) -> None:
    with processor_seconds(2):
        assert not is_harmless(answer)


@given(st.text(max_size=300) | st.text(alphabet="()[]{}:=,.+-*/ \n'\"ab01sin_", max_size=300))
def test_no_answer_makes_it_raise(answer: str) -> None:
    assert is_harmless(answer) in (True, False)


def test_a_verifier_that_evaluates_gets_no_code(tmp_path: Path) -> None:
    def verifier(answer: str, entry: object) -> float:
        return float(eval(answer) == [1])

    entry, file = {"metadata": {"source_dataset": "n_queens"}}, tmp_path / "file"
    assert _score(verifier, entry, "[1]") == 1.0
    assert _score(verifier, entry, f"[open({str(file)!r}, 'w') and 1]") == 0.0
    assert not file.exists()
