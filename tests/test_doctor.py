"""`python -m grpo_fused doctor` reports what runs, what is missing and why, and predicts a call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig

import pytest
import torch

from grpo_fused import __main__, engines
from grpo_fused.engines import cpu_library, libraries
from grpo_fused.engines.base import Cost
from grpo_fused.engines.chunked import ChunkedEngine
from grpo_fused.tools import doctor, predictions
from grpo_fused.tools.predictions import Shape

SHAPE = Shape(1024, 896, 151936, torch.bfloat16)
CPU = torch.device("cpu")


def test_report_agrees_with_choose():
    command = [sys.executable, "-m", "grpo_fused", "doctor", "--tokens", "40", "--hidden", "32", "--vocab", "500"]
    text = subprocess.run([*command, "--dtype", "float32"], capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("impl='auto' on the CPU"))
    for dtype in doctor.DTYPES:
        name = engines.choose("auto", CPU, dtype, 64)
        (mine,) = (part for part in line.removeprefix("impl='auto' on the CPU takes ").split("; ")
                   if part.startswith(name))  # fmt: skip
        assert str(dtype).removeprefix("torch.") in mine
    assert f"torch         {torch.__version__}" in text
    assert "40 tokens, H = 32, V = 500, float32" in text
    assert "500 of 500 rows of the head, measured now" in text
    if libraries.cpu_available() is None:
        assert f"engine native       runs on {cpu_library.instruction_set()}\n" in text
    assert max(map(len, text.splitlines())) <= 140


def test_the_compiler_is_the_one_of_a_build(monkeypatch):
    monkeypatch.setenv("CXX", "/a/c++ -m64")
    assert dict(doctor.versions())["C++ compiler"] == "/a/c++: not found"
    for nothing in ("", " "):
        monkeypatch.setenv("CXX", nothing)
        assert doctor.cpp_compiler() == (sysconfig.get_config_var("CXX") or "g++").split()[0]


@pytest.mark.parametrize(("machine", "listed"), [("x86_64", True), ("aarch64", False)])
def test_flags_of_x86_are_listed_there_only(monkeypatch, machine, listed):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(doctor.Path, "exists", lambda path: True)
    monkeypatch.setattr(doctor.Path, "read_text", lambda path: "model name : a CPU\nflags : fpu avx2")
    assert ("avx2, no avx512f" in doctor.devices()[0][1]) == listed


def test_nothing_warns_of_a_missing_gpu():
    """torch's CUDA builds do, where `torch.utils.cpp_extension` is imported on a machine without one."""
    code = "import sys; from grpo_fused.tools import doctor; print('torch.utils.cpp_extension' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_help_lists_the_commands_and_each_has_help(capsys):
    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            __main__.main(list(arguments))
        return capsys.readouterr().out

    assert all(f"  {command} " in said("--help") for command in __main__.COMMANDS)
    assert "--vocab" in said("doctor", "--help")
    assert "--quick" in said("check", "--help")


def test_a_reader_that_stops_gets_one_line(monkeypatch):
    """`| head`: no traceback, and nothing more at exit."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit, match="grpo-fused doctor: .*Broken pipe"):
            __main__.main(["doctor", "--no-measure"])
        print("the rest", flush=True)


def test_a_closed_output_is_no_error(monkeypatch):
    """`>&-`: Python has no stdout then."""
    monkeypatch.setattr(sys, "stdout", None)
    __main__.main(["doctor", "--no-measure"])


@pytest.mark.parametrize(("command", "extra"), [("train", "train"), ("trl", "peers")])
def test_a_missing_package_is_named_with_its_extra(command, extra, monkeypatch):
    monkeypatch.setitem(__main__.COMMANDS, command, ("no_such_module", ""))
    with pytest.raises(SystemExit, match=rf"grpo-fused {command} needs .*pip install -e '\.\[{extra}\]'"):
        __main__.main([command])


@pytest.mark.parametrize("argument", ["--tokens", "--hidden", "--vocab"])
@pytest.mark.parametrize("size", ["0", "2147483648"])
def test_impossible_shapes_are_refused(argument, size, capsys):
    with pytest.raises(SystemExit):
        doctor.main([argument, size, "--no-measure"])
    assert f"{argument} must be from 1 to 2^31 - 1; got {size}" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("grpo_fused.engines.libraries._cpu_reason", "the processor has no AVX-512")
    assert doctor.findings()["engine native"] == "the processor has no AVX-512"
    assert doctor.findings().keys() == doctor.BRINGS.keys()
    text = doctor.report(SHAPE, measure=False)
    assert "engine native       no: the processor has no AVX-512" in text
    assert f"engine native       {doctor.BRINGS['engine native']}" in text
    assert engines.choose("auto", CPU, torch.float32, 64) == "chunked"


def test_times_are_those_of_a_part_times_what_the_call_has_more_of(monkeypatch):
    """Five times the rows; and four products in place of three."""
    clock = iter(range(10**6))
    monkeypatch.setattr(predictions, "perf_counter", lambda: float(next(clock)))
    shape = Shape(40, 32, 5 * predictions.LEAST_ROWS, torch.float32)
    monkeypatch.setattr(predictions, "FLOP", 0.0)
    assert shape.part == shape._replace(vocab=predictions.LEAST_ROWS)
    monkeypatch.setattr(
        ChunkedEngine, "cost", lambda self, head, *_: Cost(4.0 if head.vocab_size > 9999 else 3.0, 0, 0)
    )
    assert predictions.seconds(shape, CPU, "chunked") == pytest.approx((5 * 4 / 3, 5.0))


def test_every_engine_that_runs_is_timed(monkeypatch):
    asked = []
    monkeypatch.setattr(predictions, "seconds", lambda shape, device, name: (asked.append(name), (1.25, 0.5))[1])
    text = doctor.report(SHAPE)
    costs = predictions.costs(SHAPE, CPU)
    assert asked == list(costs)
    assert "triton" not in asked, "interpreted for these tests"
    auto = engines.choose("auto", CPU, torch.bfloat16, 64)
    for name, cost in costs.items():
        assert cost == engines.engine(name).cost(SHAPE.head(CPU), 1024, None)
        assert re.search(rf"{name}{r' [*]' if name == auto else ''} .* MiB.* 1.2 s +0.5 s", text)
    assert f"{SHAPE.part.vocab} of 151936 rows of the head, measured now" in text
    monkeypatch.setattr(predictions, "seconds", None)
    assert "measured now" not in doctor.report(SHAPE, measure=False)


def test_memory_is_in_mib(monkeypatch):
    cost = Cost(products=3.0, scratch_bytes=3 * 2**20, accumulator_bytes=5 * 2**20)
    monkeypatch.setattr(predictions, "costs", lambda *_: {"chunked": cost})
    assert " 3 MiB + 5 MiB to sum dW in fp32" in doctor.report(SHAPE, measure=False)


def test_a_part_is_of_a_second_at_most():
    """At 100 GFLOP/s; and never less than 2048 rows, or more than there are."""
    assert SHAPE.part.vocab == 18165
    assert Shape(8192, 4096, 151936, torch.bfloat16).part.vocab == 2048
    assert Shape(1, 1, 300, torch.float32).part.vocab == 300


@pytest.mark.parametrize("dtype", doctor.DTYPES, ids=str)
def test_times_of_every_dtype(dtype):
    for name in predictions.costs(Shape(70, 16, 300, dtype), CPU):
        training, scoring = predictions.seconds(Shape(70, 16, 300, dtype), CPU, name)
        assert 0 < training < 60
        assert 0 < scoring < 60
