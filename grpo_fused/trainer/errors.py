"""Errors of numbers that are not finite."""

from __future__ import annotations


class NonFiniteError(FloatingPointError):
    """The loss or a gradient is NaN or infinite; no optimizer step was taken on it."""


class DivergedError(NonFiniteError):
    """The policy's own states or logits are NaN or infinite: its weights are of no use any more."""
