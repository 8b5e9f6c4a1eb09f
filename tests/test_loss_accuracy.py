"""`fused_linear_grpo_loss`: accuracy by dtype, the precision of its products, and bits that the batch does not change."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from grpo_fused.kernels.configs import padded
from helpers import (
    ENGINES,
    config_id,
    frobenius_error,
    make_case,
    make_config,
    rounding_error_of_gradients,
)
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_fused import GRPOLossConfig, HeadAdapter, fused_linear_divergence, fused_linear_logprobs
from grpo_fused.call.calls import LMHead
from grpo_fused.engines.gradients import GradientSums
from grpo_fused.engines.products import has_fp32_output, ieee_products
from grpo_fused.testing import BITWISE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtype_id = str


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda impl, config, **_: impl != "triton" or config.entropy_coef)
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "config",
    [
        make_config("dapo", beta=0.1),
        make_config("dapo", importance_sampling_level="sequence"),
        make_config("cispo", entropy_coef=0.05),
        make_config("grpo", top_entropy_quantile=0.5),
        make_config("vespo"),
    ],
    ids=config_id,
)
@pytest.mark.parametrize("scratch", [None, 400_000], ids=["one-chunk", "chunks"])
def test_accuracy_of_gradients(config, dtype, impl, scratch):
    """No worse than twice a float64 computation that rounds dlogits once and its result once; fp32 to 2e-5."""
    case = make_case(6, B=4, T=24, H=64, V=301, dtype=dtype, logit_std=3.0, drift=0.1)
    exact = case.to(torch.float64)
    want = exact.run(config, impl="reference")
    got = case.run(config, impl=impl, max_scratch_bytes=scratch)
    assert (got.out.per_token_logps.double() - want.out.per_token_logps).abs().max() <= 1e-4
    torch.testing.assert_close(got.out.loss.double(), want.out.loss, rtol=1e-4, atol=1e-5)
    allowed = rounding_error_of_gradients(exact, config, dtype)
    for name, gradient in got.gradients().items():
        assert gradient.dtype == dtype
        # Triton's interpreter truncates to bf16, where a GPU rounds to the nearest
        times = 2.2 if impl == "triton" and dtype == torch.bfloat16 else 2.0
        bound = 2e-5 if dtype == torch.float32 else times * allowed[name]
        assert frobenius_error(gradient, want.gradients()[name]) <= bound, name


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("softcap", [3.0, 30.0])
def test_accuracy_under_a_saturated_softcap(softcap, impl):
    """The slope of a flat softcap is a small difference, which roundings of the logit destroy."""
    case = make_case(3, B=2, T=8, H=64, V=600, dtype=torch.bfloat16, logit_std=20.0, softcap=softcap, extras=False)
    case.completion_ids = (case.hidden_states.double() @ case.lm_head_weight.double().T).argmax(-1)
    case.options["old_per_token_logps"] = None
    want = case.to(torch.float64).run(make_config("dapo", entropy_coef=0.1), impl="reference")
    got = case.run(make_config("dapo", entropy_coef=0.1), impl=impl)
    bound = 2**-7 if impl == "triton" else 2**-8  # the interpreter truncates where a GPU rounds
    for name, gradient in got.gradients().items():
        assert frobenius_error(gradient, want.gradients()[name]) <= bound, name


@pytest.mark.parametrize("impl", [impl for impl in ENGINES if impl != "triton"])  # docs/numerics.md
def test_a_low_temperature_after_a_wide_softcap(impl):
    """An absolute error of tanh would be multiplied by the cap over the temperature, 40,000."""
    case = make_case(5, B=2, T=16, H=16, V=300, dtype=torch.float32, logit_std=5.0, extras=False)
    given = case.hidden_states * 0.01, case.lm_head_weight, case.completion_ids
    options = {"softcap": 400.0, "temperature": 0.01}
    want = fused_linear_logprobs(*(x.double() if x.is_floating_point() else x for x in given), **options).logps
    got = fused_linear_logprobs(*given, **options, impl=impl).logps
    assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize(("impl", "bound"), [("chunked", 5e-3), ("native", 2e-2), ("triton", 1e-4)])
def test_a_target_on_the_flat_part_of_a_softcap(impl, bound):
    """1 - tanh^2 is 2e-5 there; `chunked` and `native` take it from z, whose last bit is 4e-3 of it."""
    found = []
    for dtype in (torch.float64, torch.float32):
        weight = torch.tensor([[180.0], [179.0], [182.0], [0.0]], dtype=dtype, requires_grad=True)
        engine = "reference" if dtype == torch.float64 else impl
        hidden, ids = torch.ones(1, 1, dtype=dtype), torch.tensor([0])
        fused_linear_logprobs(hidden, weight, ids, softcap=30.0, impl=engine).logps.sum().backward()
        found.append(weight.grad.double())
    torch.testing.assert_close(found[1], found[0], rtol=bound, atol=0)


@pytest.mark.gate(keep=lambda impl, dtype: impl != "triton")  # 15 s; 4096 columns are in test_logprobs.py
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_accuracy_of_logprobs_at_vocabulary_size(dtype, impl):
    """max |dlogp| <= 1e-4 at V = 32000, logits up to 24: a bf16 head is off by 5e-2 there."""
    case = make_case(7, B=2, T=8 if impl == "triton" else 16, H=128, V=32000, dtype=dtype, logit_std=4.8)
    got = case.run(GRPOLossConfig(), impl=impl)
    logits = case.hidden_states.double() @ case.lm_head_weight.double().T
    assert 20 < logits.abs().max() < 32
    want = logits.log_softmax(-1).gather(-1, case.completion_ids.unsqueeze(-1)).squeeze(-1)
    mask = case.completion_mask
    assert (got.out.per_token_logps.double() - want)[mask].abs().max() <= 1e-4
    rounded = (case.hidden_states @ case.lm_head_weight.T).double().log_softmax(-1)
    rounded = rounded.gather(-1, case.completion_ids.unsqueeze(-1)).squeeze(-1)
    if dtype == torch.bfloat16:
        assert (rounded - want)[mask].abs().max() > 1e-2, "the case must be one where rounding the logits shows"


@pytest.mark.parametrize("impl", ENGINES)
def test_common_offset_in_all_logits(impl):
    """1e4 in every logit: log-sum-exp as one number would be off by 5e-4, entropies by several nats."""
    case = make_case(8, B=2, T=9, H=16, V=211, dtype=torch.float32, logit_std=2.0)
    config = make_config("dapo", entropy_coef=0.1)
    plain = case.run(config, impl=impl)
    offset = case.run(config, impl=impl, lm_head_bias=torch.full((211,), 8192.0))
    # the offset gives the fp32 logits themselves an error of ulp(8192) / 2 = 5e-4; there is no further error
    logits = (case.hidden_states @ case.lm_head_weight.T + 8192.0).double()
    want = logits.log_softmax(-1).gather(-1, case.completion_ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(
        offset.out.per_token_logps[case.completion_mask].double(), want[case.completion_mask], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(offset.out.entropies, plain.out.entropies, rtol=0, atol=2e-3)


@pytest.mark.pairs
@pytest.mark.gate(
    keep=lambda impl, hidden_dtype, weight_dtype: impl != "triton" or torch.bfloat16 in (hidden_dtype, weight_dtype)
)
@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
def test_mixed_dtypes_promote(hidden_dtype, weight_dtype, impl):
    case = make_case(9, B=2, T=8, H=24, V=97, dtype=torch.float32)
    case.hidden_states = case.hidden_states.to(hidden_dtype)
    case.lm_head_weight = case.lm_head_weight.to(weight_dtype)
    got = case.run(GRPOLossConfig(), impl=impl, max_scratch_bytes=60_000)
    want = case.to(torch.float64).run(GRPOLossConfig(), impl="reference")
    assert (got.out.per_token_logps.double() - want.out.per_token_logps).abs().max() < 1e-4
    assert got.dhidden.dtype == hidden_dtype
    assert got.dweight.dtype == weight_dtype
    for name, gradient in got.gradients().items():
        eps = torch.finfo(gradient.dtype).eps + (torch.finfo(hidden_dtype).eps if hidden_dtype == weight_dtype else 0)
        assert frobenius_error(gradient, want.gradients()[name]) < max(eps, 2e-6), name


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_fp32_products_are_ieee_with_any_global_setting(precision):
    case = make_case(10, B=2, T=32, H=256, V=512, dtype=torch.float32, logit_std=4.0)
    plain = case.run(GRPOLossConfig())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        lowered = case.run(GRPOLossConfig())
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(lowered.out.per_token_logps, plain.out.per_token_logps)
    assert torch.equal(lowered.dweight, plain.dweight)


def test_settings_of_precision_can_be_read_and_are_restored():
    """Another thread may read the legacy flags, which raise if the two interfaces disagree."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with ieee_products():
            assert not torch.backends.cuda.matmul.allow_tf32
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("vocab", [37, 2000, 2016])
def test_the_padding_of_dlogits_is_0(vocab, monkeypatch):
    """oneDNN's AMX products multiply it by 0, up to a multiple of 32: the bits of a logit may be a NaN."""
    add, seen = GradientSums.add, []

    def recording(self, rows, hidden, dlogits, scale):
        whole = dlogits.as_strided((len(dlogits), padded(vocab)), dlogits.stride())
        seen.append((whole[:, vocab:] == 0).all())
        add(self, rows, hidden, dlogits, scale)

    monkeypatch.setattr(GradientSums, "add", recording)
    case = make_case(13, B=2, T=40, H=64, V=vocab, dtype=torch.bfloat16, logit_std=5.0)
    want = case.to(torch.float64).run(GRPOLossConfig(), impl="reference")
    got = case.run(GRPOLossConfig(), impl="chunked")
    assert frobenius_error(got.dhidden, want.dhidden) < 1e-2
    head = [case.hidden_states, case.lm_head_weight]
    fused_linear_divergence(head[0].requires_grad_(), head[1], *(x.detach() + 0.1 for x in head))
    assert len(seen) == 2
    assert all(seen)


def test_low_rank_products_are_ieee():
    """h A^T, dA and its part of dH are products of plain torch, outside of the engines; also under autocast."""
    seen = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), options=None):
            if function is torch.ops.aten.mm.default:
                seen.append((given[0].dtype, torch.backends.mkldnn.matmul.fp32_precision))
            return function(*given, **(options or {}))

    before = torch.get_float32_matmul_precision()
    hidden, a = torch.zeros(3, 8, requires_grad=True), torch.zeros(2, 8, requires_grad=True)
    adapter = HeadAdapter(a, torch.zeros(11, 2), 1.0)
    torch.set_float32_matmul_precision("high")
    try:
        with Recording():
            out = fused_linear_logprobs(hidden, torch.zeros(11, 8), torch.zeros(3).long(), lm_head_adapter=adapter)
            with torch.autocast("cpu", torch.bfloat16):
                out.logps.sum().backward()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [(torch.float32, "ieee")] * 3


def test_bf16_is_widened_on_processors_without_bf16_products():
    """The library's fallback is 18 times slower than fp32; here in a process that may use AVX2 only."""
    program = (
        "import torch; from grpo_fused.call.calls import LMHead; from grpo_fused.engines import products; "
        "head = LMHead(torch.zeros(3, 4, dtype=torch.bfloat16), compute_dtype=torch.bfloat16); "
        "print(products.gradient_dtype(head), products.dhidden_dtype(head))"
    )
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **limits}, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["torch.float32", "torch.float32"]


def test_products_with_fp32_results_are_used_if_available(monkeypatch):
    weight = SimpleNamespace(device=torch.device("cuda"))
    of_bf16, of_fp16, of_fp32 = (
        LMHead(weight, compute_dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
    for capability, bf16 in {(7, 5): False, (8, 0): True, (9, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert has_fp32_output(of_bf16) == bf16
        assert has_fp32_output(of_fp16)
        assert not has_fp32_output(of_fp32)
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert not has_fp32_output(of_fp16)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not has_fp32_output(of_bf16)


@pytest.mark.parametrize("impl", ENGINES)
def test_a_score_does_not_depend_on_the_batch(impl):
    """At most 1e-5 with the other tokens of the call, old scores against training scores included."""
    from grpo_fused import fused_linear_logprobs

    T, V = (24, 257) if impl == "triton" else (40, 1009)
    case = make_case(11, B=3, T=T, H=64, V=V, dtype=torch.bfloat16, logit_std=4.0, masked=0.0)
    case.completion_mask[:] = True
    trained = case.run(GRPOLossConfig(), impl=impl).out.per_token_logps
    together = fused_linear_logprobs(case.hidden_states, case.lm_head_weight, case.completion_ids, impl=impl).logps
    some = torch.arange(0, T, 8 if impl == "triton" else 1)
    alone = torch.cat(
        [
            fused_linear_logprobs(case.hidden_states[:, t : t + 1], case.lm_head_weight, case.completion_ids[:, t : t + 1],
                                  impl=impl).logps
            for t in some
        ],
        dim=1,
    )  # fmt: skip
    if impl in BITWISE:
        assert torch.equal(together, trained)
        assert torch.equal(together[:, some], alone)
    assert (together - trained).abs().max() <= 1e-5
    assert (together[:, some] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("config", [make_config("dapo", beta=0.1), make_config("vespo")], ids=config_id)
def test_two_runs_are_bitwise_equal(config, impl):
    case = make_case(12, B=4, T=16, H=32, V=257, dtype=torch.bfloat16)
    first = case.run(config, impl=impl, max_scratch_bytes=150_000)
    again = case.run(config, impl=impl, max_scratch_bytes=150_000)
    assert torch.equal(first.out.loss, again.out.loss)
    assert torch.equal(first.out.per_token_logps, again.out.per_token_logps)
    for name, gradient in first.gradients().items():
        assert torch.equal(gradient, again.gradients()[name]), name
