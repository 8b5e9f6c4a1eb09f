"""`python -m grpo_fused doctor` says what runs, what is missing and why, and what to expect of a call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from grpo_fused import __main__, doctor, engines, predictions
from grpo_fused.predictions import MEASURED, Shape

SHAPE = Shape(1024, 896, 151936, torch.bfloat16)
CPU = torch.device("cpu")


def test_report_is_what_choose_does():
    command = [sys.executable, "-m", "grpo_fused", "doctor", "--tokens", "40", "--hidden", "32", "--vocab", "500"]
    text = subprocess.run([*command, "--dtype", "float32"], capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("impl='auto' on the CPU"))
    for dtype in doctor.DTYPES:
        name = engines.choose("auto", CPU, dtype)
        (mine,) = (part for part in line.removeprefix("impl='auto' on the CPU takes ").split("; ")
                   if part.startswith(name))  # fmt: skip
        assert str(dtype).removeprefix("torch.") in mine
    assert f"torch         {torch.__version__}" in text
    assert "40 tokens, H = 32, V = 500, float32" in text
    assert "FLOP/s, measured now" in text
    assert max(map(len, text.splitlines())) <= 140


def test_help_names_the_commands_and_each_has_its_own(capsys):
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
    monkeypatch.setattr("grpo_fused._native._cpu_reason", "the processor has no AVX-512")
    found = {finding.name: finding for finding in doctor.findings()}
    assert found["engine native"].missing == "the processor has no AVX-512"
    text = doctor.report(SHAPE, measure=False)
    assert "engine native       no: the processor has no AVX-512" in text
    assert f"engine native       {found['engine native'].brings}" in text
    assert engines.choose("auto", CPU, torch.float32) == "chunked"


def test_predictions_are_products_times_ratios():
    found = {p.engine: p for p in predictions.predict(SHAPE, CPU, rate=1e12)}
    flop = 2 * 1024 * 896 * 151936
    for name, p in found.items():
        if name == "triton":  # interpreted here
            continue
        assert p.is_auto == (name == engines.choose("auto", CPU, torch.bfloat16))
        assert p.source.endswith(".json, bf16-1024-896-151936")
        assert p.training_ratio is not None
        assert p.training == pytest.approx([ratio * 3 * flop / 1e12 for ratio in p.training_ratio])
        assert p.scoring == pytest.approx([ratio * flop / 1e12 for ratio in p.scoring_ratio])
        assert p.cost == engines.engine(name).cost(SHAPE.head(CPU), 1024, None)


def test_without_a_checkout_the_table_stands_in(monkeypatch):
    """And it is not far from what the newest runs say (which may have been taken on a busier machine)."""
    for (engine, dtype), ratios in MEASURED.items():
        measured, _ = predictions.ratios_of(engine, SHAPE._replace(dtype=dtype), CPU)
        pairs = zip((*ratios.training, *ratios.scoring), (*measured.training, *measured.scoring), strict=True)
        for mine, newest in pairs:
            assert 1 / 2 < mine / newest < 2, (engine, dtype)
    monkeypatch.setattr(predictions, "_measurements", lambda: [])
    for (engine, dtype), ratios in MEASURED.items():
        assert predictions.ratios_of(engine, SHAPE._replace(dtype=dtype), CPU) == (ratios, predictions.FROM_TABLE)
    assert predictions.ratios_of("native", SHAPE._replace(dtype=torch.float16), CPU)[0] is None
    assert predictions.ratios_of("chunked", SHAPE, torch.device("cuda"))[0] is None
    assert "not predicted" in doctor.report(SHAPE._replace(dtype=torch.float16), measure=False)


def test_the_rate_is_that_of_products():
    """Of a tenth of a second or so, whatever the shape."""
    assert 1e8 < predictions.bare_rate(Shape(10**6, 64, 10**6, torch.float32), CPU) < 1e14
    assert predictions.bare_rate(Shape(1, 1, 1, torch.float32), CPU) > 0


def test_result_files_of_both_schemas_are_read():
    summary = {"median": 1.0, "p20": 0.9, "p80": 1.2}
    case = {
        "shape": {"N": 8192, "B": 16, "T": 512, "H": 4096, "V": 151936, "dtype": "bf16", "pattern": "dense"},
        "providers": {
            "triton": {"forward_backward": {"ms": summary, "times_bare": summary},
                       "scoring": {"ms": summary, "times_bare": summary}},
            "chunked": {"errors": {}, "not_timed": "dW is off by 1"},
        },
    }  # fmt: skip
    half = {**case, "shape": {**case["shape"], "pattern": "half-inactive"}}
    machine = {"device": "cuda", "date": "2027-01-01"}
    report = {"schema": 2, "machine": machine, "sections": {"loss": {"cases": {"dense": case, "half": half}}}}
    (found,) = predictions._schema_2(report, "h200/run.json")
    assert found.engine == "triton"
    assert (found.device, found.dtype, found.sizes) == ("cuda", torch.bfloat16, (8192, 4096, 151936))
    assert found.ratios == ((0.9, 1.2), (0.9, 1.2))
    assert found.source == "h200/run.json, dense"
    assert list(predictions._schema_2({"machine": machine, "sections": {}}, "x/y.json")) == []
    assert predictions._measurements(), "there are runs in this checkout"
