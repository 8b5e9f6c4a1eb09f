"""The accuracy that engines promise."""

from __future__ import annotations

LOGP_BOUND = 1e-4
"""Nats, while every |z| <= 32: log-probs and entropies of fp32, bf16 and fp16 inputs against float64 on the same."""


def logp_bound(largest_logit: float) -> float:
    """Nats by which a log-prob or an entropy may be off if |z| reaches `largest_logit`."""
    return LOGP_BOUND * max(1.0, largest_logit / 32.0)
