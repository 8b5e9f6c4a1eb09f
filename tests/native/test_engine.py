"""The native engine against the fp64 reference, its instruction sets, and bounded scratch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    assert_same,
    config_id,
    covering_configs,
    frobenius_error,
    make_case,
    make_config,
    pack,
    rounding_error_of_gradients,
)
from recording import CostRecorder

from grpo_fused import engines, fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.engines import cpu_library, libraries, native
from grpo_fused.engines.pairs import NativePairs, Pairs

LOW = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("cpu_extension")
on_each_isa = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("config", covering_configs(), ids=config_id)
def test_objectives_in_fp32(config):
    case = make_case(1, B=5, T=40, H=33, V=301, dtype=torch.float32)
    want = case.to(torch.float64).run(config, impl="reference")
    assert_same(case.run(config, impl="native"), want, tol=2e-5)


@on_each_isa
@pytest.mark.parametrize(("hidden_size", "vocab"), [(64, 20000), (1024, 2000)], ids=["long in V", "long in H"])
def test_long_sums_in_fp32_are_as_exact_as_those_of_the_library(hidden_size, vocab):
    """One chain of additions over all of V or H, rounded at each, has an error of 2e-6."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, hidden_size) * 16 / hidden_size**0.5, torch.randn(vocab, hidden_size) / 4
    ids, upstream = torch.randint(0, vocab, (64,)), torch.randn(64)

    def gradients(dtype, impl):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        fused_linear_logprobs(h[None], w, ids[None], impl=impl).logps.backward(upstream.to(dtype)[None])
        return h.grad, w.grad

    for got, want in zip(gradients(torch.float32, "native"), gradients(torch.float64, "reference"), strict=True):
        assert frobenius_error(got, want) < 1e-6


HEADS = {
    "plain": {},
    "bias": {"lm_head_bias": torch.linspace(-2, 2, 517)},
    "scale": {"logit_scale": 0.5},
    "softcap": {"softcap": 6.0},
    "temperature": {"temperature": 0.7},
    "temperature-sequences": {"temperature": torch.linspace(0.6, 1.5, 4)},
    "temperature-tokens": {"temperature": torch.linspace(0.6, 1.5, 100).view(4, 25)},
    "all": {"lm_head_bias": torch.linspace(-1, 1, 517), "logit_scale": 1.3, "softcap": 8.0, "temperature": 1.4},
}


@on_each_isa
@pytest.mark.pairs
@pytest.mark.parametrize("scratch", [None, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("entropy", [0.0, 0.05], ids=["", "entropy"])
@pytest.mark.parametrize("head", HEADS)
def test_heads_in_fp32(head, entropy, scratch):
    """H = 40 of fp32: dW holds no whole panel of tokens, so scratch keeps all exponentials or none."""
    case = make_case(2, B=4, T=25, H=40, V=517, dtype=torch.float32, **HEADS[head])
    config = make_config("grpo", entropy_coef=entropy)
    want = case.to(torch.float64).run(config, impl="reference")
    assert_same(case.run(config, impl="native", max_scratch_bytes=scratch), want, tol=2e-5)


# (N, H, V): one of everything; odd; several panels and blocks; more tokens than a chunk of dW holds
SHAPES = [(1, 1, 1), (3, 5, 1), (1, 7, 3), (65, 33, 257), (130, 200, 5000), (1100, 70, 300)]


@on_each_isa
@pytest.mark.pairs
@pytest.mark.parametrize("isa", ["", "avx2", "avx512f"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    N, H, V = shape
    case = make_case(3, B=1, T=N, H=H, V=V, dtype=dtype, masked=0.1 if N > 1 else 0.0, extras=False)
    exact = case.to(torch.float64)
    config = make_config("dapo")
    want = exact.run(config, impl="reference")
    got = case.run(config, impl="native")
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
    best = (
        {"dhidden": 1e-5, "dweight": 1e-5}
        if dtype == torch.float32
        else rounding_error_of_gradients(exact, config, dtype)
    )
    for name, gradient in want.gradients().items():
        if gradient.any():
            assert frobenius_error(got.gradients()[name], gradient) <= 2 * best[name], name
        else:  # one token of vocabulary, or all clipped
            assert not got.gradients()[name].any()


@on_each_isa
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("entropy", [0.0, 0.05], ids=["", "entropy"])
@pytest.mark.parametrize("softcap", [None, 20.0], ids=["", "softcap"])
def test_low_precision_keeps_the_contract(dtype, entropy, softcap):
    case = make_case(4, B=4, T=64, H=128, V=3000, dtype=dtype, logit_std=5.0, extras=False, softcap=softcap)
    exact = case.to(torch.float64)
    config = make_config("dapo", entropy_coef=entropy)
    want, got = exact.run(config, impl="reference"), case.run(config, impl="native")
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
    assert (got.out.entropies - want.out.entropies).abs().max() <= 1e-4
    if softcap is None:
        best = rounding_error_of_gradients(exact, config, dtype)
        for name, error in best.items():
            assert frobenius_error(got.gradients()[name], want.gradients()[name]) <= 2 * error, name


@on_each_isa
@pytest.mark.parametrize(
    ("hidden", "weight"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_mixed_dtypes(hidden, weight):
    case = make_case(5, B=3, T=50, H=96, V=700, dtype=torch.float32)
    case.hidden_states, case.lm_head_weight = case.hidden_states.to(hidden), case.lm_head_weight.to(weight)
    want = case.to(torch.float64).run(make_config("dapo"), impl="reference")
    got = case.run(make_config("dapo"), impl="native")
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
    for name, gradient in got.gradients().items():
        assert frobenius_error(gradient, want.gradients()[name]) <= (2e-5 if gradient.dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_autocast_rounds_the_fp32_master(dtype, softcap):
    case = make_case(6, B=3, T=50, H=96, V=700, dtype=torch.float32)
    case.options["softcap"] = softcap
    with torch.autocast("cpu", dtype=dtype):
        got = case.run(make_config("dapo"), impl="native")
    want = case.to(dtype).to(torch.float64).run(make_config("dapo"), impl="reference")
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 1e-4
    assert got.dweight is not None
    assert got.dweight.dtype == torch.float32
    assert frobenius_error(got.dweight, want.dweight) <= 4e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("scratch", [None, 2**18], ids=["", "several-parts"])
@pytest.mark.parametrize("frozen", ["hidden_states", "lm_head_weight"])
def test_a_frozen_side_gets_no_gradient_and_changes_none(frozen, scratch, level):
    """A frozen weight has no dW for exponentials: there are parts of 64 tokens, where tokens do not need their sequence."""
    case = make_case(7, B=2, T=128, H=48, V=600, dtype=torch.float32)
    config = make_config("dapo", beta=0.1, importance_sampling_level=level)
    tensors = {"hidden_states": case.hidden_states.clone(), "lm_head_weight": case.lm_head_weight.clone()}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name != frozen)
    options = {k: v for k, v in case.options.items() if k != "sampling_per_token_logps"}
    out = fused_linear_grpo_loss(
        **tensors, completion_ids=case.completion_ids, advantages=case.advantages,
        completion_mask=case.completion_mask, config=config, impl="native", max_scratch_bytes=scratch, **options,
    )  # fmt: skip
    out.loss.backward()
    want = case.to(torch.float64).run(config, impl="reference")
    assert tensors[frozen].grad is None
    trained, gradient = (
        ("hidden_states", want.dhidden) if frozen == "lm_head_weight" else ("lm_head_weight", want.dweight)
    )
    assert frobenius_error(tensors[trained].grad, gradient) <= 2e-5


def test_packed_and_not_contiguous():
    case = make_case(8, B=4, T=30, H=24, V=200, dtype=torch.float32)
    config = make_config("grpo", importance_sampling_level="sequence", beta=0.1)
    want = case.to(torch.float64).run(config, impl="reference")
    packed = pack(case)
    assert_same(packed.run(config, impl="native"), pack(case.to(torch.float64)).run(config, impl="reference"), tol=2e-5)
    for weight in (case.lm_head_weight.T.contiguous().T, torch.cat([case.lm_head_weight] * 2, 1)[:, :24]):
        assert not weight.is_contiguous()
        case.lm_head_weight = weight
        assert_same(case.run(config, impl="native"), want, tol=2e-5)
    case.hidden_states = torch.cat([case.hidden_states] * 2, 2)[:, :, :24]
    assert_same(case.run(config, impl="native"), want, tol=2e-5)


def test_banned_tokens_and_masked_garbage():
    """A bias of -inf bans a token; masked positions may have any values."""
    case = make_case(9, B=3, T=30, H=16, V=300, dtype=torch.float32, extras=False)
    case.options["lm_head_bias"] = torch.where(torch.arange(300) < 290, 0.0, -torch.inf)
    case.completion_ids.clamp_(max=280)
    config = make_config("dapo", entropy_coef=0.01)
    want = case.to(torch.float64).run(config, impl="reference")
    case.hidden_states[~case.completion_mask] = torch.nan
    case.completion_ids[~case.completion_mask] = -100
    got = case.run(config, impl="native")
    for name, gradient in got.gradients().items():
        assert frobenius_error(gradient, want.gradients()[name]) <= 2e-5, name


@on_each_isa
@pytest.mark.parametrize("bias", [-torch.inf, torch.finfo(torch.float32).min], ids=["-inf", "lowest"])
@pytest.mark.parametrize("first", [0, 1300])
def test_blocks_of_the_vocabulary_without_a_possible_token(bias, first):
    case = make_case(9, B=3, T=30, H=16, V=1500, dtype=torch.float32, extras=False)
    case.options["lm_head_bias"] = torch.full((1500,), bias).index_fill_(0, torch.arange(first, first + 200), 0.0)
    case.completion_ids.clamp_(max=199).add_(first)
    config = make_config("dapo", entropy_coef=0.01)
    want = case.to(torch.float64).run(config, impl="reference")
    assert_same(case.run(config, impl="native"), want, tol=2e-5)


@pytest.mark.parametrize("offset", [-150.0, 150.0])
def test_all_logits_far_from_0(offset):
    """Exponentials are taken against a maximum: one that starts at 0, or a padding lane's own, leaves their range."""
    case = make_case(18, B=2, T=9, H=16, V=300, dtype=torch.float32, masked=0.0)
    case.options["lm_head_bias"] = torch.full((300,), offset)
    config = make_config("dapo", entropy_coef=0.05)
    for some in (config, make_config("dapo")):
        want = case.to(torch.float64).run(some, impl="reference")
        assert_same(case.run(some, impl="native"), want, tol=1e-4)  # a logit of 150 has ulps of 1.5e-5


def test_nan_in_a_row_of_the_head_propagates():
    """It makes every log-prob NaN, for any target."""
    case = make_case(19, B=2, T=9, H=16, V=300, dtype=torch.float32, extras=False)
    case.lm_head_weight[100] = torch.nan
    case.completion_ids.clamp_(max=99)
    got = case.run(make_config("dapo"), impl="native")
    assert got.out.per_token_logps[case.completion_mask].isnan().all()
    assert got.out.loss.isnan()
    assert got.dweight.isnan().any()


@on_each_isa
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_nan_of_any_bits_stays_nan_in_bf16(bits):
    """Rounded like a number it would become 0."""
    hidden, weight = torch.randn(1, 5, 32), torch.randn(100, 32)
    weight[50, 7] = torch.frombuffer(bytearray(bits.to_bytes(4, "little")), dtype=torch.float32)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused_linear_logprobs(hidden, weight, torch.arange(5)[None], impl="native").logps.isnan().all()


@pytest.mark.parametrize("vocab", [2049, 2060, 4100])
def test_a_vocabulary_that_ends_in_a_product_of_few_rows(vocab):
    """dH sums products of 2048 rows, and then of fewer than the 32 that an AMX tile holds."""
    case = make_case(22, B=1, T=20, H=32, V=vocab, dtype=torch.bfloat16, masked=0.0, extras=False)
    exact, config = case.to(torch.float64), make_config("dapo")
    want, got = exact.run(config, impl="reference"), case.run(config, impl="native")
    for name, error in rounding_error_of_gradients(exact, config, torch.bfloat16).items():
        assert frobenius_error(got.gradients()[name], want.gradients()[name]) <= 2 * error, name


@on_each_isa
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_gradient_of_the_bias_in_low_precision(dtype):
    """A sum over tokens of each row of dz; in bf16 two neighbours share a word."""
    case = make_case(20, B=3, T=30, H=24, V=301, dtype=dtype, extras=False)
    case.options["lm_head_bias"] = torch.linspace(-1, 1, 301).to(dtype)
    want = case.to(torch.float64).run(make_config("dapo"), impl="reference")
    got = case.run(make_config("dapo"), impl="native")
    assert frobenius_error(got.dbias, want.dbias) <= 2 * torch.finfo(dtype).eps


def test_nothing_active():
    case = make_case(10, B=2, T=5, H=8, V=20, dtype=torch.float32)
    case.completion_mask[:] = False
    got = case.run(make_config("dapo"), impl="native")
    assert got.out.loss == 0
    assert all((gradient == 0).all() for gradient in got.gradients().values())


@on_each_isa
@pytest.mark.pairs
@pytest.mark.parametrize("scratch", [None, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_a_coefficient_cost_no_gradient(dtype, scratch):
    """Clipped rows are known only after scoring; they are dropped between the phases."""
    case = make_case(11, B=4, T=100, H=32, V=400, dtype=dtype, drift=1.0, masked=0.0, extras=False)
    exact, config = case.to(torch.float64), make_config("dapo")
    want = exact.run(config, impl="reference")
    got = case.run(config, impl="native", max_scratch_bytes=scratch)
    assert 0 < got.out.metrics["gradient_tokens"] < 0.8 * 400
    if dtype == torch.float32:
        assert_same(got, want, tol=2e-5)
    else:
        for name, error in rounding_error_of_gradients(exact, config, dtype).items():
            assert frobenius_error(got.gradients()[name], want.gradients()[name]) <= 2 * error, name


@on_each_isa
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_products_and_sums_of_single_rows(dtype):
    """Of any length, from any address."""
    for columns in (1, 8, 63, 201):
        a, b = (torch.randn(7, columns + 1).to(dtype)[:, 1:] for _ in range(2))
        j, factor = torch.randint(0, 7, (50,)), torch.randn(50)
        sizes, offsets = torch.tensor([20, 0, 30, 0, 0, 0, 0]), torch.tensor([0, 20, 20, 50, 50, 50, 50, 50])
        targets, ones = torch.zeros(7, dtype=torch.int64), torch.ones(7)
        z, found = torch.empty(50), torch.empty(4, 7)
        cpu_library.call("set_scores", a, b, j, j, offsets, targets, None, ones, 1.0, 0.0, True, z, found)
        assert (z - (a.repeat_interleave(sizes, 0).double() * b[j].double()).sum(1)).abs().max() < 1e-4
        sums = torch.zeros(7, columns)
        cpu_library.call("add_segment_sums", sums, torch.arange(7), b, j, factor, offsets)
        want = [(b[j[part]].double() * factor[part, None]).sum(0) for part in map(slice, (0, 20, 20), (20, 20, 50))]
        assert (sums[:3] - torch.stack(want)).abs().max() < 1e-4


@pytest.mark.parametrize("isa", ["avx2"], indirect=True)
def test_avx2_differs_from_avx512_in_rounding_alone(isa):
    """Another order of the same sums; and it shows that another set can be chosen."""
    case = make_case(21, B=2, T=40, H=200, V=900, dtype=torch.float32, masked=0.0, extras=False)

    def score():
        return fused_linear_logprobs(case.hidden_states, case.lm_head_weight, case.completion_ids, impl="native").logps

    ours = score()
    assert cpu_library.instruction_set() == "AVX2, bf16 widened"
    cpu_library.use_isa("")
    assert (score() - ours).abs().max() < 1e-5


def test_an_unknown_instruction_set_is_refused():
    """At import: one that is passed over would not be noticed."""
    run = subprocess.run(
        [sys.executable, "-c", "import grpo_fused.engines"],
        env={**os.environ, "GRPO_FUSED_ISA": "sse"}, cwd=Path(engines.__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "ValueError: GRPO_FUSED_ISA must be avx2, avx512 or amx; got 'sse'"


def test_torch_compile_of_a_caller():
    case = make_case(15, B=2, T=20, H=16, V=100, dtype=torch.float32)

    def loss(hidden):
        return fused_linear_grpo_loss(
            hidden, case.lm_head_weight, case.completion_ids, case.advantages, case.completion_mask, impl="auto"
        ).loss  # fmt: skip

    hidden = case.hidden_states.requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(hidden), hidden)
    (want,) = torch.autograd.grad(loss(hidden), hidden)
    assert torch.equal(got, want)


PEAK = """
import re, sys
from pathlib import Path
import torch
from grpo_fused import fused_linear_grpo_loss

def high_water():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def call(rows, vocab):
    hidden = torch.randn(1, rows, 64).bfloat16().requires_grad_()
    weight = torch.randn(vocab, 64).bfloat16().requires_grad_()
    ids = torch.zeros(1, rows, dtype=torch.int64)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = high_water()
    loss = fused_linear_grpo_loss(hidden, weight, ids, torch.ones(1), impl="native", max_scratch_bytes=24 * 2**20).loss
    loss.backward()
    return high_water() - before - hidden.grad.nbytes - weight.grad.nbytes

call(8, 100)  # the libraries' own memory
print(call(512, 65536))
"""


def test_scratch_is_bounded():
    """Peak memory of a process beyond inputs and gradients; bf16 logits would be 64 MiB, 24 are allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak cannot be reset here: {error}")
    root = Path(engines.__file__).parents[2]  # the folder of the tested package and its extension
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        2**20 < int(done.stdout) <= (24 + 4) * 2**20
    )  # besides scratch: per-token vectors, the backward's copies of dH


def test_named_engine_says_why_it_cannot_run(monkeypatch):
    case = make_case(17, B=1, T=3)
    with pytest.raises(RuntimeError, match=r"impl='native' cannot run on cpu: .*not in torch\.float64"):
        case.run(make_config("dapo"), impl="native")
    cuda = native.unavailable(torch.device("cuda", 0), torch.float32)
    assert cuda is not None
    assert "runs on the CPU" in cuda
    monkeypatch.setattr(libraries, "_cpu_reason", "the native engine needs AVX2 and FMA")
    with pytest.raises(RuntimeError, match="needs AVX2 and FMA"):
        case.to(torch.float32).run(make_config("dapo"), impl="native")
    assert engines.choose("auto", torch.device("cpu"), torch.float32, 64) == "chunked"
    case.to(torch.float32).run(make_config("dapo"))


def test_auto_takes_it():
    assert engines.choose("auto", torch.device("cpu"), torch.bfloat16, 64) == "native"
    assert engines.choose("auto", torch.device("cpu"), torch.float64, 64) == "chunked"


@pytest.mark.parametrize(("frozen", "products"), [(True, 2), (False, 4)])
def test_products_of_log_probs(frozen, products):
    """With a frozen head dlogp/dh is made in the forward, after every 128th row of the head is scored."""
    N, H, V = 64, 32, 600
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=not frozen)
    with CostRecorder() as recorder:
        logps = fused_linear_logprobs(hidden, weight, torch.arange(N), impl="native").logps
        logps.sum().backward()
    sampled = len(range(0, V, 128)) if frozen else 0
    assert recorder.flop == 2 * N * H * (products * V + sampled)


def test_what_computes_sets():
    """The C++ library beside chunked too; numbers that it has no products of, in torch operations."""
    cpu = torch.device("cpu")
    for name in ("native", "chunked"):
        assert type(engines.pairs(name, cpu, torch.bfloat16)) is NativePairs
    for name in ("chunked", "reference"):
        assert type(engines.pairs(name, cpu, torch.float64)) is Pairs
