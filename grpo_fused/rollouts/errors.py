"""Errors of rollouts, and of the numbers that they are sampled and trained with."""

from __future__ import annotations


class PromptError(ValueError):
    """A prompt that cannot be made or encoded, or that the model or the rollout engine cannot take."""


class NonFiniteError(FloatingPointError):
    """The loss or a gradient is NaN or infinite; no optimizer step was taken on it."""


class DivergedError(NonFiniteError):
    """The policy's own states or logits are NaN or infinite: its weights are of no use any more."""
