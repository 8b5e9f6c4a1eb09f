"""Predicted memory of a call, by the engines' own rules (`Engine.cost`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from grpo_fused import engines
from grpo_fused.engines.base import Cost
from grpo_fused.tools import predictions


class Shape(NamedTuple):
    """A call."""

    N: int
    """tokens, active or not"""
    H: int
    V: int
    active: float = 1.0
    """share of the tokens that are not masked"""

    @property
    def tokens(self) -> int:
        """Active tokens; nothing is computed for the others."""
        return round(self.N * self.active)


def cost_of(engine: str, shape: Shape, dtype: torch.dtype) -> Cost:
    """By the engine's own rules."""
    head = predictions.Shape(shape.tokens, shape.H, shape.V, dtype).head(torch.device("cpu"))
    return engines.engine(engine).cost(head, shape.tokens, None)


def scratch_bytes(engine: str, shape: Shape, dtype: torch.dtype) -> int:
    """Peak of a loss with both gradients, beyond inputs and gradients."""
    at_work = cost_of(engine, shape, dtype).scratch_bytes + shape.tokens * shape.H * dtype.itemsize  # gathered states
    # all tokens decide whether dW needs its own sum; the gradient that it becomes does not exist yet
    sums = cost_of(engine, shape._replace(active=1.0), dtype).accumulator_bytes
    return max(at_work + sums - shape.V * shape.H * dtype.itemsize, sums) if sums else at_work
