"""`grpo_fused.objectives` on flat log-probs: against formulas written out token by token, in float64.

tests/with_verl/test_objectives.py compares most of them with verl's own code.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from objective_cases import ALL, SEEDS, case, evaluate

from grpo_fused import GRPOLossConfig, grpo_loss, objectives
from grpo_fused.objectives import base


def clip(x, low, high):
    return min(max(x, low), high)


class Token(NamedTuple):
    """What the formulas of one token read: Python numbers."""

    x: float
    """its log-prob"""
    A: float
    old: float
    ref: float
    mu: float
    """the engine's log-prob"""

    @property
    def r(self) -> float:
        return math.exp(self.x - self.old)

    @property
    def rho(self) -> float:
        return math.exp(self.x - self.mu)

    @property
    def moved(self) -> float:
        """By how much the probability is above the engine's."""
        return math.exp(self.x) - math.exp(self.mu)

    @property
    def is_near_in_tv(self) -> bool:
        moved = math.exp(self.x) - math.exp(self.old)
        return moved <= 0.15 if self.A > 0 else moved >= -0.1

    @property
    def is_near_in_kl(self) -> bool:
        p, q = math.exp(self.x), math.exp(self.old)
        kl = q * (self.old - self.x) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        return kl <= 0.03 or p <= q if self.A > 0 else kl <= 0.02 or p >= q


def constant_factor(factor):
    """-factor A log p, where the factor has no gradient."""
    return lambda t: (-factor(t) * t.A * t.x, -factor(t) * t.A)


def near_the_engine(is_kept, advantage):
    """-rho a for kept tokens, and 0.05 (log p - log mu)^2 for all."""

    def formula(t):
        policy = -is_kept(t) * t.rho * advantage(t)
        return policy + 0.05 * (t.x - t.mu) ** 2, policy + 0.1 * (t.x - t.mu)

    return formula


def squared_distance(coef, first):
    return lambda t: (-t.A * first(t) + coef / 2 * (t.x - t.old) ** 2, -t.A + coef * (t.x - t.old))


TOKEN_BY_TOKEN = {
    "ipo": near_the_engine(lambda t: abs(t.moved) <= 0.1, lambda t: t.A),
    "ref_kl": near_the_engine(lambda t: t.moved >= -0.1, lambda t: t.ref - t.x),
    "icepop": lambda t: (-(0.7 <= t.rho <= 1.4) * t.rho * t.A,) * 2,
    "cispo": constant_factor(lambda t: clip(t.r, 0.8, 1.3)),
    "dppo_tv": constant_factor(lambda t: t.is_near_in_tv * min(t.r, 1.5)),
    "dppo_kl": constant_factor(lambda t: t.is_near_in_kl * min(t.r, 1.5)),
    "reinforce": constant_factor(lambda t: min(t.rho, 1.2)),
    "reinforce_band": constant_factor(lambda t: (0.8 <= t.rho <= 1.2) * t.rho),
    "topr_token": constant_factor(lambda t: 1.0 if t.A > 0 else min(t.r, 1.0)),
    "dro": squared_distance(0.3, lambda t: t.x),
    "kimi_token": squared_distance(0.2, lambda t: t.x - t.old),
    "gpg": constant_factor(lambda t: 1.0),
    "cross_entropy": lambda t: (-t.x, -1.0),
}
"""The loss of a token and its derivative by the log-prob, derived by hand; weights of tokens are not in it."""
LEAVE_OUT_TOKENS = {"icepop", "dppo_tv", "dppo_kl", "reinforce_band"}


def expected(formula, logps, inputs):
    """Losses and gradients [n], one token at a time."""
    names = ("advantages", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
    tokens = map(Token, logps.tolist(), *(inputs[name].tolist() for name in names))
    losses, gradients = torch.tensor([formula(t) for t in tokens], dtype=torch.float64).unbind(1)
    return losses * inputs["weights"], gradients * inputs["weights"]


@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
def test_token_formulas(name):
    left_out = 0
    for seed in SEEDS:
        logps, inputs, cu_seqlens = case(seed)
        got = evaluate(ALL[name], logps, inputs, cu_seqlens)
        torch.testing.assert_close(got, expected(TOKEN_BY_TOKEN[name], logps, inputs), rtol=1e-10, atol=1e-12)
        left_out += int((got[0] == 0).sum())
    assert (left_out > 0) == (name in LEAVE_OUT_TOKENS)


def by_a_factor(factor):
    """-factor A log p of a sequence's tokens, where the factor has no gradient."""
    return lambda x, A, w, s, d: (-w * factor(A, s, d) * A * x, -w * factor(A, s, d) * A)


def kimi(x, A, w, s, d):
    """Each token moves the whole sequence's s."""
    return w * ((A - 0.2 * s) ** 2 - A**2) / 0.4, ((0.2 * s - A) * w).sum().expand_as(x)


SEQUENCE_BY_SEQUENCE = {
    "topr": by_a_factor(lambda A, s, d: torch.where(A > 0, 1.0, s.exp().clamp(max=1.0))),
    "kimi": kimi,
    "reinforce_product": by_a_factor(lambda A, s, d: d.sum().exp().clamp(max=1.2)),
    "reinforce_mean": by_a_factor(lambda A, s, d: (d.sum() / max(len(d), 1)).exp().clamp(max=1.05)),
}
"""Losses and gradients of the tokens of one sequence, from log-probs, advantages, weights, the log of the sequence's
ratio to the old policy, and log-ratios to the engine."""


@pytest.mark.parametrize("name", SEQUENCE_BY_SEQUENCE)
def test_sequence_formulas(name):
    for seed in SEEDS:
        logps, inputs, cu_seqlens = case(seed)
        parts = []
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            x, A, w = logps[start:stop], inputs["advantages"][start:stop], inputs["weights"][start:stop]
            s = (x - inputs["old_per_token_logps"][start:stop]).sum()
            d = x - inputs["sampling_per_token_logps"][start:stop]
            parts.append(SEQUENCE_BY_SEQUENCE[name](x, A, w, s, d))
        want = tuple(map(torch.cat, zip(*parts, strict=True)))
        torch.testing.assert_close(evaluate(ALL[name], logps, inputs, cu_seqlens), want, rtol=1e-10, atol=1e-12)


class Fipo(NamedTuple):
    """The options of an objective of the name, as the formula reads them."""

    half_life: float
    delta: float
    high: float
    bounds: tuple[float, float]
    threshold: float


FIPO = {
    "fipo": Fipo(half_life=3.0, delta=1.5, high=1.28, bounds=(1.0, 1.2), threshold=1.1),
    "fipo_free": Fipo(half_life=2.0, delta=math.inf, high=1.2, bounds=(0.0, math.inf), threshold=math.inf),
}


@pytest.mark.parametrize("name", FIPO)
def test_fipo(name):
    half_life, delta, high, bounds, threshold = FIPO[name]
    discount, unsafe = 2 ** (-1 / half_life), 0
    for seed in SEEDS:
        logps, inputs, cu_seqlens = case(seed)
        A, old, w = (inputs[key].tolist() for key in ("advantages", "old_per_token_logps", "weights"))
        d = [x - o for x, o in zip(logps.tolist(), old, strict=True)]
        loss, grad = [], []
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            for t in range(start, stop):
                r = math.exp(d[t])
                future = sum(discount ** (k - t) * d[k] for k in range(t, stop) if math.exp(d[k]) <= delta)
                f = clip(math.exp(future), *bounds)
                if A[t] < 0 and r > threshold:
                    f, unsafe = clip(f, 0.8, 1.0), unsafe + 1
                plain = -min(min(r, delta) * A[t], clip(r, 0.8, high) * A[t])
                live = r <= min(high, delta) if A[t] > 0 else 0.8 <= r <= delta
                loss.append(w[t] * f * plain)
                grad.append(-w[t] * f * r * A[t] * live)
        want = torch.tensor([loss, grad], dtype=torch.float64)
        got = torch.stack(evaluate(ALL[name], logps, inputs, cu_seqlens))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert (unsafe > 0) == (threshold < math.inf)


SAME_AS_LOSS_TYPES = {
    "vanilla": ("bnpo", {"loss_type": "bnpo", "epsilon": 0.2, "epsilon_high": 0.28, "dual_clip": 3.0}),
    "no_dual_clip": ("grpo", {"loss_type": "grpo", "epsilon": 0.2}),
    "sapo": ("grpo", {"loss_type": "sapo", "sapo_temperature_neg": 1.4}),
    "gspo": ("luspo", {"loss_type": "luspo", "epsilon": 0.05, "epsilon_high": 0.1,
                       "importance_sampling_level": "sequence_token"}),
    "gmpo": ("grpo", {"loss_type": "gmpo", "epsilon": 0.2, "epsilon_high": 0.3}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AS_LOSS_TYPES)
def test_same_as_the_loss_types_of_the_package(name):
    """Padded, with NaN at masked positions."""
    aggregation, options = SAME_AS_LOSS_TYPES[name]
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        mask = torch.rand(4, 5, generator=g) < 0.6
        logps = -2.0 * torch.rand(4, 5, generator=g, dtype=torch.float64)
        old = logps + 0.3 * torch.randn(4, 5, generator=g, dtype=torch.float64)
        old[~mask] = math.nan
        advantages = torch.randn(4, generator=g, dtype=torch.float64)
        leaf = logps.clone().requires_grad_()
        out = grpo_loss(leaf, advantages, mask, old_per_token_logps=old, config=GRPOLossConfig(**options))
        want = out.loss.detach().double(), torch.autograd.grad(out.loss, leaf)[0]

        weights = objectives.token_weights(mask, aggregation, dtype=torch.float64)
        inputs = {"advantages": advantages[:, None].expand(4, 5), "old_per_token_logps": old, "weights": weights}
        offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        losses, grad = evaluate(ALL[name], logps[mask], {k: x[mask] for k, x in inputs.items()}, offsets)
        torch.testing.assert_close(losses.sum(), want[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(torch.zeros_like(logps).masked_scatter(mask, grad), want[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].scope == "token"])
def test_token_scope_uses_no_other_tokens(name):
    for seed in range(5):
        logps, inputs, _ = case(seed)
        whole = evaluate(ALL[name], logps, inputs, None)
        some = torch.tensor([7, 0, 4])
        part = evaluate(ALL[name], logps[some], {key: x[some] for key, x in inputs.items()}, None)
        torch.testing.assert_close(part, (whole[0][some], whole[1][some]), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].scope == "sequence"])
def test_sequence_scope_uses_no_other_sequences(name):
    for seed in range(5):
        logps, inputs, cu_seqlens = case(seed)
        whole = evaluate(ALL[name], logps, inputs, cu_seqlens)
        for start, stop in ((0, 3), (3, 8), (8, 9)):
            own = {key: x[start:stop] for key, x in inputs.items()}
            part = evaluate(ALL[name], logps[start:stop], own, torch.tensor([0, 0, stop - start]))
            torch.testing.assert_close(part, (whole[0][start:stop], whole[1][start:stop]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_hostile_values_stay_finite(name):
    """-inf, huge and tiny log-probs everywhere, NaN where the engine has none: finite, and -inf has no gradient."""
    objective = ALL[name]
    logps = torch.tensor([-math.inf, -1e3, -1e-30, 0.0, -5.0, -math.inf, -2.0, -0.5], dtype=torch.float64)
    n, cu_seqlens = len(logps), torch.tensor([0, 0, 2, 7, 7, 8])
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        odd = torch.tensor([-math.inf, -1e3, 0.0, -1.0, -700.0, -1e-3], dtype=torch.float64)
        inputs = {
            key: odd[torch.randint(0, 6, (n,), generator=g)]
            for key in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
        }
        inputs["sampling_per_token_logps"][torch.rand(n, generator=g) < 0.3] = math.nan
        inputs["advantages"] = torch.randint(-1, 2, (n,), generator=g).double() * 5
        for key in ("weights", "rl_weights", "ce_weights", "kl_weights"):
            inputs[key] = torch.rand(n, generator=g, dtype=torch.float64)
        for dtype in (torch.float64, torch.float32):
            losses, grad = evaluate(objective, logps.to(dtype), inputs, cu_seqlens)
            assert losses.dtype == dtype
            assert losses.isfinite().all(), losses
            assert grad.isfinite().all(), grad
            assert (grad[logps == -math.inf] == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_no_tokens(name):
    logps, inputs, _ = case(0, lengths=(0, 0, 0, 0))
    for offsets in ([0], [0, 0, 0]):
        losses, grad = evaluate(ALL[name], logps, inputs, torch.tensor(offsets))
        assert losses.shape == grad.shape == (0,)


@pytest.mark.parametrize("name", ["ipo", "icepop", "reinforce", "reinforce_product"])
def test_no_sampling_log_prob_is_a_ratio_of_one(name):
    logps, inputs, cu_seqlens = case(1)
    missing = torch.arange(len(logps)) % 2 == 0
    with_nan = inputs["sampling_per_token_logps"].masked_fill(missing, math.nan)
    same = torch.where(missing, logps, inputs["sampling_per_token_logps"])
    got = evaluate(ALL[name], logps, {**inputs, "sampling_per_token_logps": with_nan}, cu_seqlens)
    want = evaluate(ALL[name], logps, {**inputs, "sampling_per_token_logps": same}, cu_seqlens)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_on_policy_without_old_log_probs():
    logps, inputs, cu_seqlens = case(2)
    inputs["old_per_token_logps"] = logps.clone()
    for name, objective in ALL.items():
        if "old_per_token_logps" in objective.reads - objective.needs:
            want = evaluate(objective, logps, inputs, cu_seqlens)
            without = {key: x for key, x in inputs.items() if key != "old_per_token_logps"}
            torch.manual_seed(0)
            got = evaluate(objective, logps, without, cu_seqlens)
            if name != "clip_cov":  # draws
                torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("advantage", [1.0, -1.0], ids=["has-become", "was"])
def test_dppo_kl_keeps_a_token_that_is_certain(advantage):
    """p = 1 in floating point: the divergence from q = 0.9999 is 8e-4 nats, not infinite; so for q = 1."""
    certain, near, one = torch.zeros(1), torch.full((1,), -1e-4), torch.ones(1)
    logps, old = (certain, near) if advantage > 0 else (near, certain)
    inputs = {"advantages": advantage * one, "old_per_token_logps": old}
    assert float(evaluate(objectives.dppo_kl(), logps, inputs, None)[1]) == pytest.approx(-advantage, abs=1e-3)


def test_gmpo_has_the_mean_of_advantages_that_differ():
    logps, inputs, cu_seqlens = case(0)
    A = inputs["advantages"] = torch.arange(1.0, 10.0, dtype=torch.float64)
    mean = torch.cat([A[:3].mean().expand(3), A[3:8].mean().expand(5), A[8:]])
    got = evaluate(ALL["gmpo"], logps, inputs, cu_seqlens)
    want = evaluate(ALL["gmpo"], logps, {**inputs, "advantages": mean}, cu_seqlens)
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize(("drift", "advantage", "options", "factor"), [
    (-1.0, 1.0, {"clip_high_only": False}, 0.8),
    (-1.0, 1.0, {}, 1.0),
    (30.0, 1.0, {"clip_range": None, "delta": None}, math.exp(20)),
    (-30.0, -1.0, {"clip_range": None, "delta": None}, 0.8),
])  # fmt: skip
def test_the_factor_of_fipo(drift, advantage, options, factor):
    """The first token has a ratio of 1, or of 5 where it is bad, and the second moves by `drift`."""
    own = 0.0 if advantage > 0 else math.log(5)
    old = torch.tensor([-3.0 - own, -31.0 - drift], dtype=torch.float64)
    logps, A = torch.tensor([-3.0, -31.0], dtype=torch.float64), torch.full((2,), advantage, dtype=torch.float64)
    objective = objectives.fipo(**options, half_life=1e9)
    if drift > 0:  # log-ratios are at most 20: two tokens make 40
        old, logps, A = (torch.cat([x, x[1:]]) for x in (old, logps, A))
    got = objective(logps, None, cu_seqlens=torch.tensor([0, len(A)]), advantages=A, old_per_token_logps=old)[0]
    assert float(got) == pytest.approx(-factor * advantage * (1.0 if advantage > 0 else 5.0), rel=1e-6)


def test_a_ratio_of_delta_counts_in_the_factor_of_fipo():
    one, old = torch.ones(1, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64).log()
    objective = objectives.fipo(delta=2.0, clip_range=None, safety_threshold=2.0)
    got = objective(0.0 * one, cu_seqlens=torch.tensor([0, 1]), advantages=-one, old_per_token_logps=old)
    assert got.tolist() == [4.0]


@pytest.mark.parametrize("drift", [30.0, -30.0])
@pytest.mark.parametrize(("objective", "distance"), [
    (objectives.dro(0.3), lambda x, d: 0.15 * d * d - x),
    (objectives.kimi(0.3), lambda x, d: 0.15 * d * d - d),
    (objectives.kimi(0.3, "token"), lambda x, d: 0.15 * d * d - d),
    (objectives.ipo(1e-9, 0.15), lambda x, d: 0.15 * d * d),
    (objectives.rollout_truncation(objectives.gpg(), high=1e30), lambda x, d: -math.exp(d) * x),
], ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_a_log_ratio_counts_as_at_most_20_nats(objective, distance, drift):
    logps, one = torch.full((1,), -1.0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    inputs = {"advantages": one, "old_per_token_logps": logps - drift, "sampling_per_token_logps": logps - drift}
    read = {name: x for name, x in inputs.items() if name in objective.reads}
    got = objective(logps, None, cu_seqlens=torch.tensor([0, 1]), **read)
    assert float(got) == pytest.approx(distance(-1.0, math.copysign(20.0, drift)), rel=1e-12)


def test_the_log_ratios_of_topr_are_summed_as_they_are():
    drift = torch.tensor([25.0, -30.0], dtype=torch.float64)
    logps, bad = torch.full_like(drift, -1.0), torch.full_like(drift, -1.0)
    got = objectives.topr()(logps, cu_seqlens=torch.tensor([0, 2]), advantages=bad, old_per_token_logps=logps - drift)
    torch.testing.assert_close(got, torch.full_like(drift, -math.exp(-5.0)))


def test_a_rejected_log_ratio_counts_as_at_most_20_nats():
    """One token of ten is 1000 nats off: the mean is 2, not 100."""
    sampling = torch.full((10,), -1.0).index_fill(0, torch.tensor([3]), -1001.0)
    made = objectives.rollout_rejection(objectives.gpg(), "sequence_mean", low=math.exp(-2.5), high=1.5)
    logps = torch.full((10,), -1.0)
    got = made(logps, cu_seqlens=torch.tensor([0, 10]), advantages=-logps, sampling_per_token_logps=sampling)
    assert got.tolist() == [1.0] * 10


def test_inputs_get_no_gradient():
    logps, inputs, _ = case(0)
    leaf = inputs["advantages"].clone().requires_grad_()
    assert not ALL["gpg"](logps, advantages=leaf).requires_grad


def test_clip_cov_leaves_out_few_candidates():
    logps, inputs, _ = case(3, lengths=(100, 0, 300, 100))
    objective = objectives.clip_cov(0.01, 0.05, 5.0, generator=torch.Generator().manual_seed(1))
    plain = objectives.vanilla(0.2, dual_clip=None)
    whole = evaluate(plain, logps, inputs, None)[0]
    got, grad = evaluate(objective, logps, inputs, None)
    out = (got == 0).nonzero().squeeze(1)
    assert len(out) == 5
    A = inputs["advantages"]
    cov = (A - A.mean()) * (logps - logps.mean())
    assert ((cov[out] > 0.05) & (cov[out] < 5)).all()
    ratio = (logps - inputs["old_per_token_logps"]).exp()
    bound = torch.where(A > 0, ratio > 1.2, ratio < 0.8)
    assert (bound & (cov > 0.05) & (cov < 5)).sum() > 20, "some candidates must be clipped"
    for draw in range(20):
        drawn = objectives.clip_cov(0.1, 0.05, 5.0, generator=torch.Generator().manual_seed(draw))
        assert not (bound & (evaluate(drawn, logps, inputs, None)[0] == 0)).any()
    assert (grad[out] == 0).all()
    assert torch.equal(got[got != 0], whole[got != 0])
    few = evaluate(objectives.clip_cov(1e-5, 0.05, 5.0), logps, inputs, None)[0]
    assert (few == 0).sum() == 1, "at least one"
    every = evaluate(objectives.clip_cov(1.0, 0.05, 5.0), logps, inputs, None)[0] == 0
    assert torch.equal(every, (cov > 0.05) & (cov < 5) & ~bound)
    below = evaluate(objectives.clip_cov(1.0, 0.05, 0.1), logps, inputs, None)[0] == 0
    assert below.any()
    assert (cov[below] < 0.1).all()
    again = objectives.clip_cov(0.01, 0.05, 5.0, generator=torch.Generator().manual_seed(1))
    assert torch.equal(evaluate(again, logps, inputs, None)[0], got)


@pytest.mark.parametrize(("share", "count"), [(0.2, 1), (0.01, 1), (0.5, 4), (1.0, 9)])
def test_kl_cov(share, count):
    for seed in SEEDS:
        logps, inputs, _ = case(seed)
        A, w, d = inputs["advantages"], inputs["weights"], logps - inputs["old_per_token_logps"]
        cov = (A - A.mean()) * (logps - logps.mean())
        largest = cov >= cov.sort(descending=True).values[count - 1]
        want = w * (0.5 * largest * d.abs() - A * d.exp()), w * (0.5 * largest * d.sign() - A * d.exp())
        got = evaluate(objectives.kl_cov(share, 0.5), logps, inputs, None)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("objective", "logp", "other", "advantage"), [
    (objectives.icepop(1.0, 1.0), -1.0, -1.0, 1.0),
    (objectives.rollout_truncation(objectives.gpg(), low=1.0, high=1.0), -1.0, -1.0, 1.0),
    (objectives.rollout_rejection(objectives.gpg(), low=1.0, high=1.0), -1.0, -1.0, 1.0),
    (objectives.ipo(0.5), 0.0, math.log(0.5), 1.0),
    (objectives.ref_kl(0.5), math.log(0.5), 0.0, 1.0),
    (objectives.dppo_tv(0.5), 0.0, math.log(0.5), 1.0),
    (objectives.dppo_tv(0.5), math.log(0.5), 0.0, -1.0),
    (objectives.dppo_kl(1e-9), -1.0, -1.0, 1.0),
], ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_a_token_at_a_bound_is_kept(objective, logp, other, advantage):
    one = torch.ones(1, dtype=torch.float64)
    inputs = {
        "advantages": advantage * one,
        "old_per_token_logps": other * one,
        "sampling_per_token_logps": other * one,
        "ref_per_token_logps": -3.0 * one,
    }
    leaf = (logp * one).requires_grad_()
    read = {name: x for name, x in inputs.items() if name in objective.reads}
    (with_policy,) = torch.autograd.grad(objective(leaf, None, **read), leaf)
    assert with_policy.abs() > 0.3


def test_the_maximum_of_a_sequence_may_be_negative_and_has_no_gradient():
    x = torch.tensor([-3.0, -1.0, -2.0], requires_grad=True)
    got = base.Sequences(torch.tensor([0, 2, 2, 3]), 3).reduce(x, "max")
    assert got.tolist() == [-1.0, -1.0, -2.0]
    assert not got.requires_grad


def test_discounted_future_of_long_sequences():
    """A thousand tokens in ten doublings: the sum over later tokens of the same sequence only."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=g, dtype=torch.float64)
    sequences = base.Sequences(torch.tensor([0, 1, 1, 700, 1000]), 1000)
    want = torch.empty_like(x)
    for start, stop in ((0, 1), (1, 700), (700, 1000)):
        later = 0.0
        for t in reversed(range(start, stop)):
            later = x[t].item() + 0.97 * later
            want[t] = later
    torch.testing.assert_close(sequences.discounted_future(x, 0.97), want, rtol=1e-10, atol=1e-12)
