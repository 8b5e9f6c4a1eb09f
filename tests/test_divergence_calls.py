"""`fused_linear_divergence` as a call: layouts, masks, frozen parts, torch.compile, products, scratch, errors."""

from __future__ import annotations

import math

import pytest
import torch
from divergence_cases import Pair, kinds
from recording import AllocationRecorder, CostRecorder

from grpo_fused import fused_linear_divergence
from grpo_fused.api.operators import linear_divergence
from grpo_fused.call.calls import DivergenceCall, LMHead, Needs, Run


@kinds
@pytest.mark.parametrize("compact", [True, False])
def test_masked_positions_may_have_any_values(kind, beta, compact):
    pair = Pair(14)
    options = {"kind": kind, "beta": beta, "compact": compact, "weighted": True, "bias": True}
    want = pair.run(**options)
    for x in (pair.hidden, pair.other, pair.weights):
        x[~pair.mask] = torch.nan
    got = pair.run(**options)
    for a, b in zip((*got[0], *got[1:]), (*want[0], *want[1:]), strict=True):
        assert torch.equal(a, b)
    assert (got[0].divergence[~pair.mask] == 0).all()
    assert (got[1][~pair.mask] == 0).all()


@kinds
def test_packed_is_padded(kind, beta):
    pair = Pair(15, temperature=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    want = pair.run(kind=kind, beta=beta)
    packed = Pair()
    packed.__dict__.update(pair.__dict__)
    packed.hidden, packed.other = pair.hidden[pair.mask], pair.other[pair.mask]
    packed.options = {"temperature": pair.options["temperature"].repeat_interleave(pair.mask.sum(1))}
    got = packed.run(kind=kind, beta=beta, mask=False)
    torch.testing.assert_close(got[0].loss, want[0].loss)
    torch.testing.assert_close(got[0].divergence, want[0].divergence[pair.mask])
    torch.testing.assert_close(got[1], want[1][pair.mask])
    torch.testing.assert_close(got[2], want[2])


@kinds
def test_nothing_active(kind, beta):
    pair = Pair(16)
    pair.mask[:] = False
    out, dhidden, dweight, _ = pair.run(kind=kind, beta=beta)
    assert out.loss == 0
    assert (dhidden == 0).all()
    assert (dweight == 0).all()


@kinds
def test_frozen_parts_and_no_gradient(kind, beta):
    pair = Pair(17)
    want = pair.run(kind=kind, beta=beta)
    head = pair.run(kind=kind, beta=beta, need=(True, False))
    body = pair.run(kind=kind, beta=beta, need=(False, True))
    assert torch.equal(head[1], want[1])
    assert head[2] is None
    assert torch.equal(body[2], want[2])
    assert body[1] is None
    with torch.no_grad():
        out = fused_linear_divergence(
            pair.hidden, pair.weight, pair.other, pair.other_weight, pair.mask, kind=kind, beta=beta
        )
    assert torch.equal(out.loss, want[0].loss)
    assert not out.loss.requires_grad
    assert not want[0].divergence.requires_grad
    assert not want[0].entropies.requires_grad


def test_no_gradient_reaches_the_other_head():
    pair = Pair(18)
    other, weight = pair.other.requires_grad_(), pair.other_weight.requires_grad_()
    for impl in ("chunked", "reference"):
        pair.run(impl=impl)
        assert other.grad is None
        assert weight.grad is None


@kinds
def test_two_runs_are_bitwise_equal(kind, beta):
    pair = Pair(19, (70,), V=800).to(torch.bfloat16)
    first, second = (pair.run(kind=kind, beta=beta, max_scratch_bytes=400_000) for _ in range(2))
    for a, b in zip((*first[0], *first[1:3]), (*second[0], *second[1:3]), strict=True):
        assert torch.equal(a, b)


@kinds
def test_torch_compile_of_a_caller(kind, beta):
    pair = Pair(20, (2, 40), V=300).to(torch.bfloat16)

    def loss(hidden, weight):
        return fused_linear_divergence(
            hidden * 1.0,
            weight,
            pair.other,
            pair.other_weight,
            pair.mask,
            kind=kind,
            beta=beta,
            max_scratch_bytes=150_000,
        ).loss  # several chunks: dW is summed in fp32

    given = pair.hidden.clone().requires_grad_(), pair.weight.clone().requires_grad_()
    want = torch.autograd.grad(loss(*given), given)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*given), given)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_autocast():
    pair = Pair(21).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = pair.run()
    want = pair.to(torch.bfloat16).run()
    assert got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].divergence, want[0].divergence)


def call_of(pair, needs, scratch, other_ids=None, other_logprobs=None):
    dtype = pair.hidden.dtype
    head, kind, other = LMHead(pair.weight, compute_dtype=dtype), "forward_kl", (None, None)
    if other_ids is None:
        kind, other = "jsd", (pair.other, LMHead(pair.other_weight, compute_dtype=dtype))
    given = pair.mask, pair.weights, kind, 0.5, *other, other_ids, other_logprobs
    return DivergenceCall(pair.hidden, head, *given, needs, Run("chunked", scratch))


@pytest.mark.parametrize(("needs", "products"), [((True, True), 4), ((True, False), 3), ((False, True), 3),
                                                 ((False, False), 2)])  # fmt: skip
def test_products(needs, products):
    pair = Pair(22, (64,), H=16, other_H=16, V=1000).to(torch.float32)
    pair.mask[:] = True
    with torch.no_grad(), CostRecorder() as recorded:
        linear_divergence.body(call_of(pair, Needs(*needs, False), 2_000_000))
    assert recorded.products(64, 16, 1000) == products
    best = torch.arange(3).expand(64, 3), torch.full((64, 3), -2.0)
    with torch.no_grad(), CostRecorder() as recorded:
        linear_divergence.body(call_of(pair, Needs(*needs, False), 2_000_000, *best))
    assert recorded.products(64, 16, 1000) == products - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scratch_stays_within_the_budget(dtype):
    """N = 256, V = 8192: fp32 logits of one head would be 8 MiB; 2 MiB of scratch suffice for both."""
    budget = 2 * 2**20
    pair = Pair(23, (256,), H=8, other_H=8, V=8192).to(dtype)
    with torch.no_grad(), AllocationRecorder() as recorded:
        out = linear_divergence.body(call_of(pair, Needs(True, True, False), budget))
    assert out.dweight.norm() > 0
    gradients = out.dhidden.nbytes + pair.weight.numel() * 4  # dW is accumulated in fp32
    tokens = 256 * 8 * 64
    assert recorded.largest <= budget
    assert recorded.peak <= gradients + budget + tokens
    assert recorded.peak >= budget // 3, "the recorder must have counted the engine's memory"


TOP = {
    "other_hidden_states": None, "other_lm_head_weight": None, "kind": "forward_kl",
    "other_ids": torch.zeros(3, 7, 2).long(), "other_logprobs": torch.zeros(3, 7, 2),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"kind": "kl"}, ValueError, "kind must be one of reverse_kl, forward_kl, jsd; got 'kl'"),
    ({"impl": "native"}, ValueError, "impl must be one of auto, chunked, reference; got 'native'"),
    ({"kind": "jsd", "beta": 0.0}, ValueError, r"beta must be in \(0, 1\) .* got 0.0"),
    ({"kind": "jsd", "beta": 1.0}, ValueError, r"beta must be in \(0, 1\) .* got 1.0"),
    ({"kind": "jsd", "beta": math.nan}, ValueError, "beta must be finite"),
    ({"beta": 0.1}, ValueError, "left out for other kinds; got 0.1 for 'reverse_kl'"),
    ({"hidden_states": torch.zeros(4)}, ValueError, r"hidden_states must have shape \(B, T, H\) or \(N, H\); got \(4,\)"),
    ({"hidden_states": None}, TypeError, "hidden_states must be a torch.Tensor; got NoneType"),
    ({"lm_head_weight": torch.zeros(29, 5)}, ValueError, r"lm_head_weight must have shape \(V, 12\)"),
    ({"other_lm_head_weight": torch.zeros(28, 9)}, ValueError, "same vocabulary; got 29 and 28 rows"),
    ({"other_lm_head_weight": torch.zeros(29, 5)}, ValueError, r"other head: lm_head_weight must have .*\(V, 9\)"),
    ({"other_hidden_states": torch.zeros(3, 6, 9)}, ValueError, r"other head: hidden_states must have shape \(3, 7, H\)"),
    ({"other_lm_head_weight": torch.zeros(29, 9).int()}, TypeError, "other head: .* plain floating-point"),
    ({"other_hidden_states": None}, ValueError, "the first two or the last two .* given; got other_lm_head_weight"),
    ({**TOP, "other_ids": [0]}, TypeError, "other_ids must be a torch.Tensor; got list"),
    ({**TOP, "other_ids": torch.tensor(1)}, ValueError, r"other_ids must have shape \(3, 7, K\); got \(\)"),
    ({**TOP, "other_logprobs": torch.zeros(3, 7, 3)}, ValueError, r"other_logprobs must have shape \(3, 7, 2\) to go with"),
    ({**TOP, "other_logprobs": torch.zeros(3, 7, 2).int()}, TypeError, "other_logprobs must be fp16, .* got torch.int32"),
    ({**TOP, "kind": "jsd"}, ValueError, "other_logprobs are for kind='forward_kl'; got 'jsd'"),
    ({**TOP, "other_lm_head_bias": torch.zeros(29)}, ValueError, "are of another head; other_logprobs has none"),
    ({**TOP, "other_softcap": 2.0}, ValueError, "are of another head; other_logprobs has none"),
    ({**TOP, "other_logit_scale": 2.0}, ValueError, "are of another head; other_logprobs has none"),
    ({"other_softcap": 0.0}, ValueError, "other head: softcap must be in"),
    ({"mask": torch.ones(3, 6)}, ValueError, r"mask must have shape \(3, 7\)"),
    ({"mask": torch.full((3, 7), 0.5)}, ValueError, "mask must hold only 0 and 1"),
    ({"weights": torch.ones(3, 6)}, ValueError, r"weights must have shape \(3, 7\)"),
    ({"weights": torch.full((3, 7), torch.nan)}, ValueError, "weights must be finite"),
    ({"temperature": 0.0}, ValueError, "temperature must be > 0"),
    ({"max_scratch_bytes": 100}, ValueError, "max_scratch_bytes=100 is too small"),
    ({"hidden_states": torch.full((3, 7, 12), torch.inf)}, ValueError, "^hidden_states must be finite on active tokens; got others at 21"),
    ({"other_hidden_states": torch.full((3, 7, 9), torch.nan)}, ValueError, "^other_hidden_states must be finite on"),
])  # fmt: skip
def test_bad_arguments(options, error, message):
    given = {"hidden_states": torch.zeros(3, 7, 12), "lm_head_weight": torch.zeros(29, 12),
             "other_hidden_states": torch.zeros(3, 7, 9), "other_lm_head_weight": torch.zeros(29, 9)} | options  # fmt: skip
    with pytest.raises(error, match=message):
        fused_linear_divergence(**given)
