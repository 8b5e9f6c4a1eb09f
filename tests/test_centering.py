"""The study of score centering: its samplers, exact biases, statistics, tables and picture."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from benchmarks import centering, centering_page, centering_tail, seeds, small_policy
from benchmarks.results import Run
from benchmarks.small_policy import Other, rounded_to_fp8

ABOUT = {"name": "A machine", "commit": "abc", "dirty": False, "date": "2026-01-01T00:00:00"}
TINY = replace(centering.RECIPE, warmup=0, steps=3, prompts_per_step=2, num_generations=4, max_completion_length=6)


@pytest.fixture
def model(monkeypatch):
    """A random policy, and a judge whose verdicts differ within a group."""
    data = small_policy.sums()._replace(judge=lambda text, row: float(sum(map(ord, text)) % 2))
    monkeypatch.setattr(small_policy, "data_of", lambda task: data)
    monkeypatch.setattr(small_policy, "VOCAB", 32)
    return small_policy.start("sums", 0, 0)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_sampler_has_the_weights_of_lag_steps_ago(model, lag):
    engine = Other(model, small_policy.tokenizer(), lag, fp8=False)
    for step in range(5):
        model.lm_head.weight.data.fill_(float(step))
        engine.sync_weights(model)
        assert engine.model.lm_head.weight.unique().tolist() == [max(step - lag, 0)]


def test_an_fp8_sampler_rounds_the_linear_layers_and_not_the_policy(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Other(model, small_policy.tokenizer(), 0, fp8=True)
    engine.sync_weights(model)
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], before[name])
        is_linear = ("proj" in name and name.endswith("weight")) or name == "lm_head.weight"
        assert torch.equal(tensor, rounded_to_fp8(before[name]) if is_linear else before[name]), name


def test_fp8_has_three_bits_and_a_scale_for_each_row():
    weight = torch.randn(4, 300) * torch.tensor([[1e-6], [1.0], [1e6], [0.0]])
    got = rounded_to_fp8(weight)
    large = weight.abs() > 1e-3 * weight.abs().amax(1, keepdim=True)
    error = ((got - weight).abs() / weight.abs())[large]
    assert 0.05 < error.max() <= 1 / 16 + 1e-6
    largest = weight.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(got.gather(1, largest), weight.gather(1, largest))
    assert (got[3] == 0).all()


@pytest.mark.parametrize("objective", list(centering.OBJECTIVES))
@pytest.mark.parametrize("sampler", list(centering.SAMPLERS))
def test_a_run_of_each_arm(model, sampler, objective):
    recipe = replace(TINY, objective=centering.OBJECTIVES[objective], **centering.SAMPLERS[sampler])
    trained = small_policy.train("ours", recipe, 0, model)
    kl = [step["sampler_kl"] for step in trained.metrics]
    assert len(kl) == len(trained.rewards) == TINY.steps
    if sampler == "fp8":
        assert abs(kl[0]) > 1e-5
    else:  # the sampler is the policy in the first step
        assert abs(kl[0]) < 1e-5 < abs(kl[-1])


@pytest.mark.parametrize("cap", centering.CAPS)
def test_the_biases_are_those_of_the_formula(cap):
    """From probabilities, without autograd: the update of token y in the logits is A w_y (1[v = y] - p_v)."""
    got = centering.bias(0.3, cap)
    g = torch.Generator().manual_seed(0)
    z, noise, reward = (
        torch.randn(centering.DRAWS, centering.VOCAB, generator=g, dtype=torch.float64) for _ in range(3)
    )
    reward = (reward > reward.mean(1, keepdim=True)).double()
    p, q = (1.5 * z).softmax(1), (1.5 * z + 0.3 * noise).softmax(1)
    weight = (p / q).clamp(max=cap)

    def update(advantages, q=q, weight=weight):
        share = q * weight * advantages
        return share - share.sum(1, keepdim=True) * p

    exact = update(reward, p, 1.0)
    score = update(torch.ones_like(reward))
    centered = update(reward) - (q * reward).sum(1, keepdim=True) * score
    for name, found in (("tis", update(reward)), ("centered", centered), ("tis_baseline", centered)):
        error = (found - exact).norm(dim=1) / exact.norm(dim=1)
        assert got[name]["mean"] == pytest.approx(error.mean().item(), abs=1e-12)
    assert (got["tis"]["mean"] < 1e-12) == (cap > 1e5)


def test_what_the_top_k_form_leaves_is_that_of_the_formula():
    """From probabilities, without autograd, and the sampler beyond the K tokens taken to be the policy, rescaled."""
    tail = centering_tail
    K = 16
    (got,) = (row for row in tail.errors(0.3) if row["K"] == K)
    g = torch.Generator().manual_seed(0)
    z, noise, reward = (torch.randn(tail.DRAWS, tail.VOCAB, generator=g, dtype=torch.float64) for _ in range(3))
    reward = (reward > 0).double()
    p, q = (3.0 * z).softmax(1), (3.0 * z + 0.3 * noise).softmax(1)
    top = torch.zeros_like(q).scatter_(1, q.topk(K).indices, 1.0)
    model = torch.where(top > 0, q, p * (1 - (q * top).sum(1, keepdim=True)) / (1 - (p * top).sum(1, keepdim=True)))
    assert got["mass"] == pytest.approx((q * top).sum(1).mean().item())
    for name, cap in (("reinforce", None), ("tis", 2.0)):
        weight, beyond = (torch.ones_like(p) if cap is None else (p / x).clamp(max=cap) for x in (q, model))
        mean = (q * reward).sum(1, keepdim=True)

        def score(share, p=p):
            return share - share.sum(1, keepdim=True) * p

        full, approximate = (
            score(q * weight * reward) - mean * score(x * w) for x, w in ((q, weight), (model, beyond))
        )
        error = (approximate - full).norm(dim=1) / full.norm(dim=1)
        assert error.mean() > 1e-4
        assert got[name] == pytest.approx(error.mean().item(), rel=1e-6), name


def test_the_error_of_the_top_k_form_falls_to_nothing():
    rows = centering_tail.errors(1.0)
    errors = [row["reinforce"] for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.5
    assert errors[-1] < 1e-4
    section = {"vocab": 256, "draws": 50, "spread": 3.0, "cap": 2.0, "rows": rows}
    text = centering_tail.table(section, Run(None, ABOUT, {}))
    assert f"| 1 | 16 | {rows[3]['mass']:.2%} | {errors[3]:.2%} | {rows[3]['tis']:.2%} |" in text


def section() -> dict:
    rows = [
        {
            "seed": seed, "sampler": sampler, "objective": name, "commit": f"c{seed}", "before": 0.2,
            "after": 0.5 + 0.01 * seed + gain * (1 + seed), "reward": 0.4 + 0.02 * seed, "sampler_kl": 0.01,
            "rewards": [0.1 * step + 0.01 * seed for step in range(6)], "kl": [0.01] * 6,
        }
        for sampler in centering.SAMPLERS
        for name, gain in (("tis", 0.0), ("centered", 0.01))
        for seed in range(3)
    ]  # fmt: skip
    return centering.section_of([*rows, {**rows[0], "seed": 7}])


def test_centered_runs_are_compared_over_the_seeds_of_both():
    pytest.importorskip("scipy")
    found = section()
    assert found["arms"]["lag_4"]["tis"]["after"]["n"] == 4
    row = found["against_tis"]["lag_4"]["after"]
    assert (row["n"], row["mean"]) == (3, pytest.approx(fmean([0.01, 0.02, 0.03])))
    assert found["against_tis"]["fp8"]["reward"]["mean"] == pytest.approx(0.0)
    assert [(row["mismatch"], row["cap"]) for row in found["bias"]["rows"]][:2] == [(0.1, 1.0), (0.1, 2.0)]


def test_the_table_and_the_picture(tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    found = section()
    text = centering_page.table(found, Run(None, ABOUT, {}))
    assert "| fp8 | TIS | 3 | 1.0e-02 | 51.0% ± 1.0 |  | 42.0% ± 2.0 |  |" in text
    assert "| fp8 | TIS, centered | 3 | 1.0e-02 | 53.0% ± 2.0 | +2.0 (-0.5 to +4.5) |" in text
    assert "trained at c0, c1, c2." in text
    exact = found["bias"]["rows"][0]
    assert f"| 0.1 | 1 | {exact['tis']['mean']:.2%} | {exact['tis_baseline']['mean']:.2%} |" in text
    assert "| 0.1 | none | 0 | 0 | 0 |" in text
    figure = centering_page.plot(found)
    assert [len(axes.lines) for axes in figure.axes[:3]] == [2, 2, 2]
    assert [len(part.get_offsets()) for part in figure.axes[3].collections if len(part.get_offsets()) == 3] == [3] * 3
    figure.savefig(tmp_path / "a.svg")


def test_a_study_continues(tmp_path, monkeypatch):
    done = section()["runs"]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in done if row["seed"] < 2))
    monkeypatch.setattr(seeds, "start", lambda *_: pytest.fail("nothing is missing"))
    *_, last = centering.run(seeds=2, work=tmp_path)
    assert len(last["runs"]) == 12
