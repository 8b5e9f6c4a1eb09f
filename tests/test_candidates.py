"""Candidate sets: the distribution renormalised over a set, against a dense mask in float64."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import (
    ENGINES,
    PRECISION,
    assert_same,
    config_id,
    frobenius_error,
    make_case,
    make_config,
    set_scores,
    with_sets,
)

from grpo_fused import (
    CandidateSets,
    GRPOLossConfig,
    engines,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
)
from grpo_fused.engines.scratch import sparse_zeros_like
from grpo_fused.testing import BITWISE

HEADS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "logit_scale": 0.7, "softcap": 3.0},
    {"temperature": torch.linspace(0.5, 2, 28, dtype=torch.float64).view(4, 7),
     "lm_head_bias": torch.linspace(-1, 1, 29, dtype=torch.float64)},
]  # fmt: skip


@pytest.mark.pairs
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("whole", [0.0, 0.3], ids=["sets", "mixed"])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: "+".join(head) or "plain")
@pytest.mark.parametrize(
    "config",
    [
        make_config("dapo", beta=0.1, entropy_coef=0.05),
        make_config("grpo", importance_sampling_level="sequence", beta=0.1),
        make_config("vespo"),
        make_config("dapo", top_entropy_quantile=0.5, entropy_coef=0.1),
    ],
    ids=config_id,
)
def test_loss_is_that_of_a_dense_mask(config, head, whole, impl):
    dtype, tol = PRECISION[impl]
    case = with_sets(make_case(0, **head), whole=whole).poisoned()
    want = case.run(config, impl="reference")
    assert_same(case.to(dtype).run(config, impl=impl), want, tol=tol)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(dtype, impl):
    B, V = (2, 100) if impl == "triton" else (8, 300)
    case = with_sets(make_case(3, B=B, T=16, H=64, V=V, dtype=dtype, grid=0.02, logit_std=3.0), whole=0.1)
    config = make_config("dapo", beta=0.1)
    got, want = (
        case.run(config, impl=impl, upstream=4.0),
        case.to(torch.float64).run(config, impl="reference", upstream=4.0),
    )
    torch.testing.assert_close(got.out.per_token_logps, want.out.per_token_logps.float(), rtol=0, atol=1e-4)
    for name, gradient in want.gradients().items():
        # entries in both parts of a mixed dW are rounded twice
        assert frobenius_error(got.gradients()[name], gradient) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
def test_against_autograd_through_a_masked_softmax(impl):
    """Independent of the reference: random sets, 60 cases (6 interpreted), log-probs, entropies and gradients of both."""
    dtype, tol = PRECISION[impl]
    for seed in range(6 if impl == "triton" else 60):
        g = torch.Generator().manual_seed(seed)
        N, H, V = int(torch.randint(1, 9, (1,), generator=g)), int(torch.randint(1, 40, (1,), generator=g)), 23
        h, w = torch.randn(N, H, generator=g, dtype=torch.float64), torch.randn(V, H, generator=g, dtype=torch.float64)
        kept = torch.rand(N, V, generator=g) < torch.rand(N, 1, generator=g)
        ids = torch.randint(0, V, (N,), generator=g)
        kept[torch.arange(N), ids] = True
        c = torch.randn(2, N, generator=g, dtype=torch.float64)
        h, w = h.to(dtype).double().requires_grad_(), w.to(dtype).double().requires_grad_()
        log_p = (h @ w.T).masked_fill(~kept, -torch.inf).log_softmax(-1)
        entropies = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
        logps = log_p.gather(-1, ids.unsqueeze(1)).squeeze(1)
        want = torch.autograd.grad((c[0] * logps + c[1] * entropies).sum(), (h, w))
        given = h.detach().to(dtype).requires_grad_(), w.detach().to(dtype).requires_grad_()
        out = fused_linear_logprobs(*given, ids, candidates=CandidateSets.from_mask(kept), with_entropy=True, impl=impl)
        got = torch.autograd.grad((c[0] * out.logps + c[1] * out.entropies).sum(), given)
        torch.testing.assert_close(out.logps.double(), logps, rtol=0, atol=10 * tol)
        torch.testing.assert_close(out.entropies.double(), entropies, rtol=0, atol=10 * tol)
        for mine, theirs in zip(got, want, strict=True):
            assert (mine.double() - theirs).norm() <= 2 * tol * theirs.norm().clamp(min=1.0)


def test_gradcheck():
    case = with_sets(make_case(2, B=3, T=3, H=4, V=7), sizes=(1, 2, 5), whole=0.2)
    config = make_config("dapo", beta=0.1, entropy_coef=0.1)
    given = case.inputs(config)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fused_linear_grpo_loss(hidden, weight, case.completion_ids, case.advantages, case.completion_mask,
                                      config=config, impl="chunked", **given).loss  # fmt: skip

    tensors = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    assert torch.autograd.gradcheck(loss, tensors)


@pytest.mark.parametrize("impl", ENGINES)
def test_packed_is_padded(impl):
    dtype, tol = PRECISION[impl]
    case = with_sets(make_case(4), whole=0.2)
    packed = case.packed()
    keep = case.completion_mask.clone()
    keep[::2] = True
    packed.options["candidates"] = case.options["candidates"].select(keep.reshape(-1).nonzero().squeeze(1))
    config = make_config("grpo", beta=0.1)
    want, got = case.run(config, impl="reference"), packed.to(dtype).run(config, impl=impl)
    torch.testing.assert_close(got.out.loss.double(), want.out.loss, rtol=tol, atol=tol)
    assert frobenius_error(got.dweight, want.dweight) <= tol


def every_second(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them in memory."""
    return torch.stack([x, torch.full_like(x, 17)], dim=-1)[..., 0]


@pytest.mark.parametrize("impl", ENGINES)
def test_tensors_with_gaps(impl):
    hidden, weight, ids = torch.randn(6, 16), torch.randn(29, 16), torch.randint(29, (6,))
    sets = CandidateSets.from_padded(torch.stack([ids, (ids + 3) % 29, (ids + 7) % 29], dim=1))
    gaps = CandidateSets(every_second(sets.ids), every_second(sets.offsets))
    bias = every_second(torch.randn(29))
    got, want = (
        fused_linear_logprobs(hidden, weight, ids, lm_head_bias=b, candidates=x, impl=impl).logps
        for b, x in ((bias, gaps), (bias.clone(), sets))
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"])
def test_a_token_alone_in_its_set_has_a_log_prob_of_0_in_an_objective_too(name):
    case = with_sets(make_case(5, extras=False), sizes=(1,)).to(torch.float32)
    head = (case.hidden_states, case.lm_head_weight, case.completion_ids)
    seen = []

    def objective(logps, entropies, **inputs):
        seen.append(inputs)
        return -logps

    objective.scope = "token"
    options = {"mask": case.completion_mask, "candidates": case.options["candidates"]}
    for value, error in (
        (0.0, nullcontext()),
        (-2.0, pytest.raises(ValueError, match=f"{name} must be 0 where a token is alone")),
    ):
        given = torch.full(case.completion_ids.shape, value)
        with error:
            fused_linear_objective(*head, objective, inputs={name: given}, **options)
    assert len(seen) > 0


@pytest.mark.parametrize("impl", ENGINES)
def test_a_set_of_one_token(impl):
    """Its log-prob and entropy are 0, and it needs no gradient work; but it counts."""
    case = with_sets(make_case(5, extras=False), sizes=(1,)).to(torch.float32)
    config = GRPOLossConfig()
    got = case.run(config, impl=impl)
    assert (got.out.per_token_logps == 0).all()
    assert (got.out.entropies == 0).all()
    assert (got.dhidden == 0).all()
    assert (got.dweight == 0).all()
    assert got.out.metrics["gradient_tokens"] == 0
    active = case.completion_mask
    assert got.out.metrics["active_tokens"] == active.sum()
    want = -(case.advantages.unsqueeze(1) * active).sum() / active.sum()
    torch.testing.assert_close(got.out.loss, want.float())


def test_tokens_with_a_gradient_of_their_entropy_alone_are_counted():
    case = with_sets(make_case(0), sizes=(3, 9), whole=0.3)
    case.advantages.zero_()
    got = case.run(make_config("dapo", entropy_coef=0.1), impl="chunked")
    assert got.out.metrics["gradient_tokens"] == case.completion_mask.sum()


def test_tokens_without_a_gradient_are_not_counted():
    case = with_sets(make_case(0, extras=False), sizes=(3, 9), whole=0.3)
    case.advantages[1] = 0.0
    got = case.run(GRPOLossConfig(), impl="chunked")
    assert got.out.metrics["gradient_tokens"] == got.dhidden.any(-1).sum() < case.completion_mask.sum()


@pytest.mark.parametrize("impl", BITWISE)
def test_a_token_is_the_same_in_any_batch_and_with_any_threads(impl):
    H = 40 if impl == "triton" else 200
    case = with_sets(make_case(6, B=6, T=2, H=H, V=120, dtype=torch.bfloat16), sizes=(2, 30, 90), whole=0.2)
    every = set_scores(case, impl)
    sets = case.options["candidates"]
    for n in (0, 5, 11):
        hidden, ids = case.hidden_states.reshape(12, -1)[n : n + 1], case.completion_ids.reshape(-1)[n : n + 1]
        alone = fused_linear_logprobs(
            hidden, case.lm_head_weight, ids, candidates=sets.select(torch.tensor([n])), impl=impl
        )
        if case.completion_mask.reshape(-1)[n]:
            assert alone.logps.item() == every.reshape(-1)[n].item()
    before, threads = case.run(GRPOLossConfig(), impl=impl), torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        after = case.run(GRPOLossConfig(), impl=impl)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(before.dweight, after.dweight)
    assert torch.equal(before.dhidden, after.dhidden)


@pytest.mark.parametrize("impl", ENGINES)
def test_confident_tokens_are_accurate(impl):
    margins = torch.tensor([18.0, 20.0, 30.0, 60.0], dtype=torch.float64)
    hidden = torch.ones(4, 1, dtype=torch.float64)
    # the target's own row is not 0: its 1 - p is seen in dH
    weight = torch.tensor([[1.0]] + [[1.0 - m] for m in margins.tolist()], dtype=torch.float64)
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[:, 0] = True
    mask[torch.arange(4), torch.arange(1, 5)] = True
    ids = torch.zeros(4, dtype=torch.int64)
    out = fused_linear_logprobs(
        hidden.float(), weight.float(), ids, candidates=CandidateSets.from_mask(mask), with_entropy=True, impl=impl
    )
    p = (-margins).exp()
    torch.testing.assert_close(out.logps.double(), -p.log1p(), rtol=1e-6, atol=0)
    given = hidden.float().requires_grad_()
    fused_linear_logprobs(
        given, weight.float(), ids, candidates=CandidateSets.from_mask(mask), impl=impl
    ).logps.sum().backward()
    torch.testing.assert_close(given.grad.double()[:, 0], margins * p / (1 + p), rtol=1e-5, atol=0)
    want = p.log1p() + margins * p / (1 + p)
    torch.testing.assert_close(out.entropies.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ENGINES)
def test_equal_logits(impl):
    """Several maxima: all of them except one are in the sum."""
    sets = CandidateSets(torch.tensor([3, 1, 4, 0, 2]), torch.tensor([0, 3, 5]))
    hidden, weight, ids = torch.ones(2, 2), torch.ones(40, 2), torch.tensor([3, 2])
    out = fused_linear_logprobs(hidden, weight, ids, candidates=sets, with_entropy=True, impl=impl)
    want = torch.tensor([3.0, 2.0]).log()
    torch.testing.assert_close(out.logps, -want)
    torch.testing.assert_close(out.entropies, want)


@pytest.mark.parametrize("impl", ENGINES)
def test_a_candidate_that_the_bias_rules_out(impl):
    """It counts 0: in value, entropy and both gradients those of the set without it."""
    dtype, tol = PRECISION[impl]
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=g).to(dtype).requires_grad_() for n in (2, 40))
    bias, ids, found = torch.zeros(40), torch.tensor([3, 2]), []
    bias[4] = -torch.inf
    for sets in ([3, 1, 4, 2, 4, 0], [3, 1, 2, 0]):
        sets = CandidateSets(torch.tensor(sets), torch.tensor([0, len(sets) // 2, len(sets)]))
        out = fused_linear_logprobs(
            hidden, weight, ids, candidates=sets, lm_head_bias=bias, with_entropy=True, impl=impl
        )
        found.append([*out[:2], *torch.autograd.grad(out.logps.sum() + 2 * out.entropies.sum(), (hidden, weight))])
    for got, want in zip(*found, strict=True):
        assert want.abs().max() > 0.01
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def test_a_frozen_head_and_a_scaled_loss():
    case = with_sets(make_case(7, H=16, V=40, dtype=torch.float16), whole=0.0)
    config = GRPOLossConfig()
    hidden = case.hidden_states.detach().requires_grad_()
    out = fused_linear_grpo_loss(hidden, case.lm_head_weight, case.completion_ids, case.advantages,
                                 case.completion_mask, config=config, impl="chunked", **case.inputs(config))  # fmt: skip
    out.loss.backward()
    want = case.run(config, impl="chunked")
    assert torch.equal(hidden.grad, want.dhidden)
    scaled, exact = (
        case.run(config, impl="chunked", upstream=2.0**14),
        case.to(torch.float64).run(config, impl="reference"),
    )
    assert frobenius_error(scaled.dweight.double() / 2**14, exact.dweight) < 1e-3


@pytest.mark.parametrize("impl", ENGINES)
def test_autocast_rounds_as_without_sets(impl):
    case = with_sets(make_case(8, H=32, V=50, dtype=torch.float32), whole=0.2)
    config = GRPOLossConfig()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = case.run(config, impl=impl), case.run(config, impl="reference")
    torch.testing.assert_close(got.out.per_token_logps, want.out.per_token_logps, rtol=0, atol=1e-5)
    assert got.dweight.dtype == torch.float32
    assert frobenius_error(got.dweight, want.dweight) < 2**-7


def test_the_largest_set_that_is_worked_by_its_rows():
    sizes = {V: engines.largest_sparse_set("native", V) for V in (80, 512, 1000, 8000, 151936)}
    assert sizes == {80: 10, 512: 64, 1000: 64, 8000: 83, 151936: 1582}
    assert engines.largest_sparse_set("chunked", 80) == 80


@pytest.mark.parametrize("where", [slice(None), slice(0, 1)], ids=["all", "alone"])
def test_large_sets_are_worked_by_the_whole_head(where, monkeypatch):
    """By the size of a set alone, in any batch: here of more than V / 8 tokens."""
    from grpo_fused.engines.native import NativeEngine

    worked, score = [], NativeEngine.score
    monkeypatch.setattr(NativeEngine, "score", lambda self, work: (worked.append(work.rows), score(self, work))[1])
    mask = torch.arange(80) < torch.tensor([11, 10, 1, 79, 80, 2]).unsqueeze(1)
    sets, ids = CandidateSets.from_mask(mask[where]), torch.zeros(len(mask[where]), dtype=torch.int64)
    hidden, weight = torch.randn(len(ids), 16), torch.randn(80, 16)
    got = fused_linear_logprobs(hidden, weight, ids, candidates=sets, impl="native")
    want = fused_linear_logprobs(hidden, weight, ids, candidates=sets, impl="reference")
    assert [rows.tolist() for rows in worked] == [[0, 3, 4] if where == slice(None) else [0]]
    torch.testing.assert_close(got.logps, want.logps, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.entropies, want.entropies, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("size", [3, 20], ids=["small", "large"])
@pytest.mark.parametrize("impl", ["native", "chunked", "reference"])
def test_sets_of_masked_tokens_may_hold_anything(impl, size, compact):
    """Ids beyond the vocabulary of 80; `native` works sets of more than V / 8 tokens by the whole head."""
    kept = torch.stack([torch.randperm(80)[:size] for _ in range(9)])
    mask, hidden, weight = torch.arange(9) % 4 != 3, torch.randn(9, 16), torch.randn(80, 16)
    found = []
    for beyond in (0, 500):
        ids = torch.where(mask.unsqueeze(1), kept, kept + beyond)
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        sets = CandidateSets(ids.flatten(), torch.arange(0, 9 * size + 1, size))
        out = fused_linear_logprobs(*inputs, kept[:, 0], mask, candidates=sets, impl=impl, compact=compact)
        found.append((out.logps, *torch.autograd.grad(out.logps.sum(), inputs)))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("scratch", [None, 1], ids=["kept", "computed again"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "head", [{}, {"softcap": 5.0}, {"temperature": 0.25}, {"logit_scale": -4.0}], ids=lambda head: "+".join(head)
)
def test_large_sets_that_leave_out_whole_blocks_of_the_vocabulary(head, dtype, scratch):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=g).to(dtype).requires_grad_() for n in (3, 2000))
    sets = CandidateSets.from_mask((torch.arange(2000) < 500).repeat(3, 1))
    ids = torch.tensor([0, 499, 7])
    grads = []
    for impl in ("native", "reference"):
        out = fused_linear_logprobs(hidden, weight, ids, candidates=sets, impl=impl, max_scratch_bytes=scratch,
                                    with_entropy=True, **head)  # fmt: skip
        grads.append(torch.autograd.grad(out.logps.sum() + 2 * out.entropies.sum(), (hidden, weight)))
    for got, want in zip(*grads, strict=True):
        assert frobenius_error(got, want) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert (grads[0][1][500:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("size", [3, 190], ids=["small", "large"])
@pytest.mark.parametrize(
    ("impl", "scratch"), [("native", None), ("native", 1), ("chunked", None), ("reference", None)],
    ids=["kept", "computed again", "chunked", "reference"],
)  # fmt: skip
def test_rows_of_the_weight_outside_every_set_touch_nothing(impl, size, bad, scratch, dtype):
    """Sets below and above the limit, beyond which `native` multiplies whole; 70 tokens fill a panel of 64 and part of the next.

    Rows of even and odd numbers, which share words of operands, and the neighbour of a row in a set.
    """
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 17, generator=g).to(dtype).requires_grad_() for n in (70, 600))
    sets = CandidateSets.from_mask(((torch.arange(600) >= 10) & (torch.arange(600) < 10 + size)).repeat(70, 1))
    ids = torch.randint(10, 10 + size, (70,), generator=g)
    found = []
    for outside in (1.0, bad):
        with torch.no_grad():
            weight[[3, 4, 10 + size, 599]] = outside
        out = fused_linear_logprobs(hidden, weight, ids, candidates=sets, impl=impl, max_scratch_bytes=scratch,
                                    with_entropy=True)  # fmt: skip
        found.append((*out[:2], *torch.autograd.grad((out.logps + out.entropies).sum(), (hidden, weight))))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)
    with torch.no_grad():
        weight[11] = bad  # in every set
    assert fused_linear_logprobs(hidden, weight, ids, candidates=sets, impl=impl).logps.isnan().all()


@pytest.mark.parametrize("impl", ["native", "chunked"])
def test_a_masked_position_without_a_set_reads_no_row_of_the_weight(impl):
    """With `compact=False` too, beside a token whose set `native` multiplies whole."""
    hidden, weight = torch.randn(4, 17, requires_grad=True), torch.randn(600, 17)
    weight[599] = torch.nan
    weight.requires_grad_()
    sets = CandidateSets(torch.arange(190).repeat(2), torch.tensor([0, 190, 380, 380, 380]))
    mask = torch.tensor([True, True, False, False])
    out = fused_linear_logprobs(hidden, weight, torch.arange(4), mask, candidates=sets, impl=impl, compact=False)
    for gradient in torch.autograd.grad(out.logps.sum(), (hidden, weight)):
        assert gradient.isfinite().all()


def test_a_call_holds_no_vocab_sized_tensor():
    """Besides dW: the largest allocation of a forward pass is far below that of one row block of the weight."""
    from recording import AllocationRecorder

    case = with_sets(make_case(9, B=4, T=16, H=8, V=50000, dtype=torch.float32, extras=False), sizes=(2, 8))
    with AllocationRecorder() as recorded, torch.no_grad():
        fused_linear_logprobs(case.hidden_states, case.lm_head_weight, case.completion_ids, case.completion_mask,
                              candidates=case.options["candidates"], impl="chunked")  # fmt: skip
    assert 0 < recorded.largest < 50000 * 4


@pytest.mark.parametrize("impl", ENGINES)
def test_blocks_of_candidates(impl, monkeypatch):
    """Results do not depend on the block size."""
    from grpo_fused.engines import candidates

    dtype, _ = PRECISION[impl]
    case, config = with_sets(make_case(10), whole=0.2).to(dtype), make_config("dapo", beta=0.1)
    want = case.run(config, impl=impl)
    monkeypatch.setattr(candidates, "_BLOCK_CANDIDATES", 10)
    assert_same(case.run(config, impl=impl), want, tol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [10, 300_000], ids=["small", "large"])
def test_zeros_of_a_sparse_gradient(rows, dtype):
    weight = torch.randn(rows, 64).to(dtype)[:, :60]
    zeros = sparse_zeros_like(weight)
    assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == (weight.shape, dtype, True)
    zeros[7] += 1
    assert zeros.sum(dtype=torch.float64) == 60
    assert torch.equal(pickle.loads(pickle.dumps(zeros)), zeros)
    weight = weight.requires_grad_()
    (weight.sum() * 0).backward()
    weight.grad = zeros
    torch.optim.SGD([weight], lr=1.0).step()


def test_torch_compile_runs_the_call():
    case = with_sets(make_case(11), whole=0.2)
    config = GRPOLossConfig()

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return fused_linear_grpo_loss(hidden * 1.0, case.lm_head_weight, case.completion_ids, case.advantages,
                                      case.completion_mask, config=config, impl="chunked", **case.inputs(config)).loss  # fmt: skip

    given = case.hidden_states.requires_grad_()
    (want,) = torch.autograd.grad(loss(given), given)
    (got,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(given), given)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
@pytest.mark.parametrize(("B", "T", "masked"), [(0, 3, False), (2, 0, False), (2, 3, True)])
def test_nothing_to_do(B, T, masked, impl):
    hidden, weight = torch.randn(B, T, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    ids, mask = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.bool) if masked else None
    sets = CandidateSets(torch.zeros(B * T, dtype=torch.int64), torch.arange(B * T + 1))
    out = fused_linear_grpo_loss(hidden, weight, ids, torch.ones(B), mask, candidates=sets, impl=impl)
    out.loss.backward()
    assert out.loss == 0
    assert (weight.grad == 0).all()
