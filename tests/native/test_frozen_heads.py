"""dH of a frozen head, which `native` sums while it scores: scores to the same bits, gradients as of any other head."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import frobenius_error
from recording import CostRecorder

from grpo_fused import (
    CandidateSets,
    GRPOLossConfig,
    HeadAdapter,
    QuantizedWeight,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
)
from grpo_fused.engines import cpu_library, native

pytestmark = pytest.mark.usefixtures("cpu_extension")

N, H, V = 150, 40, 2500
OPTIONS = {
    "plain": {},
    "bias": {"lm_head_bias": torch.linspace(-122, -118, V)},
    "softcap": {"softcap": 6.0, "temperature": 0.7},
    "temperatures": {"temperature": torch.linspace(0.6, 1.5, N).view(1, N), "logit_scale": 1.3},
}


class Problem:
    """Off-policy tokens; the logits have a standard deviation of `spread`."""

    def __init__(self, dtype=torch.float32, *, tokens=N, width=H, vocab=V, spread=3.0, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(1, tokens, width, generator=g).to(dtype)
        self.weight = (spread / width**0.5 * torch.randn(vocab, width, generator=g)).to(dtype)
        self.ids = torch.randint(vocab, (1, tokens), generator=g)
        self.advantages = torch.randn(1, tokens, generator=g)

    def dhidden(self, impl="native", **options):
        """(dH, per-token log-probs): in float64 if by the reference."""
        dtype = torch.float64 if impl == "reference" else self.hidden.dtype
        hidden = self.hidden.detach().to(dtype, copy=True).requires_grad_()
        if impl == "reference" and (bias := options.get("lm_head_bias")) is not None:
            options = options | {"lm_head_bias": bias.double()}
        weight = self.weight.to(dtype) if isinstance(self.weight, torch.Tensor) else self.weight
        out = fused_linear_grpo_loss(hidden, weight, self.ids, self.advantages, impl=impl, **options)
        out.loss.backward()
        return hidden.grad[0], out.per_token_logps[0]

    def offsets_above(self, by):
        """A weight with one row that is not sampled, whose logit is `by` above the offset for the first token."""
        sampled = (self.hidden[0, 0].double() @ self.weight[:: native.SAMPLE].double().T).max()
        first = self.hidden[0, 0].double()
        self.weight[5] = (first / first.dot(first) * (sampled + native.HEADROOM + by)).to(self.weight.dtype)
        return self


def assert_right(problem, **options):
    want, logps = problem.dhidden("reference", **options)
    got, scored = problem.dhidden(**options)
    # the reference rounds nothing of bf16 inputs; dlogits are rounded once
    bound = 2e-5 if problem.hidden.dtype == torch.float32 else 5e-3
    assert frobenius_error(got, want) < bound
    torch.testing.assert_close(scored.double(), logps, rtol=1e-6, atol=1e-4)


@pytest.mark.usefixtures("isa")
@pytest.mark.pairs
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(N, H, V), (1, 33, V), (64, 8, V), (65, 70, V)], ids=str)
def test_gradients_are_those_of_float64(shape, dtype, options):
    tokens, width, vocab = shape
    problem = Problem(dtype, tokens=tokens, width=width, vocab=vocab)
    if isinstance(temperature := options.get("temperature"), torch.Tensor):
        options = options | {"temperature": temperature[:, :tokens]}
    assert_right(problem, **options)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 30000])
def test_vocabularies_of_any_size(vocab):
    assert_right(Problem(tokens=70, width=8, vocab=vocab))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [900, 52000], ids=["a block for each split", "splits of several blocks"])
def test_scores_are_those_of_scoring_and_sums_of_any_threads(vocab, dtype, with_entropy, threads):
    problem = Problem(dtype, tokens=130, width=8, vocab=vocab)
    nothing = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    products = cpu_library.HeadProducts(problem.hidden[0], problem.weight)
    inputs = cpu_library.HeadInputs(products, problem.ids[0], torch.ones(130))
    want, _, none = cpu_library.head_scores(inputs, with_entropy, *nothing)
    assert none is None
    sums = []
    for count in (1, 2, 5):
        threads(count)
        table, offsets, made = cpu_library.head_scores(inputs, with_entropy, *nothing, want[0] + 1)
        assert torch.equal(table, want)
        assert offsets.numel() == 0
        sums.append(made.values)
    assert all(torch.equal(x, sums[0]) for x in sums[1:])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by", [-40.0, -0.5, 0.5, 30.0, 200.0])
def test_a_maximum_far_above_those_of_the_sample(by, dtype, monkeypatch):
    """Up to 48 nats the sums hold; beyond, dH is computed again."""
    problem = Problem(dtype).offsets_above(by)
    calls, real = [], cpu_library.head_gradient
    monkeypatch.setattr(cpu_library, "head_gradient", lambda *a: (calls.append(a[3]), real(*a))[1])
    assert_right(problem)
    z = problem.hidden[0].double() @ problem.weight.double().T
    far = z.amax(1) > z[:, :: native.SAMPLE].amax(1) + native.HEADROOM
    assert bool(far[0]) == (by > 0)
    assert [rows.tolist() for rows in calls[1:]] == ([far.nonzero().squeeze(1).tolist()] if far.any() else [])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("target", [5, 128], ids=["a target", "a sampled target"])
@pytest.mark.parametrize("margin", [5.0, 30.0, 45.0, 80.0])
def test_a_confident_token_keeps_its_digits(margin, target, monkeypatch):
    """1 - p of the target is 1e-2 to 1e-35; its row of the weight is the largest, and its dH takes no more products.

    AMX takes pieces of fp32 numbers below 1.2e-38 as 0: 1e-3 of the smallest.
    """
    problem = Problem(spread=0.5)
    first = problem.hidden[0, 0]
    problem.weight[target] = first / first.dot(first) * (margin + 8.0)
    problem.weight[1] = first / first.dot(first) * 8.0
    problem.ids[0, 0] = target
    problem.hidden, problem.ids, problem.advantages = (
        problem.hidden[:, :1],
        problem.ids[:, :1],
        problem.advantages[:, :1],
    )
    want, logps = problem.dhidden("reference")
    calls, real = [], cpu_library.head_gradient
    monkeypatch.setattr(cpu_library, "head_gradient", lambda *a: (calls.append(a), real(*a))[1])
    got, scored = problem.dhidden()
    torch.testing.assert_close(scored[0].double(), logps[0], rtol=1e-3, atol=0)
    assert frobenius_error(got[0], want[0]) < (
        2e-3 if margin == 80 and cpu_library.instruction_set() == "AMX" else 1e-4
    )
    assert len(calls) == 1


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_target_above_the_sample_takes_no_more_products(options, monkeypatch):
    """Its own z is known, with all that makes z of a product."""
    problem, calls, real = Problem(spread=1.0), [], cpu_library.head_gradient
    options = options | {"softcap": 70.0} if "softcap" in options else options
    problem.weight[5] = 30 * problem.hidden[0, 0] / problem.hidden[0, 0].norm()
    problem.ids[0, 0] = 5
    monkeypatch.setattr(cpu_library, "head_gradient", lambda *a: (calls.append(a[3]), real(*a))[1])
    assert_right(problem, **options)
    z = calls[1:]
    assert all(0 not in rows for rows in z)


def test_a_target_that_the_adapter_raises_above_the_sample(monkeypatch):
    """Its own z has the adapter's part."""
    problem, calls, real = Problem(width=64, spread=1.0), [], cpu_library.head_gradient
    a, b = torch.randn(4, 64), torch.zeros(V, 4)
    first = problem.hidden[0, 0] @ a.T
    b[5] = 100.0 * first / first.dot(first)
    problem.ids[0, 0] = 5
    monkeypatch.setattr(cpu_library, "head_gradient", lambda *args: (calls.append(args[3]), real(*args))[1])
    problem.dhidden(lm_head_adapter=HeadAdapter(a, b))
    assert calls
    assert all(0 not in rows for rows in calls[1:])


def test_a_huge_coefficient():
    """A sum's factor is up to e48: times the coefficient it would be infinite."""
    problem = Problem()
    hidden = problem.hidden.clone().requires_grad_()
    fused_linear_objective(
        hidden, problem.weight, problem.ids, lambda logps, _: -1e25 * logps, impl="native"
    ).loss.backward()
    want = problem.hidden.double().requires_grad_()
    (1e25 * -(want @ problem.weight.double().T).log_softmax(-1).gather(-1, problem.ids.unsqueeze(-1))).sum().backward()
    assert frobenius_error(hidden.grad, want.grad) < 2e-5


def test_no_sampled_row_can_be_drawn():
    """A bias of -inf: no sampled row has a finite logit, so no offset is one."""
    problem = Problem()
    bias = torch.zeros(V)
    bias[:: native.SAMPLE] = -torch.inf
    problem.ids += (problem.ids % native.SAMPLE == 0).long()
    assert_right(problem, lm_head_bias=bias)


@pytest.mark.parametrize("groups", [0, 2], ids=["a scale a row", "two scales a row"])
def test_quantized_heads(groups):
    g = torch.Generator().manual_seed(1)
    problem = Problem(torch.bfloat16, width=64)
    values = torch.randint(-127, 128, (V, 64), generator=g, dtype=torch.int8)
    scale = 0.005 * (0.5 + torch.rand(V, groups or 1, generator=g))
    values[1:20], scale[1:20] = 0, 100.0  # far above those of sampled rows
    problem.weight = QuantizedWeight(values, scale if groups else scale.squeeze(1))
    got, scored = problem.dhidden()
    problem.weight = problem.weight.dequantize(torch.float64 if groups == 0 else torch.bfloat16)
    want, logps = problem.dhidden("reference")
    assert frobenius_error(got, want) < 5e-3
    torch.testing.assert_close(scored.double(), logps, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_of_which_only_a_is_trained(dtype):
    """B is a part of a frozen head, beside the base."""
    problem = Problem(dtype, width=64)
    g = torch.Generator().manual_seed(1)
    a, b = 0.1 * torch.randn(4, 64, generator=g), torch.randn(V, 4, generator=g)
    found = []
    for impl in ("native", "reference"):
        a = a.detach().to(torch.float64 if impl == "reference" else torch.float32).requires_grad_()
        adapter = HeadAdapter(a, b.to(a.dtype), 2.0)
        found.append((*problem.dhidden(impl, lm_head_adapter=adapter), a.grad))
    for got, want in zip(*found, strict=True):
        assert frobenius_error(got, want) < (2e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.usefixtures("isa")
def test_slices_of_the_vocabulary():
    """Each has sums of its own, relative to its own offset, and only one has the target."""
    problem, rows, slices = Problem(), torch.arange(N), (slice(0, 1100), slice(1100, V))
    nothing, dlogp = (torch.empty(0), torch.empty(0, dtype=torch.uint8)), torch.randn(N)
    scored = []
    for part in slices:
        mine = (problem.ids[0] >= part.start) & (problem.ids[0] < part.stop)
        products = cpu_library.HeadProducts(problem.hidden[0], problem.weight[part])
        targets = torch.where(mine, problem.ids[0] - part.start, -1)
        inputs = cpu_library.HeadInputs(products, targets, torch.ones(N))
        z = problem.hidden[0] @ problem.weight[part].T
        _, offsets, sums = cpu_library.head_scores(inputs, False, *nothing, z.amax(1) + 3.0 * part.start / V)
        scored.append((inputs, offsets, sums))
    hidden = problem.hidden[0].double().requires_grad_()
    z = hidden @ problem.weight.double().T
    logps = z.log_softmax(1)[rows, problem.ids[0]]
    logps.backward(dlogp.double())
    table = torch.stack([z.amax(1), z.logsumexp(1) - z.amax(1), logps, torch.zeros(N)]).detach().float()
    parts = [
        cpu_library.head_gradient(inputs, table, offsets, rows, dlogp, None, None, *nothing, sums, True, False)[0]
        for inputs, offsets, sums in scored
    ]
    assert frobenius_error(sum(parts), hidden.grad) < 2e-5


@pytest.mark.parametrize("size", [9, 1500], ids=["by rows", "by the dense head"])
def test_candidate_sets(size):
    """A sampled row may be in no set."""
    problem = Problem()
    order = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(t)) for t in range(N)])
    problem.ids = order[:, :1].T.contiguous()
    assert_right(problem, candidates=CandidateSets(order[:, :size].reshape(-1), torch.arange(0, N * size + 1, size)))


def test_rows_without_a_gradient():
    """Masked, of advantage 0, and so many clipped that a panel is left out: dH of these is 0, that of others as usual."""
    problem = Problem(tokens=300)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[0, ::9] = False
    problem.advantages[0, 1::5] = 0
    old = problem.dhidden()[1].unsqueeze(0).clone()
    problem.advantages[0, 20:220] = 1
    old[0, 20:220] -= 2  # ratios of e^2
    options = {"completion_mask": mask, "old_per_token_logps": old}
    assert_right(problem, **options)
    got, _ = problem.dhidden(**options)
    assert (got[::9] == 0).all()
    assert (got[20:220] == 0).all()


def test_products():
    """Two, and the sample's; more where the weight, the bias or an entropy has a gradient, or an adapter."""
    sampled = -(-V // native.SAMPLE) / V

    def products(**options):
        problem = Problem()
        for name in ("weight", "bias"):
            if options.pop(f"trained_{name}", False):
                options |= {"lm_head_bias": torch.zeros(V)} if name == "bias" else {}
                (options["lm_head_bias"] if name == "bias" else problem.weight).requires_grad_()
        with CostRecorder() as recorder:
            problem.dhidden(max_scratch_bytes=1, **options)
        return recorder.products(N, H, V)

    assert products() == pytest.approx(2 + sampled)
    assert products(trained_weight=True) == pytest.approx(4)
    assert products(trained_bias=True) == pytest.approx(3)
    assert products(config=GRPOLossConfig(entropy_coef=0.1)) == pytest.approx(3)


def test_an_objective_of_entropies():
    """It is not known whether their derivatives are 0."""
    problem = Problem()

    def objective(logps, entropies, advantages):
        return -(advantages * logps + 0.1 * entropies) / N

    found = []
    for impl, dtype in (("native", torch.float32), ("reference", torch.float64)):
        hidden = problem.hidden.to(dtype, copy=True).requires_grad_()
        inputs = {"advantages": problem.advantages.to(dtype)}
        fused_linear_objective(
            hidden, problem.weight.to(dtype), problem.ids, objective, inputs=inputs, with_entropy=True, impl=impl
        ).loss.backward()
        found.append(hidden.grad)
    assert frobenius_error(*found) < 2e-5


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
def test_an_odd_vocabulary_reads_nothing_of_an_earlier_call(adapted):
    """Rows are multiplied in pairs; the second of the last pair is not what was NaN in the same memory before."""
    g = torch.Generator().manual_seed(0)
    hidden, ids = torch.randn(70, 32, generator=g).bfloat16(), torch.randint(64, (70,), generator=g)
    for V in (65, 129, 1001):
        weight, b = torch.randn(V + 1, 32, generator=g).bfloat16(), torch.randn(V + 1, 4, generator=g)
        weight[-1], b[-1], a = math.nan, math.nan, torch.randn(4, 32, generator=g)
        for rows in (V + 1, V) * 3:
            states = hidden.clone().requires_grad_()
            adapter = HeadAdapter(a, b[:rows]) if adapted else None
            out = fused_linear_logprobs(states, weight[:rows], ids, lm_head_adapter=adapter, impl="native")
            (gradient,) = torch.autograd.grad(out.logps.sum(), states)
            assert rows > V or gradient.isfinite().all()
