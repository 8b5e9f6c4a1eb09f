"""The studies in a tiny form: their figures are plausible, errors are detected, and pictures are drawn."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import (
    accuracy,
    candidates,
    end_to_end,
    growth,
    integration_steps,
    limit,
    memory,
    objective,
    study_plots,
    tables,
    trl_steps,
)
from benchmarks.providers import PROVIDERS
from benchmarks.results import Run, load
from benchmarks.study import main, repeated
from grpo_fused.engines import libraries
from grpo_fused.rollouts import vllm_outputs

TINY = accuracy.Shape(B=2, T=24, H=64, V=1000)
ENGINES = [
    pytest.param("native", marks=pytest.mark.skipif(libraries.cpu_available() is not None, reason="not built")),
    "chunked",
]


@pytest.fixture(scope="module")
def tiny_accuracy():
    return accuracy.study((accuracy.HISTOGRAM_AT,), TINY, "cpu")


@pytest.mark.parametrize("engine", ENGINES)
def test_our_logps_are_within_the_bound_and_those_of_a_bf16_head_are_not(tiny_accuracy, engine):
    rows = {row["provider"]: row for row in tiny_accuracy["rows"]}
    ours, eager = rows[engine], rows["eager"]
    assert ours["max_logit"] == pytest.approx(accuracy.HISTOGRAM_AT, rel=0.02)
    assert 0 < ours["logp_error"]["mean"] < ours["logp_error"]["max"] <= accuracy.PROMISED_ERROR
    assert eager["logp_error"]["max"] > 100 * accuracy.PROMISED_ERROR
    assert ours["flipped"]["exact_old"] < 0.002 < eager["flipped"]["exact_old"] < 0.2
    assert ours["on_policy"]["exact"]["max_deviation"] <= accuracy.PROMISED_ERROR
    assert eager["on_policy"]["exact"]["max_deviation"] > 1e-2


def test_histograms_count_every_token_by_its_ratio(tiny_accuracy):
    histograms = tiny_accuracy["histograms"]
    edges, counts = histograms["edges"], histograms["counts"]["bfloat16"]
    middle = next(i for i, edge in enumerate(edges[1:]) if edge > 1.0)
    assert edges[middle] < 1.0
    for of in counts.values():
        assert all(sum(values) == TINY.B * TINY.T for values in of.values())
    assert counts["chunked"]["exact"][middle] == TINY.B * TINY.T
    assert counts["eager"]["exact"][middle] < TINY.B * TINY.T
    assert accuracy.histogram(torch.tensor([0.1, 1.0, 9.0])) == [1, *[0] * 39, 1, *[0] * 39, 1]


def test_flips_are_counted_on_both_sides():
    exact_ratios = torch.tensor([0.79, 0.81, 1.0, 1.19, 1.21, 1.5]).log()
    got = torch.tensor([0.81, 0.81, 1.0, 1.21, 1.19, 1.5]).log()
    assert accuracy.flipped(got, exact_ratios) == 0.5
    assert accuracy.flipped(exact_ratios, exact_ratios) == 0.0


@pytest.fixture(scope="module")
def measured_scratch():
    shape = growth.Shape(256, 256, 32768)
    with memory.blocks_given_back():
        return shape, growth.measure_memory(shape, "cpu")


@pytest.mark.parametrize("engine", ENGINES)
def test_predicted_scratch_is_what_a_call_takes(measured_scratch, engine):
    shape, measured = measured_scratch
    if math.isnan(measured[engine]):
        pytest.skip("the peak of this process cannot be read")
    predicted = growth.scratch_bytes(engine, shape)
    if engine == "native":  # to what an allocator may keep of the blocks of earlier tests
        assert abs(measured[engine] - predicted) < 2 * 2**20 < predicted / 1.5
    else:  # a budget, of which a small call does not take all
        assert 0.4 * predicted < measured[engine] < predicted + 8 * 2**20


@pytest.mark.skipif(libraries.cpu_available() is not None, reason="not built")
def test_the_native_plan_recomputes_only_what_does_not_fit():
    few = growth.cost_of("native", growth.Shape(512, 512, 65536)).products
    many = growth.cost_of("native", growth.Shape(8192, 512, 65536)).products
    assert few == 3.0
    assert 3.5 < many < 4.0


@pytest.mark.full
def test_growth_in_a_tiny_form(tmp_path):
    grid = growth.Grid(growth.Shape(64, 32, 2048), {"N": (32, 64), "active": (0.5, 1.0)})
    section = growth.study(grid, "cpu", rounds=1)
    assert len(section["points"]) == 3 * len({p["engine"] for p in section["points"]})
    for point in section["points"]:
        assert ("predicted_bytes" in point) == (point["engine"] != "bare")
    rendered(study_plots.growth_plot(section), tmp_path, panels=4)


def test_end_to_end_in_a_tiny_form(tmp_path, monkeypatch):
    monkeypatch.setattr(end_to_end, "in_child", lambda _, *case: end_to_end.memory(*case))  # a process takes too long
    setting = end_to_end.Setting(64, 1, 500, sequences=2, prompt=3, completion=8)
    section = end_to_end.study([setting], 1)
    results = section["results"]["bfloat16"]
    assert {"ours", "eager"} <= results.keys()
    for found in results.values():
        assert 0.0 < found["gradient_error"] <= end_to_end.GRADIENT_TOLERANCE
        assert found["tokens_per_second"] == pytest.approx(16 / found["step_seconds"]["median"])
        assert found["standing_bytes"] > 2 * 500 * 64
    assert 0.0 < section["head_flop_share"]["Qwen2.5-7B"] < section["head_flop_share"]["Qwen2.5-0.5B"] < 0.5
    assert end_to_end.head_flop_share(3e6, 1000, 1000) == 0.25
    rendered(study_plots.end_to_end_plot(section), tmp_path, panels=3)


def test_all_losses_of_a_step_agree():
    setting = end_to_end.Setting(64, 1, 500, sequences=2, prompt=3, completion=8, dtype="float32")
    found = {name: end_to_end.Step(setting, loss).forward().item() for name, loss in end_to_end.losses().items()}
    assert found == pytest.approx(dict.fromkeys(found, found["eager"]), rel=1e-4)


def test_a_step_of_a_wrong_loss_is_not_timed(monkeypatch):
    monkeypatch.setattr(end_to_end, "losses", lambda: {"ours": lambda p: 0.9 * PROVIDERS["eager"].loss(p)})
    found = end_to_end.measure(end_to_end.Setting(64, 1, 500, 2, 3, 8), 1)["ours"]
    assert found["gradient_error"] > 0.05
    assert "step_seconds" not in found


def test_accuracy_makes_a_picture(tiny_accuracy, tmp_path):
    rendered(study_plots.accuracy_plot(tiny_accuracy), tmp_path, panels=3)


def rendered(figure, folder, *, panels: int) -> None:
    """It draws, and no panel is empty."""
    assert len(figure.axes) == panels
    assert all(axes.has_data() for axes in figure.axes)
    path = folder / "figure.png"
    figure.savefig(path)
    assert path.stat().st_size > 10_000


def test_peak_memory_is_measured():
    def call() -> Tensor:
        return torch.ones(8 * 2**20)

    peak = memory.peak_bytes(call, "cpu")
    if math.isnan(peak):
        pytest.skip("the peak of this process cannot be read")
    assert 30 * 2**20 < peak < 40 * 2**20


def test_forms_of_a_step_agree(capsys):
    """The custom objective has the loss of the built-in one, every form is timed, and the command prints all."""
    main("objective", ["--quick", "--rounds", "1"])
    found = json.loads(capsys.readouterr().out)["objective"]
    assert list(found["calls"]) == ["bare-1", "bare-3", "built-in", "custom", "k3", "exact KL"]
    assert found["custom_over_built_in"] > 0


def test_a_custom_objective_that_is_nan_is_not_timed(monkeypatch):
    monkeypatch.setattr(objective, "calls_of", lambda *shape: ({}, {"built-in": 1.0, "custom": math.nan}))
    with pytest.raises(SystemExit, match="the custom objective must be the built-in one; .*; nothing is timed"):
        next(objective.run(quick=True))


SMALL_STEP = integration_steps.Setting(vocab=500, hidden=64, layers=1, sequences=4, length=8, dtype="float32")


@pytest.mark.full
def test_a_training_step_of_an_integration_is_compared_and_timed():
    pytest.importorskip("liger_kernel")
    found = integration_steps.measure("liger", SMALL_STEP, rounds=2, threads=1)
    assert 0 < found["gradient_error"] < 1e-5
    assert found["loss_difference"] < 1e-6
    own, ours = (found["sides"][name] for name in ("own", "ours"))
    assert found["ratio"] == own["seconds"]["median"] / ours["seconds"]["median"] > 0
    assert min(own["peak_bytes"], ours["peak_bytes"]) > 1e8


@pytest.mark.full
def test_steps_that_disagree_are_not_timed(monkeypatch):
    pytest.importorskip("liger_kernel")
    monkeypatch.setitem(integration_steps.TOLERANCE, "float32", (1e-5, 0.0))
    with pytest.raises(RuntimeError, match="not timed: .*gradient_error"):
        integration_steps.measure("liger", SMALL_STEP, rounds=1, threads=1)


def test_a_gradient_that_is_nan_is_above_the_tolerance():
    """Whichever it is."""
    own = {"loss": 1.0, "gradients": {name: torch.ones(2) for name in "abc"}}
    for name in "abc":
        ours = {"loss": 1.0, "gradients": own["gradients"] | {name: torch.tensor([1.0, math.nan])}}
        assert math.isnan(integration_steps.compare(own, ours)["gradient_error"])


def test_losses_of_a_trainer_that_are_nan_are_not_those_of_stock(monkeypatch):
    losses = {"stock": [1.0, 2.0, 3.0], "patched": [1.0, 2.0, 3.0], "fused": [1.0, math.nan, 3.0]}
    found = {"seconds": 1.0, "processor_seconds": 1.0, "peak_bytes": 1}
    monkeypatch.setattr(trl_steps, "save_model", lambda folder: None)
    monkeypatch.setattr(trl_steps, "in_child", lambda _, kind, *args, **env: found | {"losses": losses[kind]})
    with pytest.raises(SystemExit, match="fused: losses are off by nan"):
        next(trl_steps.run(rounds=1))


def test_published_rollouts_get_more_log_probs_than_others(monkeypatch):
    """In bf16 more tokens than the default keep the mass of a position."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the module sets options of vLLM
    from benchmarks import published

    seen = []

    class Measured:
        def __init__(self, *args, **options) -> None:
            seen.append(vllm_outputs.MOST_CANDIDATES)

        truncated = sizes = correlation = lambda self, *args: {}

    monkeypatch.setattr(published, "Measured", Measured)
    usual = vllm_outputs.MOST_CANDIDATES
    list(published.run(Path("gemma")))
    assert seen == [published.MOST] * 2
    assert vllm_outputs.MOST_CANDIDATES == usual < published.MOST


@pytest.mark.parametrize("out", [["--out", "r.json"], ["--out=r.json"]], ids=" ".join)
def test_the_command_of_a_run_has_no_file(out):
    assert repeated("cpu", ["--peers", *out, "--rounds", "2"]) == "python -m benchmarks.cpu --peers --rounds 2"


@pytest.mark.full
def test_sets_recorded_from_a_rollout(monkeypatch):
    """Times of exactly its tensors: targets are in their sets, and log-probs those of float64."""
    problem = candidates.rollout_problem("cpu", warmup_steps=2, prompts=2)
    monkeypatch.setattr(candidates, "rollout_problem", lambda device: problem)
    found = candidates.recorded("cpu", ["chunked"], rounds=1)
    assert found["N"] == len(problem.sets) == problem.hidden.shape[1] > 0
    assert 1 <= found["set_sizes"]["median"] <= found["V"] == problem.weight.shape[0]
    assert found["logp_error"]["chunked"] <= 1e-4
    lines = tables.candidates({"recorded": found}, Run(Path(), {}, {})).splitlines()
    assert f"N = {found['N']}, H = {found['H']}, V = {found['V']}" in lines[0]
    assert len(lines) == 4 + len(found["calls"])


def test_fp32_by_amx_has_a_sixth_of_its_rate(monkeypatch):
    """Six products of bf16 pieces are one of fp32."""
    monkeypatch.setattr(limit.cpu_library, "instruction_set", lambda: "AMX")
    monkeypatch.setattr(limit, "rate", lambda instruction, threads: {"AMX": 600.0}[instruction])
    monkeypatch.setattr(limit, "measure", lambda *args, **options: {})
    monkeypatch.setattr(limit, "print_case", lambda *args: None)
    limits = {
        dtype: case["limit"]
        for dtype in ("bf16", "fp32")
        for section in limit.run(tokens=(8,), dtype=dtype)
        for case in section["cases"].values()
    }
    assert limits == {
        "bf16": {"instruction": "AMX", "gflops": 600.0},
        "fp32": {"instruction": "AMX, 6 products for one", "gflops": 100.0},
    }


@pytest.mark.skipif(libraries.cpu_available() is not None, reason="not built")
def test_the_share_of_the_limit(tmp_path):
    """Of the rate in registers, which the processor's instructions have in their order."""
    out = tmp_path / "r.json"
    shape = ["--hidden", "64", "--vocab", "2000", "--rounds", "1"]
    main("limit", ["--tokens", "8", *shape, "--out", str(out)])
    with pytest.raises(ValueError, match="tokens must be at most 256, or a multiple of 256; got 300"):
        main("limit", ["--tokens", "300", *shape])
    main("limit", ["--tokens", "256", *shape, "--dtype", "fp32", "--peers", "eager", "--out", str(out)])
    run = load(out)
    cases = run.sections["limit"]["cases"]
    assert list(cases) == ["bf16-8-64-2000", "fp32-256-64-2000"]
    case = cases["fp32-256-64-2000"]
    case["limit"]["gflops"] = 1000.0
    case["providers"]["eager"] = {"forward_backward": {"ms": {"median": 2.0}}}
    lines = limit.table(run.sections["limit"], run).splitlines()
    share = 3 * 2 * 256 * 64 * 2000 / 2e-3 / 1e12
    assert f"| fp32, N = 256, H = 64, V = 2000 | eager | 2 ms | {share:.2f} |  |  |" in lines
    for row in lines[2:-2]:
        shares = [float(row.split(" | ")[i].strip("| ")) for i in (3, 5) if "eager" not in row]
        assert all(0.0 <= x <= 1.0 for x in shares), row
