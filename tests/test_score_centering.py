"""Score centering and divergences on K tokens: other projects' numbers, and what the formulas promise, by exact sums."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import PRECISION, frobenius_error, make_case

from grpo_fused import CandidateSets, check_objective, fused_linear_divergence, fused_linear_objective, objectives

RECORDED = json.loads((Path(__file__).parent / "score_centering.json").read_text())
"""Losses and gradients by the formulas of vime (2b83ea2), a development branch of verl, torchtitan (main), prime-rl
(main) and MarinSkyRL (a3b98f2), a fork of SkyRL: their functions were copied out and run once in fp32 on the same logits
of a policy and a sampler, in November 2026. MarinSkyRL's correction is that of PPO; its policy before the update is the
policy itself here."""

V, EVERY = 7, torch.arange(7)
CENTERED = {
    "reinforce": objectives.score_centered_reinforce,
    "tis": lambda support="mask": objectives.score_centered_tis(support, cap=1.3),
    "icepop": lambda support="mask": objectives.score_centered_icepop(support, low=0.5, high=1.6),
}
WEIGHTS = {
    "reinforce": lambda ratio: torch.ones_like(ratio),
    "tis": lambda ratio: ratio.clamp(max=1.3),
    "icepop": lambda ratio: ratio * ((ratio >= 0.5) & (ratio <= 1.6)),
}


def sets_of(ids):
    """The same number of tokens for each position, [n, K]."""
    return torch.arange(0, ids.numel() + 1, ids.shape[1])


def call(objective, log_p, log_q, targets, ids, advantages):
    """Losses [n] of an objective from all log-probs of the policy and the sampler ([n, V] each)."""

    def at(x):
        return x.gather(1, targets.unsqueeze(1)).squeeze(1)

    return objective(
        at(log_p), None, advantages=advantages, sampling_per_token_logps=at(log_q).detach(),
        alternative_logps=log_p.gather(1, ids).reshape(-1), alternative_offsets=sets_of(ids),
        sampling_alternative_logps=log_q.gather(1, ids).reshape(-1).detach(),
    )  # fmt: skip


@pytest.mark.parametrize("name", list(CENTERED))
def test_top_k_gives_the_numbers_of_other_projects(name):
    log_q = torch.tensor(RECORDED["sampler_logits"], dtype=torch.float64).log_softmax(1)
    ids, targets = torch.tensor(RECORDED["top_k_ids"]), torch.tensor(RECORDED["ids"])
    projects = RECORDED["top_k"][name]
    assert {"vime", "verl"} <= projects.keys()
    for project, want in projects.items():
        z = torch.tensor(RECORDED["logits"], dtype=torch.float64, requires_grad=True)
        loss = call(
            CENTERED[name]("top_k"), z.log_softmax(1), log_q, targets, ids, torch.tensor(RECORDED["advantages"])
        )
        torch.testing.assert_close(loss.tolist(), want["loss"], rtol=2e-5, atol=2e-6, msg=project)
        (gradient,) = torch.autograd.grad(loss.sum(), z)
        torch.testing.assert_close(gradient.tolist(), want["gradient"], rtol=2e-5, atol=2e-6, msg=project)


def test_ipo_over_the_mask_has_the_gradient_of_prime_rl():
    """prime-rl's loss of the sampled token is -A ratio: another value, the same gradient."""
    kept, targets = torch.tensor(RECORDED["kept"]), torch.tensor(RECORDED["ids"])
    sets = CandidateSets.from_mask(kept)
    z = torch.tensor(RECORDED["logits"], dtype=torch.float64, requires_grad=True)
    log_p = torch.where(kept, z, -math.inf).log_softmax(1)
    log_q = torch.where(kept, torch.tensor(RECORDED["sampler_logits"], dtype=torch.float64), -math.inf).log_softmax(1)
    rows = torch.arange(len(targets))
    loss = objectives.score_centered_ipo(0.1, 2.5)(
        log_p[rows, targets], None, advantages=torch.tensor(RECORDED["advantages"]),
        sampling_per_token_logps=log_q[rows, targets], alternative_logps=log_p[sets.positions, sets.ids],
        alternative_offsets=sets.offsets, sampling_alternative_logps=log_q[sets.positions, sets.ids],
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    want = RECORDED["mask"]["ipo"]["prime-rl"]["gradient"]
    torch.testing.assert_close(gradient.tolist(), want, rtol=2e-5, atol=2e-6)


def policy_and_sampler(seed, mismatch=0.8):
    """Logits of a policy that require a gradient, and log-probs of a sampler: [V] fp64."""
    g = torch.Generator().manual_seed(seed)
    z = 1.3 * torch.randn(V, generator=g, dtype=torch.float64)
    return z.requires_grad_(), (z.detach() + mismatch * torch.randn(V, generator=g, dtype=torch.float64)).log_softmax(0)


def expected_update(objective, log_p, log_q, ids, advantages, z):
    """The gradient of the objective in `z`, summed over all tokens that the sampler may draw, by their probability."""
    n = len(log_p)
    shares = call(
        objective, log_p.expand(n, n), log_q.expand(n, n), torch.arange(n), ids.expand(n, -1), advantages.expand(n)
    )
    return torch.autograd.grad((log_q.exp() * shares).sum(), z)[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", [*CENTERED, "ipo"])
def test_a_constant_advantage_moves_nothing(name, seed):
    """Over the mask, which is the whole vocabulary here; without the centering it moves the policy to the sampler."""
    z, log_q = policy_and_sampler(seed)
    objective = objectives.score_centered_ipo(0.1, 2.0) if name == "ipo" else CENTERED[name]()
    got = expected_update(objective, z.log_softmax(0), log_q, EVERY, torch.tensor(1.7).double(), z)
    assert got.abs().max() < 1e-14
    plain = expected_update(gpg_with_alternatives(), z.log_softmax(0), log_q, EVERY, torch.tensor(1.7).double(), z)
    assert plain.abs().max() > 0.01


def gpg_with_alternatives():
    return lambda logps, entropies, *, advantages, **_: -advantages * logps


@pytest.mark.parametrize("name", list(CENTERED))
def test_the_same_under_truncation(name):
    """The mask is a part of the vocabulary, over which both distributions are renormalised."""
    z, log_q = policy_and_sampler(9)
    mask = torch.tensor([0, 2, 3, 6])
    log_p, log_q = z[mask].log_softmax(0), log_q[mask].log_softmax(0)
    got = expected_update(CENTERED[name](), log_p, log_q, torch.arange(4), torch.tensor(1.0).double(), z)
    assert got.abs().max() < 1e-14


@pytest.mark.parametrize("support", ["mask", "top_k"])
@pytest.mark.parametrize("name", list(CENTERED))
def test_no_correction_where_sampler_and_policy_agree(name, support):
    z, _ = policy_and_sampler(3)
    log_p = z.log_softmax(0)
    ids = EVERY if support == "mask" else log_p.topk(3).indices
    for target in range(V):

        def gradient(objective, target=target):
            shares = call(objective, log_p[None], log_p.detach()[None], torch.tensor([target]), ids[None],
                          torch.tensor([1.0]).double())  # fmt: skip
            return torch.autograd.grad(shares.sum(), z, retain_graph=True)[0]

        torch.testing.assert_close(gradient(CENTERED[name](support)), gradient(gpg_with_alternatives()))


@pytest.mark.parametrize("name", list(CENTERED))
def test_top_k_approaches_the_full_form(name):
    """Its error is the tail's: it falls as K grows, to that of the floor for K = V."""
    errors = []
    for K in (2, 4, V - 1, V):
        worst = 0.0
        for seed in range(8):
            z, log_q = policy_and_sampler(seed, 0.3)
            log_p, advantages = z.log_softmax(0), torch.randn(V, generator=torch.Generator().manual_seed(seed)).double()
            full = expected_update(CENTERED[name](), log_p, log_q, EVERY, advantages, z)
            top = expected_update(
                CENTERED[name]("top_k"), z.log_softmax(0), log_q, log_q.topk(K).indices, advantages, z
            )
            assert top.isfinite().all()
            worst = max(worst, float((top - full).norm() / full.norm()))
        errors.append(worst)
    assert errors[0] > errors[2] > errors[3]
    assert errors[2] < 1e-9 or name != "reinforce"  # a tail of one token is rescaled exactly
    assert errors[3] < 1e-5


@pytest.mark.parametrize("centered", [False, True])
def test_the_uncapped_ratio_is_the_gradient_of_the_expected_reward(centered):
    """With w = p / q the expected update is that of the policy's own reward, by finite differences."""
    z, log_q = policy_and_sampler(4)
    rewards = torch.randn(V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uncapped = objectives.score_centered_tis(cap=1e9)
    plain = objectives.reinforce("token", high=1e9)

    def without(logps, entropies, *, advantages, sampling_per_token_logps, **_):
        return plain(logps, None, advantages=advantages, sampling_per_token_logps=sampling_per_token_logps)

    log_p = z.log_softmax(0)
    got = expected_update(uncapped if centered else without, log_p, log_q, EVERY, rewards, z)
    step, want = 1e-6, []
    for k in range(V):
        shift = torch.zeros(V, dtype=torch.float64)
        shift[k] = step
        up, down = ((z.detach() + sign * shift).softmax(0) @ rewards for sign in (1, -1))
        want.append(-float(up - down) / (2 * step))
    torch.testing.assert_close(got.tolist(), want, rtol=1e-6, atol=1e-9)


def test_the_third_form_is_the_divergence_with_weights_of_either_sign():
    """-A (log p_y - sum_v q_v log p_v): REINFORCE, and -A times the forward KL from the sampler's hidden states."""
    case = make_case(3, extras=False)
    sampler = case.hidden_states + 0.3 * torch.randn(case.hidden_states.shape, dtype=torch.float64)
    hidden, mask = case.hidden_states.detach().requires_grad_(), case.completion_mask
    advantages = case.advantages.unsqueeze(1).expand(mask.shape)
    weight = case.lm_head_weight
    reinforce = fused_linear_objective(
        hidden, weight, case.completion_ids, objectives.gpg(), mask, inputs={"advantages": advantages}
    ).loss
    centering = fused_linear_divergence(
        hidden, weight, sampler, weight, mask, kind="forward_kl", weights=-advantages
    ).loss  # fmt: skip
    (got,) = torch.autograd.grad(reinforce + centering, hidden)
    log_p, log_q = ((h @ weight.T).log_softmax(-1) for h in (hidden, sampler))
    at = log_p.gather(-1, case.completion_ids.unsqueeze(-1)).squeeze(-1)
    want = -advantages * (at - (log_q.detach().exp() * log_p).sum(-1)) * mask
    assert frobenius_error(got, torch.autograd.grad(want.sum(), hidden)[0]) < 1e-9
    assert (advantages[mask] < 0).any()
    assert (advantages[mask] > 0).any()


@pytest.mark.parametrize("impl", ["chunked", "native", "triton"])
@pytest.mark.parametrize("support", ["mask", "top_k"])
def test_in_the_pass_over_the_head(support, impl):
    dtype, tol = PRECISION[impl]
    case = make_case(5, extras=False)
    z = (case.hidden_states @ case.lm_head_weight.T).flatten(0, 1)
    sampler = z + 0.3 * torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = torch.zeros_like(z, dtype=torch.bool).scatter(1, sampler.topk(5, 1).indices, True)
    kept.scatter_(1, case.completion_ids.reshape(-1, 1), True)
    sets, options = CandidateSets.from_mask(kept), {}
    if support == "mask":
        sampler, options = torch.where(kept, sampler, -math.inf), {"candidates": sets}
    log_q = sampler.log_softmax(1)
    inputs = {
        "advantages": case.advantages.unsqueeze(1).expand(case.completion_ids.shape),
        "sampling_per_token_logps": log_q.gather(1, case.completion_ids.reshape(-1, 1)).view(case.completion_ids.shape),
    }
    found = {}
    for name, x in (("reference", case), (impl, case.to(dtype))):
        hidden, weight = (t.detach().requires_grad_() for t in (x.hidden_states, x.lm_head_weight))
        out = fused_linear_objective(
            hidden, weight, x.completion_ids, objectives.score_centered_tis(support, 1.2), x.completion_mask,
            inputs=inputs, alternatives=sets, alternative_inputs={"sampling_alternative_logps": log_q[kept]},
            impl=name, **options,
        )  # fmt: skip
        out.loss.backward()
        found[name] = hidden.grad, weight.grad
    for got, want in zip(found[impl], found["reference"], strict=True):
        assert frobenius_error(got, want) <= 2 * tol


def distributions(seed=0, n=6, K=3):
    g = torch.Generator().manual_seed(seed)
    z, t = (torch.randn(n, V, generator=g, dtype=torch.float64) for _ in range(2))
    return z.requires_grad_(), t.log_softmax(1), t.topk(K, 1).indices


@pytest.mark.parametrize("tail", ["left_out", "lumped"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_divergences_on_k_tokens(direction, tail):
    z, log_q, ids = distributions()
    log_p = z.log_softmax(1)
    make = getattr(objectives, f"topk_{direction}_kl")
    got = make(tail)(
        torch.zeros(6, dtype=torch.float64), None, alternative_logps=log_p.gather(1, ids).reshape(-1),
        alternative_offsets=sets_of(ids), teacher_alternative_logps=log_q.gather(1, ids).reshape(-1),
    )  # fmt: skip
    p, q = (x.exp().gather(1, ids) for x in (log_p, log_q))
    if tail == "lumped":
        p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
    a, b = (q, p) if direction == "forward" else (p, q)
    want = (a * (a / b).log()).sum(1)
    torch.testing.assert_close(got, want)
    for x, y in zip(*(torch.autograd.grad(v.sum(), z, retain_graph=True) for v in (got, want)), strict=True):
        torch.testing.assert_close(x, y)
    assert tail == "left_out" or (got > 0).all()


def test_an_impossible_alternative_counts_as_the_lowest():
    logps = torch.tensor([-math.inf, -1.0], dtype=torch.float64, requires_grad=True)
    got = objectives.topk_forward_kl()(
        torch.zeros(1, dtype=torch.float64), None, alternative_logps=logps, alternative_offsets=torch.tensor([0, 2]),
        teacher_alternative_logps=torch.tensor([0.5, 0.5], dtype=torch.float64).log(),
    )  # fmt: skip
    assert float(got) == pytest.approx(0.5 * 1e4 + 0.5 + math.log(0.5))
    got.sum().backward()
    assert logps.grad.tolist() == pytest.approx([0.0, -0.5])


@pytest.mark.parametrize(("direction", "want"), [
    ("forward", math.log(2)), ("reverse", 0.5 * (math.log(0.5) + 1e4) + 0.5 * math.log(0.5)),
])  # fmt: skip
def test_an_alternative_that_the_teacher_finds_impossible(direction, want):
    got = getattr(objectives, f"topk_{direction}_kl")()(
        torch.zeros(1), None, alternative_logps=torch.tensor([0.5, 0.5]).log(),
        alternative_offsets=torch.tensor([0, 2]), teacher_alternative_logps=torch.tensor([-math.inf, 0.0]),
    )  # fmt: skip
    assert float(got) == pytest.approx(want, rel=1e-6)


def test_a_tail_that_is_rounded_to_nothing_counts_as_a_millionth():
    got = objectives.topk_forward_kl("lumped")(
        torch.zeros(1), None, alternative_logps=torch.zeros(1), alternative_offsets=torch.tensor([0, 1]),
        teacher_alternative_logps=torch.tensor([0.5]).log(),
    )  # fmt: skip
    assert float(got) == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-6), rel=1e-5)


@pytest.mark.parametrize("make", [*CENTERED.values(), objectives.score_centered_ipo])
def test_an_alternative_that_the_sampler_cannot_give_counts_nothing(make):
    logps = torch.tensor([-1.0, -0.5], requires_grad=True)
    got = make()(
        torch.zeros(1), None, alternative_logps=logps, alternative_offsets=torch.tensor([0, 2]),
        advantages=torch.ones(1), sampling_per_token_logps=torch.zeros(1),
        sampling_alternative_logps=torch.tensor([-math.inf, -0.5]),
    )  # fmt: skip
    got.sum().backward()
    assert logps.grad[0] == 0
    assert logps.grad[1] > 0


def test_several_teachers():
    """Each with its tokens and weight; NaN where a token is none of a teacher's."""
    z, log_q, _ = distributions(1)
    _, log_r, _ = distributions(2)
    log_p, ids = z.log_softmax(1), EVERY.expand(6, V)
    first, second = (torch.zeros(6, V, dtype=torch.bool).scatter(1, x.topk(3, 1).indices, True) for x in (log_q, log_r))
    both = objectives.mixture(
        a=objectives.topk_forward_kl("lumped", "a_logps"), b=objectives.topk_reverse_kl("left_out", "b_logps")
    )
    a, b = 0.7 * torch.ones(6).double(), torch.tensor([0, 0.5, 0, 1, 1, 1]).double()
    got = both(
        torch.zeros(6, dtype=torch.float64), None, a_weights=a, b_weights=b, alternative_logps=log_p.reshape(-1),
        alternative_offsets=sets_of(ids), a_logps=torch.where(first, log_q, torch.nan).reshape(-1),
        b_logps=torch.where(second, log_r, torch.nan).reshape(-1),
    )  # fmt: skip
    p, q = (torch.cat([(x.exp() * first), 1 - (x.exp() * first).sum(1, keepdim=True)], 1) for x in (log_p, log_q))
    want = a * torch.where(q > 0, q * (q / p).log(), 0.0).sum(1)
    want = want + b * torch.where(second, log_p.exp() * (log_p - log_r), 0.0).sum(1)
    torch.testing.assert_close(got, want)
    (gradient,) = torch.autograd.grad(got.sum(), z)
    assert gradient.isfinite().all()
    assert gradient.any()


@pytest.mark.parametrize("sampled", [0.5, 1.0001])
@pytest.mark.parametrize("name", list(CENTERED))
def test_a_sampler_whose_top_k_are_everything_has_a_tail_of_a_millionth(name, sampled):
    """fp32 sums of probabilities are above 1 now and then. NaN of the token's own log-prob is a weight of 1."""
    logps = torch.tensor([0.5]).log().requires_grad_()
    got = CENTERED[name]("top_k")(
        torch.tensor([-1.0]), None, advantages=torch.ones(1), sampling_per_token_logps=torch.tensor([math.nan]),
        alternative_logps=logps, alternative_offsets=torch.tensor([0, 1]),
        sampling_alternative_logps=torch.tensor([sampled]).log(),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(got, logps)
    weight = WEIGHTS[name]
    tail = max(1.0 - sampled, 1e-6)
    alpha = tail / 0.5 * weight(torch.tensor(0.5 / tail))
    coefficient = sampled * weight(torch.tensor(0.5 / sampled)) - 0.5 * alpha
    assert float(gradient) == pytest.approx(float(coefficient), rel=1e-5)
    assert float(got.detach()) == pytest.approx(1.0 + float(coefficient) * math.log(0.5), rel=1e-5)


@pytest.mark.parametrize("make", [
    lambda: objectives.score_centered_icepop(low=1.0, high=1.0), lambda: objectives.score_centered_ipo(0.0),
], ids=["icepop", "ipo"])  # fmt: skip
def test_a_weight_at_its_bound_counts(make):
    logps = torch.tensor([-1.0, -0.5], requires_grad=True)
    got = make()(
        torch.zeros(1), None, advantages=torch.ones(1), sampling_per_token_logps=torch.zeros(1),
        alternative_logps=logps, alternative_offsets=torch.tensor([0, 2]), sampling_alternative_logps=logps.detach(),
    )  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(got, logps)[0], logps.detach().exp())


@pytest.mark.parametrize("make", [*CENTERED.values(), objectives.score_centered_ipo])
def test_a_token_does_not_depend_on_others(make):
    n = 30
    inputs = {"advantages": torch.randn(n).double(), "sampling_per_token_logps": -torch.rand(n).double()}
    check_objective(make(), inputs, alternative_inputs={"sampling_alternative_logps": -2 - torch.rand(2 * n).double()})


def test_check_objective_finds_a_mean_over_alternatives():
    def mean(logps, entropies, *, alternative_logps, alternative_offsets):
        return logps * 0.0 + alternative_logps.mean()

    with pytest.raises(
        ValueError, match="the gradient by alternative_logps of all and of parts differ|the loss of all"
    ):
        check_objective(mean, alternative_inputs={})

    def shares(logps, entropies, *, alternative_logps, alternative_offsets):
        owner = torch.repeat_interleave(alternative_offsets.diff())
        return logps.index_add(0, owner, alternative_logps / len(alternative_logps))

    with pytest.raises(ValueError, match="differ by"):
        check_objective(shares, alternative_inputs={})


def test_errors():
    objective, logps = objectives.score_centered_tis(), torch.zeros(2)
    given = {"advantages": logps, "sampling_per_token_logps": logps}
    with pytest.raises(TypeError, match="needs sampling_alternative_logps"):
        objective(logps, None, **given)
    given["sampling_alternative_logps"] = torch.zeros(3)
    with pytest.raises(TypeError, match="needs alternatives; got no alternative_logps"):
        objective(logps, None, **given)
    others = {"alternative_logps": torch.zeros(4), "alternative_offsets": torch.tensor([0, 2, 4])}
    for name, x in others.items():
        with pytest.raises(TypeError, match="needs alternatives; got no alternative_logps and alternative_offsets"):
            objective(logps, None, **given, **{name: x})
    with pytest.raises(ValueError, match=r"sampling_alternative_logps must have shape \(4,\); got \(3,\)"):
        objective(logps, None, **given, **others)
    with pytest.raises(TypeError, match=r"gpg\(\) reads no alternatives"):
        objectives.gpg()(logps, None, advantages=logps, **others)
    with pytest.raises(ValueError, match="support must be"):
        objectives.score_centered_tis("top_p")
    with pytest.raises(ValueError, match="threshold must be at least 0; got -0.1"):
        objectives.score_centered_ipo(-0.1)
    with pytest.raises(ValueError, match="tail must be"):
        objectives.topk_forward_kl("rest")
    with pytest.raises(ValueError, match="must be the name of an input that ends in _logps; got 'teacher'"):
        objectives.topk_reverse_kl(teacher="teacher")
