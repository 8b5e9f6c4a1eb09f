"""The row kernels' arithmetic, compiled for the CPU with simulated threads, against fp64.

All except barriers, shuffles and launches: partial statistics and their merge, the objective, gradient elements, 16-byte
and single accesses, in place and not. The padding of rows is NaN.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from grpo_fused.kernels.row_types import Transform
from helpers import config_id, make_config
from native.harness import Harness
from native.rows import TRANSFORMS, assert_gradient, exact, exact_gradient, in_place, make_rows, make_transform, padded

from grpo_fused.call.calls import LossInputs
from grpo_fused.call.layout import Layout
from grpo_fused.engines.token_kernels import token_inputs
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate

# one column; several packets and an odd tail; no tail; a stride of 512 threads and more; several strides
SHAPES = [(1, 1), (5, 37), (3, 256), (2, 4097), (2, 20011)]
THREADS = [32, 96, 512]
PLAIN = Transform(None, 1.0, None, 1.0)


@pytest.fixture
def rows(row_functions) -> Harness:
    return row_functions


@pytest.mark.pairs
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(rows, shape, name, dtype, threads):
    values, targets = make_rows(shape)
    logits, transform = padded(values, dtype), make_transform(name, *shape)
    stats = rows.statistics(logits, targets, transform, threads)
    logp, entropy = exact(logits.double(), targets, transform)
    assert (stats.logp.double() - logp).abs().max() <= 1e-5
    assert (stats.entropy.double() - entropy).abs().max() <= 2e-5
    assert torch.equal(rows.statistics(logits, targets, transform, threads, with_entropy=False).logp, stats.logp)


@pytest.mark.pairs
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient_in_place(rows, shape, name, with_entropy, out_dtype, threads):
    """The gradient is written to the memory of the logits, in fp32 or over their first halves."""
    values, targets = make_rows(shape)
    transform = make_transform(name, *shape)
    dlogp, dentropy = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(1))
    coefficient = dentropy if with_entropy else None
    logits = padded(values)
    stats = rows.statistics(logits, targets, transform, threads)
    out = in_place(logits, out_dtype)
    rows.gradient(logits, out, targets, stats, dlogp, coefficient, transform, threads)
    assert_gradient(out, exact_gradient(values, targets, transform, dlogp, coefficient))


@pytest.mark.pairs
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [37, 5003])
def test_rows_at_odd_addresses_and_a_separate_buffer(rows, dtype, vocab_size, threads):
    """Rows of a caller's contiguous logits: no 16-byte access, nothing read or written beyond a row."""
    values, targets = make_rows((3, vocab_size))
    logits = values.to(dtype)
    stats = rows.statistics(logits, targets, PLAIN, threads)
    logp, _ = exact(logits.double(), targets, PLAIN)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=0, atol=1e-5)
    memory = torch.full((3 * vocab_size + 2,), 7.0, dtype=dtype)
    out = memory[1:-1].view(3, vocab_size)
    before = logits.clone()
    rows.gradient(logits, out, targets, stats, torch.ones(3), None, PLAIN, threads)
    assert torch.equal(logits, before)
    assert memory[0] == memory[-1] == 7.0
    assert_gradient(out, exact_gradient(logits, targets, PLAIN, torch.ones(3), None))


CONFIGS = [
    make_config("dapo"),
    make_config("grpo", delta=1.4, beta=0.1),
    make_config("luspo", dual_clip=1.3, beta=0.1, kl_estimator="k1"),
    make_config("dapo", beta=0.1, use_bias_correction_kl=False, entropy_coef=0.05),
    make_config("cispo", beta=0.1, kl_estimator="k2"),
    make_config("sapo", entropy_coef=0.05),
]


@pytest.mark.pairs
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_loss_in_one_launch(rows, config, out_dtype, threads):
    """Statistics, objective and gradient in place; on- and off-policy; masked tokens, clipped ones, A = 0."""
    shape = (12, 4500)
    values, targets = make_rows(shape)
    transform = make_transform("all", *shape)
    logp, _ = exact(values.double(), targets, transform)
    g = torch.Generator().manual_seed(2)
    mask = torch.rand(3, 4, generator=g) > 0.2
    old, ref = (logp.float().view(3, 4) + torch.randn(3, 4, generator=g) * s for s in (0.3, 1.0))
    old[~mask], ref[~mask] = torch.nan, torch.nan
    for on_policy, with_ratio in ((False, False), (True, True)):
        inputs = LossInputs(
            advantages=torch.tensor([1.0, -0.7, 0.0]),
            completion_mask=mask,
            old_per_token_logps=None if on_policy else old,
            ref_per_token_logps=ref if config.beta else None,
            importance_sampling_ratio=torch.rand(3, 4, generator=g) * 2 if with_ratio else None,
        )
        batch = TokenBatch.build(inputs, Layout(torch.Size((3, 4)), 3, None), config, torch.float32)
        logits = padded(values)
        out = in_place(logits, out_dtype)
        stats, loss, dlogp = rows.loss(logits, out, targets, token_inputs(batch, config), config, transform, threads)
        alone = rows.statistics(padded(values), targets, transform, threads)
        assert all(torch.equal(got, want) for got, want in zip(stats, alone, strict=True))
        want = evaluate(stats.logp, stats.entropy, batch, config)
        slope = want.derivatives()
        torch.testing.assert_close(dlogp, slope.dlogp, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(loss.sum(), want.policy_loss, rtol=1e-5, atol=1e-6)
        gradient = exact_gradient(values, targets, transform, dlogp, slope.dentropy)
        assert gradient.abs().max() > 0
        assert_gradient(out, gradient)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("offset", [-1e4, 1e4], ids=str)
def test_common_offset(rows, offset, threads):
    values, targets = make_rows((4, 5000))
    logits = padded(values + offset)
    stats = rows.statistics(logits, targets, PLAIN, threads)
    logp, entropy = exact(logits.double(), targets, PLAIN)
    assert (stats.logp.double() - logp).abs().max() <= 1e-5
    assert (stats.entropy.double() - entropy).abs().max() <= 1e-4


@pytest.mark.parametrize("threads", THREADS)
def test_impossible_tokens(rows, threads):
    """-inf logits, whole parts of a row among them: no NaN in value or gradient."""
    values, _ = make_rows((3, 9000))
    values[:, :4500] = -math.inf
    values[1, 5000:] = -math.inf
    targets = torch.tensor([4600, 4700, 5])
    logits = padded(values)
    stats = rows.statistics(logits, targets, PLAIN, threads)
    logp, entropy = exact(logits.double(), targets, PLAIN)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=0, atol=1e-4)
    out = torch.full((3, 9000), torch.nan)
    rows.gradient(logits, out, targets, stats, torch.tensor([1.0, -2.0, 0.0]), torch.ones(3), PLAIN, threads)
    assert out.isfinite().all()
    assert out[:2, :4500].eq(0).all()


@pytest.mark.parametrize("threads", THREADS)
def test_nan_propagates_within_its_row(rows, threads):
    values, targets = make_rows((3, 5000))
    values[1, 4999] = math.nan
    logits = padded(values)
    stats = rows.statistics(logits, targets, PLAIN, threads)
    assert stats.logp.isnan().tolist() == [False, True, False]
    assert stats.entropy.isnan().tolist() == [False, True, False]
    out = torch.empty(3, 5000)
    rows.gradient(logits, out, targets, stats, torch.ones(3), None, PLAIN, threads)
    assert out.isnan().all(1).tolist() == [False, True, False]
    assert out.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("threads", THREADS)
def test_rows_without_a_coefficient_are_zeros_for_any_logits(rows, threads):
    values, targets = make_rows((2, 5000))
    logits = padded(values)
    stats = rows.statistics(logits, targets, PLAIN, threads)
    logits[1] = math.nan
    out = in_place(logits, torch.bfloat16)
    rows.gradient(logits, out, targets, stats, torch.tensor([1.0, 0.0]), None, PLAIN, threads)
    assert out[1].eq(0).all()
    assert_gradient(out[:1], exact_gradient(values[:1], targets[:1], PLAIN, torch.ones(1), None))


@pytest.mark.parametrize("threads", THREADS)
def test_certain_tokens(rows, threads):
    """log-probs are never above 0, and a confident token's gradient is accurate."""
    values = torch.zeros(3, 64)
    values[:, 7] = torch.tensor([12.0, 16.0, 200.0])
    targets = torch.full((3,), 7)
    stats = rows.statistics(values, targets, PLAIN, threads)
    assert (stats.logp <= 0).all()
    assert (stats.entropy >= 0).all()
    out = torch.empty(3, 64)
    rows.gradient(values, out, targets, stats, torch.ones(3), None, PLAIN, threads)
    torch.testing.assert_close(out[:, 7].double(), -torch.expm1(stats.logp.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("threads", THREADS)
def test_an_id_outside_the_vocabulary_is_nan_and_not_read(rows, threads):
    logits = torch.randn(3, 112)[:, :100]  # the values after it are finite, so that reading them would be detected
    stats = rows.statistics(logits, torch.tensor([-100, 100, 1 << 40]), PLAIN, threads)
    assert stats.logp.isnan().all()
    assert stats.log_sum.isfinite().all()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("margin", [20.0, 80.0])
def test_confident_tokens_and_equal_maxima(rows, margin, threads):
    values, _ = make_rows((3, 4097), std=1.0)
    targets = torch.tensor([7, 4000, 7])
    values[0, 7] = values[1, 4000] = margin
    values[2] = 0.5
    stats = rows.statistics(values, targets, PLAIN, threads)
    e = (values.double() - values.double().amax(1, keepdim=True)).exp()
    e[[0, 1, 2], targets] = 0.0
    rest = e.sum(1)
    torch.testing.assert_close(stats.logp.double(), -rest.log1p(), rtol=1e-5, atol=0)
