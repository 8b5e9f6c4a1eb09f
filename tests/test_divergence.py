"""`fused_linear_divergence`: values and gradients as from all logits in float64, and as those of TRL and Liger."""

from __future__ import annotations

import math

import pytest
import torch
from divergence_cases import KINDS, Pair, kinds
from helpers import frobenius_error

from grpo_fused import fused_linear_divergence
from grpo_fused.testing import ROUNDINGS, rounding_errors


def naive(pair, kind, beta, *, bias, temperature, scale, other_scale, softcap, other_softcap, weighted):
    """The definition, by log-softmax and autograd only."""

    def log_probs(hidden, weight, b, scale, softcap):
        z = (hidden @ weight.T + (b if bias else 0.0)) * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        each = temperature if not torch.is_tensor(temperature) else temperature.view(*temperature.shape, 1)
        return (z / each).log_softmax(-1)

    hidden, weight = pair.hidden.clone().requires_grad_(), pair.weight.clone().requires_grad_()
    b = pair.bias.clone().requires_grad_()
    log_p = log_probs(hidden, weight, b, scale, softcap)
    log_q = log_probs(pair.other, pair.other_weight, pair.other_bias, other_scale, other_softcap)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((1 - beta) * p + beta * q).log()
    each = {
        "reverse_kl": p * (log_p - log_q),
        "forward_kl": q * (log_q - log_p),
        "jsd": beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m),
    }[kind].sum(-1)
    weights = pair.weights * pair.mask if weighted else pair.mask.double() / pair.mask.sum()
    loss = (weights * each).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight, b) if bias else (hidden, weight))
    return loss, each * pair.mask, -(p * log_p).sum(-1) * pair.mask, gradients


@kinds
@pytest.mark.gate(keep=lambda seed, **_: seed < 12)
@pytest.mark.parametrize("seed", range(50))
def test_random_cases_in_float64(kind, beta, seed):
    """200 cases with random options."""
    g = torch.Generator().manual_seed(1000 + seed)

    def drawn(*values):
        return values[int(torch.randint(len(values), (), generator=g))]

    shape = drawn((3, 7), (1, 1), (11,), (2, 5))
    pair = Pair(seed, shape, V=drawn(2, 29, 130), std=drawn(0.5, 2.0, 6.0))
    temperature = drawn(1.0, 0.6, 0.5 + torch.rand(shape, generator=g, dtype=torch.float64))
    bias, scale, other_scale, softcap, other_softcap, weighted = (
        drawn(True, False), drawn(1.0, 0.7), drawn(1.0, 1.4), drawn(None, 4.0), drawn(None, 6.0), drawn(True, False)
    )  # fmt: skip
    loss, each, entropies, gradients = naive(
        pair, kind, beta, bias=bias, temperature=temperature, scale=scale, other_scale=other_scale, softcap=softcap,
        other_softcap=other_softcap, weighted=weighted,
    )  # fmt: skip
    for impl, scratch in (("chunked", drawn(None, 60000)), ("reference", None)):
        out, *got = pair.run(
            kind=kind, beta=beta, bias=bias, temperature=temperature, logit_scale=scale, other_logit_scale=other_scale,
            softcap=softcap, other_softcap=other_softcap, weighted=weighted, impl=impl, max_scratch_bytes=scratch,
            upstream=1.7, compact=drawn(True, False),
        )  # fmt: skip
        torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out.divergence, each, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(out.entropies, entropies, rtol=1e-10, atol=1e-11)
        for mine, want in zip(got, gradients, strict=False):
            assert frobenius_error(mine, 1.7 * want) <= 1e-10


@kinds
@pytest.mark.parametrize("std", [1.0, 4.0], ids="std={}".format)
def test_small_divergences_are_accurate(kind, beta, std):
    """D of about 1e-4: its relative error stays below 1e-3, that of gradients near what fp32 products allow."""
    near = 0.014 / std
    if kind == "jsd":
        near /= math.sqrt(beta * (1 - beta))
    exact = Pair(0, (40,), H=64, V=4000, std=std, near=near).to(torch.float32).to(torch.float64)
    want, got = exact.run(kind=kind, beta=beta, impl="reference"), exact.to(torch.float32).run(kind=kind, beta=beta)
    active = exact.mask
    assert 2e-5 < want[0].divergence[active].mean() < 4e-4
    error = (got[0].divergence.double() - want[0].divergence).abs()[active] / want[0].divergence[active]
    assert error.max() <= 1e-3
    # logits from fp32 products, all else in float64
    z, w = (h @ exact.weight.T for h in (exact.hidden, exact.other))
    z32, w32 = ((h.float() @ exact.weight.float().T).double() for h in (exact.hidden, exact.other))

    def slopes(z, w):
        p, ratio = z.softmax(-1), z.log_softmax(-1) - w.log_softmax(-1)
        return p * (ratio - (p * ratio).sum(-1, keepdim=True)) * active.unsqueeze(-1)

    best, floor = slopes(z, w), slopes(z32, w32)
    assert frobenius_error(got[1], want[1]) <= 2e-5 + 2 * frobenius_error(floor @ exact.weight, best @ exact.weight)
    assert frobenius_error(got[2], want[2]) <= 2e-5 + 2 * frobenius_error(floor.T @ exact.hidden, best.T @ exact.hidden)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("far", [True, False], ids=["far", "near"])
def test_narrow_dtypes(kind, beta, dtype, far):
    exact = Pair(3, (48,), H=32, V=500, std=2.0, near=None if far else 0.05).to(dtype).to(torch.float64)
    exact.weights *= 50.0  # so that gradients are normal numbers of fp16
    options = {"kind": kind, "beta": beta, "weighted": True}
    want, got = exact.run(impl="reference", **options), exact.to(dtype).run(**options)
    assert got[0].loss.dtype == got[0].divergence.dtype == got[0].entropies.dtype == torch.float32
    assert got[1].dtype == got[2].dtype == dtype
    torch.testing.assert_close(got[0].divergence.double(), want[0].divergence, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(got[0].entropies.double(), want[0].entropies, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(got[0].loss.double(), want[0].loss, rtol=1e-5, atol=0.0)
    bounds = {"dhidden": 2e-5, "dweight": 2e-5}
    if dtype != torch.float32:
        products = (exact.hidden @ exact.weight.T).requires_grad_()
        log_p, log_q = products.log_softmax(-1), (exact.other @ exact.other_weight.T).log_softmax(-1)
        log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
        pairs = {"reverse_kl": [(1, log_p, log_q)], "forward_kl": [(1, log_q, log_p)],
                 "jsd": [(beta, log_q, log_m), (1 - beta, log_p, log_m)]}[kind]  # fmt: skip
        loss = sum((c * (exact.weights * exact.mask).unsqueeze(-1) * a.exp() * (a - b)).sum() for c, a, b in pairs)
        (dlogits,) = torch.autograd.grad(loss, products)
        bounds = {n: ROUNDINGS * e for n, e in rounding_errors(dlogits, exact.hidden, exact.weight, dtype).items()}
    assert frobenius_error(got[1], want[1]) <= bounds["dhidden"]
    assert frobenius_error(got[2], want[2]) <= bounds["dweight"]


@kinds
def test_mixed_dtypes(kind, beta):
    """A bf16 policy and an fp32 teacher; with an fp64 teacher all is fp64."""
    pair = Pair(4).to(torch.bfloat16)
    pair.other, pair.other_weight = pair.other.float(), pair.other_weight.float()
    exact = pair.to(torch.float64)
    want, got = exact.run(kind=kind, beta=beta), pair.run(kind=kind, beta=beta)
    torch.testing.assert_close(got[0].divergence.double(), want[0].divergence, rtol=1e-5, atol=1e-6)
    pair.other, pair.other_weight = pair.other.double(), pair.other_weight.double()
    got = pair.run(kind=kind, beta=beta)
    assert got[0].loss.dtype == torch.float64
    assert got[1].dtype == torch.bfloat16
    torch.testing.assert_close(got[0].divergence, want[0].divergence, rtol=1e-12, atol=1e-12)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identical_heads_give_exactly_zero(kind, beta, dtype):
    pair = Pair(5, (33,), V=3000, std=4.0, near=0.0).to(dtype)
    out, dhidden, dweight, _ = pair.run(kind=kind, beta=beta, max_scratch_bytes=2_000_000)
    assert out.loss == 0
    for x in (out.divergence, dhidden, dweight):
        assert (x == 0).all()
    assert (out.entropies[pair.mask] > 0).all()


@kinds
@pytest.mark.parametrize("margin", [12.0, 30.0, 80.0], ids="margin={}".format)
def test_confident_tokens_are_accurate(kind, beta, margin):
    """The policy's best token is `margin` nats above the others, and the teacher's slightly more or less."""
    exact = Pair(6, (9,), V=20, std=1.0, near=0.3)
    exact.weight[:, 0] = exact.other_weight[:, 0] = 0.0
    exact.weight[3, 0] = exact.other_weight[3, 0] = margin
    exact.hidden[:, 0] = 1.0
    exact.other[:, 0] = 1.02
    exact = exact.to(torch.float32).to(torch.float64)
    want, got = (
        exact.run(kind=kind, beta=beta, mask=False),
        exact.to(torch.float32).run(kind=kind, beta=beta, mask=False),
    )
    assert 0 < want[2][3].abs().max() < 2 * math.exp(5.0 - margin)
    torch.testing.assert_close(got[2][3].double(), want[2][3], rtol=1e-3, atol=1e-3 * float(want[2][3].abs().max()))
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-3, atol=1e-3 * float(want[1].abs().max()))


class TestZeroProbabilities:
    """A bias of -inf, as of padded vocabulary entries."""

    @kinds
    def test_in_both(self, kind, beta):
        pair = Pair(7, V=30)
        want = pair.run(kind=kind, beta=beta, bias=True)
        wide = Pair(7, V=30)
        for name in ("weight", "other_weight"):
            setattr(wide, name, torch.cat([getattr(pair, name), torch.ones(4, getattr(pair, name).shape[1]).double()]))
        for name in ("bias", "other_bias"):
            setattr(wide, name, torch.cat([getattr(pair, name), torch.full((4,), -torch.inf).double()]))
        for impl in ("chunked", "reference"):
            out, dhidden, dweight, dbias = wide.run(kind=kind, beta=beta, bias=True, impl=impl)
            torch.testing.assert_close(out.divergence, want[0].divergence)
            torch.testing.assert_close(out.entropies, want[0].entropies)
            torch.testing.assert_close(dhidden, want[1])
            torch.testing.assert_close(dweight[:30], want[2])
            torch.testing.assert_close(dbias[:30], want[3])
            assert (dweight[30:] == 0).all()

    @pytest.mark.parametrize("impl", ["chunked", "reference"])
    @pytest.mark.parametrize(("kind", "name"), [("forward_kl", "other_bias"), ("reverse_kl", "bias"),
                                                ("jsd", "other_bias"), ("jsd", "bias")])  # fmt: skip
    def test_of_the_first_distribution_counts_zero(self, kind, name, impl):
        """The limit of a decreasing bias: D is finite."""
        pair = Pair(8)
        getattr(pair, name)[4] = -1e3
        want = pair.run(kind=kind, bias=True, impl="reference")
        getattr(pair, name)[4] = -torch.inf
        got = pair.run(kind=kind, bias=True, impl=impl)
        torch.testing.assert_close(got[0].divergence, want[0].divergence)
        for a, b in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("impl", ["chunked", "reference"])
    @pytest.mark.parametrize(("kind", "name"), [("reverse_kl", "other_bias"), ("forward_kl", "bias")])
    def test_of_the_second_distribution_raises(self, kind, name, impl):
        pair = Pair(8)
        getattr(pair, name)[4] = -torch.inf
        with pytest.raises(ValueError, match=f"second distribution must not be 0 .* got {int(pair.mask.sum())} tokens"):
            pair.run(kind=kind, bias=True, impl=impl)

    def test_far_apart(self):
        """Probabilities that underflow are not 0: the log-ratio is finite."""
        pair = Pair(9, std=60.0)
        for kind, beta in KINDS:
            want = pair.run(kind=kind, beta=beta, impl="reference")
            got = pair.to(torch.float32).run(kind=kind, beta=beta)
            assert want[0].divergence.max() > (100 if "kl" in kind else 0.3)
            torch.testing.assert_close(got[0].divergence.double(), want[0].divergence, rtol=1e-4, atol=1e-5)
            # if p and q have no common support, the JSD is constant: its derivative is a difference of equal numbers
            assert frobenius_error(got[1], want[1]) <= (5e-3 if kind == "jsd" else 1e-4)


class TestTopK:
    """A teacher's K most likely tokens."""

    def teacher(self, pair, K):
        log_q = (pair.other @ pair.other_weight.T).log_softmax(-1)
        return log_q.topk(K, dim=-1)

    @pytest.mark.parametrize("K", [1, 5, 29])
    def test_definition(self, K):
        pair = Pair(10)
        best = self.teacher(pair, K)
        log_q, ids = best.values.clone(), best.indices.clone()
        if K == 5:
            log_q[:, ::2, 3:], ids[:, ::2, 3:] = -torch.inf, 0  # fewer than K; these ids may have any values
            ids[:, 2, 3:] = -100
        hidden = pair.hidden.clone().requires_grad_()
        log_p = (hidden @ pair.weight.T / 0.8).log_softmax(-1).gather(-1, ids.clamp(min=0))
        each = torch.where(log_q > -torch.inf, log_q.exp() * (log_q - log_p), 0.0).sum(-1)
        (want,) = torch.autograd.grad((each * pair.mask).sum() / pair.mask.sum(), hidden)
        for impl in ("chunked", "reference"):
            out, dhidden, *_ = pair.run(other_ids=ids, other_logprobs=log_q, kind="forward_kl", temperature=0.8,
                                        impl=impl)  # fmt: skip
            torch.testing.assert_close(out.divergence, each.detach() * pair.mask)
            torch.testing.assert_close(dhidden, want)

    @pytest.mark.parametrize("margin", [12.0, 30.0, 80.0], ids="margin={}".format)
    def test_confident_token(self, margin):
        """One id with all of the probability: the derivative is p - 1."""
        exact = Pair(27, (5,), V=20, std=1.0)
        exact.weight[:, 0], exact.hidden[:, 0] = 0.0, 1.0
        exact.weight[3, 0] = margin
        exact = exact.to(torch.float32)
        z = exact.hidden.double() @ exact.weight.double().T
        others = z.log_softmax(-1).exp()
        others[:, 3] = 0.0
        best = torch.full((5, 1), 3), torch.zeros(5, 1)
        _, _, dweight, _ = exact.run(kind="forward_kl", other_ids=best[0], other_logprobs=best[1], mask=False)
        want = -(others.sum(1, keepdim=True) * exact.hidden.double()).sum(0) / 5
        torch.testing.assert_close(dweight[3].double(), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))

    @pytest.mark.parametrize("K", [2, 29])
    def test_a_narrow_teacher_may_sum_to_a_little_more_than_1(self, K):
        pair, shape = Pair(11), Pair(11).mask.shape
        ids = torch.arange(K).expand(*shape, K)
        log_q = torch.full((*shape, K), 1 / K).log().bfloat16()
        log_q = torch.where(log_q.exp() * K < 1, log_q * (1 - 2**-8), log_q)  # rounded up, where it was down
        assert 1.001 < float(log_q.double().exp().sum(-1).max()) < 1.01
        assert pair.run(kind="forward_kl", other_ids=ids, other_logprobs=log_q)[0].divergence.isfinite().all()
        with pytest.raises(ValueError, match="must sum to 1 at most"):
            pair.run(kind="forward_kl", other_ids=ids, other_logprobs=log_q + 0.0625)

    def test_all_ids_are_the_forward_kl(self):
        pair = Pair(11)
        best = self.teacher(pair, 29)
        want = pair.run(kind="forward_kl")
        got = pair.run(kind="forward_kl", other_ids=best.indices, other_logprobs=best.values)
        torch.testing.assert_close(got[0].divergence, want[0].divergence)
        assert frobenius_error(got[2], want[2]) <= 1e-12

    @pytest.mark.parametrize("compact", [True, False])
    def test_masked_garbage(self, compact):
        pair = Pair(12)
        best = self.teacher(pair, 4)
        options = {"kind": "forward_kl", "compact": compact, "weighted": True}
        want = pair.run(other_ids=best.indices, other_logprobs=best.values, **options)
        pair.hidden[~pair.mask], pair.weights[~pair.mask] = torch.nan, torch.nan
        best.values[~pair.mask], best.indices[~pair.mask] = torch.nan, 10**9
        got = pair.run(other_ids=best.indices, other_logprobs=best.values, **options)
        for a, b in zip((*got[0], got[1], got[2]), (*want[0], want[1], want[2]), strict=True):
            assert torch.equal(a, b)

    def test_errors(self):
        pair = Pair(13)
        best = self.teacher(pair, 4)
        ids, log_q = best.indices, best.values
        with pytest.raises(ValueError, match=r"other_ids must be in \[0, 29\).* got ids from .* to 5"):
            pair.run(kind="forward_kl", other_ids=ids + 29, other_logprobs=log_q, impl="reference")
        for options, message in (
            ({}, "are for kind='forward_kl'; got 'reverse_kl'"),
            ({"kind": "forward_kl", "other_ids": ids.double()}, "other_ids must have an integer dtype"),
            (
                {"kind": "forward_kl", "other_ids": ids[..., :2]},
                r"other_logprobs must have shape \(3, 7, 2\) to go with other_ids",
            ),
            ({"kind": "forward_kl", "other_ids": ids + 29}, r"other_ids must be in \[0, 29\)"),
            ({"kind": "forward_kl", "other_logprobs": -log_q}, "must sum to 1 at most"),
            (
                {"kind": "forward_kl", "other_ids": ids[..., :1].expand_as(ids), "other_logprobs": log_q - 2},
                r"other_ids must be different at each position; got \d+ that are there again",
            ),
            ({"kind": "forward_kl", "other_logprobs": None}, "the last two .* must be given"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                pair.run(**{"other_ids": ids, "other_logprobs": log_q, **options})
        with pytest.raises(ValueError, match="the first two or the last two"):
            fused_linear_divergence(pair.hidden, pair.weight, pair.other, pair.other_weight, other_ids=ids,
                                    other_logprobs=log_q, kind="forward_kl")  # fmt: skip


class TestPeers:
    """The same tensors through TRL and Liger."""

    @pytest.mark.parametrize(("kind", "beta", "theirs"), [("forward_kl", 0.5, 0.0), ("reverse_kl", 0.5, 1.0),
                                                          ("jsd", 0.5, 0.5), ("jsd", 0.9, 0.9)])  # fmt: skip
    def test_trl(self, kind, beta, theirs):
        trl = pytest.importorskip("trl.kernels.chunked_divergence")
        pair = Pair(24, (50,), V=300).to(torch.float32)
        options = {
            "temperature": 0.8,
            "softcap": 5.0,
            "logit_scale": 1.2,
            "other_softcap": 6.0,
            "other_logit_scale": 0.9,
        }
        hidden, weight, bias = (x.clone().requires_grad_() for x in (pair.hidden, pair.weight, pair.bias))
        each, entropies = trl.ChunkedDivergenceFunction.apply(
            hidden, weight, bias, pair.other, pair.other_weight, pair.other_bias, theirs, 0.8, 1.2, 5.0, 0.9, 6.0
        )
        (each * pair.mask).sum().div(pair.mask.sum()).backward()
        out, dhidden, dweight, dbias = pair.run(kind=kind, beta=beta, bias=True, **options)
        torch.testing.assert_close(out.divergence, (each * pair.mask).detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(out.entropies, entropies * pair.mask, rtol=1e-4, atol=1e-5)
        for mine, want in ((dhidden, hidden.grad), (dweight, weight.grad), (dbias, bias.grad)):
            assert frobenius_error(mine, want) <= 2e-5

    @pytest.mark.parametrize("beta", [0.5, 0.9])
    def test_liger(self, beta):
        liger = pytest.importorskip("liger_kernel.chunked_loss")
        pair = Pair(25, (50,), V=300).to(torch.float32)
        hidden, weight = pair.hidden.clone().requires_grad_(), pair.weight.clone().requires_grad_()
        labels = torch.where(pair.mask, 1, -100)
        loss = liger.LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=0.8, compiled=False, chunk_size=16
        )(hidden, weight, pair.other, pair.other_weight, labels)
        loss.backward()
        out, dhidden, dweight, _ = pair.run(kind="jsd", beta=beta, temperature=0.8)
        torch.testing.assert_close(out.loss, loss.detach(), rtol=1e-5, atol=0.0)
        assert frobenius_error(dhidden, hidden.grad) <= 2e-5
        assert frobenius_error(dweight, weight.grad) <= 2e-5


@pytest.mark.parametrize("scratch", [None, 1 << 17])
@pytest.mark.parametrize(("far", "weights"), [(8000.0, 1.0), (8000.0, 1e-8), (0.0, 1.0)], ids=str)
def test_fp16_gradient_operands_of_divergences_of_any_size(monkeypatch, far, weights, scratch):
    """On CUDA fp16 dlogits feed the tensor cores; here the same code runs on CPU products."""
    from grpo_fused.engines import chunked, divergence, gradients, products

    pair = Pair(8, (40,), H=16, V=60, std=0.5, near=None if far else 1e-3)
    pair.other_weight[30:] -= far * pair.other[3] / (pair.other[3] @ pair.other[3])  # half of token 3's q is e^-far
    pair.mask[3], pair.weights = True, weights * pair.weights
    exact = pair.to(torch.float16).to(torch.float64)
    options = {"weighted": True, "upstream": 1 / weights}
    want = exact.run(impl="reference", **options)
    assert (want[0].divergence[3] > 2000.0) if far else (want[0].divergence.max() < 1e-3)
    for module in (chunked, divergence, gradients, products):
        monkeypatch.setattr(module, "gradient_dtype", lambda head: torch.float16)
    got = exact.to(torch.float16).run(max_scratch_bytes=scratch, **options)
    for ours, theirs in zip(got[1:3], want[1:3], strict=True):
        assert frobenius_error(ours, theirs) < (2e-3 if far else 2e-2)
