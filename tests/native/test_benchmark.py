"""`python -m benchmarks.cpu` writes the file of a run, with the native engine in it."""

from __future__ import annotations

import pytest

from benchmarks import cpu
from benchmarks.results import load
from benchmarks.study import main

pytestmark = pytest.mark.usefixtures("cpu_extension")


@pytest.mark.full
def test_small_mode_writes_a_result(tmp_path, monkeypatch):
    plan = cpu.SMALL[0]._replace(peers=("eager", "trl"))
    monkeypatch.setattr(cpu, "SMALL", [plan])
    monkeypatch.setattr("benchmarks.memory.in_child", lambda function, *arguments, timeout_s: {"resident": 1.0})
    out = tmp_path / "r.json"
    main("cpu", ["--small", "--rounds", "2", "--out", str(out)])
    run = load(out)
    section = run.sections["loss"]
    assert section["command"] == "python -m benchmarks.cpu --small --rounds 2"
    assert section["providers"]["triton"]["unavailable"] == "runs on cuda only"
    case = section["cases"][plan.case.name]
    assert case["bare"].keys() == {"bare-3", "bare-1"}
    assert {"native", "chunked", "eager"} <= case["providers"].keys()
    for row in case["providers"].values():
        assert row["forward_backward"]["ms"]["median"] > 0
        assert row["scoring"]["times_bare"]["median"] > 0
        assert row["memory_mib"] == {"resident": 1.0}
    assert case["providers"]["native"]["errors"]["logp"] <= 1e-4
    assert case["shape"]["N"] == plan.case.N
    assert case["shares"] == {"active": 1.0, "gradient": 1.0}


def test_nothing_is_started_after_the_time_limit(tmp_path):
    out = tmp_path / "r.json"
    main("cpu", ["--small", "--seconds", "0", "--out", str(out)])
    section = load(out).sections["loss"]
    assert section["left_out"] == [cpu.SMALL[0].case.name]
    assert section["cases"] == {}
