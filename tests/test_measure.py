"""Benchmarks check a result before they time it, and distinguish wrong, failed and absent providers."""

from __future__ import annotations

from dataclasses import replace
from mmap import mmap

import pytest
import torch

from benchmarks import measure, memory, providers, timing
from benchmarks.child import in_child
from benchmarks.command import parser_of
from benchmarks.exact import Exact, wrong
from benchmarks.problem import PATTERNS, Case, cross_entropy, loss_from_logps, shares
from benchmarks.providers import PEERS, PROVIDERS, available
from benchmarks.studies import STUDIES
from benchmarks.timing import bare_gemms, busy_gpu, cache_flush, times_by_round, with_ratios

SMALL = Case(5, 16, 32, 300, "fp32")
RUNNABLE = [name for name, p in PROVIDERS.items() if p.unavailable("cpu") is None and not p.compiles]


def test_case_names():
    case = Case(4, 256, 896, 151936, "bf16", "half-inactive")
    assert case.name == "bf16-1024-896-151936-half-inactive"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exact_is_autograd_in_float64(pattern):
    case = replace(SMALL, pattern=pattern)
    problem = case.problem("cpu")
    want = problem.to(torch.float64).map(lambda name, x: x.double() if name == "old_per_token_logps" else x.detach())
    want.hidden_states.requires_grad_()
    want.lm_head_weight.requires_grad_()
    logits = want.hidden_states @ want.lm_head_weight.T
    logps = logits.log_softmax(-1).gather(-1, want.completion_ids.unsqueeze(-1)).squeeze(-1)
    loss = loss_from_logps(logps, want)
    loss.backward()
    exact = Exact.of(problem)
    assert exact.loss_error(loss) < 1e-6  # advantages are fp32 there
    assert max(exact.gradient_errors(want).values()) < 1e-6
    assert exact.logp_error(logps.detach(), problem) < 1e-12
    found = shares(problem)
    expected = {"dense": (1.0, 1.0), "half-inactive": (0.5, 0.5), "zero-advantage-40": (1.0, 0.6)}[pattern]
    assert (found["active"], found["gradient"]) == pytest.approx(expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", RUNNABLE)
def test_providers_compute_the_same_loss(name, pattern):
    provider = PROVIDERS[name]
    problem = replace(SMALL, pattern=pattern).problem("cpu")
    errors = measure.check(provider, problem, Exact.of(problem))
    assert wrong(errors, torch.float32, ours=provider.ours) is None
    assert max(errors.values()) < 1e-4
    assert ("logp" in errors) == (provider.logps is not None)


@pytest.mark.full
def test_wrong_and_failed_results_are_not_timed():
    def no_mask(p):
        return loss_from_logps(
            PROVIDERS["eager"].logps(p), replace(p, completion_mask=torch.ones_like(p.completion_mask))
        )

    def fails(p):
        raise RuntimeError("no such kernel\nand more")

    ours, peer = PROVIDERS["chunked"], PROVIDERS["eager"]
    providers = {
        "right": ours,
        "peer": peer,
        "no mask": replace(peer, loss=no_mask),
        "log-probs": replace(ours, logps=lambda p: ours.logps(p) + 1e-3),
        "rounded": replace(peer, logps=lambda p: peer.logps(p) + 1e-3),
        "fails": replace(peer, loss=fails),
        "nan": replace(peer, loss=lambda p: peer.loss(p) * float("nan")),
    }
    rows = measure.measure(replace(SMALL, pattern="half-inactive"), "cpu", providers, rounds=1)["providers"]
    reasons = {name: row.get("not_timed") for name, row in rows.items()}
    assert [name for name, reason in reasons.items() if reason is None] == ["right", "peer", "rounded"]
    assert "is off by" in reasons["no mask"]
    assert reasons["log-probs"] == "logp is off by 0.001, allowed is 0.0002"
    assert reasons["fails"] == "RuntimeError: no such kernel"
    assert reasons["nan"].endswith("is off by nan, allowed is 0.005")
    for name, row in rows.items():
        assert ("forward_backward" in row) == (reasons[name] is None)


def test_a_provider_is_judged_by_its_own_loss():
    problem, eager = SMALL.problem("cpu"), PROVIDERS["eager"]
    mean = replace(eager, loss=lambda p: loss_from_logps(eager.logps(p), p, cross_entropy), per_token=cross_entropy)
    verdict = measure.verdicts(problem)
    assert "not_timed" not in verdict(mean)
    assert "not_timed" in verdict(replace(mean, per_token=eager.per_token))


def test_a_wrong_result_of_ours_fails_the_run(monkeypatch):
    ours = PROVIDERS["chunked"]
    bad = replace(ours, loss=lambda p: 2 * ours.loss(p))
    monkeypatch.setitem(PROVIDERS, "chunked", bad)
    seen = []
    with pytest.raises(SystemExit, match="a result of ours is wrong"):
        seen.extend(measure.sections([measure.Plan(SMALL, peers=(), memory=False)], "cpu", rounds=1, seconds=None))
    assert "not_timed" in seen[-1]["cases"][SMALL.name]["providers"]["chunked"]


def test_which_providers_run():
    assert available("cpu", "dense", ()).keys() <= {"native", "chunked"}
    assert "ours-lean" in available("cpu", "zero-advantage-40", ())
    assert available("cpu", "dense", ("eager",)).keys() == {"eager", *available("cpu", "dense", ())}
    for name in ("liger-triton", "liger-scaled", "cce", "cce-exact", "quack", "quack-mean", "verl", "triton", "cuda"):
        assert PROVIDERS[name].unavailable("cpu") == "runs on cuda only"
    assert "absent is not installed" in str(replace(PROVIDERS["eager"], packages=("absent",)).unavailable("cpu"))
    whole = ("liger", "liger-triton", "torchtitan", "quack-mean")  # the others give log-probs
    assert all(("formula" in PROVIDERS[name].composition) == (name not in whole) for name in PEERS)


@pytest.mark.parametrize(
    ("release", "reason"), [("1.14.2", "trl 1.14.2 has no fused head, 1.15 has"), ("1.15.0", None)]
)
def test_trl_is_a_peer_where_it_has_a_fused_head(release, reason, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(providers, "version", lambda _: release)
    assert PROVIDERS["trl"].unavailable("cpu") == reason


def test_options_choose_problems_and_peers():
    plans = [measure.Plan(replace(SMALL, pattern=pattern)) for pattern in PATTERNS]
    dense, *_ = plans
    assert measure.chosen(plans, ("",), PATTERNS, peers=PEERS, memory=True) == plans
    found = measure.chosen(plans, (SMALL.name,), ("dense",), peers=("trl", "eager"), memory=False)
    assert found == [dense._replace(peers=("eager", "trl"), memory=False)]
    for wrong_options in ({"cases": ("bf16",)}, {"patterns": ("sparse",)}):
        with pytest.raises(SystemExit, match="no problem is named"):
            measure.chosen(plans, **{"cases": ("",), "patterns": PATTERNS, **wrong_options}, peers=(), memory=True)


@pytest.mark.parametrize("program", ["cpu", "limit", "sweep"])
def test_a_peer_that_does_not_exist_is_refused(program, capsys):
    parser = parser_of(STUDIES[program].run)
    assert parser.parse_args(["--peers"]).peers == []
    assert parser.parse_args(["--peers", "trl", "eager"]).peers == ["trl", "eager"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--peers", "lige"])
    assert "--peers: invalid choice: 'lige' (choose from " in capsys.readouterr().err


def test_memory_on_a_gpu_is_counted_in_this_process(monkeypatch):
    pytest.importorskip("triton")
    from cuda_double import cuda_double

    case, eager = Case(2, 64, 32, 2048, "fp32"), {"eager": PROVIDERS["eager"]}
    monkeypatch.setattr(memory, "in_child", None)
    monkeypatch.setattr(measure, "available", lambda *_: eager)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda *_: 1.0)
    with cuda_double():
        *_, last = measure.sections([measure.Plan(case)], "cuda", rounds=1, seconds=None)
        monkeypatch.setitem(PROVIDERS, "eager", replace(eager["eager"], loss=lambda p: 1 / 0))
        failed = memory.of_call(case, "eager", "cuda")
    rows = last["cases"][case.name]["providers"]
    assert 2 <= rows["eager"]["memory_mib"]["allocator"] <= 5  # all logits are 1 MiB
    assert failed == {"failed": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize("has_products", [True, False])
def test_bare_products_are_those_that_a_cpu_has(has_products, monkeypatch):
    """bf16 without instructions for it is no measure: with AVX2 it takes a hundred times as long as fp32."""
    monkeypatch.setattr("benchmarks.timing.has_products_in", lambda *_: has_products)
    calls = bare_gemms(6, 4, 10, torch.bfloat16, "cpu")
    want = torch.bfloat16 if has_products else torch.float32
    assert [x.dtype for x in (calls["bare-1"](), *calls["bare-3"]())] == [want] * 4


def test_bare_products_have_the_shapes_of_a_head():
    calls = bare_gemms(6, 4, 10, torch.float32, "cpu")
    assert calls["bare-1"]().shape == (6, 10)
    assert [x.shape for x in calls["bare-3"]()] == [(6, 10), (6, 4), (10, 4)]


def test_ratios_are_of_each_round_and_the_median_is_theirs():
    times = {"bare": [1.0, 2.0, 4.0], "ours": [3.0, 2.0, 2.0]}
    found = with_ratios(times, "bare")
    assert found["ours"]["ms"] == {"median": 2.0, "p20": 2.0, "p80": pytest.approx(2.6)}
    assert found["ours"]["times_bare"] == {"median": 1.0, "p20": pytest.approx(0.7), "p80": pytest.approx(2.2)}


def test_bare_products_take_the_fastest_layout_of_each(monkeypatch):
    """The second layout of each product is made the fastest."""
    seen = []
    monkeypatch.setattr("benchmarks.timing._shortest", lambda call, _: seen.append(call) or (len(seen) % 4 != 2))
    layouts = timing._layouts
    taken = []

    def named(*arguments):
        return [lambda i=i, form=form: (taken.append(i), form())[1] for i, form in enumerate(layouts(*arguments))]

    monkeypatch.setattr(timing, "_layouts", named)
    bare_gemms(6, 4, 10, torch.float32, "cpu")["bare-3"]()
    assert taken == [1, 1, 1]


@pytest.mark.parametrize("what", ["forward_backward", "scoring"])
def test_a_timed_call_makes_its_gradients_once(what):
    problem = Case(2, 8, 16, 64, "fp32").problem("cpu")
    call = measure.call_of(PROVIDERS["eager"], what, problem)
    call()
    first = problem.hidden_states.grad
    if what == "scoring":
        assert first is None
        return
    first = first.clone()
    call()
    assert torch.equal(problem.hidden_states.grad, first)
    assert first.abs().max() > 0


def test_no_round_is_an_error():
    with pytest.raises(ValueError, match="rounds must be at least 1; got 0"):
        times_by_round({}, "cpu", rounds=0)


def test_rounds_are_interleaved():
    seen = []
    times = times_by_round({name: lambda name=name: seen.append(name) for name in "ab"}, "cpu", rounds=3, warmup=1)
    assert seen == ["a", "b"] * 4
    assert [len(values) for values in times.values()] == [3, 3]
    assert cache_flush("cpu") is busy_gpu("cpu") is None


@pytest.mark.full
def test_peak_memory_of_a_fresh_process():
    """All logits are 64 MiB here, and eager holds several such at once."""
    case = Case(2, 128, 32, 65536, "fp32")
    found = memory.of_call(case, "eager", "cpu", timeout_s=120)
    assert found["resident"] is None or 2 * 64 <= found["resident"] <= 5 * 64 + 40


def test_the_peak_of_a_child_is_its_own():
    """Not that of the process which started it, as `getrusage` has it."""
    bytearray(b"1") * 2**30
    assert memory.peak_of_process() > 2**30
    assert in_child("benchmarks.memory:peak_of_process") < 2**30
    before = memory.peak_of_process()
    with mmap(-1, 2**33):  # pages that nobody touches are none
        assert memory.peak_of_process() < before + 2**30


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "timeout_s", "reason"),
    [(SMALL, 0.01, "no result within 0 s"), (Case(1, 4, 8, 2**45), 120, "memory")],
    ids=["time-out", "out of memory"],
)
def test_a_process_that_gives_no_result_is_reported(case, timeout_s, reason):
    found = memory.of_call(case, "eager", "cpu", timeout_s=timeout_s)
    assert found.keys() == {"failed"}
    assert reason in found["failed"]
