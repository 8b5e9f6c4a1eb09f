"""`alternatives`: log-probs of several tokens of a position, and their gradients, against all logits in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import pytest
import torch
from grpo_fused.kernels.row_types import Coefficients, Entries, Statistics
from helpers import ENGINES, PRECISION, frobenius_error, make_case, with_sets
from torch.profiler import ProfilerActivity, profile

from grpo_fused import CandidateSets, engines, fused_linear_logprobs, fused_linear_objective, objectives
from grpo_fused.call.calls import LMHead
from grpo_fused.engines import alternatives as engine_of_alternatives
from grpo_fused.engines.gradients import fp16_scale
from grpo_fused.testing import ROUNDINGS, rounding_errors

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2, "temperature": 0.7, "logit_scale": 1.3},
    "bias": {"lm_head_bias": torch.linspace(-1, 1, 29, dtype=torch.float64), "temperature": torch.rand(4, 7) + 0.5},
}


def some(case, seed=0, *, most=6, vocab_size=None):
    """Up to `most` tokens of each position, with repetitions and targets; of its candidate set, if it has one."""
    g = torch.Generator().manual_seed(seed)
    ids, sets = case.completion_ids.reshape(-1), case.options.get("candidates")
    parts = []
    for n, target in enumerate(ids.tolist()):
        allowed = torch.arange(vocab_size or len(case.lm_head_weight))
        if sets is not None and sets.sizes[n] > 0:
            allowed = sets.ids[sets.offsets[n] : sets.offsets[n + 1]]
        drawn = allowed[torch.randint(len(allowed), (int(torch.randint(most + 1, (), generator=g)),), generator=g)]
        parts.append(torch.cat([drawn, drawn[:1], torch.tensor([target])[: int(n % 3 == 0)]]))
    offsets = torch.tensor([0, *(len(x) for x in parts)]).cumsum(0)
    return CandidateSets(torch.cat(parts), offsets)


def loss_of(logps, entropies, *, alternative_logps, alternative_offsets, weights, advantages, cu_seqlens=None):
    """Depends on targets, alternatives and their number."""
    sizes = alternative_offsets.diff()
    owner = torch.repeat_interleave(sizes)
    terms = weights * (alternative_logps.exp() + 0.3 * alternative_logps)
    total = torch.zeros_like(logps).index_add(0, owner, terms.to(logps.dtype))
    loss = -advantages * logps + total * logps.detach().exp()
    return loss if entropies is None else loss - 0.2 * entropies * advantages


def run(case, sets, impl, *, objective=loss_of, freeze=False, scope="token", with_entropy=False, **options):
    hidden = case.hidden_states.detach().requires_grad_()
    weight = case.lm_head_weight.detach().requires_grad_(not freeze)
    given = {n: x for n, x in case.options.items() if n in (*HEADS["softcap"], "lm_head_bias", "candidates")}
    bias = given.pop("lm_head_bias", None)
    bias = None if bias is None else bias.detach().requires_grad_()
    g = torch.Generator().manual_seed(7)
    weights = torch.randn(len(sets.ids), generator=g, dtype=torch.float64)
    advantages = torch.randn(case.completion_ids.shape, generator=g, dtype=torch.float64)
    out = fused_linear_objective(
        hidden, weight, case.completion_ids, objective, case.completion_mask, impl=impl, scope=scope,
        lm_head_bias=bias, inputs={"advantages": advantages}, alternatives=sets,
        alternative_inputs={"weights": weights}, with_entropy=with_entropy, **given, **options,
    )  # fmt: skip
    out.loss.backward()
    grads = {"dhidden": hidden.grad, "dweight": weight.grad, "dbias": None if bias is None else bias.grad}
    return out, {name: x for name, x in grads.items() if x is not None}


def assert_same(got, want, tol):
    torch.testing.assert_close(got[0].loss.double(), want[0].loss, rtol=10 * tol, atol=10 * tol)
    for name, x in want[1].items():
        if name in got[1]:
            assert frobenius_error(got[1][name], x) <= 2 * tol, name


def case_of(seed=0, head="plain", sets=None, **options):
    case = make_case(seed, extras=False, **HEADS[head], **options)
    return case if sets is None else with_sets(case, whole=sets)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
def test_objective(impl, head, with_entropy):
    dtype, tol = PRECISION[impl]
    case = case_of(head=head)
    sets = some(case)
    want = run(case, sets, "reference", with_entropy=with_entropy)
    assert_same(run(case.to(dtype), sets, impl, with_entropy=with_entropy), want, tol)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize(
    "options", [{"max_scratch_bytes": 9000}, {"compact": False}, {"freeze": True}, {"scope": "sequence"}, {"scope": "batch"}],
    ids=lambda o: "-".join(map(str, next(iter(o.items())))),
)  # fmt: skip
def test_ways_to_run(impl, options):
    dtype, tol = PRECISION[impl]
    case = case_of(1)
    sets = some(case, 1)
    want = run(case, sets, "reference", **{n: x for n, x in options.items() if n in ("scope", "freeze")})
    assert_same(run(case.to(dtype), sets, impl, **options), want, tol)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("whole", [0.0, 0.4])
@pytest.mark.parametrize("head", list(HEADS))
def test_candidate_sets(impl, whole, head):
    dtype, tol = PRECISION[impl]
    case = case_of(2, head, whole)
    sets = some(case, 2)
    want = run(case, sets, "reference", with_entropy=True)
    assert_same(run(case.to(dtype), sets, impl, with_entropy=True), want, tol)


@pytest.mark.parametrize("impl", ENGINES)
def test_candidates_themselves_are_multiplied_once(impl, monkeypatch):
    """The tokens of a set, as `alternatives`: no product beside those of the sets."""
    dtype, tol = PRECISION[impl]
    case = case_of(3, sets=0.0)
    sets = case.options["candidates"]
    want = run(case, sets, "reference")
    monkeypatch.setattr(engine_of_alternatives, "score_pairs", None)
    # `native` takes the whole head for sets of more than V / 8
    wide = replace(case, lm_head_weight=torch.cat([case.lm_head_weight, case.lm_head_weight, case.lm_head_weight]))
    assert_same(run((wide if impl == "native" else case).to(dtype), sets, impl, freeze=impl == "native"), want, tol)


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
@pytest.mark.parametrize("sets", [None, 0.3], ids=["whole", "sets"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
def test_logprobs(impl, sets, with_entropy):
    dtype, tol = PRECISION[impl]
    case = case_of(4, "softcap", sets)
    others = some(case, 4)
    found = {}
    for name, x in (("reference", case), (impl, case.to(dtype))):
        hidden, weight = (t.detach().requires_grad_() for t in (x.hidden_states, x.lm_head_weight))
        given = {n: v for n, v in x.options.items() if n in (*HEADS["softcap"], "candidates")}
        out = fused_linear_logprobs(
            hidden, weight, x.completion_ids, x.completion_mask, alternatives=others, with_entropy=with_entropy,
            impl=name, **given,
        )  # fmt: skip
        g = torch.Generator().manual_seed(3)
        total = sum((y * torch.randn(y.shape, generator=g, dtype=torch.float64)).sum() for y in out if y is not None)
        total.backward()
        found[name] = out, hidden.grad, weight.grad
    want, got = found["reference"], found[impl]
    assert got[0].alternative_logps.shape == others.ids.shape
    torch.testing.assert_close(got[0].alternative_logps.double(), want[0].alternative_logps, rtol=0, atol=10 * tol)
    masked = ~case.completion_mask.reshape(-1)[others.positions]
    assert masked.any()
    assert (got[0].alternative_logps[masked] == 0).all()
    for a, b in zip(got[1:], want[1:], strict=True):
        assert frobenius_error(a, b) <= 2 * tol


@pytest.mark.parametrize("impl", ["chunked", "native", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_narrow_dtypes(impl, dtype):
    """Rounded once: dlogits, with the alternatives' entries, and the results."""
    case = make_case(5, B=4, T=32, H=32, V=61, extras=False).to(dtype)
    exact, sets = case.to(torch.float64), some(case, 5)
    want, got = run(exact, sets, "reference"), run(case, sets, impl)
    hidden = exact.hidden_states.masked_fill(~case.completion_mask.unsqueeze(-1), 0.0)
    products = (hidden @ exact.lm_head_weight.T).requires_grad_()
    log_p = products.log_softmax(-1).flatten(0, 1)
    rows = case.completion_mask.reshape(-1).nonzero()[:, 0]
    g = torch.Generator().manual_seed(7)
    weights = torch.randn(len(sets.ids), generator=g, dtype=torch.float64)
    advantages = torch.randn(case.completion_ids.shape, generator=g, dtype=torch.float64).reshape(-1)
    chosen = sets.select(rows)
    loss_of(
        log_p[rows, case.completion_ids.reshape(-1)[rows]], None,
        alternative_logps=log_p[rows[chosen.positions], chosen.ids], alternative_offsets=chosen.offsets,
        weights=weights[sets.places(rows)], advantages=advantages[rows],
    ).sum().backward()  # fmt: skip
    best = rounding_errors(products.grad.detach().flatten(0, 1), hidden.flatten(0, 1), exact.lm_head_weight, dtype)
    for name, x in want[1].items():
        assert frobenius_error(got[1][name], x) <= ROUNDINGS * best[name], name


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
def test_the_target_has_its_own_logp_to_the_bit(impl):
    dtype, _ = PRECISION[impl]
    case = make_case(6, B=4, T=9, H=24, V=97, extras=False).to(dtype)
    ids = case.completion_ids.reshape(-1)
    sets = CandidateSets(ids, torch.arange(len(ids) + 1))
    out = fused_linear_logprobs(
        case.hidden_states, case.lm_head_weight, case.completion_ids, alternatives=sets, impl=impl
    )
    assert torch.equal(out.alternative_logps, out.logps.reshape(-1))


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("margin", [6.0, 12.0, 25.0])
def test_a_confident_alternative_keeps_its_digits(impl, margin):
    """Its log-prob is -log(1 + rest), its gradient (c - C) - C (p - 1): neither comes from a difference."""
    dtype, tol = PRECISION[impl]
    N, H, V = 5, 8, 40
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g, dtype=torch.float64)
    weight = 0.1 * torch.randn(V, H, generator=g, dtype=torch.float64)
    bias = torch.zeros(V, dtype=torch.float64)
    bias[3] = margin
    hidden, weight, bias = (x.to(dtype) for x in (hidden, weight, bias))
    targets, sets = torch.full((N,), 5), CandidateSets(torch.full((N,), 3), torch.arange(N + 1))

    def both(name, hidden, weight, bias):
        hidden = hidden.detach().requires_grad_()
        out = fused_linear_logprobs(hidden, weight, targets, lm_head_bias=bias, alternatives=sets, impl=name)
        out.alternative_logps.sum().backward()
        return out.alternative_logps.detach(), hidden.grad

    want = both("reference", hidden.double(), weight.double(), bias.double())
    got = both(impl, hidden, weight, bias)
    assert frobenius_error(got[0], want[0]) <= (2e-6 if dtype == torch.float32 else 1e-12)
    assert frobenius_error(got[1], want[1]) <= 5 * tol


@pytest.mark.parametrize("impl", ["chunked", "native", "triton"])
def test_scores_do_not_depend_on_the_batch(impl):
    dtype, _ = PRECISION[impl]
    case = make_case(8, B=3, T=50, H=40, V=131, extras=False, masked=0.0).to(dtype)
    ids = case.completion_ids.reshape(-1)
    sets = some(case, 8)
    hidden = case.hidden_states.flatten(0, 1)
    every = fused_linear_logprobs(hidden, case.lm_head_weight, ids, alternatives=sets, impl=impl)
    part = torch.arange(40, 97)
    alone = fused_linear_logprobs(
        hidden[part], case.lm_head_weight, ids[part], alternatives=sets.select(part), impl=impl
    )
    if impl != "chunked":
        assert torch.equal(alone.alternative_logps, every.alternative_logps[sets.places(part)])
    else:
        torch.testing.assert_close(alone.alternative_logps, every.alternative_logps[sets.places(part)])


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
def test_masked_alternatives_are_never_read(impl):
    dtype, _ = PRECISION[impl]
    case = case_of(9).to(dtype)
    sets = some(case, 9)
    masked = ~case.completion_mask.reshape(-1)[sets.positions]
    ids = sets.ids.masked_fill(masked, 10**9)
    want, got = run(case, sets, impl), run(case.poisoned(), CandidateSets(ids, sets.offsets), impl)
    assert torch.equal(want[0].loss, got[0].loss)
    assert torch.equal(want[1]["dweight"], got[1]["dweight"])
    got = run(case.poisoned(), CandidateSets(ids, sets.offsets), impl, compact=False)
    torch.testing.assert_close(want[1]["dweight"], got[1]["dweight"])
    for compact in (True, False):
        x = case.poisoned()
        weight = x.lm_head_weight.detach().requires_grad_()
        out = fused_linear_logprobs(
            x.hidden_states, weight, x.completion_ids, x.completion_mask, impl=impl, compact=compact,
            alternatives=CandidateSets(ids, sets.offsets),
        )  # fmt: skip
        assert (out.alternative_logps[masked] == 0).all()
        out.alternative_logps.sum().backward()
        assert weight.grad.isfinite().all()


def test_masked_candidates_are_never_read():
    """Ids beyond the vocabulary, which would be those of other positions."""
    last = CandidateSets(torch.tensor([3]), torch.tensor([0, 0, 1]))
    assert CandidateSets(torch.tensor([13, 2, 3]), torch.tensor([0, 1, 3])).find(last, vocab_size=10).tolist() == [2]
    case = case_of(9, sets=0.0).to(torch.float32)
    sets, alternatives, V = case.options["candidates"], some(case, 9), len(case.lm_head_weight)
    masked = ~case.completion_mask.reshape(-1)[sets.positions]
    want = run(case, alternatives, "chunked")
    for step in (V, 2 * V, -V):
        strange = CandidateSets(sets.ids + step * masked, sets.offsets)
        got = run(replace(case, options=case.options | {"candidates": strange}), alternatives, "chunked")
        assert torch.equal(got[0].loss, want[0].loss)
        assert torch.equal(got[1]["dweight"], want[1]["dweight"])


@pytest.mark.parametrize("impl", ENGINES)
def test_an_impossible_alternative(impl):
    """Its log-prob is -inf, the lowest that an objective sees; it gets no gradient, and others get theirs."""
    dtype, tol = PRECISION[impl]
    case = make_case(10, extras=False, lm_head_bias=torch.zeros(29, dtype=torch.float64))
    bias = case.options["lm_head_bias"]
    bias[4] = -math.inf
    case = replace(case, completion_ids=case.completion_ids.masked_fill(case.completion_ids == 4, 5))
    ids = torch.tensor([4, 6]).repeat(case.completion_ids.numel())
    sets = CandidateSets(ids, torch.arange(0, len(ids) + 1, 2))
    out = fused_linear_logprobs(
        case.hidden_states, case.lm_head_weight, case.completion_ids, case.completion_mask, lm_head_bias=bias,
        alternatives=sets, impl="chunked",
    )  # fmt: skip
    active = case.completion_mask.reshape(-1)
    assert (out.alternative_logps.view(-1, 2)[active, 0] == -math.inf).all()
    assert out.alternative_logps.view(-1, 2)[:, 1].isfinite().all()
    for with_entropy in (False, True):
        want = run(case, sets, "reference", with_entropy=with_entropy)
        got = run(case.to(dtype), sets, impl, with_entropy=with_entropy)
        for name in ("dhidden", "dweight"):
            assert frobenius_error(got[1][name], want[1][name]) <= 10 * tol, name


@pytest.mark.parametrize("scope", ["token", "batch"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_an_objective_sees_a_finite_log_prob_of_an_impossible_alternative(trained, scope):
    hidden, weight, bias = torch.randn(3, 5, requires_grad=trained), torch.randn(9, 5), torch.zeros(9)
    bias[4] = -math.inf
    seen = []

    def objective(logps, entropies, *, alternative_logps, **offsets):
        seen.append(alternative_logps)
        return logps

    fused_linear_objective(
        hidden, weight, torch.tensor([1, 2, 3]), objective, lm_head_bias=bias, cu_seqlens=torch.tensor([0, 3]),
        scope=scope, alternatives=CandidateSets(torch.tensor([4, 5]), torch.tensor([0, 1, 2, 2])),
    )  # fmt: skip
    assert seen[0].tolist()[0] == -1e4
    assert seen[0].isfinite().all()


def test_all_derivatives_are_scaled_by_the_largest():
    """fp16 dlogits of a GPU are multiplied by a power of two, chosen so that entries do not overflow either."""
    nothing, entries = torch.zeros(2), Entries(torch.tensor([1]), torch.tensor([3]), torch.tensor([2.0**14]))
    found = Coefficients(Statistics(nothing, nothing, nothing, None), torch.ones(2), torch.ones(2), entries)
    scaled = found.scaled(torch.tensor(0.25))
    assert (scaled.dlogp == 0.25).all()
    assert (scaled.dentropy == 0.25).all()
    assert scaled.entries.values.tolist() == [2.0**12]
    head = LMHead(torch.zeros(4, 2))
    assert float(fp16_scale(head, 1.0, found.dlogp, None)) == 2.0**8
    assert float(fp16_scale(head, 1.0, found.dlogp, None, entries)) == 2.0**-6
    assert float(fp16_scale(head, 1.0, found.dlogp, found.dentropy)) == 2.0**2  # at most 1 + 32
    assert float(fp16_scale(head._replace(logit_scale=-8.0), torch.tensor([1.0, 0.25]), found.dlogp, None)) == 2.0**3
    assert float(fp16_scale(head, 1.0, nothing, None)) == 2.0**120


@pytest.mark.parametrize("impl", ENGINES)
def test_cancelled_coefficients_leave_their_entries(impl):
    """Coefficients that sum to 0 in every row: no entry by the formula, and still a gradient."""
    dtype, tol = PRECISION[impl]
    case = case_of(11)
    ids = torch.stack([(case.completion_ids.reshape(-1) + k) % 29 for k in (1, 2)], 1)
    sets = CandidateSets(ids.reshape(-1), torch.arange(0, ids.numel() + 1, 2))

    def difference(logps, entropies, *, alternative_logps, alternative_offsets, weights, advantages):
        first, second = alternative_logps.view(-1, 2).unbind(1)
        return advantages * (first - second) + 0.0 * logps

    want, got = (
        run(case, sets, "reference", objective=difference),
        run(case.to(dtype), sets, impl, objective=difference),
    )
    assert_same(got, want, tol)
    assert want[1]["dweight"].abs().max() > 0


@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_many_blocks(impl, monkeypatch):
    """Blocks of few alternatives, several blocks of the vocabulary, and rows without a gradient."""
    monkeypatch.setattr(engine_of_alternatives, "_BLOCKS", {"cpu": 7})
    monkeypatch.setattr(import_module("grpo_fused.engines.pairs"), "_PRODUCT_BYTES", {"cpu": 3 * 4 * 24})
    dtype, tol = PRECISION[impl]
    case = make_case(12, B=4, T=60, H=24, V=3000, extras=False)
    sets = some(case, 12, most=30)
    want = run(case, sets, "reference")
    assert_same(run(case.to(dtype), sets, impl), want, tol)

    def half(logps, entropies, *, advantages, weights, **inputs):
        return loss_of(logps, entropies, advantages=advantages * (advantages > 0.3), weights=0.0 * weights, **inputs)

    assert_same(run(case.to(dtype), sets, impl, objective=half), run(case, sets, "reference", objective=half), tol)


@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "sets"])
@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_blocks_of_sets_entropies_and_sequences(impl, truncated, scope, monkeypatch):
    monkeypatch.setattr(engine_of_alternatives, "_BLOCKS", {"cpu": 7})
    dtype, tol = PRECISION[impl]
    case = make_case(13, B=4, T=20, H=24, V=300, extras=False)
    case = with_sets(case, whole=0.3) if truncated else case
    sets = some(case, 13)

    def objective(logps, entropies, *, cu_seqlens=None, **inputs):
        loss = loss_of(logps, entropies, **inputs)
        if cu_seqlens is None:
            return loss
        return loss * torch.cat([part.mean().expand(len(part)) for part in logps.split(cu_seqlens.diff().tolist())])

    options = {"scope": scope, "with_entropy": True, "objective": objective}
    assert_same(run(case.to(dtype), sets, impl, **options), run(case, sets, "reference", **options), tol)


@pytest.mark.parametrize(("impl", "bytes_each"), [("native", 42), ("chunked", 24)])
def test_an_alternative_takes_a_few_bytes(impl, bytes_each):
    """Its entry, 20 bytes, in `native` 24 more to bring it in the order of the library; the rest is done in blocks."""
    if engines.unavailable(impl, torch.device("cpu"), torch.bfloat16):
        pytest.skip("not built")
    N, H, V = 1024, 64, 4000
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=g).bfloat16().requires_grad_() for shape in ((N, H), (V, H)))
    targets = torch.randint(V, (N,), generator=g)
    inputs = {"advantages": torch.randn(N, generator=g), "sampling_per_token_logps": torch.full((N,), -8.0)}

    def peak(K):
        sets = CandidateSets(torch.randint(V, (N * K,), generator=g), torch.arange(0, N * K + 1, K))
        others = {"sampling_alternative_logps": torch.full((N * K,), -8.0)}
        objective = objectives.score_centered_tis("top_k")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            fused_linear_objective(
                hidden,
                weight,
                targets,
                objective,
                inputs=inputs,
                alternatives=sets,
                alternative_inputs=others,
                impl=impl,
            ).loss.backward()
        hidden.grad = weight.grad = None
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        return max(accumulate(changes))

    peak(1)  # the libraries' own memory
    assert peak(128) - peak(1) < bytes_each * 127 * N


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no sets": ({"alternatives": torch.zeros(3)}, "alternatives must be CandidateSets; got Tensor"),
    "other positions": ({"alternatives": CandidateSets(torch.tensor([1]), torch.tensor([0, 1]))},
                        "alternatives must have a set for each of 4 positions; got 1"),
    "out of range": ({"alternatives": CandidateSets(torch.tensor([1, 9]), torch.tensor([0, 1, 2, 2, 2]))},
                     r"alternative ids must lie in \[0, 9\); got 1 to 9"),
    "offsets": ({"alternatives": CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 1, 1, 1, 1]))},
                "offsets of alternatives must rise from 0 to 2"),
    "outside of a set of one": (
        {"alternatives": CandidateSets(torch.tensor([3]), torch.tensor([0, 1, 1, 1, 1])),
         "candidates": CandidateSets(torch.tensor([0]), torch.tensor([0, 1, 1, 1, 1]))},
        "an alternative must be in the candidate set of its token; got 1 that are not",
    ),
    "outside of the set": (
        {"alternatives": CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 2, 2, 2, 2])),
         "candidates": CandidateSets(torch.tensor([0, 1]), torch.tensor([0, 2, 2, 2, 2]))},
        "an alternative must be in the candidate set of its token; got 1 that are not"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(ERRORS))
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_errors(what, impl):
    options, message = ERRORS[what]
    hidden, weight, ids = torch.randn(4, 5), torch.randn(9, 5), torch.zeros(4, dtype=torch.int64)
    with pytest.raises((ValueError, TypeError), match=message):
        fused_linear_logprobs(hidden, weight, ids, impl=impl, **options)
    with pytest.raises((ValueError, TypeError), match=message):
        fused_linear_objective(hidden, weight, ids, lambda *_, **__: None, impl=impl, **options)


def test_errors_of_inputs():
    hidden, weight, ids = torch.randn(4, 5), torch.randn(9, 5), torch.zeros(4, dtype=torch.int64)
    sets = CandidateSets(torch.tensor([1, 2]), torch.tensor([0, 1, 2, 2, 2]))

    def refuse(message, **options):
        with pytest.raises(ValueError, match=message):
            fused_linear_objective(hidden, weight, ids, lambda logps, *_, **__: logps, **options)

    refuse("alternative_inputs need alternatives; got q and None", alternative_inputs={"q": torch.zeros(2)})
    refuse(r"alternative_inputs\['q'\] must have shape \(2,\) to go with alternatives.ids; got \(3,\)",
           alternatives=sets, alternative_inputs={"q": torch.zeros(3)})  # fmt: skip
    refuse(r"alternative_inputs\['q'\] must be detached", alternatives=sets,
           alternative_inputs={"q": torch.zeros(2, requires_grad=True)})  # fmt: skip
    refuse("different names; got 'q' in both", alternatives=sets, alternative_inputs={"q": torch.zeros(2)},
           inputs={"q": torch.zeros(4)})  # fmt: skip
    refuse("not cu_seqlens, alternative_logps, alternative_offsets; got 'alternative_logps'", alternatives=sets,
           inputs={"alternative_logps": torch.zeros(4)})  # fmt: skip
