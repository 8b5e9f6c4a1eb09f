"""csrc/objective.h against the torch objective and the autograd reference: every token-level loss and option."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch

pytest.importorskip("triton")

from grpo_fused.kernels.row_types import KL_ESTIMATORS, POLICIES
from helpers import config_id, make_config
from native.building import CSRC, shared_library

from grpo_fused import grpo_loss
from grpo_fused._fakes import register_fakes
from grpo_fused.batch import TokenBatch
from grpo_fused.calls import LossInputs
from grpo_fused.engines.token_kernels import objective_numbers, token_inputs
from grpo_fused.layout import Layout
from grpo_fused.objective import evaluate

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


@pytest.fixture(scope="session", autouse=True)
def _operator(tmp_path_factory):
    """The operator of the built extension, or compiled here."""
    with contextlib.suppress(ImportError):
        from grpo_fused import _native

        _native.cpu_available()  # loads it: an operator must not be defined twice
    if not hasattr(torch.ops.grpo_fused_C, "token_objective"):
        target = tmp_path_factory.mktemp("objective") / "objective.so"
        torch.ops.load_library(str(shared_library(target, CSRC / "cpu" / "objective.cpp", torch_abi=True)))


def token_objective(logp, batch, config):
    inputs, options = token_inputs(batch, config), objective_numbers(config)
    return torch.ops.grpo_fused_C.token_objective(
        logp, inputs.old, inputs.ref, inputs.advantages, inputs.weight, inputs.is_ratio, POLICIES[options.loss_type],
        KL_ESTIMATORS[options.kl_estimator], options.bias_correction, options.epsilon, options.epsilon_high,
        options.delta, options.dual_clip, options.tau_pos, options.tau_neg, options.beta,
    )  # fmt: skip


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
def test_matches_the_torch_objective(config, dtype):
    rtol, atol = TOL[dtype]
    for seed, on_policy, with_ratio in ((0, False, False), (1, True, False), (2, False, True)):
        logp, _, _, _, batch = make_tokens(config, dtype, seed, on_policy, with_ratio)
        logp = logp.to(dtype).flatten()
        loss, dlogp = token_objective(logp, batch, config)
        want = evaluate(logp, None, batch, config)
        assert want.dlogp.abs().max() > 0
        torch.testing.assert_close(dlogp, want.dlogp, rtol=rtol, atol=atol)
        torch.testing.assert_close(loss.double().sum().to(dtype), want.policy_loss, rtol=rtol, atol=10 * atol)
        assert dlogp[~batch.mask].eq(0).all()
        assert loss[~batch.mask].eq(0).all()


@pytest.mark.parametrize("config", GRID, ids=config_id)
def test_matches_the_reference_by_autograd(config):
    """The derivative of the reference's loss, in fp64."""
    logp, mask, advantages, options, batch = make_tokens(config, torch.float64, seed=3, with_ratio=True)
    leaf = logp.clone().requires_grad_()
    grpo_loss(leaf, advantages, mask, **options, config=config, impl="reference").loss.backward()
    _, dlogp = token_objective(logp.flatten(), batch, config)
    torch.testing.assert_close(dlogp, leaf.grad.flatten(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
@pytest.mark.parametrize("where", ["logp", "old", "ref", "advantages"])
def test_nan_of_an_active_token_propagates(loss_type, where):
    """To the loss always, to the coefficient where torch has NaN too."""
    config = make_config(loss_type, beta=0.1)
    logp, mask, _, _, batch = make_tokens(config, torch.float32)
    logp = logp.float().flatten()
    token = int(mask.flatten().nonzero()[2])
    x = logp if where == "logp" else getattr(batch, where)
    x[token] = torch.nan
    loss, dlogp = token_objective(logp, batch, config)
    want = evaluate(logp, None, batch, config)
    assert loss[token].isnan()
    assert loss.isnan().sum() == 1
    assert torch.equal(dlogp.isnan(), want.dlogp.isnan())


def test_an_impossible_token_has_a_loss_but_no_coefficient():
    config = make_config("dapo", beta=0.1)
    logp, _, _, _, batch = make_tokens(config, torch.float32)
    loss, dlogp = token_objective(logp.float().flatten(), batch, config)
    assert loss[3 * 12 + 2].isfinite()
    assert dlogp[3 * 12 + 2] == 0


def test_bounds_count_as_not_clipped():
    """Exactly at a clip bound both sides are right; torch and the header must take the same one."""
    config = make_config("dapo", epsilon=0.5, epsilon_high=0.5, delta=2.0)
    logp = torch.tensor([0.5, 1.5, 2.0]).log().repeat(2).double()
    batch = TokenBatch.build(
        LossInputs(advantages=torch.tensor([1.0, -1.0]), old_per_token_logps=torch.zeros(2, 3)),
        Layout(torch.Size((2, 3)), 2, None), config, torch.float64,
    )  # fmt: skip
    torch.testing.assert_close(token_objective(logp, batch, config)[1], evaluate(logp, None, batch, config).dlogp)


def test_torch_opcheck():
    """Schema, fake implementation and compiled calls, by torch's own checks."""
    register_fakes()
    row = torch.randn(5)
    arguments = (row, row, None, row, row, None, 0, 3, True, 0.2, 0.2, math.inf, math.inf, 1.0, 1.05, 0.0)
    torch.library.opcheck(torch.ops.grpo_fused_C.token_objective.default, arguments)


def test_no_tokens():
    config = make_config("dapo")
    empty = torch.zeros(0)
    got = torch.ops.grpo_fused_C.token_objective(
        empty, None, None, empty, empty, None, 0, 3, True, *[config.epsilon] * 2, math.inf, math.inf, 1.0, 1.0, 0.0
    )
    assert all(x.shape == (0,) for x in got)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": torch.zeros(3, dtype=torch.bfloat16)}, "logp must be float32 or float64"),
        ({"logp": torch.zeros(3, 1)}, r"logp must be contiguous \[R\]; got 2 dimensions"),
        ({"advantages": torch.zeros(2)}, r"advantages must be \[R\] with R = 3; got 1 dimensions and 2 elements"),
        ({"weight": torch.zeros(3, dtype=torch.float64)}, "weight must have the dtype of logp"),
        ({"old_logp": torch.zeros(6)[::2]}, "old_logp must be contiguous"),
        ({"policy": 3}, "policy must be at least 0 and below 3; got 3"),
        ({"kl_estimator": 0}, "kl_estimator must be 1, 2 or 3; got 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_inputs_are_refused(change, message):
    row = torch.zeros(3)
    call = {
        "logp": row, "old_logp": None, "ref_logp": None, "advantages": row, "weight": row, "is_ratio": None,
        "policy": 0, "kl_estimator": 3, "bias_correction": True, "epsilon": 0.2, "epsilon_high": 0.2,
        "delta": math.inf, "dual_clip": math.inf, "tau_pos": 1.0, "tau_neg": 1.05, "beta": 0.0,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        torch.ops.grpo_fused_C.token_objective(**{**call, **change})
