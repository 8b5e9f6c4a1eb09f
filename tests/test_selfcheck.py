"""`python -m grpo_fused check` passes here, and sees what is broken."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from grpo_fused import __main__, _native, accuracy, objective, selfcheck
from grpo_fused.config import LossType
from grpo_fused.engines import rows


def test_passes(capsys):
    selfcheck.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    engines = {"chunked"} | ({"native"} if _native.cpu_available() is None else set())
    checks = [line for line in lines if line.startswith("ok ")]
    assert {line.split()[1] for line in checks} >= engines
    assert lines[-1].startswith(f"all {len(checks)} checks passed")
    assert len(checks) >= 27 * len(engines)


def test_covers_what_it_says():
    configs = [selfcheck.GRPOLossConfig(**options) for options in selfcheck.OBJECTIVES.values()]
    assert {config.loss_type for config in configs} == set(get_args(LossType))
    assert {config.importance_sampling_level for config in configs} == {"token", "sequence", "sequence_token"}
    assert {config.kl_estimator for config in configs if config.beta} == {"k1", "k2", "k3"}
    for option in ("entropy_coef", "delta", "dual_clip", "off_policy_mask_threshold"):
        assert any(getattr(config, option) for config in configs), option
    assert any(config.top_entropy_quantile < 1 for config in configs)
    problem = selfcheck.make_problem(torch.float32)
    assert problem.hidden.isnan().any(), "masked positions are poisoned"
    assert (problem.ids == -100).any()


BREAKAGES = {
    "logp": (rows, "_statistics", lambda out: out._replace(logp=out.logp - 2e-4)),
    "dH": (rows, "_gradient", lambda out: out * 1.001),
    "loss": (objective, "_policy_factor", lambda out: out * 1.01),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_sees_what_is_broken(what, monkeypatch, capsys):
    """The reference shares none of these."""
    module, name, spoil = BREAKAGES[what]
    whole = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: spoil(whole(*args, **kwargs)))
    with pytest.raises(SystemExit) as stopped:
        selfcheck.main(["--quick", "--engines", "chunked"])
    assert "checks failed: chunked on cpu float32 dapo;" in str(stopped.value)
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert "chunked on cpu float32 dapo " in failed[0]


def test_sees_scores_that_change_with_their_company(monkeypatch):
    """An engine whose scores are not bitwise the same fails where it must be."""
    monkeypatch.setattr(
        selfcheck,
        "score",
        lambda problem, impl, rows=None: torch.rand(problem.ids.shape if rows is None else len(rows)),
    )
    check = selfcheck._bitwise("chunked", torch.device("cpu"), torch.float32)
    assert not check.passed
    assert check.errors["differ in company"][0] > 0
    assert not selfcheck._company("chunked", torch.device("cpu")).passed


def test_nan_fails():
    assert not selfcheck.Check("x", {"logp": (float("nan"), 1.0)}).passed
    assert selfcheck._largest(torch.tensor([0.0, torch.nan])) == float("inf")


def test_bounds_follow_the_contract():
    assert accuracy.logp_bound(10.0) == accuracy.logp_bound(32.0) == 1e-4
    assert accuracy.logp_bound(320.0) == pytest.approx(1e-3)


def test_nothing_to_check_is_no_success():
    with pytest.raises(SystemExit, match="nothing was checked: none of none runs here"):
        __main__.main(["check", "--engines", "none"])
