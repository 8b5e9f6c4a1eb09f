"""`grpo_fused.objectives` against verl's own losses, rejection masks and advantage estimators, in float64: `make verl`."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from with_verl.ray_double import import_verl

from grpo_fused import objectives
from grpo_fused.objectives import estimators

SEEDS = range(12)
EXACT = {"rtol": 1e-6, "atol": 1e-9}
"""verl adds 1e-8 to denominators."""


@pytest.fixture(scope="module")
def verl():
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed (make verl)")
    import_verl("verl.trainer.config", "verl.trainer.ppo.core_algos", "verl.workers.config")
    from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return SimpleNamespace(
        core=core_algos, rollout=rollout_corr_helper, AlgoConfig=AlgoConfig, ActorConfig=ActorConfig,
        PolicyLossConfig=PolicyLossConfig, RolloutCorrectionConfig=RolloutCorrectionConfig,
    )  # fmt: skip


def rollout(seed: int, spread: float = 0.5) -> SimpleNamespace:
    """Padded [B, T] log-probs of three policies, advantages of both signs, a mask with holes and no empty row."""
    g = torch.Generator().manual_seed(seed)
    B, T = 5, 9
    old = -3.0 * torch.rand(B, T, generator=g, dtype=torch.float64) - 0.01
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[:, 0] = True
    logps = (old + spread * torch.randn(B, T, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    sampling = (old + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.randn(B, 1, generator=g, dtype=torch.float64).expand(B, T).contiguous()
    return SimpleNamespace(logps=logps, old=old, sampling=sampling, advantages=advantages, mask=mask)


def ours(objective, r, aggregation="bnpo", **inputs):
    """Loss and gradient [B, T] of an objective on the active tokens."""
    logps = r.logps.clone().requires_grad_()
    weights = objectives.token_weights(r.mask, aggregation, dtype=torch.float64)
    cu_seqlens = torch.nn.functional.pad(r.mask.sum(1).cumsum(0), (1, 0))
    flat = {name: x[r.mask] for name, x in {"weights": weights, **inputs}.items()}
    loss = objective(logps[r.mask], None, cu_seqlens=cu_seqlens, **flat).sum()
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def theirs(verl, name, r, aggregation="token-mean", policy_loss=None, old=None, **options):
    """Loss and gradient [B, T] of the registered loss `name`."""
    config = verl.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        policy_loss=verl.PolicyLossConfig(**(policy_loss or {})), **options,
    )  # fmt: skip
    # a rejected token counts as 0 in the average, as in verl with a known global batch size
    config.global_batch_info.update(batch_num_tokens=int(r.mask.sum()), global_batch_size=len(r.mask))
    logps = r.logps.clone().requires_grad_()
    old = r.old if old is None else old
    loss, _ = verl.core.get_policy_loss_fn(name)(old, logps, r.advantages, r.mask.double(), aggregation, config)
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def clip(low, high):
    return {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high}


CASES = {
    "vanilla": (objectives.vanilla(0.2, 0.28, 3.0), {**clip(0.2, 0.28), "clip_ratio_c": 3.0}),
    "dppo_tv": (objectives.dppo_tv(0.1, 0.2, 1.5), {**clip(0.1, 0.2), "clip_ratio_c": 1.5}),
    "dppo_kl": (objectives.dppo_kl(0.02, 0.05, 1.5), {**clip(0.02, 0.05), "clip_ratio_c": 1.5}),
    "gspo": (objectives.gspo(0.05, 0.1), clip(0.05, 0.1)),
    "sapo": (objectives.sapo(1.0, 1.5), {"tau_pos": 1.0, "tau_neg": 1.5}),
    "gpg": (objectives.gpg(), {}),
    "clip_cov": (objectives.clip_cov(0.2, 0.1, 5.0, 0.2, 0.3),
                 {**clip(0.2, 0.3), "policy_loss": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}}),
    "kl_cov": (objectives.kl_cov(0.2, 0.7), {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}}),
    "geo_mean": (objectives.gmpo(0.2, 0.3), clip(0.2, 0.3)),
    "dro": (objectives.dro(0.3), {"policy_loss": {"dro_beta": 0.3}}),
    "cispo": (objectives.cispo(0.2, 0.3), clip(0.2, 0.3)),
}  # fmt: skip


def average_of(name):
    """The average of a loss in verl: our name and its name."""
    if name in ("sapo", "geo_mean", "gspo"):
        return "grpo", "seq-mean-token-mean"
    return "bnpo", "token-mean"


def test_covers_every_loss_of_verl(verl):
    assert set(CASES) | {"bypass_mode"} == set(verl.core.POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(verl, name):
    objective, options = CASES[name]
    our_average, their_average = average_of(name)
    reads_old = objective.reads & {"old_per_token_logps"}
    for seed in SEEDS:
        r = rollout(seed)
        torch.manual_seed(seed)  # clip_cov draws
        got = ours(
            objective, r, our_average, advantages=r.advantages, **({"old_per_token_logps": r.old} if reads_old else {})
        )
        torch.manual_seed(seed)
        want = theirs(verl, name, r, their_average, **options)
        torch.testing.assert_close(got, want, **EXACT)
        assert want[1].abs().max() > 1e-4


@pytest.mark.parametrize(("ours_name", "their_name"), [
    ("bnpo", "token-mean"), ("grpo", "seq-mean-token-mean"), ("luspo", "seq-mean-token-sum"),
    ("dr_grpo", "seq-mean-token-sum-norm"),
])  # fmt: skip
def test_averages(verl, ours_name, their_name):
    r = rollout(0)
    steps = r.mask.shape[1]
    weights = objectives.token_weights(
        r.mask, ours_name, max_completion_length=steps if ours_name == "dr_grpo" else None, dtype=torch.float64
    )
    want = verl.core.agg_loss(r.logps, r.mask.double(), their_name)
    torch.testing.assert_close((weights * r.logps).sum(), want, **EXACT)


@pytest.mark.parametrize(("level", "threshold", "bounds"), [
    ("token", 1.3, {"high": 1.3}), ("token", "0.8_1.2", {"high": 1.2, "low": 0.8}),
    ("sequence", 1.5, {"high": 1.5}), ("sequence", "0.3_1.5", {"high": 1.5, "low": 0.3}),
])  # fmt: skip
@pytest.mark.parametrize("aggregation", [("bnpo", "token-mean"), ("luspo", "seq-mean-token-sum")])
def test_reinforce_of_bypass_mode(verl, level, threshold, bounds, aggregation):
    objective = objectives.reinforce("token" if level == "token" else "sequence_sum", **bounds)
    correction = verl.RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is=level, rollout_is_threshold=threshold
    )
    for seed in SEEDS:
        r = rollout(seed, spread=0.2)
        got = ours(objective, r, aggregation[0], advantages=r.advantages, sampling_per_token_logps=r.sampling)
        want = theirs(verl, "bypass_mode", r, aggregation[1], {"rollout_correction": correction}, old=r.sampling)
        torch.testing.assert_close(got, want, **EXACT)


REJECTIONS = {
    "token_k1": (("token", "k1"), "0.8_1.2", {"low": 0.8, "high": 1.2}),
    "token_k2": (("token", "k2"), 0.03, {"high": 0.03}),
    "token_k3": (("token", "k3"), 0.03, {"high": 0.03}),
    "seq_sum_k1": (("sequence_sum", "k1"), 1.6, {"high": 1.6}),
    "seq_sum_k2": (("sequence_sum", "k2"), 0.3, {"high": 0.3}),
    "seq_sum_k3": (("sequence_sum", "k3"), 0.3, {"high": 0.3}),
    "seq_mean_k1": (("sequence_mean", "k1"), "0.9_1.1", {"low": 0.9, "high": 1.1}),
    "seq_mean_k2": (("sequence_mean", "k2"), 0.05, {"high": 0.05}),
    "seq_mean_k3": (("sequence_mean", "k3"), 0.05, {"high": 0.05}),
    "seq_max_k2": (("sequence_max", "k2"), 0.15, {"high": 0.15}),
    "seq_max_k3": (("sequence_max", "k3"), 0.15, {"high": 0.15}),
}


def test_covers_every_rejection_of_verl(verl):
    assert set(REJECTIONS) == verl.rollout.SUPPORTED_ROLLOUT_RS_OPTIONS


@pytest.mark.parametrize("option", REJECTIONS)
def test_rejection(verl, option):
    """As in bypass_mode (d changes with the policy), and before the update (d of the old log-probs)."""
    arguments, threshold, bounds = REJECTIONS[option]
    inner = objectives.vanilla(0.2, 0.2, 3.0)
    current = objectives.rollout_rejection(inner, *arguments, **bounds)
    before = objectives.rollout_rejection(inner, *arguments, **bounds, policy="old")
    correction = verl.RolloutCorrectionConfig(
        bypass_mode=True, loss_type="ppo_clip", rollout_is=None, rollout_rs=option, rollout_rs_threshold=threshold
    )
    kept = total = 0
    for seed in SEEDS:
        r = rollout(seed, spread=0.2)
        got = ours(
            current, r, advantages=r.advantages, old_per_token_logps=r.sampling, sampling_per_token_logps=r.sampling
        )
        want = theirs(verl, "bypass_mode", r, policy_loss={"rollout_correction": correction}, old=r.sampling)
        torch.testing.assert_close(got, want, **EXACT)

        _, mask, _ = verl.rollout.compute_rollout_correction_and_rejection_mask(
            old_log_prob=r.old, rollout_log_prob=r.sampling, response_mask=r.mask.double(), rollout_is=None,
            rollout_rs=option, rollout_rs_threshold=threshold,
        )  # fmt: skip
        plain = ours(inner, r, advantages=r.advantages, old_per_token_logps=r.old)[1]
        got = ours(before, r, advantages=r.advantages, old_per_token_logps=r.old, sampling_per_token_logps=r.sampling)
        torch.testing.assert_close(got[1], plain * mask, **EXACT)
        kept, total = kept + int(mask.sum()), total + int(r.mask.sum())
    assert 0 < kept < total


@pytest.mark.parametrize(("level", "bounds", "threshold"), [
    ("token", {"high": 1.2}, 1.2), ("token", {"low": 0.8, "high": 1.2}, "0.8_1.2"),
    ("sequence", {"high": 1.2}, 1.2), ("sequence", {"low": 0.5, "high": 2.0}, "0.5_2.0"),
])  # fmt: skip
def test_truncation_before_the_update(verl, level, bounds, threshold):
    inner = objectives.vanilla(0.2, 0.2, 3.0)
    level_of_ours = "token" if level == "token" else "sequence_sum"
    objective = objectives.rollout_truncation(inner, level_of_ours, **bounds, policy="old")
    for seed in SEEDS:
        r = rollout(seed)
        weights, _ = verl.rollout.compute_rollout_correction_weights(
            r.old - r.sampling, r.mask.double(), rollout_is=level, rollout_is_threshold=threshold
        )
        plain = ours(inner, r, advantages=r.advantages, old_per_token_logps=r.old)[1]
        got = ours(
            objective, r, advantages=r.advantages, old_per_token_logps=r.old, sampling_per_token_logps=r.sampling
        )
        torch.testing.assert_close(got[1], plain * weights, **EXACT)


def samples(seed: int) -> SimpleNamespace:
    """Rewards [12] on the last active token of each row, in groups of 4."""
    r = rollout(seed)
    g = torch.Generator().manual_seed(1000 + seed)
    mask = torch.arange(8) < torch.randint(2, 9, (12, 1), generator=g)
    rewards = torch.rand(12, generator=g, dtype=torch.float64)
    old = -2.0 * torch.rand(12, 8, generator=g, dtype=torch.float64)
    return SimpleNamespace(
        r=r, mask=mask, rewards=rewards, lengths=mask.sum(1), index=np.repeat(np.arange(3), 4), old=old,
        squares=torch.rand(12, 8, generator=g, dtype=torch.float64),
        ratio=torch.rand(12, 8, generator=g, dtype=torch.float64) + 0.5,
        baselines=torch.rand(12, generator=g, dtype=torch.float64),
        tokens=estimators.at_last_token(rewards, mask),
    )  # fmt: skip


def outcome(s, name):
    """An estimator of one number a sample."""
    return {
        "rloo": lambda: estimators.rloo(s.rewards, 4),
        "rloo_vectorized": lambda: estimators.rloo(s.rewards, 4),
        "opo": lambda: estimators.opo(s.rewards, 4, s.lengths),
        "remax": lambda: estimators.remax(s.rewards, s.baselines),
        "grpo_passk": lambda: estimators.best_of_group(s.rewards, 4),
        "reinforce_plus_plus_baseline": lambda: estimators.reinforce_plus_plus_baseline(s.rewards, 4, s.lengths),
        "gdpo": lambda: estimators.gdpo(s.rewards, 4, s.lengths),
    }[name]()


@pytest.mark.parametrize(
    "name", ["rloo", "rloo_vectorized", "opo", "remax", "grpo_passk", "reinforce_plus_plus_baseline", "gdpo"]
)
def test_estimators(verl, name):
    for seed in SEEDS:
        s = samples(seed)
        extra = {"reward_baselines": s.baselines} if name == "remax" else {"index": s.index}
        if name == "grpo_passk":
            extra["config"] = verl.AlgoConfig(norm_adv_by_std_in_grpo=True)
        want, _ = verl.core.get_adv_estimator_fn(name)(
            token_level_rewards=s.tokens, response_mask=s.mask.double(), **extra
        )
        got = outcome(s, name).unsqueeze(1) * s.mask
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
        assert want.abs().max() > 0.01


def test_gdpo_of_several_functions(verl):
    """verl reads each function's rewards as fp32 from its batch."""
    for seed in SEEDS:
        s = samples(seed)
        table = torch.stack([s.rewards, s.baselines], dim=1)
        config = verl.AlgoConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5])
        batch = {
            "prompts": torch.zeros(12, 3, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(12, 3), s.mask.double()], dim=1).long(),
        }
        want, _ = verl.core.get_adv_estimator_fn("gdpo")(
            token_level_rewards=s.tokens, response_mask=s.mask.double(), index=s.index, config=config,
            non_tensor_batch={"a": s.rewards.numpy(), "b": s.baselines.numpy()}, batch=batch,
        )  # fmt: skip
        got = estimators.gdpo(table, 4, s.lengths, weights=[1.0, 0.5]).unsqueeze(1) * s.mask
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(verl, gamma):
    for seed in SEEDS:
        s = samples(seed)
        rewards = s.tokens - 0.1 * s.squares * s.mask
        holes = s.mask & ((torch.arange(8) != 1) | (s.lengths[:, None] < 4))
        for mask in (s.mask, holes):
            want, _ = verl.core.get_adv_estimator_fn("reinforce_plus_plus")(
                token_level_rewards=rewards, response_mask=mask.double(), config=verl.AlgoConfig(gamma=gamma)
            )
            got = estimators.reinforce_plus_plus(rewards, mask, gamma=gamma)
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_optimal_token_baseline(verl, zero_tail, corrected):
    for seed in SEEDS:
        s = samples(seed)
        ratio = s.ratio if corrected else None
        want, _ = verl.core.get_adv_estimator_fn("optimal_token_baseline")(
            token_level_rewards=s.tokens, response_mask=s.mask.double(), index=s.index, old_log_probs=s.old,
            sum_pi_squared=s.squares, rollout_is_weights=ratio, handle_zero_tail=zero_tail,
        )  # fmt: skip
        got = estimators.optimal_token_baseline(
            s.tokens, s.mask, 4, s.old, s.squares, importance_sampling_ratio=ratio, zero_tail=zero_tail
        )
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_divergences_on_the_teachers_tokens(verl, seed):
    """`compute_forward_kl_topk`; the reverse and the lumped one by its `kl_divergence`, as verl's pull requests have."""
    import_verl("verl.trainer.distillation.fsdp.losses")
    from verl.trainer.distillation.fsdp import losses

    g = torch.Generator().manual_seed(seed)
    n, V, K = 6, 11, 4
    logits = torch.randn(1, n, V, generator=g, requires_grad=True)
    log_q, ids = torch.randn(n, V, generator=g).log_softmax(1).topk(K, dim=1)
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False))
    nested = [torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged) for x in (log_q, ids)]
    forward = losses.compute_forward_kl_topk(logits, *nested, config, "thd")["distillation_losses"][0]
    log_p = logits[0].log_softmax(1).gather(1, ids)
    lumped_p, lumped_q = (torch.cat([x, (1 - x.exp().sum(1, keepdim=True)).log()], 1) for x in (log_p, log_q))
    expected = {
        objectives.topk_forward_kl(): forward,
        objectives.topk_reverse_kl(): losses.kl_divergence(log_q=log_q, log_p=log_p),
        objectives.topk_forward_kl("lumped"): losses.kl_divergence(log_q=lumped_p, log_p=lumped_q),
        objectives.topk_reverse_kl("lumped"): losses.kl_divergence(log_q=lumped_q, log_p=lumped_p),
    }
    for objective, want in expected.items():
        got = objective(
            torch.zeros(n), None, alternative_logps=log_p.reshape(-1), alternative_offsets=torch.arange(0, n * K + 1, K),
            teacher_alternative_logps=log_q.reshape(-1),
        )  # fmt: skip
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        pair = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (got, want)]
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)
