"""The objective's jit helpers, interpreted, against `objective.py` over the whole grid of token-level options."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from helpers import config_id, make_config

pytest.importorskip("triton")

from grpo_fused.kernels.launch import TritonRows
from grpo_fused.kernels.row_types import Rows, Transform

from grpo_fused.call.calls import LossInputs
from grpo_fused.call.layout import Layout
from grpo_fused.engines.token_kernels import objective_numbers, token_inputs
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate

GRID = [
    make_config(loss_type, beta=beta, kl_estimator=kl, use_bias_correction_kl=corrected, entropy_coef=bonus, **clip)
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
    for beta, kl, corrected in [(0.0, "k3", True), *itertools.product((0.1,), ("k1", "k2", "k3"), (True, False))]
    for clip in (
        {},
        {"delta": 1.4},
        {"delta": 0.9, "epsilon_high": 0.4},
        {"dual_clip": 1.3},
        {"epsilon": 0.1, "epsilon_high": 0.3},
    )
    for bonus in (0.0, 0.05)
    if not clip or loss_type not in ("cispo", "sapo")
]


CALLS = ((0, False, False), (1, True, False), (2, False, True))  # seed, on_policy, with_ratio


def pairs(config, call):
    """Pairs of options that share code; policy and KL terms are computed separately and added."""
    policy = ("policy", config.kind.kernel)
    kl = ("kl", config.beta, config.kl_estimator, config.use_bias_correction_kl)
    clip = ("clip", config.epsilon, config.epsilon_high, config.delta, config.dual_clip)
    bonus = ("bonus", config.entropy_coef)
    found = {(policy, kl), (policy, bonus), (kl, bonus), (policy, call), (kl, call)}
    return found if call[1] else found | {(policy, clip), (clip, bonus)}  # on-policy, nothing is clipped


def covering(cases):
    """Cases that have a pair of options for the first time, those with most such pairs first."""
    wanted, chosen = set().union(*(pairs(*case) for case in cases)), []
    while wanted:
        chosen.append(max(cases, key=lambda case: len(pairs(*case) & wanted)))
        wanted -= pairs(*chosen[-1])
    return chosen


CASES = random.Random(0).sample(list(itertools.product(GRID, CALLS)), len(GRID) * len(CALLS))


def case_id(value):
    return ("off-policy", "on-policy", "ratio")[value[0]] if isinstance(value, tuple) else config_id(value)


def batch_and_logits(config, seed=0, on_policy=False, with_ratio=False):
    """12 tokens in 3 sequences over 19 tokens of vocabulary: extreme ratios, masked tokens full of NaN, A = 0."""
    g = torch.Generator().manual_seed(seed)
    rows, vocab_size = 12, 19
    logits = torch.randn(rows, vocab_size, generator=g) * 2
    targets = torch.randint(0, vocab_size, (rows,), generator=g)
    logp = logits.double().log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    mask = torch.rand(rows, generator=g) > 0.2
    mask[[2, 3, 8, 9, 10]] = True
    spread = torch.randn(rows, generator=g) * 0.4
    spread[2], spread[3], spread[8] = 30.0, -30.0, -1.0
    old, ref = (logp + spread).float(), (logp + torch.randn(rows, generator=g)).float()
    ref[9] += 40.0
    ref[10] = -math.inf
    for x in (old, ref):
        x[~mask] = torch.nan
    signs = torch.tensor([1.0, 0.0, -1.0])  # of tokens 2 and 3; of token 8, beyond every bound
    advantages = (torch.rand(3, generator=g) + 0.5) * (-signs if with_ratio else signs)
    layout = Layout(torch.Size((3, 4)), 3, None)
    inputs = LossInputs(
        advantages=advantages,
        completion_mask=mask.view(3, 4),
        old_per_token_logps=None if on_policy else old.view(3, 4),
        ref_per_token_logps=ref.view(3, 4) if config.beta else None,
        importance_sampling_ratio=torch.rand(3, 4, generator=g) * 2 if with_ratio else None,
    )
    return TokenBatch.build(inputs, layout, config, torch.float32), logits, targets


# an option that is off is inf; inf * 0 is computed and discarded by a where
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize(("config", "call"), covering(CASES), ids=case_id)
def test_matches_the_torch_objective(config, call):
    assert_matches_torch(config, [call])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("config", GRID, ids=config_id)
def test_matches_the_torch_objective_on_the_whole_grid(config):
    assert_matches_torch(config, CALLS)


def row_loss(batch, logits, targets, config, out, temperature=1.0):
    rows = Rows(logits, targets, Transform(temperature=temperature))
    return TritonRows().loss(rows, token_inputs(batch, config), objective_numbers(config), out, with_entropy=True)


def assert_matches_torch(config, calls):
    for seed, on_policy, with_ratio in calls:
        batch, logits, targets = batch_and_logits(config, seed, on_policy, with_ratio)
        out = torch.empty_like(logits)
        stats, loss, dlogp = row_loss(batch, logits, targets, config, out)
        want = evaluate(stats.logp, stats.entropy, batch, config)
        want_dlogp, want_dentropy = want.derivatives()
        assert want_dlogp.abs().max() > 0
        torch.testing.assert_close(dlogp, want_dlogp, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(loss.sum(), want.policy_loss, rtol=1e-5, atol=1e-6)
        assert dlogp[~batch.mask].eq(0).all()
        assert loss[~batch.mask].eq(0).all()

        raw = logits.double().requires_grad_()
        log_p = raw.log_softmax(1)
        picked = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        total = (picked * want_dlogp.double()).sum()
        if want_dentropy is not None:
            total = total - ((log_p.exp() * log_p).sum(1) * want_dentropy.double()).sum()
        total.backward()
        scale = raw.grad.abs().max()
        assert (out.double() - raw.grad).abs().max() <= 2e-6 * scale


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN is tested here
def test_an_impossible_token_has_no_gradient_and_nan_propagates():
    config = make_config("dapo", beta=0.1)
    batch, logits, targets = batch_and_logits(config)
    active = batch.mask.nonzero().squeeze(1)
    logits[active[0], targets[active[0]]] = -math.inf
    logits[active[1]] = math.nan
    out = torch.empty_like(logits)
    stats, loss, dlogp = row_loss(batch, logits, targets, config, out)
    assert stats.logp[active[0]] == -math.inf
    assert dlogp[active[0]] == 0
    assert out[active[0]].eq(0).all()
    assert loss[active[0]].isfinite()
    assert stats.logp[active[1]].isnan()
    assert loss[active[1]].isnan()
    assert dlogp[active[1]].isnan()


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_each_token_may_have_its_own_temperature():
    config, temperature = make_config("dapo"), torch.linspace(0.5, 2, 12)
    batch, logits, targets = batch_and_logits(config)
    divided = logits / temperature.unsqueeze(1)
    got, want = (
        row_loss(batch, x, targets, config, torch.empty_like(x), t) for x, t in ((logits, temperature), (divided, 1.0))
    )
    torch.testing.assert_close(got[0].logp, want[0].logp)
    torch.testing.assert_close(got[1], want[1])


def test_options_are_not_compiled_in():
    """Constexprs are blocks, booleans and enumerations: no length, temperature, beta or epsilon among them."""
    from grpo_fused.kernels import rows

    allowed = {
        "BLOCK", "POLICY", "KL", "HAS_OLD", "HAS_KL", "BIAS_CORRECTION", "HAS_IS_RATIO", "HAS_BIAS", "HAS_SOFTCAP",
        "HAS_TEMPERATURES", "WITH_ENTROPY", "HAS_DENTROPY", "IN_PLACE",
    }  # fmt: skip
    import inspect

    for name in ("row_statistics_fwd_kernel", "row_gradient_bwd_kernel", "row_loss_fwd_bwd_kernel"):
        signature = inspect.signature(getattr(rows, name).fn)
        constexprs = {p.name for p in signature.parameters.values() if "constexpr" in str(p.annotation)}
        assert constexprs <= allowed, name
