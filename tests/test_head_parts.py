"""Heads with low-rank adapters and quantised weights, against fp64 with the weight that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from recording import allocated_peak
from torch import Tensor

from grpo_fused import (
    CandidateSets,
    GRPOLossConfig,
    HeadAdapter,
    QuantizedWeight,
    engines,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
)
from grpo_fused.api import operators
from grpo_fused.api.composed import composed
from grpo_fused.call.calls import LMHead, Needs, flat
from grpo_fused.call.head_parts import dense_weight
from grpo_fused.call.validation import check_adapters
from grpo_fused.engines import candidates, cpu_library, native, products
from grpo_fused.engines.base import Tokens
from grpo_fused.engines.gradients import GradientSums
from grpo_fused.heads.check import inputs_of
from grpo_fused.heads.form import HeadForm
from grpo_fused.heads.modules import HeadParts

B, T, H, V, R = 3, 37, 64, 1000, 5
FORMATS = ("plain", "int8", "fp8", "int8-groups", "fp8-groups", "q8_0", "nf4", "codes-rows")
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
       0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]  # fmt: skip
IMPLS = ("native", "chunked", "triton", "reference")
OF_TRITON = ("plain", "int8", "fp8")
"""formats that the kernel takes"""
needs_library = pytest.mark.skipif(
    native.unavailable(torch.device("cpu"), torch.float32) is not None, reason="no C++ library"
)
LOGPS = {torch.bfloat16: 1e-4, torch.float32: 4e-6, torch.float16: 2e-5}
GRADIENT = {torch.bfloat16: 6e-3, torch.float32: 4e-6, torch.float16: 1e-3}
"""relative, by Frobenius norms; adapters have the dtype of the hidden states or fp32"""


def quantized(weight: Tensor, name: str) -> Tensor | QuantizedWeight:
    if name == "plain":
        return weight
    groups = weight.float().unflatten(1, (-1, 32) if name in ("int8-groups", "fp8-groups", "q8_0", "nf4") else (1, -1))
    most, dtype = {"n": (1, None), "c": (1, None), "f": (448, torch.float8_e4m3fn)}.get(name[0], (127, torch.int8))
    scale = groups.abs().amax(2) / most
    if name == "q8_0":
        scale = scale.half().float()
    values = (groups / scale.unsqueeze(2)).flatten(1)
    if dtype is None:
        at = (values.unsqueeze(2) - torch.tensor(NF4)).abs().argmin(2).to(torch.uint8)
        return QuantizedWeight(at[:, ::2] << 4 | at[:, 1::2], scale, torch.tensor(NF4))
    numbers = (values.round() if dtype == torch.int8 else values).to(dtype)
    if name == "q8_0":
        blocks = [
            scale.half().view(torch.uint8).unflatten(1, (-1, 2)),
            numbers.view(torch.uint8).unflatten(1, (-1, 32)),
        ]
        return QuantizedWeight.from_q8_0(torch.cat(blocks, dim=2).flatten(1))
    return QuantizedWeight(numbers, scale)


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor | QuantizedWeight
    adapters: tuple[HeadAdapter, ...]
    ids: Tensor
    mask: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, *(x for adapter in self.adapters for x in (adapter.a, adapter.b))]

    def exact(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Leaves in fp64, hidden states among them, and the dense weight as a function of the leaves."""
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        weight = self.weight
        if isinstance(weight, QuantizedWeight):  # what groups and codes stand for is rounded to the computation's dtype
            weight = weight.dequantize(torch.float64 if weight.scales_rows else self.hidden.dtype)
        weight = weight.detach().double()
        for adapter, a, b in zip(self.adapters, leaves[1::2], leaves[2::2], strict=True):
            weight = weight + adapter.scale * b @ a
        return leaves, leaves[0], weight


def case_of(
    name: str = "plain", dtype: torch.dtype = torch.float32, adapters: int = 1, of: torch.dtype | None = None,
    width: int = H, vocab: int = V, seed: int = 0,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    made = tuple(
        HeadAdapter(
            normal(R + k, width, scale=1 / 8).to(of or dtype).requires_grad_(),
            normal(vocab, R + k, scale=1 / 4).to(of or dtype).requires_grad_(),
            0.7 + k,
        )
        for k in range(adapters)
    )
    return Case(
        normal(B, T, width).to(dtype).requires_grad_(),
        quantized(normal(vocab, width, scale=width**-0.5).to(dtype), name),
        made,
        torch.randint(vocab, (B, T), generator=generator),
        torch.rand(B, T, generator=generator) > 0.2,
    )


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def sets_of(kept: Tensor) -> CandidateSets:
    """Those of a mask [N, V], of which rows may be empty."""
    return CandidateSets(kept.nonzero()[:, 1], torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)]))


def assert_close(found: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    for x, y in zip(found, want, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < GRADIENT[dtype]


OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.7}, {"softcap": 6.0}, {"logit_scale": 0.5, "temperature": 1.3}, {"lm_head_bias": True},
]  # fmt: skip
CONFIGS = [
    GRPOLossConfig(), GRPOLossConfig(importance_sampling_level="sequence"), GRPOLossConfig(entropy_coef=0.05),
    GRPOLossConfig(loss_type="cispo", epsilon_high=3.0), GRPOLossConfig(top_entropy_quantile=0.5),
]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_a_small_b_in_fp16(impl):
    """The gradient of u, dlogits B, is far below fp16's range: without a loss scale it would be 0, and so would dA."""
    case = case_of("plain", torch.float16, 1, torch.float32)
    (adapter,) = case.adapters
    adapter.b.data *= 1e-3
    loss = fused_linear_logprobs(
        case.hidden, case.weight, case.ids, case.mask, lm_head_adapter=case.adapters, impl=impl
    ).logps.sum() / 1000  # fmt: skip
    (found,) = torch.autograd.grad(loss, [adapter.a])
    exact = HeadAdapter(adapter.a.double(), adapter.b.double(), adapter.scale)
    given = case.hidden.double(), case.weight.double(), case.ids, case.mask
    logps = fused_linear_logprobs(*given, lm_head_adapter=exact, impl="reference").logps
    (want,) = torch.autograd.grad(logps.sum() / 1000, [adapter.a])
    assert_close([found], [want], torch.float16)


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "triton"])
def test_a_small_scale_in_fp16(impl):
    """B is divided by the scale of a row, which multiplies both: the quotient is beyond fp16's range."""
    case = case_of("int8", torch.float16)
    case = case._replace(weight=replace(case.weight, scale=1e-4 * case.weight.scale))
    got = fused_linear_logprobs(
        case.hidden, case.weight, case.ids, case.mask, lm_head_adapter=case.adapters, impl=impl
    ).logps.sum()  # fmt: skip
    leaves, hidden, weight = case.exact()
    want = fused_linear_logprobs(hidden, weight, case.ids, case.mask, impl="reference").logps.sum()
    assert_close(gradients(got, case.leaves), gradients(want, leaves), torch.float16)


@pytest.mark.pairs
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("of", [None, torch.float32], ids=["narrow-adapter", "fp32-adapter"])
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_loss_is_that_of_the_dense_weight(name, dtype, of, count, impl):
    vocab = 300 if impl == "triton" else V  # several tiles; interpreted, each takes its time
    case = case_of(name, dtype, count, of, vocab=vocab)
    if impl == "triton" and name not in OF_TRITON:
        with pytest.raises(RuntimeError, match="triton takes quantised weights of int8 and fp8 with one scale a row"):
            fused_linear_logprobs(case.hidden, case.weight, case.ids, impl=impl)
        return
    if impl == "triton" and name != "plain" and dtype != torch.bfloat16:
        with pytest.raises(RuntimeError, match=f"triton takes .* where products are of bfloat16; they are of {dtype}"):
            fused_linear_logprobs(case.hidden, case.weight, case.ids, impl=impl)
        return
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(B, generator=generator)
    old = -6 + 0.1 * torch.randn(B, T, generator=generator)
    bias = 0.3 * torch.randn(vocab, generator=generator)
    # every option and every kind of objective, with no temperature and no bias too
    for options, config in zip(OPTIONS, CONFIGS, strict=True):
        leaves, hidden, weight = case.exact()
        own, exact = dict(options), dict(options)
        inputs, want_inputs = case.leaves, leaves
        if "lm_head_bias" in options:
            own["lm_head_bias"] = bias.clone().requires_grad_()
            exact["lm_head_bias"] = bias.double().requires_grad_()
            inputs, want_inputs = [*inputs, own["lm_head_bias"]], [*leaves, exact["lm_head_bias"]]
        out = fused_linear_grpo_loss(
            case.hidden, case.weight, case.ids, advantages, case.mask, old_per_token_logps=old, config=config,
            impl=impl, lm_head_adapter=case.adapters, **own,
        )  # fmt: skip
        want = fused_linear_grpo_loss(
            hidden, weight, case.ids, advantages.double(), case.mask, old_per_token_logps=old.double(), config=config,
            impl="reference", **exact,
        )  # fmt: skip
        assert float((out.per_token_logps - want.per_token_logps).abs().max()) < LOGPS[dtype]
        assert_close(gradients(out.loss, inputs), gradients(want.loss, want_inputs), dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("whole", [False, True])
def test_candidates_and_alternatives(name, impl, whole):
    """Sets of some tokens, of all, and one beyond V/8, which is worked on the whole head."""
    if impl == "triton" and name not in OF_TRITON:
        pytest.skip("not one of its formats")
    vocab = 300  # interpreted, a row of the weight's gradient takes its time
    case = case_of(name, torch.bfloat16, vocab=vocab)
    generator = torch.Generator().manual_seed(2)
    kept = torch.rand(B * T, vocab, generator=generator) < 0.04
    kept[0] = torch.rand(vocab, generator=generator) < 0.5
    kept[torch.arange(B * T), case.ids.reshape(-1)] = True
    if whole:
        kept[1::3] = False
    sets = sets_of(kept)
    others = sets_of(torch.where(kept.any(1, keepdim=True), kept, kept[:1]) & (torch.arange(vocab) % 3 == 0))
    leaves, hidden, weight = case.exact()
    biases = [(0.1 * torch.ones(vocab, dtype=x)).requires_grad_() for x in (torch.float32, torch.float64)]
    sides = (
        (case.hidden, case.weight, case.adapters, impl, [*case.leaves, biases[0]]),
        (hidden, weight, (), "reference", [*leaves, biases[1]]),
    )
    found = []
    for (h, w, adapters, how, inputs), bias in zip(sides, biases, strict=True):
        options = {"impl": how, "lm_head_adapter": adapters, "candidates": sets, "lm_head_bias": bias}
        out = fused_linear_logprobs(h, w, case.ids, case.mask, with_entropy=True, alternatives=others, **options)
        at = torch.linspace(-1, 1, B * T, dtype=h.dtype).view(B, T)
        loss = (out.logps * at).sum() + 0.1 * (out.entropies * at).sum() + 0.01 * out.alternative_logps.sum()
        found.append((out, gradients(loss, inputs)))
    (out, got), (want, exact) = found
    for field in ("logps", "entropies", "alternative_logps"):
        assert float((getattr(out, field) - getattr(want, field)).abs().max()) < 5e-5, field
    assert_close(got, exact, torch.bfloat16)


@pytest.mark.parametrize("impl", IMPLS)
def test_sets_have_both_terms_of_a_state_in_the_gradient_of_an_adapter(impl):
    """With the first alone `b`, in fp32, would have the error of a state in bf16, 2e-3."""
    case = case_of("plain", torch.bfloat16, of=torch.float32, vocab=300)
    kept = torch.zeros(B * T, 300, dtype=torch.bool).scatter_(1, case.ids.view(-1, 1), True)
    kept[:, ::30] = True
    leaves, hidden, weight = case.exact()
    options = {"candidates": sets_of(kept), "impl": impl}
    got = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=case.adapters, **options)
    want = fused_linear_logprobs(hidden, weight, case.ids, candidates=sets_of(kept), impl="reference")
    (db,), (exact,) = gradients(got.logps.sum(), case.leaves[2:]), gradients(want.logps.sum(), leaves[2:])
    assert float((db.double() - exact).norm() / exact.norm()) < 1e-4


def test_candidates_are_copied_in_blocks(monkeypatch):
    """Rows of a head in parts are copied, so there are fewer of them at a time."""
    monkeypatch.setattr(candidates, "_BLOCK_COPIED", 10)
    copied, own = [], candidates._chosen_rows
    monkeypatch.setattr(candidates, "_chosen_rows", lambda head, ids: (copied.append(len(ids)), own(head, ids))[1])
    case = case_of("int8")
    kept = torch.zeros(B * T, V, dtype=torch.bool)
    kept[:, ::250] = kept[torch.arange(B * T), case.ids.reshape(-1)] = True
    options = {"candidates": sets_of(kept), "lm_head_adapter": case.adapters, "impl": "native"}
    got = fused_linear_logprobs(case.hidden, case.weight, case.ids, **options)
    gradients(got.logps.sum(), case.leaves)
    assert max(copied) < 10 + 5  # whole sets, of at most five
    assert sum(copied) > 100


@pytest.mark.pairs
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scope", ["token", "sequence", "batch"])
def test_objectives_and_divergences(name, scope):
    case = case_of(name)

    def objective(logps, entropies, **_):
        return -logps.exp() * logps

    for function in (
        lambda h, w, adapters: fused_linear_objective(h, w, case.ids, objective, case.mask, scope=scope,
                                                      lm_head_adapter=adapters),
        lambda h, w, adapters: fused_linear_divergence(h, w, h.detach().roll(1, 0), torch.eye(V, H, dtype=h.dtype),
                                                       case.mask, lm_head_adapter=adapters),
    ):  # fmt: skip
        leaves, hidden, weight = case.exact()
        out, want = function(case.hidden, case.weight, case.adapters), function(hidden, weight, ())
        torch.testing.assert_close(out.loss.double(), want.loss, rtol=1e-5, atol=1e-6)
        assert_close(gradients(out.loss, case.leaves), gradients(want.loss, leaves), torch.float32)


@pytest.mark.parametrize("name", ["plain", "int8"])
@pytest.mark.parametrize("kind", ["divergence", "exact KL"])
def test_a_narrow_head_beside_a_reference_in_float64(name, kind):
    """Differences of logits are taken in fp64; the adapter has the terms of a bf16 product all the same."""
    case, g = case_of(name, torch.bfloat16, of=torch.float32), torch.Generator().manual_seed(1)
    other = torch.randn(B, T, H, dtype=torch.float64, generator=g), torch.randn(V, H, generator=g).double() / 8

    def loss(hidden, weight, adapters):
        if kind == "divergence":
            return fused_linear_divergence(hidden, weight, *other, case.mask, lm_head_adapter=adapters).loss
        return fused_linear_grpo_loss(
            hidden, weight, case.ids, torch.ones(B, dtype=hidden.dtype), case.mask, lm_head_adapter=adapters,
            ref_hidden_states=other[0], ref_lm_head_weight=other[1],
            config=GRPOLossConfig(beta=0.1, kl_estimator="exact"),
        ).loss  # fmt: skip

    leaves, hidden, weight = case.exact()
    found, want = loss(case.hidden, case.weight, case.adapters), loss(hidden, weight, ())
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    assert_close(gradients(found, case.leaves), gradients(want, leaves), torch.bfloat16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_every_number_of_a_format(dtype, impl):
    """All 256 of a byte, under small and large scales; NaN stays NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    is_nan = numbers.float().isnan()
    assert int(is_nan.sum()) == (2 if dtype == torch.float8_e4m3fn else 0)
    shift = torch.arange(64).unsqueeze(1) + torch.arange(256)
    values = torch.where(is_nan, 0, numbers.view(torch.uint8))[shift % 256].view(dtype)
    weight = QuantizedWeight(values, torch.logspace(-6, -1, 64))
    states = torch.eye(256, dtype=torch.bfloat16)  # each picks a column
    want = weight.dequantize(torch.float64).T.log_softmax(1)[:, 7]
    got = fused_linear_logprobs(states, weight, torch.full((256,), 7), impl=impl).logps
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)
    for nan in numbers[is_nan]:
        values = values.clone()
        values[3, 5] = nan
        got = fused_linear_logprobs(states[:2], QuantizedWeight(values, weight.scale), torch.tensor([1, 3]), impl=impl)
        assert got.logps.isnan().all()


@pytest.mark.parametrize("impl", ["chunked", "native"])
def test_no_tensor_of_the_size_of_the_weight(impl):
    """Beyond results, memory grows with r and not with H."""
    from recording import CostRecorder

    case = case_of("int8", torch.bfloat16, width=2048, vocab=4000)
    with CostRecorder() as recorder:
        out = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=case.adapters, impl=impl)
        gradients(out.logps.sum(), case.leaves)
    assert recorder.largest < 4000 * 2048, recorder.largest


@pytest.mark.parametrize("name", FORMATS)
def test_columns_in_whole_cache_lines(name):
    """The layout in which a weight without a base is read where it stands."""
    case = case_of(name, torch.bfloat16, vocab=1024)
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(32, H, generator=generator) / 16, torch.randn(1024, 32, generator=generator) / 8
    adapter = HeadAdapter(a.bfloat16().requires_grad_(), b.bfloat16().requires_grad_())
    case = case._replace(adapters=(adapter,))
    leaves, hidden, weight = case.exact()
    got = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=adapter, impl="native").logps
    want = fused_linear_logprobs(hidden, weight, case.ids, impl="reference").logps
    assert float((got - want).abs().max()) < LOGPS[torch.bfloat16]
    assert_close(gradients(got.sum(), case.leaves), gradients(want.sum(), leaves), torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_any_strides(name):
    """Columns first, and rows with gaps between them."""
    case = case_of(name, torch.bfloat16)
    want = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=case.adapters, impl="native").logps
    values = case.weight if isinstance(case.weight, Tensor) else case.weight.values
    width = values.shape[1]
    gaps = torch.zeros(V, width + 3, dtype=torch.uint8).to(values.dtype)
    gaps[:, :width] = values
    for strided in (values.T.contiguous().T, gaps[:, :width]):
        weight = strided if isinstance(case.weight, Tensor) else replace(case.weight, values=strided)
        got = fused_linear_logprobs(case.hidden, weight, case.ids, lm_head_adapter=case.adapters, impl="native").logps
        assert torch.equal(got, want)


@pytest.mark.parametrize("impl", ["native", "chunked"])
def test_scales_of_any_strides(impl):
    """One a row, in a column of a table."""
    case = case_of("int8", torch.bfloat16)
    strided = replace(case.weight, scale=case.weight.scale.repeat(1, 2)[:, 0])
    got, want = (fused_linear_logprobs(case.hidden, x, case.ids, impl=impl).logps for x in (strided, case.weight))
    assert torch.equal(got, want)


def test_scores_do_not_depend_on_the_batch():
    case = case_of("int8", torch.bfloat16)
    options = {"lm_head_adapter": case.adapters, "impl": "native"}
    whole = fused_linear_logprobs(case.hidden, case.weight, case.ids, **options).logps
    for rows in (slice(0, 1), slice(1, 3)):
        alone = fused_linear_logprobs(case.hidden[rows], case.weight, case.ids[rows], **options).logps
        assert torch.equal(alone, whole[rows])


def test_masked_positions_may_hold_anything():
    case = case_of("int8", torch.bfloat16)
    want = fused_linear_logprobs(case.hidden, case.weight, case.ids, case.mask, lm_head_adapter=case.adapters)
    exact = gradients(want.logps.sum(), case.leaves)
    broken = torch.where(case.mask.unsqueeze(-1), case.hidden.detach(), torch.nan).requires_grad_()
    got = fused_linear_logprobs(broken, case.weight, case.ids, case.mask, lm_head_adapter=case.adapters)
    for x, y in zip(gradients(got.logps.sum(), [broken, *case.leaves[1:]]), exact, strict=True):
        assert torch.equal(x, y)


def test_dropout_is_that_of_torch_on_the_same_seed():
    case = case_of()
    adapter = case.adapters[0]
    dropped = HeadAdapter(adapter.a, adapter.b, adapter.scale, dropout=0.4)
    torch.manual_seed(3)
    got = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=dropped).logps
    torch.manual_seed(3)
    states = torch.nn.functional.dropout(case.hidden, 0.4)
    logits = case.hidden @ case.weight.T + adapter.scale * (states @ adapter.a.T) @ adapter.b.T
    want = logits.log_softmax(-1).gather(-1, case.ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    for x, y in zip(gradients(got.sum(), case.leaves), gradients(want.sum(), case.leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_many_blocks_of_the_weight(name, monkeypatch):
    """Products of widened blocks are added up in fp32."""
    monkeypatch.setattr(products, "VOCAB_BLOCK_BYTES", 1)  # 256 rows each
    case = case_of(name, torch.bfloat16, vocab=20 * 256)
    leaves, hidden, weight = case.exact()
    out = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=case.adapters, impl="chunked")
    want = fused_linear_logprobs(hidden, weight, case.ids, impl="reference")
    assert float((out.logps - want.logps).abs().max()) < LOGPS[torch.bfloat16]
    (found, *_), (exact, *_) = gradients(out.logps.sum(), case.leaves), gradients(want.logps.sum(), leaves)
    assert float((found.double() - exact).norm() / exact.norm()) < 2.7e-3  # rounded, not added up in bf16


@pytest.mark.parametrize("name", FORMATS)
def test_autocast_rounds_the_bias_as_without_an_adapter(name):
    case, bias = case_of(name, adapters=0), 8 * torch.randn(V)
    nothing = HeadAdapter(torch.randn(2, H), torch.zeros(V, 2))
    rounded = bias.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        got = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_bias=bias, lm_head_adapter=nothing)
        want = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_bias=rounded)
    assert float((got.logps - want.logps).abs().max()) < 1e-5


@pytest.mark.parametrize(("dtype", "of"), [(torch.bfloat16, None), (torch.float32, torch.float64)], ids=str)
def test_states_of_an_adapter_are_in_the_dtype_of_sums(dtype, of):
    """Also under autocast to the dtype that the products have anyway, and where the adapter's own is wider."""
    case = case_of("plain", dtype, 1, of)

    def logps() -> Tensor:
        return fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=case.adapters).logps

    want = logps()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert torch.equal(logps(), want)
    _, hidden, weight = case.exact()
    exact = fused_linear_logprobs(hidden, weight, case.ids, impl="reference").logps
    assert float((want - exact).abs().max()) < LOGPS[dtype]


def test_a_head_without_needs_of_its_states():
    """Frozen states: gradients of the adapter alone."""
    case = case_of("int8", torch.bfloat16)
    out = fused_linear_logprobs(case.hidden.detach(), case.weight, case.ids, lm_head_adapter=case.adapters)
    leaves, hidden, weight = case.exact()
    want = fused_linear_logprobs(hidden, weight, case.ids, impl="reference")
    assert_close(gradients(out.logps.sum(), case.leaves[1:]), gradients(want.logps.sum(), leaves[1:]), torch.bfloat16)


@pytest.mark.gate(keep=lambda impl: impl == "native")
@pytest.mark.parametrize("impl", ["native", "chunked"])
def test_operators_and_compilation(impl):
    """Fake results have the shapes of real ones, and a compiled function gives the same."""
    case = case_of("int8", torch.bfloat16)
    states, ids = case.hidden, case.ids

    def function(h):
        return fused_linear_logprobs(h, case.weight, ids, lm_head_adapter=case.adapters, impl=impl).logps.sum()

    want = gradients(function(states), case.leaves)
    got = gradients(torch.compile(function, backend="aot_eager")(states), case.leaves)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    seen, real = [], operators.linear_grpo_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "linear_grpo_loss", lambda call: (seen.append(call), real(call))[1])
        fused_linear_grpo_loss(states, case.weight, ids, torch.ones(B), lm_head_adapter=case.adapters, impl=impl)
    torch.library.opcheck(real.traced, tuple(x.detach() if isinstance(x, Tensor) else x for x in flat(*seen)))


def test_rows_without_logits_are_left_out():
    """A model that drops the logits of its last rows: weight, bias and adapters are cut."""
    case = case_of("int8", adapters=2)
    bias = torch.randn(V)
    inputs = inputs_of(HeadForm(1.0, None, V - 7), HeadParts(case.weight, bias, case.adapters))
    ids = case.ids.clamp(max=V - 8)
    got = fused_linear_logprobs(case.hidden, token_ids=ids, **inputs).logps
    _, hidden, weight = case.exact()
    want = (hidden @ weight[:-7].T + bias[:-7].double()).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert float((got - want).abs().max()) < LOGPS[torch.float32]


def test_which_engine_runs():
    assert (
        engines.choose("auto", torch.device("cpu"), torch.float32, 48, engines.WeightForm(torch.float32, 48))
        == "chunked"
    )
    for dtype in (torch.bfloat16, torch.float32):
        narrow = case_of(dtype=dtype, width=48)
        got = fused_linear_logprobs(narrow.hidden, narrow.weight, narrow.ids, lm_head_adapter=narrow.adapters)
        _, hidden, weight = narrow.exact()
        want = fused_linear_logprobs(hidden, weight, narrow.ids, impl="reference").logps
        assert float((got.logps - want).abs().max()) < LOGPS[dtype]
    narrow = case_of("int8")._replace(weight=quantized(torch.randn(V, H) / 8, "int8-groups"))
    few = replace(narrow.weight, scale=narrow.weight.scale.repeat_interleave(2, dim=1))  # of 16 columns
    assert (
        engines.choose("auto", torch.device("cpu"), torch.float32, 64, engines.WeightForm(torch.int8, 16)) == "chunked"
    )
    for dtype in (torch.bfloat16, torch.float32):
        states = narrow.hidden.detach().to(dtype)
        got = fused_linear_logprobs(states, few, narrow.ids).logps
        want = fused_linear_logprobs(
            states.double(), few.dequantize(dtype).double(), narrow.ids, impl="reference"
        ).logps
        assert float((got - want).abs().max()) < LOGPS[dtype]
    with pytest.raises(RuntimeError, match="groups of a multiple of 32 columns with a scale; they have 16"):
        fused_linear_logprobs(narrow.hidden, few, narrow.ids, impl="native")
    narrow = case_of(width=48)
    if engines.unavailable("triton", torch.device("cpu"), torch.float32) is None:  # in its interpreter
        with pytest.raises(
            RuntimeError, match="triton takes an adapter or a quantised weight where H is a multiple of 32"
        ):
            fused_linear_logprobs(
                narrow.hidden, narrow.weight, narrow.ids, lm_head_adapter=narrow.adapters, impl="triton"
            )
    with pytest.raises(RuntimeError, match="where H is a multiple of 32; it is 48"):
        fused_linear_logprobs(narrow.hidden, narrow.weight, narrow.ids, lm_head_adapter=narrow.adapters, impl="native")


def _call(**changes: Any) -> Any:
    case = case_of("int8")
    arguments = {
        "hidden_states": case.hidden, "lm_head_weight": case.weight, "token_ids": case.ids,
        "lm_head_adapter": case.adapters, **changes,
    }  # fmt: skip
    return fused_linear_logprobs(**arguments)


def _adapter(**changes: Any) -> HeadAdapter:
    return HeadAdapter(**{"a": torch.zeros(R, H), "b": torch.zeros(V, R), **changes})


def _quantized(**changes: Any) -> QuantizedWeight:
    return QuantizedWeight(**{"values": torch.zeros(V, H, dtype=torch.int8), "scale": torch.ones(V), **changes})


def _halves(**changes: Any) -> QuantizedWeight:
    return _quantized(**{"values": torch.zeros(V, H // 2, dtype=torch.uint8), "codes": torch.tensor(NF4), **changes})


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (TypeError, "HeadAdapter or a sequence of them; got str", {"lm_head_adapter": "lora"}),
        (
            ValueError, "at least 1e-20; got 1e-2.: take 1 for a row of zeros",
            {"lm_head_weight": _quantized(scale=torch.ones(V).index_fill(0, torch.tensor([3]), 1e-21))},
        ),
        (TypeError, "HeadAdapter or a sequence of them; got Tensor", {"lm_head_adapter": [torch.zeros(2)]}),
        (TypeError, "HeadAdapter or a sequence of them; got Tensor", {"lm_head_adapter": torch.zeros(2)}),
        (ValueError, r"lm_head_adapter.a must have shape \(r, 64\)", {"lm_head_adapter": _adapter(a=torch.zeros(R, 8))}),
        (ValueError, r"lm_head_adapter.b must have shape \(1000, 5\)", {"lm_head_adapter": _adapter(b=torch.zeros(V, 2))}),
        (ValueError, r"dropout must be in \[0, 1\); got 1.0", {"lm_head_adapter": _adapter(dropout=1.0)}),
        (ValueError, "scale must be finite", {"lm_head_adapter": _adapter(scale=float("nan"))}),
        (ValueError, "lm_head_weight must be frozen", {"lm_head_weight": torch.zeros(V, H, requires_grad=True)}),
        (TypeError, r"values must be int8 or float8_e4m3fn \(uint8 needs codes\); got torch.uint8",
         {"lm_head_weight": _quantized(values=torch.zeros(V, H, dtype=torch.uint8))}),
        (ValueError, r"scale must have shape \(1000,\) or \(1000, G\)",
         {"lm_head_weight": _quantized(scale=torch.ones(V, 2, 1))}),
        (ValueError, "H / G columns; got G = 3 and H = 64", {"lm_head_weight": _quantized(scale=torch.ones(V, 3))}),
        (ValueError, "H / G columns; got G = 0 and H = 64", {"lm_head_weight": _quantized(scale=torch.ones(V, 0))}),
        (ValueError, "must be finite; got inf or NaN",
         {"lm_head_weight": _quantized(scale=torch.full((V, 2), torch.nan))}),
        (TypeError, "uint8, two numbers a byte, where there are codes; got torch.int8",
         {"lm_head_weight": _quantized(codes=torch.tensor(NF4))}),
        (ValueError, r"codes must have shape \(16,\)", {"lm_head_weight": _halves(codes=torch.zeros(15))}),
        (ValueError, "must be finite; got inf or NaN", {"lm_head_weight": _halves(codes=torch.full((16,), torch.inf))}),
        (ValueError, r"must have shape \(V, 64\) to go with hidden_states; got \(1000, 60\)",
         {"lm_head_weight": _halves(values=torch.zeros(V, 30, dtype=torch.uint8))}),
        (ValueError, "finite and not 0", {"lm_head_weight": _quantized(scale=torch.full((V,), torch.nan))}),
        (ValueError, "finite and not 0", {"lm_head_weight": _quantized(scale=torch.zeros(V))}),
        (ValueError, "must be frozen; got values or a scale",
         {"lm_head_weight": _quantized(scale=torch.ones(V, requires_grad=True))}),
        (ValueError, r"lm_head_weight must have shape \(V, 64\)",
         {"lm_head_weight": _quantized(values=torch.zeros(V, 8, dtype=torch.int8))}),
    ],
)  # fmt: skip
def test_errors(error, match, changes):
    with pytest.raises(error, match=match):
        _call(**changes)


def test_dropout_beside_other_slices_is_refused():
    hidden, weight = torch.randn(B, T, H), torch.randn(V, H)
    check_adapters([_adapter()], hidden, weight, has_group=True)
    with pytest.raises(ValueError, match="would drop different states; got lm_head_adapter.dropout=0.1"):
        check_adapters([_adapter(dropout=0.1)], hidden, weight, has_group=True)


def test_a_weight_that_requires_a_gradient_may_be_scored_without_one():
    weight = torch.zeros(V, H, requires_grad=True)
    with torch.no_grad():
        assert _call(lm_head_weight=weight) is not None


def test_numbers_of_float64_and_zeros():
    case = case_of("nf4", torch.float64)
    weight = replace(case.weight, scale=torch.rand(V, 4, dtype=torch.float64))
    got = fused_linear_logprobs(case.hidden, weight, case.ids, impl="chunked").logps
    want = fused_linear_logprobs(case.hidden, weight.dequantize(torch.float64), case.ids, impl="reference").logps
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for most in (1, 100):  # ggml rounds the scale of a block of 4e-6 to 0, after it computed the numbers
        zeros = torch.randint(most, (V, 34), dtype=torch.uint8)
        zeros[:, :2] = 0
        out = fused_linear_logprobs(torch.randn(B, T, 32), QuantizedWeight.from_q8_0(zeros), case.ids).logps
        torch.testing.assert_close(out, torch.full((B, T), -float(torch.tensor(V).log())))


def test_a_quantised_reference_is_refused():
    case, config = case_of(), GRPOLossConfig(beta=0.1, kl_estimator="exact")
    states = case.hidden.detach()
    with pytest.raises(TypeError, match="reference: lm_head_weight must be a plain tensor; got a QuantizedWeight"):
        fused_linear_grpo_loss(
            states, case.weight, case.ids, torch.ones(B), ref_hidden_states=states, ref_lm_head_weight=_quantized(),
            config=config,
        )  # fmt: skip


@pytest.mark.parametrize("impl", ["chunked", "triton"])
@pytest.mark.parametrize("budget", [None, 6 * 2**20 + 2**17])
def test_memory_of_widened_blocks_is_within_the_engine_cost(impl, budget):
    """They are part of the scratch; of the hidden states there are some copies beside it."""
    if impl == "triton":
        pytest.importorskip("triton")
    vocab, width, count = 2048, 256, 24
    weight = QuantizedWeight(torch.randint(-90, 90, (vocab, width), dtype=torch.int8), torch.full((vocab,), 0.001))
    hidden = torch.randn(count, width, dtype=torch.bfloat16, requires_grad=True)
    ids, options = torch.randint(vocab, (count,)), {"impl": impl, "max_scratch_bytes": budget}

    def call():
        fused_linear_logprobs(hidden, weight, ids, **options).logps.sum().backward()

    empty = hidden.new_empty(vocab, 0)
    head = LMHead(empty, compute_dtype=torch.bfloat16, base=weight.values, row_scale=weight.scale)
    cost = engines.engine(impl).cost(head, count, budget)
    assert budget is None or cost.scratch_bytes <= budget
    assert allocated_peak(call) <= cost.scratch_bytes + count * (4 * 4 * width + 8 * 64)


def test_several_upstream_gradients_at_once_reach_an_adapter():
    case = case_of(adapters=2)
    logps = fused_linear_logprobs(case.hidden, case.weight, case.ids, lm_head_adapter=case.adapters).logps.sum()
    upstream = torch.tensor([1.0, -2.0])
    several = torch.autograd.grad(logps, case.leaves, upstream, is_grads_batched=True, retain_graph=True)
    for x, one in zip(several, gradients(logps, case.leaves), strict=True):
        torch.testing.assert_close(x, torch.stack([one, -2.0 * one]))


def test_hooks_of_an_adapter_are_called_where_rows_could_be_added_to_a_gradient():
    """`add_to_weight_grad` says that the weight's hooks may be left out, not those of an adapter."""
    case, calls = case_of(), []
    adapter = case.adapters[0]
    kept = torch.zeros(B * T, V, dtype=torch.bool).scatter_(1, case.ids.view(-1, 1), True)
    kept[:, :4] = True
    adapter.b.register_hook(calls.append)
    for _ in range(2):
        out = fused_linear_logprobs(
            case.hidden, case.weight, case.ids, lm_head_adapter=adapter, candidates=sets_of(kept),
            add_to_weight_grad=True,
        )  # fmt: skip
        out.logps.sum().backward()
    assert [x is not None and bool(x.any()) for x in calls] == [True, True]


@needs_library
@pytest.mark.parametrize("skips", [False, True], ids=["dense", "clipped rows"])
@pytest.mark.parametrize("name", ["plain", "int8", "int8-groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_native(dtype, name, skips, monkeypatch):
    """Parts of one, two or three panels, of which the last is short: gradients of one part, in two products."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(330, 1, H, generator=g)
    hidden[300:] *= 12  # logits far above the offsets of other tokens
    case = case_of(name, dtype, vocab=900)._replace(hidden=hidden.to(dtype).requires_grad_())
    ids, old, advantages = torch.randint(900, (330, 1), generator=g), None, torch.rand(330, generator=g)
    if skips:  # all ratios but each seventh are far above 1, in the last parts all of them
        at = torch.arange(330).unsqueeze(1)
        old = torch.where((at % 7 > 0) | (at >= 256), -120.0, 0.0)

    def run(rows, budget=None):
        monkeypatch.setattr(native.NativeEngine, "chunk_rows", lambda *_: rows)
        out = fused_linear_grpo_loss(
            case.hidden, case.weight, ids, advantages, with_metrics=False, old_per_token_logps=old,
            lm_head_adapter=case.adapters, impl="native", max_scratch_bytes=budget,
        )  # fmt: skip
        return out.loss, gradients(out.loss, case.leaves)

    calls, real = [], cpu_library.head_gradient
    monkeypatch.setattr(cpu_library, "head_gradient", lambda *a: (calls.append((len(a[3]), a[9])), real(*a))[1])
    loss, want = run(2**62)
    for rows in (64, 128, 192):
        calls.clear()
        got_loss, got = run(rows)
        assert len(calls) == -(-330 // rows)
        assert all(sums is not None for _, sums in calls)
        assert (sum(count for count, _ in calls) < 330) == skips
        torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=0)
        assert_close(got, want, dtype)
    calls.clear()
    assert_close(run(2**62, budget=1)[1], want, dtype)
    assert [sums for _, sums in calls] == [None], "a product in vain: the exponentials are computed again"


def test_factors_of_rows_multiply_states_in_the_dtype_of_the_gradient():
    """Of the adapter's columns alone. In bf16 each product of state and factor would be rounded."""
    states, factor, dlogits = torch.randn(9, H + 12).bfloat16(), torch.rand(9), torch.randn(9, V)
    head = LMHead(torch.randn(V, 4), compute_dtype=torch.bfloat16, base=torch.randn(V, H).bfloat16(), terms=3)
    tokens = Tokens(states, torch.zeros(9, dtype=torch.int64), torch.ones(9, dtype=torch.bool), 1.0)
    sums = GradientSums(head, tokens, Needs(need_hidden=False, need_weight=True, need_bias=False), torch.float32)
    sums.add(torch.arange(9), states, dlogits, None, factor)
    terms = states[:, H + 4 :].double().unflatten(1, (2, 4)).sum(1)
    want = (factor.double().unsqueeze(1) * dlogits.double()).T @ terms
    assert float((sums.result().weight.double() - want).norm() / want.norm()) < 1e-6


def test_gradients_of_the_terms_of_a_state_are_added_in_the_wide_dtype():
    """In bf16 their sum would be rounded once more."""
    weight, hidden = torch.randn(V, H).bfloat16(), torch.randn(9, H).bfloat16()
    adapter = HeadAdapter(torch.randn(4, H, requires_grad=True), torch.randn(V, 4), 0.7)
    _, states = composed(LMHead(weight, compute_dtype=torch.bfloat16), weight, (adapter,), hidden, None)
    upstream = torch.randn_like(states)
    states.backward(upstream)
    of_terms = upstream[:, H : H + 8].double().unflatten(1, (2, 4)).sum(1)
    want = 0.7 * of_terms.T @ hidden.double()
    assert float((adapter.a.grad.double() - want).norm() / want.norm()) < 1e-6


def test_triton_scores_within_scratch_that_holds_the_terms():
    pytest.importorskip("triton")
    width, vocab, rank = 64, 4096, 64
    adapter = HeadAdapter(torch.randn(rank, width), torch.randn(vocab, rank))
    hidden, weight = torch.randn(8, width).bfloat16(), torch.randn(vocab, width).bfloat16()
    terms = vocab * 3 * rank * 2

    def score(budget):
        ids = torch.zeros(8, dtype=torch.int64)
        return fused_linear_logprobs(
            hidden, weight, ids, lm_head_adapter=adapter, impl="triton", max_scratch_bytes=budget
        )  # fmt: skip

    assert score(terms + 2**20).logps.isfinite().all()
    with pytest.raises(ValueError, match="too small"):
        score(terms)


def test_folding_an_adapter_in_leaves_the_weight_as_it_is():
    weight = torch.ones(3, 2)
    assert dense_weight(weight, [HeadAdapter(torch.ones(1, 2), torch.ones(3, 1))]).tolist() == [[2, 2]] * 3
    assert weight.tolist() == [[1, 1]] * 3
    assert not dense_weight(weight.requires_grad_()).requires_grad


def test_negative_scales_beside_an_adapter():
    weight = QuantizedWeight(torch.ones(8, 32, dtype=torch.int8), -torch.ones(8))
    adapter = HeadAdapter(torch.randn(2, 32), torch.randn(8, 2))
    hidden, ids = torch.randn(3, 32), torch.arange(3)
    got = fused_linear_logprobs(hidden, weight, ids, lm_head_adapter=adapter).logps
    want = fused_linear_logprobs(hidden.double(), dense_weight(weight, [adapter]).double(), ids).logps
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 34), torch.int8), ((34,), torch.uint8), ((4, 33), torch.uint8)], ids=str
)
def test_data_that_is_not_q8_0_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"the data of Q8_0 must be uint8 \[V, 34 \* H / 32\]"):
        QuantizedWeight.from_q8_0(torch.zeros(shape, dtype=dtype))
