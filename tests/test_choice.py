"""Which engine `impl="auto"` takes on a GPU: by a model, and by a measurement as soon as there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from cuda_double import cuda_double
from helpers import make_case

from benchmarks import choice as writer
from benchmarks.problem import Case
from benchmarks.results import SCHEMA, Run
from grpo_fused import GRPOLossConfig, engines
from grpo_fused.engines import choice

CUDA = torch.device("cuda")


def auto(dtype: torch.dtype, width: int) -> str:
    return engines.choose("auto", CUDA, dtype, width)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Writes the file that the package reads."""
    path = tmp_path / "measured.json"
    monkeypatch.setattr(choice, "MEASURED_FILE", path)
    choice._measured.cache_clear()
    yield path
    choice._measured.cache_clear()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)])
def test_nvidia_takes_chunked_until_it_is_measured(capability, measured):
    with cuda_double(capability):
        assert {auto(dtype, width) for dtype in (torch.bfloat16, torch.float32) for width in (64, 896, 4096)} == {
            "chunked"
        }


def test_amd_takes_triton_for_16_bits(monkeypatch, measured):
    with cuda_double():
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert {auto(dtype, width) for dtype in (torch.bfloat16, torch.float16) for width in (64, 8192)} == {"triton"}
        assert {auto(dtype, 896) for dtype in (torch.float32, torch.float64)} == {"chunked"}
        monkeypatch.setattr(engines.triton, "_HAS_TRITON", False)
        assert auto(torch.bfloat16, 896) == "chunked"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_a_measurement_switches_a_call(measured):
    case = make_case(0, B=2, T=3, H=16, V=37, dtype=torch.bfloat16, grid=0.02)

    def kernels() -> set[str]:
        choice._measured.cache_clear()
        with cuda_double() as double:
            case.to(torch.bfloat16, "cuda").run(GRPOLossConfig(), impl="auto")
        return set(double.launches)

    assert "head_fwd_kernel" not in kernels()
    measured.write_text(json.dumps({"sm_80": {"widest": 4096}, "sm_90": {"widest": 15}}))
    assert "head_fwd_kernel" not in kernels()
    measured.write_text(json.dumps({"sm_90": {"widest": 16}}))
    assert "head_fwd_kernel" in kernels()


def results(folder, name: str, times: dict[int, tuple[float, float]], *, architecture="sm_90", dtype="bf16") -> None:
    """A file of a GPU with the times of `chunked` and `triton` by H."""
    cases = {}
    for width, found in times.items():
        rows = {e: {"forward_backward": {"ms": {"median": ms}}} for e, ms in zip(writer.ENGINES, found, strict=True)}
        for pattern, slower in (("dense", 0), ("half", 100)):  # only dense cases count
            rows["triton"] = {"forward_backward": {"ms": {"median": found[1] + slower}}}
            case = Case(16, 512, width, 151936, dtype, pattern)
            cases[case.name] = {"shape": case.describe(), "providers": dict(rows)}
    about = {"device": "cuda", "date": name, "architecture": architecture}
    (folder / "gpu").mkdir(exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "machine": about, "sections": {"loss": {"cases": cases}}})
    (folder / "gpu" / f"{name}.json").write_text(text)


def test_the_file_is_written_from_the_newest_results_of_each_architecture(measured, tmp_path, capsys):
    results(tmp_path, "2027-01-01", {896: (9.0, 1.0)})
    results(tmp_path, "2027-01-02", {4096: (3.0, 2.0), 896: (2.0, 2.0), 2048: (2.0, 2.1)})
    results(tmp_path, "2027-01-01-a", {896: (1.0, 2.0)}, architecture="sm_80")
    results(tmp_path, "2027-01-03", {896: (9.0, 1.0)}, dtype="fp32")  # says nothing of bf16
    writer.run(tmp_path, measured)
    assert json.loads(measured.read_text()) == {
        "sm_90": {"widest": 896, "source": "gpu/2027-01-02.json"},
        "sm_80": {"widest": 0, "source": "gpu/2027-01-01-a.json"},
    }
    assert "sm_90: triton up to H = 896" in capsys.readouterr().out
    choice._measured.cache_clear()
    assert [choice.on_gpu("sm_90", torch.bfloat16, width) for width in (896, 897)] == ["triton", "chunked"]
    assert choice.on_gpu("sm_80", torch.bfloat16, 1) == "chunked"


@pytest.mark.parametrize(
    ("cases", "widest"),
    [
        ([(896, 131072, 1.0, 2.0), (896, 151936, 2.0, 1.0)], 0),  # slower in one of the cases
        ([(896, 151936, 2.0, None), (4096, 151936, 2.0, 1.0)], 0),  # wrong, so not timed
        ([(896, 151936, None, 1.0), (2048, 151936, 2.0, 2.0), (4096, 151936, 1.0, 2.0)], 2048),
        ([(896, 151936, None, None)], 0),
        ([], None),
    ],
)
def test_all_cases_of_a_width_count(cases, widest):
    def row(ms):
        return {"not_timed": "dweight is off by 2"} if ms is None else {"forward_backward": {"ms": {"median": ms}}}

    found = {
        f"{width}-{vocab}": {
            "shape": Case(16, 512, width, vocab, "bf16").describe(),
            "providers": {"chunked": row(chunked), "triton": row(triton)},
        }
        for width, vocab, chunked, triton in cases
    }
    assert writer.widest_triton(Run(Path(), {}, {"loss": {"cases": found}})) == widest


def test_without_results_nothing_is_written(measured, tmp_path):
    with pytest.raises(SystemExit, match="no results of a GPU"):
        writer.run(tmp_path, measured)
    assert not measured.exists()
