"""`python -m grpo_fused doctor` names what is missing, why, and what it would bring."""

from __future__ import annotations

import subprocess
import sys

import torch

from grpo_fused import doctor, engines


def test_report_is_what_choose_does():
    done = subprocess.run([sys.executable, "-m", "grpo_fused", "doctor"], capture_output=True, text=True, check=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        assert f"{name:9} {engines.choose('auto', device, dtype)}" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("grpo_fused._native._cpu_reason", "the processor has no AVX-512")
    found = {finding.name: finding for finding in doctor.findings()}
    assert found["engine native"].missing == "the processor has no AVX-512"
    assert found["engine native"].brings
    assert "engine native: no: the processor has no AVX-512" in doctor.report()
    assert engines.choose("auto", torch.device("cpu"), torch.float32) == "chunked"
