"""Mathematical answers: numbers exactly, formulas by math-verify, hostile formulas within limits."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from guards import hang_guard
from hypothesis import example, given
from hypothesis import strategies as st
from rewards.seeds import as_chat

from grpo_fused.rewards import math_accuracy, math_accuracy_reward, math_verifier
from grpo_fused.rewards.answer import is_one_number, plain_number, stated_answer, without_power_of_ten

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = 72 altogether.\n#### 72"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("72", 72, id="integer"),
        pytest.param(" -72. ", -72, id="full-stop"),
        pytest.param("1,234,567", 1234567, id="thousands"),
        pytest.param("$1,234.50", Fraction(2469, 2), id="dollars"),
        pytest.param(r"\$5", 5, id="escaped-dollar"),
        pytest.param("-$5", -5, id="minus-dollars"),
        pytest.param("$72$", 72, id="math-mode"),
        pytest.param("50%", 50, id="percent"),
        pytest.param("0\\", None, id="backslash"),
        pytest.param(r"50\%", 50, id="escaped-percent"),
        pytest.param("50%.", 50, id="full-stop-after-percent"),
        pytest.param(r"3/4 \%", Fraction(3, 4), id="percent-apart"),
        pytest.param("3/4", Fraction(3, 4), id="fraction"),
        pytest.param(r"-\dfrac{3}{4}", Fraction(-3, 4), id="latex-fraction"),
        pytest.param(r"\frac{1}{2} \%", Fraction(1, 2), id="percent-after-latex-fraction"),
        pytest.param(".5", Fraction(1, 2), id="bare-decimals"),
        pytest.param("0072.0", 72, id="zeros"),
        pytest.param("1,2", None, id="two-numbers"),
        pytest.param("1,23,456", None, id="wrong-groups"),
        pytest.param("1e999999999", None, id="exponent"),
        pytest.param("1.2.3", None, id="two-points"),
        pytest.param("1/0", None, id="zero-division"),
        pytest.param("--1", None, id="two-signs"),
        pytest.param("٧٢", None, id="arabic-digits"),
        pytest.param("nan", None, id="nan"),
        pytest.param(".", None, id="point"),
        pytest.param("", None, id="empty"),
        pytest.param("9" * 100, int("9" * 100), id="longest"),
        pytest.param("9" * 101, None, id="too-long"),
    ],
)
def test_plain_numbers(text: str, expected: Fraction | int | None) -> None:
    assert plain_number(text) == expected


@given(st.text(alphabet="0123456789.,$%+-/\\frac{} ", max_size=120) | st.text(max_size=120))
def test_no_text_makes_a_number_raise(text: str) -> None:
    number = plain_number(text)
    assert number is None or isinstance(number, Fraction)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("<answer>72</answer>", "72", id="tags"),
        pytest.param(r"so \boxed{72}.", "72", id="box"),
        pytest.param(r"\boxed{71}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}", id="last-box"),
        pytest.param(GSM8K, "72", id="hashes"),
        pytest.param(r"<answer>$\boxed{72}$</answer>", "72", id="box-in-tags"),
        pytest.param(r"\boxed{7} <answer>8</answer>", "8", id="tags-before-box"),
        pytest.param(r"\boxed{7} <answer>8</answer><answer>7</answer>", None, id="two-guesses"),
        pytest.param("72", "72", id="nothing-else"),
        pytest.param("It is 72", None, id="not-marked"),
        pytest.param(r"\boxed{7", None, id="open-box"),
        pytest.param(r"\boxed{7} </answer>", None, id="closed-only"),
        pytest.param("####", None, id="empty-hashes"),
        pytest.param("#### 71\n#### 72", "72", id="last-hashes"),
        pytest.param("#### 72\nThat is all.", "72", id="text-after-hashes"),
        pytest.param("#### $", "$", id="one-dollar-sign"),
    ],
)
def test_stated_answers(text: str, expected: str | None) -> None:
    assert stated_answer(text) == expected


@pytest.mark.parametrize(
    ("completion", "right", "expected"),
    [
        pytest.param("<answer>72</answer>", GSM8K, 1.0, id="gsm8k"),
        pytest.param("... #### 72", GSM8K, 1.0, id="gsm8k-style"),
        pytest.param("<answer>$72.00</answer>", "72", 1.0, id="dollars"),
        pytest.param("<answer>1,000</answer>", 1000, 1.0, id="integer-column"),
        pytest.param("<answer>0.5</answer>", 0.5, 1.0, id="float-column"),
        pytest.param("<answer>0.5</answer>", np.float64(0.5), 1.0, id="numpy-float"),
        pytest.param("<answer>0.00001</answer>", 0.00001, 1.0, id="small-float"),
        pytest.param("<answer>e-5</answer>", 0.00001, 0.0, id="an-exponent-is-no-formula"),
        pytest.param("<answer>1000000000000000000000000</answer>", 1e24, 1.0, id="large-float"),
        pytest.param("<answer>\N{MINUS SIGN}5</answer>", "-5", 1.0, id="minus-sign"),
        pytest.param("<answer>-5</answer>", "\N{MINUS SIGN}5", 1.0, id="minus-sign-column"),
        pytest.param("<answer>0.3333</answer>", "1/3", 0.0, id="rounded"),
        pytest.param("<answer>71</answer>", GSM8K, 0.0, id="wrong"),
        pytest.param("72 altogether", GSM8K, 0.0, id="not-marked"),
        pytest.param("<answer>x + 1</answer>", "x + 1", 1.0, id="same-text"),
        pytest.param("<answer>x + 1</answer>", "$x + 1$", 1.0, id="math-mode-column"),
        pytest.param("<answer>72</answer>", None, None, id="another-task"),
    ],
)
@pytest.mark.parametrize("with_math_verify", [False, None], ids=["plain", "math-verify"])
def test_answers(completion: str, right: str | float | None, expected: float, with_math_verify: bool | None) -> None:
    rewards = math_accuracy_reward([completion, as_chat(completion)], [right] * 2, use_math_verify=with_math_verify)
    assert rewards == [expected] * 2


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        pytest.param(r"\frac{1}{2}", r"$0.5$", 1.0, id="fractions"),
        pytest.param(r"\sqrt{18}", r"3\sqrt{2}", 1.0, id="roots"),
        pytest.param("(x+1)^2", "x^2 + 2x + 1", 1.0, id="polynomials"),
        pytest.param("x = 4", "4", 1.0, id="assignment"),
        pytest.param("4, 5", "4", 0.0, id="two-guesses"),
        pytest.param("x^2", "x^3", 0.0, id="different"),
        pytest.param(r"\text{blue}", "4", 0.0, id="word"),
        pytest.param("(3, 4)", "(3,4)", 1.0, id="point"),
        pytest.param(r"\left(3,4\right)", "(3,4)", 1.0, id="point-left"),
        pytest.param("(4,3)", "(3,4)", 0.0, id="another-point"),
        pytest.param("3, 4", "3,4", 1.0, id="roots-of-an-equation"),
        pytest.param("34", "3,4", 0.0, id="no-thousands"),
        pytest.param("1{,}000", "1000", 1.0, id="thousands"),
        pytest.param(r"10,\!080", "10080", 1.0, id="thousands-of-MATH"),
        pytest.param("- 3", "-3", 1.0, id="sign-apart"),
        pytest.param(r"3\frac{1}{2}.", "3.5", 1.0, id="full-stop"),
        pytest.param(r"3\frac{1}{2}.", "0.5", 0.0, id="a-part-of-a-mixed-number"),
        pytest.param(r"is it \int? \frac{1}{3}", r"\sqrt{1/9}", 0.0, id="a-part-of-a-text"),
        pytest.param("0.0", r"6.6 \times 10^{-34}", 0.0, id="zero-for-a-small-number"),
        pytest.param(r"6.7 \times 10^{-34}", r"6.6 \times 10^{-34}", 0.0, id="another-small-number"),
        pytest.param("0.00000066", "x = 0.0000006626", 0.0, id="two-digits-of-a-small-number"),
        pytest.param(r"0.66 \times 10^{-33}", r"6.6 \times 10^{-34}", 1.0, id="the-same-small-number"),
        pytest.param("0.0", r"x = 3 \times 10^{-7}", 0.0, id="zero-for-a-small-assignment"),
        pytest.param(r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\(2)\end{pmatrix}", 1.0, id="matrix"),
        pytest.param("0.333333", r"\sqrt{1/9}", 1.0, id="six-decimals"),
        pytest.param(r"\frac{1}{2}\%", r"0.5\%", 1.0, id="percent-after-a-fraction"),
        pytest.param(r"33\frac13 \%", r"33\frac{1}{3}\%", 1.0, id="percent-after-a-mixed-number"),
        pytest.param(r"\frac{8}{5}~\text{cm}", "1.6", 1.0, id="unit-after-a-tie"),
        pytest.param(r"25\text{ in.}^2", "25", 1.0, id="square-of-a-unit-with-full-stop"),
        pytest.param(r"25\mathrm{ m }^{2}", "25", 1.0, id="square-of-a-unit-with-spaces"),
    ],
)
def test_formulas(answer: str, right: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert math_accuracy_reward([rf"\boxed{{{answer}}}"], solution=[right]) == [expected]
    assert math_accuracy_reward([f"<answer>{answer}</answer>"], [right]) == [expected]


@pytest.mark.parametrize(
    "answer",
    [
        "12*3+6", "12 \\times 3 + 6", "6\\cdot 7", "(6)(7)", "84/2", "42/1", r"\frac{84}{2}", "41+1", "43-1", "2^5+10",
        r"\sqrt{1764}", "|42|", "42=42", r"42\times 10^0", "84.0/2", "x=41+1", "41 + 1 cm", r"\text{41+1}", "(41+1)",
        r"21\text{ times 2}", "42 - 0", "42 0/1", "--42", "7!/120", "4,2", "(4,2)", "42,", "42{,}0",
        r"3\frac{1}{2}^2", r"3\text{}^2", r"3\text{ }^2", r"4.2 \times 10^1 + 0", r"4.2 \times 10^2/10", r"2 \cdot 21",
        r"8.4/2 \times 10^1", r"\frac{84}{20}\times 10^{1}", r"0.42\times 10^{2}", r"4.2 \times 10^{0+1}", r"4.2\times 10^1^1",
        r"3 \times 10^2/7", r"1/3 \times 10^2", r"3\frac{1}{2}3 \times 10^1", r"3 \times 10^12", r"2,1 \times 10^1",
        r"\frac{1 \times 10^3}{4}", r"\frac{1}{4 \times 10^1}", r"3 \times 10^1\frac{1}{2}", r"4 \times 10^1.5",
        r"4 \times 10^2{,}000",
    ],
)  # fmt: skip
def test_an_expression_is_not_its_value(answer: str) -> None:
    """`What is 12*3+6?` is not answered by `12*3+6`."""
    for right in ("42", 42, r"42 \text{ cm}"):
        assert math_accuracy_reward([rf"<answer>{answer}</answer>", rf"\boxed{{{answer}}}"], [right] * 2) == [0.0] * 2
    assert not is_one_number(without_power_of_ten(answer))
    assert math_accuracy_reward([f"<answer>{answer}</answer>"], [answer]) == [1.0]  # the same text


@pytest.mark.parametrize(
    "answer",
    [
        "42", "+42", "42.", "42.0", "$42$", r"\$42", "(42)", "{42}", r"\text{42}", "x = 42", "42 cm", r"42\text{ cm}",
        r"42\,\mathrm{m}", r"42 \text{ m}^2", r"42^\circ", r"42^{\circ}", r"42\%", "42 apples",
    ],
)  # fmt: skip
def test_a_number_may_have_a_name_and_a_unit(answer: str) -> None:
    pytest.importorskip("math_verify")
    assert is_one_number(answer)
    assert math_accuracy_reward([f"<answer>{answer}</answer>"], ["42"]) == [1.0]
    assert math_accuracy_reward([f"<answer>{answer}</answer>"], ["43"]) == [0.0]


@pytest.mark.parametrize(
    ("answer", "right"), [(r"\frac{1 \times 10^3}{4}", "250"), (r"3 \times 10^1\frac{1}{2}", "15")]
)
def test_an_expression_with_scientific_notation_is_not_its_value(answer: str, right: str) -> None:
    pytest.importorskip("math_verify")
    answers = [rf"\boxed{{{answer}}}"]
    assert math_accuracy_reward(answers, [right]) == [0.0]
    assert math_accuracy_reward(answers, [right], accept_expressions=True) == [1.0]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (r"4.5 \times 10^{3}", "4500"), (r"x = -1.2\cdot10^{-4}\text{ m}", "-0.00012"), (r"3\times 10^8", "300,000,000"),
        (r"4.54 \times 10^{-5}", 4.54e-5),
    ],
)  # fmt: skip
def test_scientific_notation_is_a_number(answer: str, right: str | float) -> None:
    pytest.importorskip("math_verify")
    assert math_accuracy_reward([rf"\boxed{{{answer}}}"], [right]) == [1.0]
    assert math_accuracy_reward([rf"\boxed{{{answer}}}"], [7 * float(str(right).replace(",", ""))]) == [0.0]


@pytest.mark.parametrize(
    "answer", ["3/4", r"\frac34", r"-\dfrac{3}{4}", r"\frac{-3}{4}", r"3\frac{1}{2}", r"0.\overline{3}", "42 km/h"]
)
def test_fractions_in_lowest_terms_and_rates_are_numbers(answer: str) -> None:
    assert is_one_number(answer)


def test_a_fraction_of_thousands_of_digits_is_no_number() -> None:
    """Python refuses to read them."""
    assert not is_one_number("1/" + "2" * 5000)
    assert math_accuracy_reward([f"<answer>1/{'2' * 5000}</answer>"], ["42"]) == [0.0]


@given(st.text(alphabet="0123456789.,$%+-\\ ", max_size=120) | st.text(max_size=120))
@example("0$.")
def test_plain_numbers_are_numbers(text: str) -> None:
    if "/" not in text and "frac" not in text and plain_number(text) is not None:
        assert is_one_number(text)


@pytest.mark.parametrize(
    ("answer", "right"), [(r"\sqrt{16}", "4"), ("12*3+6", "42"), ("84/2", "42"), (r"\frac{2}{4}", r"\frac{1}{2}")]
)
def test_expressions_where_they_are_accepted(answer: str, right: str) -> None:
    pytest.importorskip("math_verify")
    assert math_accuracy_reward([rf"\boxed{{{answer}}}"], [right]) == [0.0]
    assert math_accuracy_reward([rf"\boxed{{{answer}}}"], [right], accept_expressions=True) == [1.0]
    with pytest.raises(TypeError, match="accept_expressions must be True or False; got 1"):
        math_accuracy_reward(["4"], ["4"], accept_expressions=1)  # type: ignore[arg-type]


def test_formulas_outside_the_main_thread_and_with_another_alarm() -> None:
    """math-verify by itself would refuse the thread, and cancel the alarm."""
    pytest.importorskip("math_verify")
    results: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: results.append(math_accuracy_reward([r"\boxed{x^2}"], ["xx"])))
    thread.start()
    thread.join()
    assert results == [[1.0]]
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 500.0)
        assert math_accuracy_reward([r"\boxed{y^2}"], ["yy"]) == [1.0]
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


HOSTILE = {
    "9^{9^{9}}": "recognised",
    "9**9**9": "recognised",
    "1+" * 10_000 + "1": "too long",
    "((9!)!)!": "slow in Python",
    r"9^{1\cdot 9^{9}}": "slow in Python",
    r"\sqrt{" * 40 + "2" + "}" * 40: "slow in Python",
}


@pytest.mark.full
def test_hostile_formulas_end_and_take_little_memory() -> None:
    """In a process with little more address space than torch maps; each formula gets half a second.

    Recognised hostile formulas, and too long ones, are not sent to the worker.
    """
    pytest.importorskip("math_verify")
    program = f"""
        from grpo_fused.rewards import math_accuracy_reward, math_verifier
        asked, ask = [], math_verifier._ask
        math_verifier._ask = lambda *question: asked.append(question) or ask(*question)
        def judge(formula, right):
            return math_accuracy_reward([r"\\boxed{{" + formula + "}}"], [right], accept_expressions=True, seconds=0.5)
        assert judge("2^3", "8") == [1.0]
        for formula, how in {HOSTILE!r}.items():
            asked.clear()
            assert judge(formula, "4") == [0.0], formula
            assert len(asked) == (how == "slow in Python"), formula
        assert judge("2^3", "8") == [1.0]
    """
    limit = 6 << 30
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_module_of_the_working_folder_is_not_imported(tmp_path: Path) -> None:
    """It could belong to a model from a stranger."""
    pytest.importorskip("math_verify")
    (tmp_path / "sympy.py").write_text("raise ImportError")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text("from grpo_fused.rewards import math_verifier\nassert math_verifier.equal('xx', 'x^2', 2.0)")
    here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=here, timeout=180, check=True)


def test_ctrl_c_does_not_end_the_worker() -> None:
    """A terminal sends it to the whole group of processes; the trainer finishes its step, which asks."""
    pytest.importorskip("math_verify")
    assert os.getpgid(math_verifier._worker().process.pid) != os.getpgid(0)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_worker_that_does_not_answer_is_replaced(how: str) -> None:
    """Its question counts as not equal, within the limit; the next question gets a new process."""
    pytest.importorskip("math_verify")
    assert math_accuracy_reward([r"\boxed{x^3}"], ["xxx"]) == [1.0]
    worker = math_verifier._worker()
    if how == "stopped":
        worker.process.send_signal(signal.SIGSTOP)
    else:
        worker.process.kill()
    with hang_guard():
        assert math_verifier._ask("4", f"{how}^2", 0.1) is False
    assert math_accuracy_reward([r"\boxed{z^2 + 0}"], ["zz"]) == [1.0]
    assert math_verifier._worker() is not worker


def test_the_limit_of_a_worker_is_of_processor_time() -> None:
    """A wait does not count, so what other programs do makes no right answer wrong."""
    program = """
        import time
        from grpo_fused.rewards.math_worker import limit_time
        limit_time(0.2)
        time.sleep(0.5)
        print("waited", flush=True)
        while True:
            pass
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.stdout == "waited\n"
    assert done.returncode == -signal.SIGPROF


def test_a_worker_may_wait_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    assert math_accuracy_reward([r"\boxed{x^3}"], ["xxx"]) == [1.0]
    monkeypatch.setattr(math_verifier, "_GRACE_SECONDS", 0.0)
    worker = math_verifier._worker().process
    worker.send_signal(signal.SIGSTOP)
    threading.Timer(1.5, worker.send_signal, [signal.SIGCONT]).start()
    with hang_guard():
        assert math_accuracy_reward([r"\boxed{(x+3)^2}"], ["x^2+6x+9"], seconds=1.0) == [1.0]


def test_a_call_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time is used up, the rest is not judged; numbers still are."""
    monkeypatch.setattr(math_accuracy.math_verifier, "equal", lambda *_: time.sleep(0.3) or False)
    completions = [r"\boxed{x}", r"\boxed{y}", r"\boxed{4}"]
    options = {"accept_expressions": True, "use_math_verify": True, "total_seconds": 0.2}
    rewards = math_accuracy_reward(completions, ["4"] * 3, **options)  # type: ignore[arg-type]
    assert rewards == [0.0, None, 1.0]


def test_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_accuracy, "_installed", lambda: False)
    assert math_accuracy_reward(["<answer>72</answer>", r"\boxed{6 \cdot 12}"], ["72", "72"]) == [1.0, 0.0]
    with pytest.warns(UserWarning, match="compared as text: math-verify is not installed"):
        assert math_accuracy_reward([r"\boxed{1+x}"], ["x+1"]) == [0.0]
    for option in ("use_math_verify", "accept_expressions"):
        with pytest.raises(ImportError, match=f"{option}=True needs .* pip install math-verify"):
            math_accuracy_reward(["72"], ["72"], **{option: True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accept_expressions=True needs math-verify; got use_math_verify=False"):
        math_accuracy_reward(["72"], ["72"], accept_expressions=True, use_math_verify=False)


def test_the_column_answer_comes_first() -> None:
    assert math_accuracy_reward(["<answer>72</answer>"], answer=["72"], solution=["73"]) == [1.0]


def test_wrong_calls_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"a column \"answer\" or \"solution\"; the data set has \['result'\]"):
        math_accuracy_reward(["72"], result=["72"])
    with pytest.raises(ValueError, match="one of 'solution' for each of 1 completions; got 2"):
        math_accuracy_reward(["72"], solution=["72", "73"])
    with pytest.raises(TypeError, match="answer column must hold str, int, float or None; got list"):
        math_accuracy_reward(["72"], [["72"]])  # type: ignore[list-item]
    for number in (math.nan, -math.inf):
        with pytest.raises(ValueError, match=f"answer column must hold finite numbers, or None .*; got {number}"):
            math_accuracy_reward([f"<answer>{number}</answer>"], [number])
    for name in ("seconds", "total_seconds"):
        with pytest.raises(ValueError, match=f"^{name} must be > 0; got 0"):
            math_accuracy_reward(["72"], ["72"], **{name: 0})
