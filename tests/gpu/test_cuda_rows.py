"""The CUDA C++ row kernel on a GPU: every mode, option and size, against fp64 (make gpu)."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Case, config_id, frobenius_error, make_case, make_config

pytest.importorskip("triton")

from grpo_fused.kernels.row_types import Coefficients, Rows, Statistics, Transform
from native.rows import TRANSFORMS, assert_gradient, exact, exact_gradient, in_place, make_rows, make_transform, padded

from grpo_fused import engines
from grpo_fused.call.calls import LossInputs
from grpo_fused.call.layout import Layout
from grpo_fused.engines import cuda_rows
from grpo_fused.engines.cuda_rows import CudaRows
from grpo_fused.engines.token_kernels import objective_numbers, token_inputs
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate

pytestmark = pytest.mark.gpu

PLAIN = Transform(None, 1.0, None, 1.0)
SHAPES = [(1, 1), (5, 37), (3, 256), (2, 4097), (3, 151936), (2, 262208)]


@pytest.fixture(autouse=True)
def _available():
    if reason := cuda_rows.unavailable():
        pytest.skip(reason)


def on_gpu(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


def to_gpu(transform: Transform) -> Transform:
    return Transform(*map(on_gpu, transform))


def statistics(work: CudaRows, logits, targets, transform, with_entropy=True) -> Statistics:
    return work.statistics(Rows(logits, targets, transform), with_entropy=with_entropy)


def gradient(work: CudaRows, logits, out, targets, stats, dlogp, dentropy, transform) -> None:
    work.gradient(Rows(logits, targets, transform), Coefficients(stats, dlogp, dentropy), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(shape, name, dtype):
    work = CudaRows()
    values, targets = map(on_gpu, make_rows(shape))
    logits, transform = padded(values, dtype), to_gpu(make_transform(name, *shape))
    stats = statistics(work, logits, targets, transform)
    logp, entropy = exact(logits.double(), targets, transform)
    assert (stats.logp.double() - logp).abs().max() <= 2e-5
    assert (stats.entropy.double() - entropy).abs().max() <= 5e-5
    assert torch.equal(statistics(work, logits, targets, transform, with_entropy=False).logp, stats.logp)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient_in_place(shape, name, with_entropy, out_dtype):
    work = CudaRows()
    values, targets = map(on_gpu, make_rows(shape))
    transform = to_gpu(make_transform(name, *shape))
    dlogp, dentropy = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(1)).cuda()
    coefficient = dentropy if with_entropy else None
    logits = padded(values)
    stats = statistics(work, logits, targets, transform)
    out = in_place(logits, out_dtype)
    gradient(work, logits, out, targets, stats, dlogp, coefficient, transform)
    assert_gradient(out, exact_gradient(values, targets, transform, dlogp, coefficient))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [37, 5003, 50257])
def test_rows_at_odd_addresses_and_a_separate_buffer(vocab_size, dtype):
    work = CudaRows()
    values, targets = map(on_gpu, make_rows((3, vocab_size)))
    logits = values.to(dtype)
    stats = statistics(work, logits, targets, PLAIN)
    memory = torch.full((3 * vocab_size + 2,), 7.0, dtype=dtype, device="cuda")
    out, before = memory[1:-1].view(3, vocab_size), logits.clone()
    gradient(work, logits, out, targets, stats, torch.ones(3, device="cuda"), None, PLAIN)
    assert torch.equal(logits, before)
    assert memory[0] == memory[-1] == 7.0
    assert_gradient(out, exact_gradient(logits, targets, PLAIN, torch.ones(3, device="cuda"), None))


CONFIGS = [
    make_config("dapo"),
    make_config("grpo", delta=1.4, beta=0.1),
    make_config("luspo", dual_clip=1.3, beta=0.1, kl_estimator="k1"),
    make_config("dapo", beta=0.1, use_bias_correction_kl=False, entropy_coef=0.05),
    make_config("cispo", beta=0.1, kl_estimator="k2"),
    make_config("sapo", entropy_coef=0.05),
]


def make_batch(config, logp, on_policy=False):
    """12 tokens of 3 sequences around the log-probs `logp`: masked ones full of NaN, A = 0."""
    g = torch.Generator().manual_seed(2)
    mask = torch.rand(3, 4, generator=g) > 0.2
    old, ref = (logp.cpu().float().view(3, 4) + torch.randn(3, 4, generator=g) * s for s in (0.3, 1.0))
    old[~mask], ref[~mask] = torch.nan, torch.nan
    inputs = LossInputs(
        advantages=torch.tensor([1.0, -0.7, 0.0]).cuda(),
        completion_mask=mask.cuda(),
        old_per_token_logps=None if on_policy else old.cuda(),
        ref_per_token_logps=ref.cuda() if config.beta else None,
        importance_sampling_ratio=(torch.rand(3, 4, generator=g) * 2).cuda() if on_policy else None,
    )
    return TokenBatch.build(inputs, Layout(torch.Size((3, 4)), 3, None), config, torch.float32)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [4500, 151936])
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_loss_in_one_launch(config, vocab_size, out_dtype):
    work = CudaRows()
    values, targets = map(on_gpu, make_rows((12, vocab_size)))
    transform = to_gpu(make_transform("all", 12, vocab_size))
    logp, _ = exact(values.double(), targets, transform)
    for on_policy in (False, True):
        batch = make_batch(config, logp, on_policy)
        logits = padded(values)
        out = in_place(logits, out_dtype)
        stats, loss, dlogp = work.loss(
            Rows(logits, targets, transform),
            token_inputs(batch, config),
            objective_numbers(config),
            out,
            with_entropy=True,
        )
        alone = statistics(work, padded(values), targets, transform)
        assert all(torch.equal(got, want) for got, want in zip(stats, alone, strict=True))
        want = evaluate(stats.logp, stats.entropy, batch, config)
        derivatives = want.derivatives()
        torch.testing.assert_close(dlogp, derivatives.dlogp, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(loss.sum(), want.policy_loss, rtol=1e-5, atol=1e-6)
        assert_gradient(out, exact_gradient(values, targets, transform, dlogp, derivatives.dentropy))


def test_impossible_tokens_nan_and_rows_without_a_coefficient():
    work = CudaRows()
    values, targets = map(on_gpu, make_rows((5, 9000)))
    targets[:2] = torch.tensor([4600, 5])
    values[:2, :4500] = -math.inf
    values[2, 8999] = math.nan
    targets[4] = -100
    logits = padded(values)
    stats = statistics(work, logits, targets, PLAIN)
    assert stats.logp[0].isfinite()
    assert stats.logp[1] == -math.inf
    assert stats.logp.isnan().tolist() == [False, False, True, False, True]
    logits[3] = math.nan
    out = in_place(logits, torch.bfloat16)
    dlogp = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], device="cuda")
    gradient(work, logits, out, targets, stats, dlogp, None, PLAIN)
    assert out[[0, 1, 3, 4]].isfinite().all()
    assert out[0, :4500].eq(0).all()
    assert out[[1, 3, 4]].eq(0).all()
    assert out[2].isnan().all()


@pytest.mark.parametrize("shape", [(70000, 40), (20000, 151936)], ids=str)
def test_beyond_the_grid_limit_and_two_to_the_31_logits(shape):
    """65,535 blocks of a grid's second dimension, and offsets of 64 bits (3e9 logits, 12 GB)."""
    work = CudaRows()
    logits = torch.randn(shape, device="cuda")
    targets = torch.randint(0, shape[1], shape[:1], device="cuda")
    want, _ = exact(logits[-8:].double(), targets[-8:], PLAIN)
    want_gradient = exact_gradient(logits[-8:], targets[-8:], PLAIN, torch.ones(8, device="cuda"), None)
    stats = statistics(work, logits, targets, PLAIN)
    assert (stats.logp[-8:].double() - want).abs().max() <= 2e-5
    out = in_place(logits, torch.bfloat16)
    gradient(work, logits, out, targets, stats, torch.ones(shape[0], device="cuda"), None, PLAIN)
    assert_gradient(out[-8:], want_gradient)


def test_no_rows():
    stats = statistics(CudaRows(), torch.zeros(0, 64, device="cuda"), torch.zeros(0, dtype=torch.int64).cuda(), PLAIN)
    assert stats.logp.shape == (0,)


def test_two_runs_are_bitwise_equal_and_rows_are_independent():
    work = CudaRows()
    values, targets = map(on_gpu, make_rows((64, 151936)))
    results = []
    for rows in (slice(None), slice(None), slice(0, 7)):
        logits = padded(values[rows])
        stats = statistics(work, logits, targets[rows], PLAIN)
        out = in_place(logits, torch.bfloat16)
        gradient(work, logits, out, targets[rows], stats, torch.ones_like(stats.logp), None, PLAIN)
        results.append((stats.logp, stats.entropy, out))
    for first, again, alone in zip(*results, strict=True):
        assert torch.equal(first, again)
        assert torch.equal(first[:7], alone)


def test_runs_on_the_current_stream():
    """The kernel waits for earlier work of its stream, here a long sleep before the logits are written."""
    work = CudaRows()
    values, targets = map(on_gpu, make_rows((64, 151936)))
    want = statistics(work, values, targets, PLAIN).logp
    logits = torch.zeros_like(values)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        logits.copy_(values)
        got = statistics(work, logits, targets, PLAIN).logp
    stream.synchronize()
    assert torch.equal(got, want)


def test_in_a_graph():
    work = CudaRows()
    values, targets = map(on_gpu, make_rows((8, 32000)))
    want = statistics(work, values, targets, PLAIN).logp
    logits = values.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = statistics(work, logits, targets, PLAIN).logp
    logits.zero_()
    graph.replay()
    assert (got + math.log(32000)).abs().max() <= 1e-5
    logits.copy_(values)
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("config", [make_config("dapo", entropy_coef=0.01), make_config("vespo")], ids=config_id)
def test_the_engine_with_it(monkeypatch, config, dtype):
    """From hidden states to gradients, against the engine with the row work that it chooses itself."""
    case = make_case(1, B=4, T=32, H=64, V=50257, dtype=dtype)
    tensors = (case.hidden_states, case.lm_head_weight, case.completion_ids, case.advantages, case.completion_mask)
    case = Case(*map(on_gpu, tensors), {name: on_gpu(value) for name, value in case.options.items()})
    want = case.run(config)
    monkeypatch.setitem(engines._ENGINES, "chunked", engines.engine("cuda"))
    got = case.run(config)
    assert (got.out.per_token_logps - want.out.per_token_logps).abs().max() <= 2e-5
    tol = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for name, value in got.gradients().items():
        assert frobenius_error(value, want.gradients()[name]) <= tol, name
