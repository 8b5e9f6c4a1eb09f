"""Small problems for the head kernels, and their statistics in fp64."""

from __future__ import annotations

import math

import torch
from grpo_fused.kernels.head_configs import HeadConfig
from grpo_fused.kernels.row_types import Statistics, Transform

SMALL = HeadConfig(16, 32, 32, 1, 1, 1, max_splits=3, steps_per_split=2)
CONFIGS = {
    "pointers": SMALL,
    "descriptors": SMALL._replace(tma=True),
    "persistent": SMALL._replace(persistent=True),
    "descriptors-persistent": SMALL._replace(tma=True, persistent=True),
}
OPTIONS = ["plain", "temperature", "temperatures", "scale", "negative-scale", "softcap", "bias", "all"]


def transform_of(option: str, rows: int, vocab_size: int) -> Transform:
    g = torch.Generator().manual_seed(5)
    bias, temperatures = torch.randn(vocab_size, generator=g), torch.rand(rows, generator=g) + 0.5
    return {
        "plain": Transform(None, 1.0, None, 1.0),
        "temperature": Transform(None, 1.0, None, 0.7),
        "temperatures": Transform(None, 1.0, None, temperatures),
        "scale": Transform(None, 0.3, None, 1.0),
        "negative-scale": Transform(None, -1.2, None, 1.0),
        "softcap": Transform(None, 1.0, 5.0, 1.0),
        "bias": Transform(bias, 1.0, None, 1.0),
        "all": Transform(bias, 1.3, 7.0, temperatures),
    }[option]


def z_of(product: torch.Tensor, transform: Transform) -> torch.Tensor:
    """fp64"""
    z = product if transform.bias is None else product + transform.bias.double()
    z = z * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    t = transform.temperature
    return z / (t.double().unsqueeze(1) if isinstance(t, torch.Tensor) else t)


def case(shape, dtype=torch.float32, std=3.0):
    N, H, V = shape
    g = torch.Generator().manual_seed(N + H + V)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (torch.randn(V, H, generator=g) * std / math.sqrt(H)).to(dtype)
    return hidden, weight, torch.randint(0, V, (N,), generator=g)


def exact(hidden, weight, targets, transform):
    """fp64: (max, log_sum, logp, entropy)."""
    z = z_of(hidden.double() @ weight.double().T, transform)
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    m = z.amax(1)
    return Statistics(m, z.logsumexp(1) - m, log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy)
