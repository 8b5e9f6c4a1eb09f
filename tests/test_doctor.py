"""`python -m grpo_fused doctor` reports what runs, what is missing and why, and predicts a call."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_fused import __main__, engines
from grpo_fused.engines import libraries
from grpo_fused.tools import doctor, predictions
from grpo_fused.tools.predictions import MEASURED, MEASURED_IN, Ratios, Shape

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
    assert "FLOP/s, measured now" in text
    if libraries.cpu_available() is None:
        assert f"engine native       runs on {libraries.instruction_set()}\n" in text
    assert max(map(len, text.splitlines())) <= 140


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


@pytest.mark.parametrize("argument", ["--tokens", "--hidden", "--vocab"])
def test_impossible_shapes_are_refused(argument, capsys):
    with pytest.raises(SystemExit):
        doctor.main([argument, "0"])
    assert f"{argument} must be at least 1; got 0" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("grpo_fused.engines.libraries._cpu_reason", "the processor has no AVX-512")
    assert doctor.findings()["engine native"] == "the processor has no AVX-512"
    assert doctor.findings().keys() == doctor.BRINGS.keys()
    text = doctor.report(SHAPE, measure=False)
    assert "engine native       no: the processor has no AVX-512" in text
    assert f"engine native       {doctor.BRINGS['engine native']}" in text
    assert engines.choose("auto", CPU, torch.float32, 64) == "chunked"


def test_predictions_are_products_times_ratios(monkeypatch):
    monkeypatch.setattr(predictions, "has_products_in", lambda dtype, device: True)
    for p in predictions.predict(SHAPE, CPU):
        assert p.is_auto == (p.engine == engines.choose("auto", CPU, torch.bfloat16, 64))
        assert p.ratios == MEASURED.get((p.engine, torch.bfloat16))
        assert p.cost == engines.engine(p.engine).cost(SHAPE.head(CPU), 1024, None)
    monkeypatch.setattr(predictions, "bare_rate", lambda shape, device: SHAPE.flop / 2.0)  # two seconds a product
    (low, high), (fast, slow) = MEASURED["chunked", torch.bfloat16]
    times = re.escape(f"{6 * low:.2g} to {6 * high:.2g} s ({low:.2f}-{high:.2f} x 3 bare)")
    assert re.search(rf"chunked .*{times} +{re.escape(f'{2 * fast:.2g} to {2 * slow:.2g} s')}", doctor.report(SHAPE))


def test_nothing_is_predicted_where_bare_products_are_a_slow_fallback(monkeypatch):
    monkeypatch.setattr(predictions, "has_products_in", lambda dtype, device: dtype != torch.bfloat16)
    assert all(p.ratios is None for p in predictions.predict(SHAPE, CPU))
    shape = SHAPE._replace(dtype=torch.float32)
    assert all(p.ratios == MEASURED.get((p.engine, torch.float32)) for p in predictions.predict(shape, CPU))


def test_the_table_equals_the_committed_runs():
    reports = [json.loads((Path(__file__).parents[1] / path).read_text()) for path in MEASURED_IN]
    cases = [c for report in reports for c in report["sections"]["loss"]["cases"].values()]
    cases = [c for c in cases if c["shape"]["pattern"] == "dense"]
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    for (engine, dtype), ratios in MEASURED.items():
        rows = [c["providers"][engine] for c in cases if c["shape"]["dtype"] == names[dtype]]
        assert len(rows) == 4 * len(MEASURED_IN)
        measured = [
            (min(row[what]["times_bare"]["p20"] for row in rows), max(row[what]["times_bare"]["p80"] for row in rows))
            for what in ("forward_backward", "scoring")
        ]
        assert Ratios(*(tuple(round(bound, 2) for bound in pair) for pair in measured)) == ratios, (engine, dtype)


def test_no_prediction_without_a_measurement():
    (chunked,) = (p for p in predictions.predict(SHAPE._replace(dtype=torch.float16), CPU) if p.engine == "chunked")
    assert chunked.ratios is None
    assert "not predicted" in doctor.report(SHAPE._replace(dtype=torch.float16), measure=False)


def test_the_rate_is_that_of_products():
    """Of about a tenth of a second, for any shape."""
    assert 1e8 < predictions.bare_rate(Shape(10**6, 64, 10**6, torch.float32), CPU) < 1e14
    assert predictions.bare_rate(Shape(1, 1, 1, torch.float32), CPU) > 0
