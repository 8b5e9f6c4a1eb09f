"""`triton` starts before the host knows how many rows are active; results are those of a call that waits."""

from __future__ import annotations

from dataclasses import replace

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
    monkeypatch.setattr(engine, "start", begin)
    return found


def waiting(case, monkeypatch, config, **options):
    """Without a start."""
    with monkeypatch.context() as patch:
        patch.setattr(engines.engine("triton"), "start", lambda work, count: None)
        return case.run(config, impl="triton", **options)


@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["token", "sequence"])
def test_a_loss(name, dtype, masked, log, monkeypatch):
    case = make_case(3, B=5, T=16, V=300, dtype=dtype, masked=masked).poisoned()
    case.advantages[2] = 0.0  # these rows are scored for the metrics
    got = case.run(CONFIGS[name], impl="triton")
    assert log == ["copy", "start", "wait"]
    assert_same(got, waiting(case, monkeypatch, CONFIGS[name]), tol=0.0)


@pytest.mark.parametrize("with_dhidden", [False, True])
def test_logprobs(with_dhidden, log, monkeypatch):
    case = make_case(3, B=5, T=16, V=300, dtype=torch.bfloat16, masked=0.3).poisoned()
    found = []
    for starts in (True, False):
        if not starts:
            monkeypatch.setattr(engines.engine("triton"), "start", lambda work, count: None)
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


def test_a_slice_of_the_vocabulary_waits(monkeypatch):
    """Its scores are merged with those of other ranks."""
    engine, given = engines.engine("triton"), []
    start = engine.start
    monkeypatch.setattr(engine, "start", lambda work, count: given.append((work, count)))
    make_case(3, B=5, T=16, V=300, dtype=torch.bfloat16).run(CONFIGS["token"], impl="triton")
    ((work, count),) = given
    assert start(work, count) is not None
    assert start(replace(work, tokens=work.tokens._replace(vocab=object())), count) is None


@pytest.mark.parametrize(("name", "options"), [("quantile", {}), ("token", {"compact": False})], ids=str)
def test_where_nothing_is_started(name, options, log):
    """All rows are scored first, or none is left out."""
    case = make_case(3, B=5, T=16, V=300, dtype=torch.bfloat16)
    case.run(CONFIGS[name], impl="triton", **options)
    assert not {"start", "not started"} & set(log)


@pytest.mark.parametrize("what", ["loss", "log-probs"])
def test_the_product_is_taken_once(what, monkeypatch):
    """For the rows with a gradient, or the active ones."""
    from grpo_fused.kernels import head_launch

    case, counts = make_case(3, B=5, T=16, V=300, dtype=torch.bfloat16, masked=0.3), []
    case.advantages[0] = 0.0
    real = head_launch.head_scores

    def seen(hidden, *arguments, count=None, **options):
        counts.append((len(hidden), None if count is None else int(count)))
        return real(hidden, *arguments, count=count, **options)

    monkeypatch.setattr(head_launch, "head_scores", seen)
    active = case.completion_mask.sum(1)
    if what == "loss":
        case.run(make_config("dapo"), impl="triton")
        assert counts == [(80, int(active.sum()))]  # the metrics need the scores of rows without a gradient, too
    else:
        fused_linear_logprobs(
            case.hidden_states, case.lm_head_weight, case.completion_ids, case.completion_mask, impl="triton"
        )
        assert counts == [(80, int(active.sum()))]
