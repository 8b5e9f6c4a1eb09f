"""`python -m benchmarks.cpu` runs, times what is right, and refuses what is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import cpu

pytestmark = pytest.mark.usefixtures("cpu_extension")


def test_small_mode_writes_a_result(tmp_path):
    cpu.main(["--small", "--rounds", "1", "--out", str(tmp_path / "r.json")])
    report = json.loads((tmp_path / "r.json").read_text())
    row = report["cases"]["small"]
    assert {"bare-3", "native", "chunked", "eager"} <= row["forward_backward"].keys()
    assert {"bare-1", "native", "chunked"} <= row["scoring"].keys()
    assert row["errors"]["native"]["logp"] <= 1e-4
    assert not {"native", "chunked"} & row["refused"].keys()
    assert {"commit", "date", "torch", "device", "native"} <= report["machine"].keys()


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(cpu, "ours_logps", lambda p, impl: torch.zeros(p.ids.shape))
    row = cpu.measure(cpu.SMALL["small"]._replace(with_peers=False), 1)
    assert row["refused"].keys() == {"native", "chunked"}
    assert row["forward_backward"].keys() == {"bare-3"}
