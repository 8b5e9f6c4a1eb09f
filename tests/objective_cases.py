"""Objectives of `grpo_fused.objectives` with their options, and random flat tokens with every input."""

from __future__ import annotations

import torch

from grpo_fused import objectives

SEEDS = range(25)
ALL = {
    "vanilla": objectives.vanilla(0.2, 0.28),
    "no_dual_clip": objectives.vanilla(0.2, dual_clip=None),
    "dppo_tv": objectives.dppo_tv(0.1, 0.15, 1.5),
    "dppo_kl": objectives.dppo_kl(0.02, 0.03, 1.5),
    "sapo": objectives.sapo(1.0, 1.4),
    "cispo": objectives.cispo(0.2, 0.3),
    "ipo": objectives.ipo(0.1, 0.05),
    "ref_kl": objectives.ref_kl(0.1, 0.05),
    "icepop": objectives.icepop(0.7, 1.4),
    "gpg": objectives.gpg(),
    "cross_entropy": objectives.cross_entropy(),
    "dro": objectives.dro(0.3),
    "reinforce": objectives.reinforce(high=1.2),
    "reinforce_band": objectives.reinforce(low=0.8, high=1.2),
    "reinforce_product": objectives.reinforce("sequence_sum", high=1.2),
    "reinforce_mean": objectives.reinforce("sequence_mean", high=1.05),
    "gspo": objectives.gspo(0.05, 0.1),
    "gmpo": objectives.gmpo(0.2, 0.3),
    "topr": objectives.topr(),
    "topr_token": objectives.topr("token"),
    "kimi": objectives.kimi(0.2),
    "kimi_token": objectives.kimi(0.2, "token"),
    "fipo": objectives.fipo(half_life=3.0, safety_threshold=1.1, delta=1.5),
    "fipo_free": objectives.fipo(0.2, 0.2, None, half_life=2.0, clip_range=None, safety_threshold=None),
    "clip_cov": objectives.clip_cov(0.2, 0.01, 5.0),
    "kl_cov": objectives.kl_cov(0.2, 0.5),
    "rejected": objectives.rollout_rejection(objectives.gspo(0.05), "sequence_mean", "k3", high=0.05),
    "mixture": objectives.mixture(rl=objectives.gspo(0.05), ce=objectives.cross_entropy(), kl=objectives.ref_kl()),
}


def case(seed: int, lengths=(3, 0, 5, 1)):
    """Flat tokens of four sequences, one of them empty: log-probs, every input, offsets."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def randn(scale: float = 1.0):
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    logps = -2.5 * torch.rand(n, generator=g, dtype=torch.float64) - 0.02
    inputs = {
        "advantages": torch.randn(4, generator=g, dtype=torch.float64).repeat_interleave(torch.tensor(lengths)),
        "old_per_token_logps": (logps + randn(0.3)).clamp(max=-1e-3),
        "ref_per_token_logps": (logps + randn(0.3)).clamp(max=-1e-3),
        "sampling_per_token_logps": (logps + randn(0.3)).clamp(max=-1e-3),
        "weights": torch.rand(n, generator=g, dtype=torch.float64),
        "rl_weights": torch.randint(0, 2, (n,), generator=g).double(),
        "ce_weights": torch.randint(0, 2, (n,), generator=g).double() * 0.3,
        "kl_weights": torch.rand(n, generator=g, dtype=torch.float64),
    }
    return logps, inputs, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def read_by(objective, inputs):
    return {name: x for name, x in inputs.items() if name in objective.reads}


def evaluate(objective, logps, inputs, cu_seqlens):
    """Losses [n] and the gradient [n] of their sum."""
    leaf = logps.clone().requires_grad_()
    losses = objective(leaf, None, cu_seqlens=cu_seqlens, **read_by(objective, inputs))
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]
