"""`triton` starts before the host knows how many rows are active; results are those of a call that waits."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, make_case, make_config

pytest.importorskip("triton")

from grpo_fused import engines, fused_linear_logprobs
from grpo_fused.api import pipeline

CONFIGS = {
    "token": make_config("dapo"),
    "sequence": make_config("grpo", importance_sampling_level="sequence"),
    "quantile": make_config("grpo", top_entropy_quantile=0.4),
}


@pytest.fixture
def log(monkeypatch):
    """What a call copies, starts and waits for, in its order."""
    found, engine = [], engines.engine("triton")
    copied, start = pipeline._copied, engine.start

    def copy(numbers):
        read = copied(numbers)
        found.append("copy")
        return lambda: (found.append("wait"), read())[1]

    def begin(work, count):
        made = start(work, count)
        found.append("start" if made is not None else "not started")
        return made

    monkeypatch.setattr(pipeline, "_copied", copy)
    monkeypatch.setattr(engine, "start", begin, raising=False)
    return found


def waiting(case, monkeypatch, config, **options):
    """Without a start."""
    with monkeypatch.context() as patch:
        patch.setattr(engines.engine("triton"), "start", lambda work, count: None, raising=False)
        return case.run(config, impl="triton", **options)


@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["token", "sequence"])
def test_a_loss(name, dtype, masked, log, monkeypatch):
    case = make_case(3, B=5, T=16, V=300, dtype=dtype, masked=masked).poisoned()
    got = case.run(CONFIGS[name], impl="triton")
    assert log == ["copy", "start", "wait"]
    assert_same(got, waiting(case, monkeypatch, CONFIGS[name]), tol=0.0)


@pytest.mark.parametrize("with_dhidden", [False, True])
def test_logprobs(with_dhidden, log, monkeypatch):
    case = make_case(3, B=5, T=16, V=300, dtype=torch.bfloat16, masked=0.3).poisoned()
    found = []
    for starts in (True, False):
        if not starts:
            monkeypatch.setattr(engines.engine("triton"), "start", lambda work, count: None, raising=False)
        hidden = case.hidden_states.clone().requires_grad_(with_dhidden)
        out = fused_linear_logprobs(
            hidden, case.lm_head_weight, case.completion_ids, case.completion_mask, impl="triton", with_entropy=False
        )
        found.append(out.logps)
        if with_dhidden:
            found.append(torch.autograd.grad(out.logps.sum(), hidden)[0])
    assert log[:3] == ["copy", "start", "wait"]
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {"max_scratch_bytes": 40_000}), (torch.bfloat16, {"softcap": 20.0}), (torch.float32, {})],
    ids=["several chunks", "softcap", "fp32"],
)
def test_where_it_waits(dtype, options, log):
    """For chunks their number must be known; with a softcap scores come in a product of their own."""
    case = make_case(3, B=5, T=16, V=300, dtype=dtype)
    case.run(CONFIGS["token"], impl="triton", **options)
    assert log == ["copy", "not started", "wait"]


@pytest.mark.parametrize(("name", "options"), [("quantile", {}), ("token", {"compact": False})], ids=str)
def test_where_nothing_is_started(name, options, log):
    """All rows are scored first, or none is left out."""
    case = make_case(3, B=5, T=16, V=300, dtype=torch.float32)
    case.run(CONFIGS[name], impl="triton", **options)
    assert "start" not in log
