"""Problems of the accuracy study, and what float64 gives on the same inputs.

Hidden states and weight are normal, so logits are too: with a vocabulary of 32000 the policy is nearly uniform at
max |z| = 4 and nearly certain at 128. Ids are sampled from it, as a rollout's are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.problem import EPSILON, Problem, loss_from_logps

OLD_NOISE = 0.1
"""Standard deviation in nats of old - new log-probs: the policy has moved a little since the rollout."""

CLEARANCE = 1e-4
"""No token of the gradient's comparison is nearer to a clip bound (nats): there float64 itself decides by chance."""

ROWS_AT_A_TIME = 128
"""Tokens whose float64 logits are held at a time."""


class Shape(NamedTuple):
    """Sequences, tokens of each, width and vocabulary of a problem."""

    B: int = 4
    T: int = 128
    H: int = 512
    V: int = 32000


class Gradients(NamedTuple):
    """Of the loss, in float64."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]


class Case(NamedTuple):
    """A problem and the truth about it."""

    problem: Problem
    moved: Problem
    """the same tokens with the hidden states of a policy that differs by up to about OLD_NOISE"""
    logps: Tensor  # [B, T] float64
    moved_logps: Tensor  # [B, T] float64
    gradients: Gradients | None
    max_logit: float
    logit_std: float
    entropy: float
    """mean over tokens, nats"""


def make_case(max_logit: float, dtype: torch.dtype, shape: Shape, device: str, *, with_gradients: bool) -> Case:
    """A case whose largest |logit| is about `max_logit`; the same random numbers for every size and dtype."""
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape.B, shape.T, shape.H, generator=g, device=device)
    weight = torch.randn(shape.V, shape.H, generator=g, device=device)
    largest = max(float((rows @ weight.T).abs().max()) for rows in hidden.flatten(0, 1).split(ROWS_AT_A_TIME))
    weight = (weight * (max_logit / largest)).to(dtype)
    ids, logps, (max_found, std, entropy) = _sample(hidden.to(dtype).flatten(0, 1), weight, g)
    step = OLD_NOISE / std  # of the hidden states: a logit moves by step * std
    moved = (hidden + step * torch.randn(hidden.shape, generator=g, device=device)).to(dtype)
    problem = Problem(
        hidden.to(dtype).requires_grad_(),
        weight.requires_grad_(),
        ids.view(shape.B, shape.T),
        torch.ones(shape.B, shape.T, dtype=torch.bool, device=device),
        torch.randn(shape.B, generator=g, device=device),
        (logps + _old_noise(logps, g)).float().view(shape.B, shape.T),
    )
    return Case(
        problem,
        Problem(moved, weight, problem.ids, problem.mask, problem.advantages, problem.old),
        logps.view(shape.B, shape.T),
        _logps(moved.flatten(0, 1), weight.detach(), ids).view(shape.B, shape.T),
        _gradients(problem) if with_gradients else None,
        max_found,
        std,
        entropy,
    )


def _sample(hidden: Tensor, weight: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, tuple[float, float, float]]:
    """Ids [N] from the policy, their log-probs [N], and largest |logit|, standard deviation and mean entropy."""
    ids, logps, entropies = [], [], []
    largest = squares = 0.0
    weight = weight.double()
    for rows in hidden.split(ROWS_AT_A_TIME):
        z = rows.double() @ weight.T
        largest, squares = max(largest, float(z.abs().max())), squares + float(z.square().sum())
        log_p = z.log_softmax(-1)
        p = log_p.exp()
        chosen = torch.multinomial(p, 1, generator=g)
        ids.append(chosen)
        logps.append(log_p.gather(1, chosen))
        entropies.append(-(p * log_p).sum(1))
    std = (squares / (hidden.shape[0] * weight.shape[0])) ** 0.5
    return torch.cat(ids).squeeze(1), torch.cat(logps).squeeze(1), (largest, std, float(torch.cat(entropies).mean()))


def _old_noise(logps: Tensor, g: torch.Generator) -> Tensor:
    noise = OLD_NOISE * torch.randn(logps.shape, generator=g, device=logps.device, dtype=logps.dtype)
    bounds = torch.tensor([1 - EPSILON, 1 + EPSILON], dtype=logps.dtype, device=logps.device).log()
    noise[(-noise[:, None] - bounds).abs().min(1).values < CLEARANCE] = 0.0
    return noise


def _logps(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """[N] float64."""
    weight = weight.double()
    found = []
    for rows, targets in zip(hidden.split(ROWS_AT_A_TIME), ids.split(ROWS_AT_A_TIME), strict=True):
        z = rows.double() @ weight.T
        found.append(z.gather(1, targets[:, None]).squeeze(1) - z.logsumexp(1))
    return torch.cat(found)


def _gradients(problem: Problem) -> Gradients:
    """By autograd, a sequence at a time."""
    weight = problem.weight.detach().double().requires_grad_()
    hidden = problem.hidden.detach().double().requires_grad_()
    for b in range(problem.ids.shape[0]):
        one = slice(b, b + 1)
        p = Problem(
            hidden[one], weight, problem.ids[one], problem.mask[one], problem.advantages[one].double(),
            problem.old[one].double(),
        )  # fmt: skip
        logps = (p.hidden @ weight.T).log_softmax(-1).gather(-1, p.ids.unsqueeze(-1)).squeeze(-1)
        (loss_from_logps(logps, p) / problem.ids.shape[0]).backward()  # sequences are of equal length
    assert hidden.grad is not None
    assert weight.grad is not None
    return Gradients(hidden.grad, weight.grad)
