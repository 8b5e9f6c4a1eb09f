"""The row kernels themselves on a CPU's threads: barriers and shuffles emulated (emulated.h).

A missing barrier, or a store on logits that another thread has not read yet, gives NaN, wrong numbers or a hang. Only a GPU can show that its instructions do what is emulated.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from grpo_fused.kernels.row_types import Transform
from helpers import config_id, make_config
from native.harness import Harness
from native.rows import assert_gradient, exact, exact_gradient, in_place, make_rows, make_transform, padded

from grpo_fused.call.calls import LossInputs
from grpo_fused.call.layout import Layout
from grpo_fused.engines.token_kernels import token_inputs
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate

THREADS = [32, 96, 512]
SHAPES = [(1, 1), (3, 37), (2, 12301)]
PLAIN = Transform(None, 1.0, None, 1.0)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Harness:
    return Harness(tmp_path_factory.mktemp("kernels"), "emulated_rows.cpp")


@pytest.fixture
def functions(row_functions) -> Harness:
    return row_functions


@pytest.mark.pairs
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(kernels, functions, shape, dtype, threads):
    """Exact, and bitwise those of the functions in their simulated order."""
    values, targets = make_rows(shape)
    transform = make_transform("all", *shape)
    for logits in (padded(values, dtype), values.to(dtype)):  # rows at multiples of 16 bytes, and at odd addresses
        got = kernels.statistics(logits, targets, transform, threads)
        logp, entropy = exact(logits.double(), targets, transform)
        assert (got.logp.double() - logp).abs().max() <= 1e-5
        assert (got.entropy.double() - entropy).abs().max() <= 2e-5
        want = functions.statistics(logits, targets, transform, threads)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.pairs
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradient_in_place(kernels, shape, out_dtype, threads):
    """Stores of one thread overwrite the logits of others."""
    values, targets = make_rows(shape)
    dlogp, dentropy = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(1))
    logits = padded(values)
    stats = kernels.statistics(logits, targets, PLAIN, threads)
    out = in_place(logits, out_dtype)
    kernels.gradient(logits, out, targets, stats, dlogp, dentropy, PLAIN, threads)
    assert_gradient(out, exact_gradient(values, targets, PLAIN, dlogp, dentropy))


@pytest.mark.parametrize("threads", THREADS)
def test_gradient_in_a_buffer_and_rows_without_a_coefficient(kernels, threads):
    values, targets = make_rows((3, 12301))
    logits = padded(values)
    stats = kernels.statistics(logits, targets, PLAIN, threads)
    logits[1] = torch.nan
    out = torch.full((3, 12301), torch.nan, dtype=torch.bfloat16)
    dlogp = torch.tensor([1.0, 0.0, -2.0])
    kernels.gradient(logits, out, targets, stats, dlogp, None, PLAIN, threads)
    assert out[1].eq(0).all()
    assert_gradient(out, exact_gradient(values, targets, PLAIN, dlogp, None))


@pytest.mark.pairs
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [make_config("dapo", beta=0.1, entropy_coef=0.05), make_config("cispo")], ids=config_id
)
def test_loss_in_one_launch(kernels, config, out_dtype, threads):
    values, targets = make_rows((6, 9001))
    transform = make_transform("temperatures", 6, 9001)
    logp, _ = exact(values.double(), targets, transform)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]) > 0
    inputs = LossInputs(
        advantages=torch.tensor([1.0, -0.7]), completion_mask=mask, old_per_token_logps=logp.float().view(2, 3) + 0.1,
        ref_per_token_logps=logp.float().view(2, 3) - 0.3 if config.beta else None,
    )  # fmt: skip
    batch = TokenBatch.build(inputs, Layout(torch.Size((2, 3)), 2, None), config, torch.float32)
    logits = padded(values)
    out = in_place(logits, out_dtype)
    stats, loss, dlogp = kernels.loss(logits, out, targets, token_inputs(batch, config), config, transform, threads)
    want = evaluate(stats.logp, stats.entropy, batch, config)
    slope = want.derivatives()
    assert (stats.logp.double() - logp).abs().max() <= 1e-5
    torch.testing.assert_close(dlogp, slope.dlogp, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss.sum(), want.policy_loss, rtol=1e-5, atol=1e-6)
    assert_gradient(out, exact_gradient(values, targets, transform, dlogp, slope.dentropy))
