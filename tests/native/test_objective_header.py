"""csrc/objective.h against the torch objective and the autograd reference: every token-level loss and option."""

from __future__ import annotations

import ctypes
import itertools
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from grpo_fused.kernels.row_types import KL_ESTIMATORS
from helpers import config_id, make_config
from native.building import shared_library

from grpo_fused import grpo_loss
from grpo_fused.call.calls import LossInputs
from grpo_fused.call.layout import Layout
from grpo_fused.engines.token_kernels import objective_numbers, token_inputs
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate

GRID = [
    make_config(loss_type, beta=beta, kl_estimator=kl, use_bias_correction_kl=corrected, **clip)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
    for beta, kl, corrected in [(0.0, "k3", True), *itertools.product((0.1,), ("k1", "k2", "k3"), (True, False))]
    for clip in (
        {},
        {"delta": 1.4},
        {"delta": 0.9, "epsilon_high": 0.4},
        {"dual_clip": 1.3},
        {"epsilon": 0.1, "epsilon_high": 0.3},
    )
    if not clip or loss_type not in ("cispo", "sapo")
]
TOL = {torch.float32: (1e-5, 1e-7), torch.float64: (1e-10, 1e-13)}
"""(relative, absolute): single rounding errors of a sum of a few terms."""


@pytest.fixture(scope="module")
def token_objective(tmp_path_factory):
    """(loss, dlogp) of tokens, by the header."""
    folder = tmp_path_factory.mktemp("objective")
    library = ctypes.CDLL(str(shared_library(folder / "objective.so", Path(__file__).parent / "objective_harness.cpp")))

    def call(logp, batch, config):
        inputs, options = token_inputs(batch, config), objective_numbers(config)
        tensors = (logp, inputs.old, inputs.ref, inputs.advantages, inputs.weight, inputs.is_ratio)
        assert all(x is None or (x.dtype == logp.dtype and x.is_contiguous()) for x in tensors)
        names = ("epsilon", "epsilon_high", "delta", "dual_clip", "tau_pos", "tau_neg", "beta")
        numbers = (ctypes.c_double * 7)(*(getattr(options, name) for name in names))
        pointers = (ctypes.c_void_p * 6)(*(None if x is None else x.data_ptr() for x in tensors))
        loss, dlogp = torch.empty_like(logp), torch.empty_like(logp)
        kinds = options.policy, KL_ESTIMATORS[options.kl_estimator]
        run = library.objective_float if logp.dtype == torch.float32 else library.objective_double
        run(ctypes.c_int64(len(logp)), pointers, numbers, *map(ctypes.c_int64, kinds), options.bias_correction,
            ctypes.c_void_p(loss.data_ptr()), ctypes.c_void_p(dlogp.data_ptr()))  # fmt: skip
        return loss, dlogp

    return call


def make_tokens(config, dtype, seed=0, on_policy=False, with_ratio=False):
    """48 tokens in 4 sequences: ratios beyond e^20 both ways, ratios at every bound, masked tokens full of NaN, A = 0."""
    g = torch.Generator().manual_seed(seed)
    shape = (4, 12)
    logp = -torch.rand(shape, generator=g, dtype=torch.float64) * 6
    mask = torch.rand(shape, generator=g) > 0.2
    old = logp + torch.randn(shape, generator=g, dtype=torch.float64) * 0.4
    ref = logp + torch.randn(shape, generator=g, dtype=torch.float64)
    old[0, 3], old[0, 4], ref[2, 1], ref[2, 2] = logp[0, 3] + 30, logp[0, 4] - 30, logp[2, 1] + 40, -math.inf
    ref[3, 1] = logp[3, 1] + 1e-3  # where k3's exponentials cancel
    logp[3, 2] = -math.inf
    mask[[0, 0, 2, 2, 3, 3], [3, 4, 1, 2, 1, 2]] = True
    for x in (logp, old, ref):
        x[~mask] = torch.nan
    advantages = torch.randn(4, generator=g, dtype=torch.float64)
    advantages[1] = 0.0
    ratio = torch.rand(shape, generator=g, dtype=torch.float64) * 2
    ratio[0, :2] = 0.0
    options = {
        "old_per_token_logps": None if on_policy else old,
        "ref_per_token_logps": ref if config.beta else None,
        "importance_sampling_ratio": ratio if with_ratio else None,
    }
    inputs = LossInputs(advantages=advantages, completion_mask=mask, **options)
    batch = TokenBatch.build(inputs, Layout(torch.Size(shape), 4, None), config, dtype)
    return logp, mask, advantages, options, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("config", GRID, ids=config_id)
def test_matches_the_torch_objective(config, dtype, token_objective):
    rtol, atol = TOL[dtype]
    for seed, on_policy, with_ratio in ((0, False, False), (1, True, False), (2, False, True)):
        logp, _, _, _, batch = make_tokens(config, dtype, seed, on_policy, with_ratio)
        logp = logp.to(dtype).flatten()
        loss, dlogp = token_objective(logp, batch, config)
        want = evaluate(logp, None, batch, config)
        slope = want.derivatives()
        assert slope.dlogp.abs().max() > 0
        torch.testing.assert_close(dlogp, slope.dlogp, rtol=rtol, atol=atol)
        torch.testing.assert_close(loss.double().sum().to(dtype), want.policy_loss, rtol=rtol, atol=10 * atol)
        assert dlogp[~batch.mask].eq(0).all()
        assert loss[~batch.mask].eq(0).all()


@pytest.mark.parametrize("config", GRID, ids=config_id)
def test_matches_the_reference_by_autograd(config, token_objective):
    """The derivative of the reference's loss, in fp64."""
    logp, mask, advantages, options, batch = make_tokens(config, torch.float64, seed=3, with_ratio=True)
    leaf = logp.clone().requires_grad_()
    grpo_loss(leaf, advantages, mask, **options, config=config, impl="reference").loss.backward()
    _, dlogp = token_objective(logp.flatten(), batch, config)
    torch.testing.assert_close(dlogp, leaf.grad.flatten(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
@pytest.mark.parametrize("where", ["logp", "old", "ref", "advantages"])
def test_nan_of_an_active_token_propagates(loss_type, where, token_objective):
    """To the loss always, to the coefficient where torch has NaN too."""
    config = make_config(loss_type, beta=0.1)
    logp, mask, _, _, batch = make_tokens(config, torch.float32)
    logp = logp.float().flatten()
    token = int(mask.flatten().nonzero()[2])
    x = logp if where == "logp" else getattr(batch, where)
    x[token] = torch.nan
    loss, dlogp = token_objective(logp, batch, config)
    want = evaluate(logp, None, batch, config)
    slope = want.derivatives()
    assert loss[token].isnan()
    assert loss.isnan().sum() == 1
    assert torch.equal(dlogp.isnan(), slope.dlogp.isnan())


def test_an_impossible_token_has_a_loss_but_no_coefficient(token_objective):
    config = make_config("dapo", beta=0.1)
    logp, _, _, _, batch = make_tokens(config, torch.float32)
    loss, dlogp = token_objective(logp.float().flatten(), batch, config)
    assert loss[3 * 12 + 2].isfinite()
    assert dlogp[3 * 12 + 2] == 0


def test_bounds_count_as_not_clipped(token_objective):
    """Exactly at a clip bound both sides are right; torch and the header must take the same one."""
    config = make_config("dapo", epsilon=0.5, epsilon_high=0.5, delta=2.0)
    bounds = torch.tensor([0.5, 1.5, 2.0], dtype=torch.float64)
    logp = bounds.log().repeat(2)
    assert torch.equal(logp.exp(), bounds.repeat(2))
    batch = TokenBatch.build(
        LossInputs(advantages=torch.tensor([1.0, -1.0]), old_per_token_logps=torch.zeros(2, 3)),
        Layout(torch.Size((2, 3)), 2, None), config, torch.float64,
    )  # fmt: skip
    torch.testing.assert_close(
        token_objective(logp, batch, config)[1], evaluate(logp, None, batch, config).derivatives().dlogp
    )
