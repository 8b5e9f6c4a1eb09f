"""Graphs of small batches and counters of a launch, on test doubles of CUDA and of ncu."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import graphs, results, rows
from benchmarks.results import Run, load, record
from benchmarks.study import main

CSV = """==PROF== Connected to process 7 (/usr/bin/python3.12)
"ID","Process ID","Kernel Name","CC","gpu__time_duration.sum","launch__registers_per_thread","sm__pipe_x.avg","other"
"","","","","ms","register/thread","%",""
"0","7","head_fwd_kernel","9.0","3.21","255","","1"
==PROF== Disconnected
"""


@pytest.fixture
def device():
    pytest.importorskip("triton")
    from cuda_double import cuda_double

    with cuda_double() as double:
        yield double


def test_eager_and_graph(device, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(graphs, "ENGINES", ("chunked",))
    main("graphs", ["--small", "--rounds", "2", "--out", str(tmp_path / "r.json")])
    (case,) = load(tmp_path / "r.json").sections["graphs"]["cases"]
    assert case["shape"]["N"] == 8
    assert case["ways"].keys() == {"chunked, eager", "chunked, not compacted", "chunked, graph"}
    for row in case["ways"].values():
        assert row["errors"].keys() == {"loss", "dhidden", "dweight"}
        assert row["host_ms"] > 0
        assert row["ms"]["p20"] <= row["ms"]["median"] <= row["ms"]["p80"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("| bf16, N = 8, H = 64, V = 300 | bare products | ")
    assert [line.split(" | ")[1] for line in printed[3:6]] == list(case["ways"])


def test_a_graph_is_replayed_on_new_advantages(device, monkeypatch):
    """One that gives the results of its capture again is wrong, and not timed; the others are."""
    monkeypatch.setattr(graphs, "ENGINES", ("chunked",))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
    ways = graphs.measure(graphs.SMALL[0], "cuda", 1)["ways"]
    assert "is off by" in ways["chunked, graph"]["not_timed"]
    assert "ms" not in ways["chunked, graph"]
    assert "ms" in ways["chunked, not compacted"]
    case = graphs.measure(graphs.SMALL[0], "cuda", 1) | {"shape": graphs.SMALL[0].describe()}
    assert f"|  | chunked, graph | not timed: {ways['chunked, graph']['not_timed'][:12]}" in graphs.table(
        {"cases": [case]}, Run(Path(), results.machine("cuda"), {})
    )


def test_only_a_compacted_call_waits_for_the_device(device):
    problem = graphs.SMALL[0].problem("cuda")
    for way, compact in graphs.WAYS.items():
        step = graphs.step_of(problem, "chunked", compact)
        device.waits.clear()
        step()
        assert bool(device.waits) == (way == "eager"), way


def test_a_wrong_gradient_of_a_row_kernel_is_found(device):
    """Of the launch that also evaluates the objective, too."""
    from grpo_fused.kernels.launch import TritonRows

    class Wrong(TritonRows):
        def loss(self, *args, **options):
            found = super().loss(*args, **options)
            problem.out.mul_(1.1)
            return found

    problem = rows.Problem(300, 2**14, "cuda")
    assert problem.error(TritonRows()) < 1e-4 < problem.error(Wrong())


def test_the_time_of_the_host_is_the_median_of_an_even_number_of_calls(device, monkeypatch):
    seconds = iter([0.0, 1.0, 0.0, 3.0])
    monkeypatch.setattr(graphs, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert graphs.host_ms(lambda: None, rounds=2) == 2000.0


def test_what_cannot_be_captured_is_named(device, monkeypatch):
    """With compaction a call waits for the device."""
    monkeypatch.setattr(graphs, "ENGINES", ("chunked",))
    monkeypatch.setattr(graphs, "WAYS", {"eager": True, "graph": True})
    ways = graphs.measure(graphs.SMALL[0], "cuda", 1)["ways"]
    assert "synchronizing" in ways["chunked, graph"]["not_timed"]
    assert "ms" in ways["chunked, eager"]


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A program of that name, which prints `text` and notes its arguments."""

    def install(text, status=0):
        (tmp_path / "text").write_text(text)
        program = tmp_path / "ncu"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/text\nexit {status}\n')
        program.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda name: str(program))

    return install


def test_counters_of_one_launch(ncu, tmp_path, capsys, device):
    ncu(CSV, status=9)  # it ends the program after the launch
    main("counters", ["--out", str(tmp_path / "r.json")])
    section = load(tmp_path / "r.json").sections["counters"]
    assert section["kernel"] == "head_fwd_kernel"
    assert section["metrics"] == {
        "gpu__time_duration.sum": ["3.21", "ms"],
        "launch__registers_per_thread": ["255", "register/thread"],
    }
    assert "head_fwd_kernel: time 3.21 ms, registers 255 register/thread" in capsys.readouterr().out
    words = (tmp_path / "arguments").read_text()
    for part in ("--kernel-name regex:head_fwd --launch-count 1", "--section SpeedOfLight", "--clock-control none",
                 "-m benchmarks.tune --no-candidates --rounds 1"):  # fmt: skip
        assert part in words


def test_ncu_that_may_not_count(ncu, tmp_path):
    ncu("==ERROR== ERR_NVGPUCTRPERM - the user does not have permission", status=1)
    with pytest.raises(SystemExit, match=r"ncu gave no counters \(status 1\).*ERR_NVGPUCTRPERM"):
        main("counters", ["--out", str(tmp_path / "r.json")])
    assert not (tmp_path / "r.json").exists()


def test_no_ncu(monkeypatch, tmp_path, capsys, device):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    out = tmp_path / "r.json"
    record("tune", {}, out=out, device="cuda")
    main("counters", ["--out", str(out)])
    main("counters", ["--out", str(tmp_path / "new.json")])
    assert capsys.readouterr().out == 2 * "no counters: ncu is not installed\n"
    assert load(out).sections.keys() == {"tune"}
    assert not (tmp_path / "new.json").exists()
