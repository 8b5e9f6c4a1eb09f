"""Problems of the accuracy study, and the float64 results on the same inputs.

Hidden states and weight are normal, so logits are too: with a vocabulary of 32000 the policy is nearly uniform at
max |z| = 4 and nearly certain at 128. Ids are sampled from it, as a rollout's are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.problem import EPSILON, trainable
from grpo_fused import GRPOLossConfig
from grpo_fused.testing import Problem, Result, largest, make_problem

OLD_NOISE = 0.1
"""Standard deviation in nats of old - new log-probs: the policy has moved a little since the rollout."""

CLEARANCE = 1e-4
"""No token of the gradient's comparison is nearer to a clip bound (nats): there even a float64 decision is random."""


class Shape(NamedTuple):
    """Sequences, tokens of each, width and vocabulary of a problem."""

    B: int = 4
    T: int = 128
    H: int = 512
    V: int = 32000


class Case(NamedTuple):
    """A problem and its exact results."""

    problem: Problem
    moved: Problem
    """the same tokens with the hidden states of a policy that differs by up to about OLD_NOISE"""
    logps: Tensor  # [B, T] float64
    moved_logps: Tensor  # [B, T] float64
    exact: Result | None
    """loss and gradients in float64"""
    max_logit: float
    logit_std: float
    entropy: float
    """mean over tokens, nats"""


def make_case(max_logit: float, dtype: torch.dtype, shape: Shape, device: str, *, with_gradients: bool) -> Case:
    """A case whose largest |logit| is about `max_logit`; the same random numbers for every size and dtype."""
    p = make_problem(0, **shape._asdict(), dtype=torch.float32, device=device, masked=0.0, extras=False)
    g = torch.Generator(device).manual_seed(1)
    wide, weight = p.hidden_states, p.lm_head_weight
    weight *= max_logit / largest(wide @ weight.T)
    p = replace(p, completion_mask=torch.ones_like(p.completion_ids, dtype=torch.bool)).to(dtype)
    z = p.hidden_states.double() @ p.lm_head_weight.double().T
    log_p = z.log_softmax(-1)
    p.completion_ids = torch.multinomial(log_p.exp().flatten(0, 1), 1, generator=g).view(shape.B, shape.T)
    logps = log_p.gather(-1, p.completion_ids.unsqueeze(-1)).squeeze(-1)
    p.options["old_per_token_logps"] = logps + _old_noise(logps, g)
    problem, std = trainable(p), float(z.square().mean().sqrt())
    step = OLD_NOISE / std  # of the hidden states: a logit moves by step * std
    moved = replace(p, hidden_states=(wide + step * torch.randn(wide.shape, generator=g, device=device)).to(dtype))
    exact = problem.to(torch.float64)
    return Case(
        problem,
        moved,
        logps,
        moved.to(torch.float64).score("reference"),
        exact.run(GRPOLossConfig(epsilon=EPSILON), impl="reference") if with_gradients else None,
        largest(z),
        std,
        float(-(log_p.exp() * log_p).sum(-1).mean()),
    )


def _old_noise(logps: Tensor, g: torch.Generator) -> Tensor:
    noise = OLD_NOISE * torch.randn(logps.shape, generator=g, device=logps.device, dtype=logps.dtype)
    bounds = torch.tensor([1 - EPSILON, 1 + EPSILON], dtype=logps.dtype, device=logps.device).log()
    noise[(-noise[..., None] - bounds).abs().min(-1).values < CLEARANCE] = 0.0
    return noise
