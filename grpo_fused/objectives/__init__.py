"""Published objectives as small functions of log-probs, and advantage estimators: docs/objectives.md."""

from grpo_fused.objectives.alternatives import (
    score_centered_icepop,
    score_centered_ipo,
    score_centered_reinforce,
    score_centered_tis,
    topk_forward_kl,
    topk_reverse_kl,
)
from grpo_fused.objectives.base import Alternatives, Objective, Sequences, Tokens
from grpo_fused.objectives.batch import clip_cov, kl_cov
from grpo_fused.objectives.mixture import mixture
from grpo_fused.objectives.rollout import reinforce, rollout_rejection, rollout_truncation
from grpo_fused.objectives.sequence import fipo, gmpo, gspo, kimi, topr
from grpo_fused.objectives.token import (
    cispo,
    cross_entropy,
    dppo_kl,
    dppo_tv,
    dro,
    gpg,
    icepop,
    ipo,
    ref_kl,
    sapo,
    vanilla,
)
from grpo_fused.objectives.weights import token_weights

__all__ = [
    "Alternatives",
    "Objective",
    "Sequences",
    "Tokens",
    "cispo",
    "clip_cov",
    "cross_entropy",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "fipo",
    "gmpo",
    "gpg",
    "gspo",
    "icepop",
    "ipo",
    "kimi",
    "kl_cov",
    "mixture",
    "ref_kl",
    "reinforce",
    "rollout_rejection",
    "rollout_truncation",
    "sapo",
    "score_centered_icepop",
    "score_centered_ipo",
    "score_centered_reinforce",
    "score_centered_tis",
    "token_weights",
    "topk_forward_kl",
    "topk_reverse_kl",
    "topr",
    "vanilla",
]
