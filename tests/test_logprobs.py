"""`fused_linear_logprobs` and `selective_logprobs`: values, and gradients through both results."""

from __future__ import annotations

import pytest
import torch
from helpers import PRECISION, frobenius_error, make_case

from grpo_fused import CandidateSets, engines, fused_linear_grpo_loss, fused_linear_logprobs, selective_logprobs
from grpo_fused.api import operators

ENGINES = ["chunked", "native", "triton"]


def objective(out, weights):
    """A loss that uses both results with different weights, as a custom loss would."""
    loss = (out.logps * weights[0]).sum()
    return loss if out.entropies is None else loss + (out.entropies * weights[1]).sum()


def head_gradients(case, impl, mask, frozen=False, **options):
    hidden = case.hidden_states.detach().requires_grad_()
    weight = case.lm_head_weight.detach().requires_grad_(not frozen)
    bias = options.pop("lm_head_bias", None)
    bias = None if bias is None else bias.detach().requires_grad_(not frozen)
    out = fused_linear_logprobs(hidden, weight, case.completion_ids, mask, lm_head_bias=bias, impl=impl, **options)
    weights = torch.randn(2, *out.logps.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    objective(out, weights).backward()
    return out, hidden.grad, weight.grad, None if bias is None else bias.grad


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": torch.linspace(0.5, 2, 4)},
        {"temperature": torch.tensor([1.0, 0.5, 1.0, 2.0]).repeat(7).view(4, 7)},  # 1: those logits stay as they are
        {"softcap": 2.0, "logit_scale": -0.7, "temperature": 0.6},
        {"lm_head_bias": torch.linspace(-1, 1, 29, dtype=torch.float64)},
        {"max_scratch_bytes": 9000},
        {"compact": False},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_linear_matches_reference(options, with_entropy, frozen, impl):
    dtype, tol = PRECISION[impl]
    case = make_case(0).to(dtype)
    mask = case.completion_mask
    if impl != "chunked" and "max_scratch_bytes" in options:
        options = {"max_scratch_bytes": 1500}
    got = head_gradients(case, impl, mask, frozen, with_entropy=with_entropy, **options)
    reference_options = {k: v for k, v in options.items() if k not in ("max_scratch_bytes", "compact")}
    want = head_gradients(
        case.to(torch.float64), "reference", mask, frozen, with_entropy=with_entropy, **reference_options
    )  # fmt: skip
    torch.testing.assert_close(got[0].logps, want[0].logps, rtol=tol, atol=tol, check_dtype=False)
    assert (got[0].entropies is None) == (not with_entropy)
    if with_entropy:
        torch.testing.assert_close(got[0].entropies, want[0].entropies, rtol=tol, atol=tol, check_dtype=False)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tol, atol=tol, check_dtype=False)
    assert got[1][~mask].eq(0).all()


@pytest.mark.parametrize("impl", ENGINES)
def test_packed(impl):
    case = make_case(1).to(PRECISION[impl].dtype)
    flat = fused_linear_logprobs(
        case.hidden_states.reshape(28, -1), case.lm_head_weight, case.completion_ids.reshape(28),
        case.completion_mask.reshape(28), temperature=torch.linspace(0.5, 2, 28), impl=impl,
    )  # fmt: skip
    padded = fused_linear_logprobs(
        case.hidden_states, case.lm_head_weight, case.completion_ids, case.completion_mask,
        temperature=torch.linspace(0.5, 2, 28).view(4, 7), impl=impl,
    )  # fmt: skip
    assert torch.equal(flat.logps, padded.logps.reshape(28))


def test_gradcheck():
    case = make_case(2, B=2, T=3, H=4, V=7)

    def scores(hidden, weight):
        out = fused_linear_logprobs(hidden, weight, case.completion_ids, with_entropy=True, softcap=3.0)
        return out.logps, out.entropies

    hidden, weight = case.hidden_states.requires_grad_(), case.lm_head_weight.requires_grad_()
    assert torch.autograd.gradcheck(scores, (hidden, weight))


@pytest.mark.parametrize("impl", ENGINES)
def test_a_frozen_head_takes_two_products(impl, monkeypatch):
    """dlogp/dh is made with the log-probs; an entropy's gradient takes two more; without gradients there is one."""
    case = make_case(2).to(PRECISION[impl].dtype)
    hidden, inputs = case.hidden_states.requires_grad_(), (case.lm_head_weight, case.completion_ids)
    out = fused_linear_logprobs(hidden, *inputs, with_entropy=True, impl=impl)
    with monkeypatch.context() as patch:
        patch.delattr(operators, "linear_logprobs_gradient")
        out.logps.sum().backward(retain_graph=True)
        with pytest.raises(AttributeError):
            out.entropies.sum().backward()
        sets = CandidateSets(torch.arange(28), torch.arange(29))
        for trained in ({"alternatives": sets}, {"lm_head_bias": torch.zeros(29, dtype=hidden.dtype).requires_grad_()}):
            with pytest.raises(AttributeError):
                fused_linear_logprobs(hidden, *inputs, impl=impl, **trained).logps.sum().backward()
    monkeypatch.delattr(type(engines.engine(impl)), "fused")
    with torch.no_grad():
        assert torch.equal(fused_linear_logprobs(hidden, *inputs, impl=impl).logps, out.logps)
    fused_linear_logprobs(hidden.detach(), *inputs, impl=impl)
    with pytest.raises(AttributeError):
        fused_linear_logprobs(hidden, *inputs, impl=impl)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("impl", ENGINES)
def test_products_of_a_frozen_head_that_are_not_finite(impl, compact):
    """A token without a coefficient has a gradient of 0, whatever its hidden states; so has a masked one, and one that is
    alone in its candidate set, for any coefficient."""
    case = make_case(4).to(PRECISION[impl].dtype)
    hidden, weights = case.hidden_states.clone(), torch.ones(case.completion_ids.shape)
    mask = torch.ones_like(case.completion_ids, dtype=torch.bool)
    hidden[0, 1], weights[0, 1] = torch.finfo(hidden.dtype).max, 0.0
    mask[1, 2], weights[1, 2] = False, torch.nan
    ids, sizes = case.completion_ids, torch.zeros(case.completion_ids.numel(), dtype=torch.int64)
    sizes[20], weights.view(-1)[20] = 1, torch.inf
    sets = CandidateSets(ids.view(-1)[20:21], torch.cat([sizes[:0].new_zeros(1), sizes.cumsum(0)]))
    hidden.requires_grad_()
    inputs = case.lm_head_weight, ids, mask
    out = fused_linear_logprobs(hidden, *inputs, impl=impl, compact=compact, candidates=sets)
    out.logps.backward(weights.to(hidden.dtype))
    none = torch.zeros_like(mask)
    none[0, 1] = none[1, 2] = none.view(-1)[20] = True
    assert hidden.grad[none].eq(0).all()
    assert hidden.grad.isfinite().all()
    assert hidden.grad[~none].abs().amax(-1).min() > 0


@pytest.mark.parametrize("function", ["linear", "of-logits"])
def test_results_may_be_changed_in_place(function):
    """As those of eager code: `logps[~mask] = 0`."""
    case = make_case(0)
    ids = case.completion_ids
    others = CandidateSets.from_padded(torch.stack([(ids + 1) % 29, (ids + 2) % 29], dim=-1))

    def gradient(in_place):
        hidden = case.hidden_states.detach().requires_grad_()
        if function == "linear":
            out = fused_linear_logprobs(
                hidden, case.lm_head_weight.detach(), ids, alternatives=others, with_entropy=True
            )
            results = [out.logps, out.entropies, out.alternative_logps]
        else:
            out = selective_logprobs(hidden @ case.lm_head_weight.detach().T, ids, with_entropy=True)
            results = [out.logps, out.entropies]
        sum((x.mul_(3.0) if in_place else 3.0 * x).sum() for x in results).backward()
        return hidden.grad

    torch.testing.assert_close(gradient(in_place=True), gradient(in_place=False), rtol=0, atol=0)


def test_only_one_result_is_used():
    case = make_case(3)
    for use in ("logps", "entropies"):
        grads = []
        for impl in ("chunked", "reference"):
            hidden = case.hidden_states.detach().requires_grad_()
            out = fused_linear_logprobs(hidden, case.lm_head_weight, case.completion_ids, with_entropy=True, impl=impl)
            getattr(out, use).sum().backward()
            grads.append(hidden.grad)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_selective(dtype, strided):
    logits = (torch.randn(3, 9, 131, dtype=torch.float64) * 3).to(dtype)
    ids = torch.randint(0, 131, (3, 8 if strided else 9))
    mask = torch.rand(ids.shape) > 0.3
    logits = logits[:, :-1] if strided else logits
    results = []
    for impl in ("auto", "reference"):
        x = logits.detach().requires_grad_()
        before = x.detach().clone()
        out = selective_logprobs(x, ids, mask, temperature=0.8, with_entropy=True, impl=impl)
        objective(out, torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(2))).backward()
        assert torch.equal(x.detach(), before)
        assert x.grad.dtype == dtype
        results.append((out, x.grad))
    (got, grad), (want, want_grad) = results
    tol = 1e-10 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(got.logps, want.logps, rtol=tol, atol=tol * 10)
    torch.testing.assert_close(got.entropies, want.entropies, rtol=tol, atol=tol * 10)
    assert frobenius_error(grad, want_grad) <= max(tol, torch.finfo(dtype).eps)
    assert grad[~mask].eq(0).all()


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 8)], ids=str)
def test_selective_temperatures_of_sequences_and_tokens(shape):
    logits = (3 * torch.randn(3, 8, 31, dtype=torch.float64)).requires_grad_()
    ids, mask = torch.randint(0, 31, (3, 8)), torch.ones(3, 8, dtype=torch.bool)
    mask[:, -2:] = False
    temperature = 0.5 + torch.rand(shape, dtype=torch.float64)
    each = temperature.reshape(3, -1).expand(3, 8)
    want = (logits / each.unsqueeze(-1)).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1) * mask
    if shape == (3, 8):
        temperature = temperature.masked_fill(~mask, -1.0)  # never read
    got = selective_logprobs(logits, ids, mask, temperature=temperature).logps
    torch.testing.assert_close(got, want)
    upstream = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad((x * upstream).sum(), logits)[0] for x in (got, want)))


def test_selective_masked_positions_may_have_any_values():
    logits = torch.randn(2, 4, 11, requires_grad=True)
    ids = torch.randint(0, 11, (2, 4))
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    want = selective_logprobs(logits, ids, mask).logps
    poisoned = torch.where((mask == 0).unsqueeze(-1), torch.nan, logits.detach()).requires_grad_()
    got = selective_logprobs(poisoned, ids.masked_fill(mask == 0, -100), mask).logps
    assert torch.equal(got, want)
    got.sum().backward()
    assert poisoned.grad.isfinite().all()


def test_no_token_at_all():
    hidden = torch.zeros(2, 3, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    out = fused_linear_logprobs(hidden, weight, torch.zeros(2, 3, dtype=torch.int64), mask, with_entropy=True)
    (out.logps.sum() + out.entropies.sum()).backward()
    assert out.logps.eq(0).all()
    assert weight.grad.eq(0).all()
    logits = torch.randn(2, 3, 5, requires_grad=True)
    selective_logprobs(logits, torch.zeros(2, 3, dtype=torch.int64), mask).logps.sum().backward()
    assert logits.grad.eq(0).all()


@pytest.mark.gate(keep=lambda margin, impl: impl != "triton" or margin == 30.0)
@pytest.mark.parametrize("impl", ["reference", *ENGINES])
@pytest.mark.parametrize("margin", [18.0, 30.0, 80.0])
def test_confident_tokens_are_accurate(margin, impl):
    """Added to the 1 of the maximum itself, a sum of exp(-18) loses digits, and one of exp(-30) is lost."""
    vocab, target = 4096, 5
    others = torch.randn(vocab - 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = torch.cat([others[:target], torch.full((1,), margin, dtype=torch.float64), others[target:]]).float()
    weight = logits.unsqueeze(1).requires_grad_()  # the hidden state is 1: the logits are the weight
    hidden = torch.ones(1, 1, 1)
    ids = torch.full((1, 1), target)
    out = fused_linear_logprobs(hidden, weight, ids, with_entropy=True, impl=impl)
    out.logps.backward()

    shifted = logits.double() - margin
    e = shifted.exp()
    e[target] = 0.0
    rest = e.sum()
    entropy = rest.log1p() - (e * shifted).sum() / (1 + rest)
    torch.testing.assert_close(out.logps.double().view(()), -rest.log1p(), rtol=1e-3, atol=0)
    torch.testing.assert_close(out.entropies.double().view(()), entropy, rtol=1e-3, atol=0)
    torch.testing.assert_close(weight.grad[target, 0].double(), rest / (1 + rest), rtol=1e-3, atol=0)
    others = torch.arange(vocab) != target
    torch.testing.assert_close(weight.grad[others, 0].double(), -e[others] / (1 + rest), rtol=1e-3, atol=1e-43)


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
@pytest.mark.parametrize("margin", [14.0, 22.0, 26.0])
def test_confident_tokens_keep_the_gradient_of_their_entropy(margin, impl):
    """Beside that of the log-prob, which is 1e6 to 1e11 times a term of the entropy."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    logits[7] = logits.max() + margin
    exact = logits.double().requires_grad_()
    log_p = exact.log_softmax(0)
    (want,) = torch.autograd.grad(-log_p[7] + 0.01 * (log_p.exp() * log_p).sum(), exact)
    weight = logits.unsqueeze(1).requires_grad_()
    out = fused_linear_logprobs(torch.ones(1, 1, 1), weight, torch.full((1, 1), 7), with_entropy=True, impl=impl)
    (-out.logps - 0.01 * out.entropies).sum().backward()
    torch.testing.assert_close(weight.grad[:, 0].double(), want, rtol=1e-3, atol=0.0)


def test_the_default_dtype_of_torch_changes_nothing():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 3, 8, generator=g), torch.randn(40, 8, generator=g)
    ids, sets = torch.randint(40, (2, 3), generator=g), CandidateSets.from_mask(torch.rand(6, 40, generator=g) < 0.5)

    def results():
        found = []
        for impl in ENGINES:
            h, w = (x.clone().requires_grad_() for x in (hidden, weight))
            out = fused_linear_logprobs(h, w, ids, with_entropy=True, alternatives=sets, impl=impl)
            found += torch.autograd.grad(out.logps.sum() + out.alternative_logps.sum(), (h, w))
            out = fused_linear_grpo_loss(h, w, ids, torch.ones(2), impl=impl)
            found += [out.loss.detach(), *torch.autograd.grad(out.loss, (h, w))]
        return found

    want = results()
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            torch.testing.assert_close(results(), want, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
def test_a_maximum_that_occurs_more_than_once(impl):
    """Hidden states of 0, a vocabulary padded with equal rows: every one of the maxima counts."""
    for vocab in (1, 2, 300, 3000):
        out = fused_linear_logprobs(
            torch.zeros(1, 2, 4),
            torch.randn(vocab, 4),
            torch.zeros(1, 2, dtype=torch.int64),
            with_entropy=True,
            impl=impl,
        )
        want = torch.full((1, 2), float(vocab)).log()
        torch.testing.assert_close(out.logps, -want)
        torch.testing.assert_close(out.entropies, want)


@pytest.mark.parametrize("impl", ["reference", *ENGINES])
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
def test_entropy_of_a_token_whose_target_is_impossible(impl, compact):
    """A bias of -inf: p log p is 0, not NaN, also at the placeholder target of a masked position."""
    hidden = torch.randn(1, 3, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    bias = torch.zeros(5)
    bias[0] = -torch.inf
    ids, mask = torch.tensor([[1, 0, -100]]), torch.tensor([[1, 1, 0]])

    def gradients(impl, dtype, **options):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        out = fused_linear_logprobs(
            h, w, ids, mask, lm_head_bias=bias.to(dtype), with_entropy=True, impl=impl, **options
        )
        (out.entropies.sum() + out.logps[0, 0]).backward()
        return h.grad, w.grad

    for got, want in zip(
        gradients(impl, torch.float32, compact=compact), gradients("reference", torch.float64), strict=True
    ):
        assert want.ne(0).any()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("impl", ["chunked", "native", "reference"])
def test_temperatures_of_masked_tokens_may_be_anything(impl, compact):
    mask = torch.arange(5) != 3
    weight = torch.randn(100, 32, requires_grad=True)
    fused_linear_logprobs(
        torch.randn(5, 32), weight, torch.zeros(5, dtype=torch.int64), mask, impl=impl, compact=compact,
        temperature=torch.where(mask, 1.0, torch.nan),
    ).logps.sum().backward()  # fmt: skip
    assert weight.grad.isfinite().all()
