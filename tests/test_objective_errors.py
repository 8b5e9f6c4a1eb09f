"""Wrong calls and options of `grpo_fused.objectives` are refused, by the name that an objective has in messages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grpo_fused import objectives

X = torch.zeros(3)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, r"vanilla\(.*\) needs advantages \(advantages, in units of reward\); got weights",
         lambda: objectives.vanilla()(X, weights=X)),
        (TypeError, r"gpg\(\) reads advantages, weights; got old_per_token_logps, too",
         lambda: objectives.gpg()(X, advantages=X, old_per_token_logps=X)),
        (ValueError, r"gpg\(\): advantages must have shape \(3,\); got \(2,\)",
         lambda: objectives.gpg()(X, advantages=torch.zeros(2))),
        (TypeError, r"gpg\(\): advantages must be a torch.Tensor; got list", lambda: objectives.gpg()(X, advantages=[0.0] * 3)),
        (ValueError, r"logps must have shape \(n,\); got \(1, 3\)",
         lambda: objectives.gpg()(X[None], advantages=X[None])),
        (ValueError, r"entropies must have shape \(3,\); got \(2,\)",
         lambda: objectives.gpg()(X, torch.zeros(2), advantages=X)),
        (TypeError, r"gspo\(.*\) has scope 'sequence' and needs cu_seqlens \[S \+ 1\] int64; got None",
         lambda: objectives.gspo()(X, advantages=X)),
        (ValueError, r"gspo\(.*\): cu_seqlens must rise from 0 to the number of tokens, 3; got \[0, 2\]",
         lambda: objectives.gspo()(X, advantages=X, cu_seqlens=torch.tensor([0, 2]))),
        (TypeError, r"gspo\(.*\): cu_seqlens must be int32 or int64; got torch.float32",
         lambda: objectives.gspo()(X, advantages=X, cu_seqlens=torch.tensor([0.0, 3.0]))),
        (ValueError, r"alternative_offsets must rise from 0 to the number of alternatives, 4; got \[0, 1, 2, 5\]",
         lambda: of_teacher([0, 1, 2, 5])),
        (ValueError, r"alternative_offsets must have shape \(4,\); got \(3,\)", lambda: of_teacher([0, 2, 4])),
        (TypeError, "alternative_offsets must be int32 or int64; got torch.float32", lambda: of_teacher([0.0, 1, 2, 4])),
        (ValueError, r"alternative_logps must have shape \(m,\); got \(2, 2\)",
         lambda: of_teacher([0, 1, 2, 4], torch.zeros(2, 2))),
        (TypeError, r"^gspo\(.*\) has scope 'sequence' and needs cu_seqlens \[S \+ 1\] int64; got None",
         lambda: objectives.mixture(a=objectives.gspo(), b=objectives.kl_cov())(
             X, advantages=X, a_weights=X + 1, b_weights=X)),
        (TypeError, "sums over sequences needs scope 'sequence' or 'batch', and cu_seqlens",
         lambda: objectives.Objective("mine", lambda tokens: tokens.groups.reduce(tokens.logps, "sum"), needs=())(
             X, cu_seqlens=torch.tensor([0, 3]))),
        (TypeError, r"ipo\(.*\) needs sampling_per_token_logps \(log-probs of the engine",
         lambda: objectives.ipo()(X, advantages=X)),
        (TypeError, "needs .*rl_weights",
         lambda: objectives.mixture(rl=objectives.gpg())(X, advantages=X)),
        (TypeError, "mixture needs at least one objective", lambda: objectives.mixture()),
        (ValueError, "the names of mixtures in one another must differ; got ce_weights twice",
         lambda: objectives.mixture(ce=objectives.mixture(ce=objectives.cross_entropy()))),
        (TypeError, "expected an objective with scope token, sequence, batch; got 3", lambda: objectives.mixture(rl=3)),
        (TypeError, "expected an objective with scope token, sequence, batch; got namespace",
         lambda: objectives.mixture(rl=SimpleNamespace(scope="token"))),
        (TypeError, "expected an objective with scope token, sequence, batch; got <function of_rows",
         lambda: objectives.mixture(rl=of_rows)),
        (ValueError, "scope must be one of token, sequence, batch; got 'row'",
         lambda: objectives.Objective("mine", lambda tokens: tokens.logps, scope="row")),
        (ValueError, "epsilon must be > 0; got 0", lambda: objectives.vanilla(0.0)),
        (ValueError, "epsilon_high must be > 0; got 0", lambda: objectives.vanilla(epsilon_high=0.0)),
        (ValueError, "beta must be > 0; got 0", lambda: objectives.dro(0.0)),
        (ValueError, "dual_clip must be > 1; got 1", lambda: objectives.vanilla(dual_clip=1.0)),
        (TypeError, "threshold must be a number; got '0.1'", lambda: objectives.dppo_tv("0.1")),
        (ValueError, "kl_coef must be at least 0; got -1", lambda: objectives.ipo(kl_coef=-1.0)),
        (ValueError, "low must be at most high; got low=2.0 and high=1.0", lambda: objectives.icepop(2.0, 1.0)),
        (ValueError, "low must be > 0; got 0", lambda: objectives.icepop(0.0)),
        (ValueError, "low must be at most high; got low=2.0 and high=1.0", lambda: objectives.clip_cov(low=2.0, high=1.0)),
        (ValueError, "temperature_pos must be > 0; got 0", lambda: objectives.sapo(0.0)),
        (ValueError, r"share must be in \(0, 1\]; got 2", lambda: objectives.kl_cov(2.0)),
        (ValueError, r"share must be in \(0, 1\]; got 0", lambda: objectives.clip_cov(0.0)),
        (ValueError, "level must be one of token, sequence; got 'batch'", lambda: objectives.topr("batch")),
        (ValueError, "cap must be > 0; got 0", lambda: objectives.score_centered_tis(cap=0.0)),
        (ValueError, "delta must be > 0; got 0", lambda: objectives.fipo(delta=0.0)),
        (ValueError, "half_life must be > 0; got 0", lambda: objectives.fipo(half_life=0.0)),
        (ValueError, "low is only used with estimator='k1'; got low=0.5 with 'k3'",
         lambda: objectives.rollout_rejection(objectives.gpg(), "token", "k3", low=0.5, high=1.0)),
        (ValueError, "level must be one of token, sequence_sum, sequence_mean; got 'sequence_max'",
         lambda: objectives.rollout_truncation(objectives.gpg(), "sequence_max")),
        (ValueError, "low must be at most high; got low=2.0 and high=1.0",
         lambda: objectives.rollout_truncation(objectives.gpg(), low=2.0, high=1.0)),
        (ValueError, "low must be at most high; got low=2.0 and high=1.0",
         lambda: objectives.rollout_rejection(objectives.gpg(), low=2.0, high=1.0)),
        (ValueError, "estimator must be one of k1, k2, k3; got 'k4'",
         lambda: objectives.rollout_rejection(objectives.gpg(), "token", "k4", high=2.0)),
        (ValueError, "policy must be one of current, old; got 'ref'",
         lambda: objectives.rollout_rejection(objectives.gpg(), high=2.0, policy="ref")),
    ],
)  # fmt: skip
def test_refuses(error, message, call):
    with pytest.raises(error, match=message):
        call()


def of_rows(logps, entropies):
    return logps


of_rows.scope = "row"


def of_teacher(offsets, logps=None):
    logps = torch.zeros(4) if logps is None else logps
    return objectives.topk_forward_kl()(
        X, alternative_logps=logps, alternative_offsets=torch.tensor(offsets), teacher_alternative_logps=logps
    )


def test_ends_of_a_range_that_are_in_it():
    objectives.ipo(kl_coef=0.0)
    objectives.clip_cov(share=1.0)
    objectives.score_centered_ipo(threshold=0.0)
    objectives.icepop(low=1.0, high=1.0)


@pytest.mark.parametrize("name", [
    "vanilla(epsilon=0.2, dual_clip=3.0)",
    "dppo_tv(threshold=0.2, max_ratio=20.0)",
    "dppo_kl(threshold=0.2, max_ratio=20.0)",
    "sapo(temperature_pos=1.0, temperature_neg=1.05)",
    "cispo(epsilon=0.2)",
    "ipo(threshold=0.3, kl_coef=0.001)",
    "ref_kl(threshold=0.2, kl_coef=0.001)",
    "icepop(low=0.2, high=5.0)",
    "gspo(epsilon=0.0003, epsilon_high=0.0004)",
    "gmpo(epsilon=0.4)",
    "topr(level='sequence')",
    "kimi(tau=0.1, level='sequence')",
    "fipo(epsilon=0.2, epsilon_high=0.28, half_life=32.0, clip_high_only=True, delta=10.0, clip_range=0.2, "
    "safety_threshold=4.0)",
    "clip_cov(share=0.0002, low=1.0, high=5.0, epsilon=0.2)",
    "kl_cov(share=0.0002, kl_coef=1.0)",
    "reinforce(level='token', high=2.0)",
    "score_centered_reinforce(support='mask')",
    "score_centered_tis(support='mask', cap=2.0)",
    "score_centered_icepop(support='mask', low=0.2, high=5.0)",
    "score_centered_ipo(support='mask', threshold=0.3, cap=10000.0)",
    "topk_forward_kl(tail='left_out', teacher='teacher_alternative_logps')",
    "topk_reverse_kl(tail='left_out', teacher='teacher_alternative_logps')",
], ids=lambda name: name.partition("(")[0])  # fmt: skip
def test_options_by_default(name):
    """The numbers of papers and of verl, and what a name says of them."""
    assert getattr(objectives, name.partition("(")[0])().__name__ == name


def test_repr_has_name_and_scope():
    objective = objectives.dppo_tv(threshold=0.1)
    assert objective.__name__ == "dppo_tv(threshold=0.1, max_ratio=20.0)"
    assert repr(objective) == "<objective dppo_tv(threshold=0.1, max_ratio=20.0), scope 'token'>"
    assert objectives.ipo(kl_coef=0.0).__name__ == "ipo(threshold=0.3, kl_coef=0.0)"
    mixed = objectives.mixture(rl=objectives.gspo(), ce=objectives.cross_entropy())
    assert mixed.__name__ == "mixture(rl=gspo(epsilon=0.0003, epsilon_high=0.0004), ce=cross_entropy())"
    assert objectives.reinforce(high=3.0).__name__ == "reinforce(level='token', high=3.0)"
    around = "rollout_rejection(gpg())(level='token', estimator='k1', high=2.0, policy='current')"
    assert objectives.rollout_rejection(objectives.gpg(), high=2.0).__name__ == around
    made = objectives.rollout_truncation(objectives.gpg())
    assert made.__name__ == "rollout_truncation(gpg())(level='token', high=2.0, policy='current')"
    safe = objectives.rollout_truncation(objectives.gpg(), policy="old")
    assert safe.__name__ == "rollout_truncation(gpg())(level='token', high=2.0, policy='old')"
