"""Row work on logits of two heads in C++: statistics, the two KL divergences and their derivatives."""

from __future__ import annotations

import os

import pytest
import torch

from grpo_fused.engines import cpu_library

pytestmark = pytest.mark.usefixtures("cpu_extension")
V = 5003


@pytest.fixture(params=["", "avx2"], ids=["best", "avx2"])
def isa(request):
    if request.param:
        cpu_library.use_isa(request.param)
    yield
    cpu_library.use_isa(os.environ.get("GRPO_FUSED_ISA", ""))


def logits(seed=0, rows=7, columns=V, std=3.0, near=0.5):
    g = torch.Generator().manual_seed(seed)
    z = std * torch.randn(rows, columns + 5, generator=g)[:, :columns]  # rows with gaps
    w = (z + near * torch.randn(rows, columns, generator=g)).contiguous()
    return z, w, torch.randint(columns, (rows,), generator=g)


def statistics(z, targets):
    found = torch.empty(4, len(z))
    cpu_library.call("logit_statistics", z, targets, True, found)
    return found


def divergence(logits, *arguments):
    value = torch.empty(len(logits))
    cpu_library.call("logit_divergence", logits, *arguments, value)
    return value


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("mean", [0.0, -150.0])
@pytest.mark.parametrize("columns", [1, 3, 17, 4096, V])
def test_statistics_are_those_of_float64(columns, mean):
    z, _, targets = logits(columns=columns)
    z += mean
    maximum, log_sum, logp, entropy = statistics(z, targets)
    log_p = z.double().log_softmax(-1)
    torch.testing.assert_close((maximum.double() + log_sum), z.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logp.double(), log_p.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
@pytest.mark.parametrize("near", [2.0, 0.5, 0.01])
@pytest.mark.parametrize("columns", [2, 17, V])
def test_divergences_are_those_of_float64(columns, near, forward):
    z, w, targets = logits(columns=columns, near=near)
    g = torch.Generator().manual_seed(1)
    factor, dlogp = torch.rand(7, generator=g), torch.randn(7, generator=g)
    exact = z.double().requires_grad_()
    log_p, log_q = exact.log_softmax(-1), w.double().log_softmax(-1)
    first, second = (log_q, log_p) if forward else (log_p, log_q)
    each = (first.exp() * (first - second)).sum(-1)
    loss = (factor * each).sum() + (dlogp * log_p.gather(1, targets[:, None])[:, 0]).sum()
    (want,) = torch.autograd.grad(loss, exact)
    tables = statistics(z, targets), statistics(w, targets)
    value = divergence(z, w, *tables, targets, forward, factor, dlogp)
    torch.testing.assert_close(value.double(), each.detach(), rtol=2e-4, atol=1e-9)
    torch.testing.assert_close(w.double(), want, rtol=1e-4, atol=2e-7)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
def test_impossible_entries_count_zero(forward):
    """A logit of -inf in the first distribution, or in both."""
    z, w, targets = logits(columns=40)
    first = w if forward else z
    first[:, 3] = z[:, 20] = w[:, 20] = -torch.inf
    targets = targets.clamp(max=2)
    exact = z.double().requires_grad_()
    log_p, log_q = exact.log_softmax(-1), w.double().log_softmax(-1)
    a, b = (log_q, log_p) if forward else (log_p, log_q)
    each = torch.where(a == -torch.inf, 0.0, a.exp() * (a - b)).sum(-1)
    tables, ones = (statistics(z, targets), statistics(w, targets)), torch.ones(7)
    value = divergence(z, w, *tables, targets, forward, ones, None)
    torch.testing.assert_close(value.double(), each.detach(), rtol=1e-5, atol=1e-6)
    p = log_p.detach().exp()
    entropy = -torch.where(p > 0, p * log_p.detach(), 0.0).sum(-1)
    torch.testing.assert_close(tables[0][3].double(), entropy, rtol=1e-5, atol=1e-6)
    ratio = torch.where(p > 0, log_p.detach() - log_q, 0.0)
    want = p - log_q.exp() if forward else p * (ratio - (p * ratio).sum(-1, keepdim=True))
    torch.testing.assert_close(w.double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
@pytest.mark.parametrize("of", [0, 1], ids=["own", "other"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_divergence_of_a_head_that_is_not_finite_is_nan(wrong, of, forward):
    z, w, targets = logits(columns=37)
    (z, w)[of][2, 5] = wrong
    value = divergence(z, w, statistics(z, targets), statistics(w, targets), targets, forward, None, None)
    assert value.isnan().tolist() == [r == 2 for r in range(7)]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("columns", [1, 16, 37])
def test_a_row_without_a_possible_entry_has_no_log_prob(columns):
    """At any width: what is beyond the row's end is not in the sum."""
    z = torch.full((1, columns), -torch.inf)
    _, log_sum, logp, entropy = statistics(z, torch.zeros(1, dtype=torch.int64))
    assert log_sum == -torch.inf
    assert logp.isnan()
    assert entropy.isnan()


@pytest.mark.usefixtures("isa")
def test_a_confident_target_keeps_its_digits():
    """Its derivative, about 1e-6, is a small difference of log-ratios of 3: it is computed from the others."""
    z, w, _ = logits(columns=40, std=1.0)
    targets = torch.arange(7)
    z[targets, targets] = 18.0
    log_p = z.double().log_softmax(-1)
    p, ratio = log_p.exp(), log_p - w.double().log_softmax(-1)
    others = torch.arange(40) != targets.unsqueeze(1)
    dz = p * (ratio - (p * ratio).sum(-1, keepdim=True))
    tables, ones = (statistics(z, targets), statistics(w, targets)), torch.ones(7)
    divergence(z, w, *tables, targets, False, ones, torch.zeros(7))
    torch.testing.assert_close(w[targets, targets].double(), -(dz * others).sum(-1), rtol=1e-5, atol=0.0)


def test_a_row_is_bitwise_the_same_in_any_batch():
    z, w, targets = logits()
    together = w.clone()
    tables = statistics(z, targets), statistics(w, targets)
    ones = torch.ones(7)
    value = divergence(z, together, *tables, targets, False, ones, ones)
    for r in range(7):
        own, row = w[r : r + 1].clone(), slice(r, r + 1)
        one = [statistics(x[row], targets[row]) for x in (z, w)]
        found = divergence(z[row], own, *one, targets[row], False, ones[row], ones[row])
        assert torch.equal(found[0], value[r])
        assert torch.equal(own[0], together[r])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: torch.zeros(V)}, r"logits must be \[R, V\]; got 1 dimensions"),
        ({0: torch.zeros(7, V, dtype=torch.float64)}, "logits must be float32"),
        ({0: torch.zeros(V, 7).T}, "rows of logits must be contiguous"),
        ({0: torch.zeros(7, 0), 1: torch.zeros(7, 0)}, "at least one column"),
        ({1: torch.zeros(7, V - 1)}, rf"other must be \[7, {V}\]; got \[7, {V - 1}\]"),
        ({1: torch.zeros(V).expand(7, V)}, "rows of other must not overlap"),
        ({1: torch.zeros(8 * V).as_strided((7, V), (V - 1, 1))}, "rows of other must not overlap"),
        ({2: torch.zeros(3, 7)}, r"statistics must be \[4, 7\]"),
        ({4: torch.full((7,), V)}, rf"targets must be in \[0, {V}\); got {V} at 0"),
        ({4: torch.full((7,), -1)}, "got -1 at 0"),
        ({6: torch.zeros(6)}, r"factor must be \[7\]"),
        ({7: torch.zeros(14)[::2]}, "dlogp must be contiguous"),
    ],
)
def test_wrong_calls_are_refused(changes, message):
    z, w, targets = logits()
    arguments = [z, w, statistics(z, targets), statistics(w, targets), targets, False, torch.ones(7), torch.ones(7)]
    for at, value in changes.items():
        arguments[at] = value
    with pytest.raises(RuntimeError, match=message):
        divergence(*arguments)
