"""What a loss call costs on the CPU: a model of four terms, fitted to measurements and checked on those left out.

    seconds = product * N V H P + logit * N V + weight * V H + call

N are the active tokens and P the head products, 3 for a loss with both gradients and more where the native engine
multiplies again. The coefficients are a machine's: `benchmarks.growth` fits them and keeps them in its result file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        """Active ones, of whom alone anything is computed."""
        return round(self.N * self.active)


class Coefficients(NamedTuple):
    """Seconds of each unit of work; none is negative."""

    product: float
    """of a multiply-add of a head product"""
    logit: float
    """of row work on a logit"""
    weight: float
    """of passing over an element of the weight, whatever the number of tokens"""
    call: float
    """of a call"""

    def seconds(self, work: Sequence[float]) -> float:
        """Predicted time of `work_of` a call."""
        return sum(c * w for c, w in zip(self, work, strict=True))


class Point(NamedTuple):
    """A measured call."""

    shape: Shape
    seconds: float


class Prediction(NamedTuple):
    """Of a loss with both gradients."""

    seconds: float
    bytes: int
    """peak beyond inputs and gradients"""


def cost_of(engine: str, shape: Shape, dtype: torch.dtype) -> Cost:
    """By the engine's own rules."""
    head = predictions.Shape(shape.tokens, shape.H, shape.V, dtype).head(torch.device("cpu"))
    return engines.engine(engine).cost(head, shape.tokens, None)


def scratch_bytes(engine: str, shape: Shape, dtype: torch.dtype) -> int:
    """Peak of a loss with both gradients, beyond inputs and gradients."""
    at_work = cost_of(engine, shape, dtype).scratch_bytes + shape.tokens * shape.H * dtype.itemsize  # gathered states
    # whether dW needs a sum of its own is decided by all tokens; the gradient that it becomes is not there yet
    sums = cost_of(engine, shape._replace(active=1.0), dtype).accumulator_bytes
    return max(at_work + sums - shape.V * shape.H * dtype.itemsize, sums) if sums else at_work


def products_of(engine: str, shape: Shape, dtype: torch.dtype) -> float:
    """Head products of a loss with both gradients."""
    return 3.0 if engine == "bare" else cost_of(engine, shape, dtype).products


def work_of(engine: str, shape: Shape, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """Amounts of work, in the units of `Coefficients`."""
    N, H, V = shape.tokens, shape.H, shape.V
    return N * V * H * products_of(engine, shape, dtype), N * V, V * H, 1.0


def fit(engine: str, dtype: torch.dtype, points: Sequence[Point]) -> Coefficients:
    """Least squares of the *relative* error over coefficients that are not negative.

    Exact: the best of the unconstrained fits on every subset of the four terms that comes out without a negative one.
    """
    if not points:
        raise ValueError("a fit needs measured points; got none")
    work = torch.tensor([work_of(engine, p.shape, dtype) for p in points], dtype=torch.float64)
    relative = work / torch.tensor([p.seconds for p in points], dtype=torch.float64)[:, None]
    unit = relative.norm(dim=0)  # terms differ by 12 orders of magnitude
    return Coefficients(*(_nonnegative_least_squares(relative / unit) / unit).tolist())


def _nonnegative_least_squares(a: Tensor) -> Tensor:
    """x >= 0 that minimises |a x - 1|."""
    best, least = torch.zeros(a.shape[1], dtype=a.dtype), float(a.shape[0])
    for size in range(1, min(a.shape) + 1):
        for subset in map(list, itertools.combinations(range(a.shape[1]), size)):
            part = torch.linalg.lstsq(a[:, subset], a.new_ones(a.shape[0], 1), driver="gelsd").solution.squeeze(1)
            error = float((a[:, subset] @ part - 1).square().sum())
            if bool((part >= 0).all()) and error < least:
                best, least = torch.zeros_like(best).index_copy_(0, torch.tensor(subset), part), error
    return best


def leave_one_out(engine: str, dtype: torch.dtype, points: Sequence[Point]) -> list[float]:
    """predicted / measured - 1 of each point, by a fit to all the others."""
    errors = []
    for i, point in enumerate(points):
        others = [*points[:i], *points[i + 1 :]]
        predicted = fit(engine, dtype, others).seconds(work_of(engine, point.shape, dtype))
        errors.append(predicted / point.seconds - 1)
    return errors


class Fitted:
    """The coefficients of a machine: `Fitted.load(file of benchmarks.growth).predict("native", 1024, 896, 151936)`."""

    def __init__(self, coefficients: dict[str, dict[str, Any]]) -> None:
        self._coefficients = coefficients

    @classmethod
    def load(cls, path: Path) -> Fitted:
        """From the section `growth` of a result file."""
        return cls(json.loads(path.read_text())["sections"]["growth"]["model"]["coefficients"])

    def predict(
        self, engine: str, N: int, H: int, V: int, dtype: torch.dtype = torch.bfloat16, active: float = 1.0
    ) -> Prediction:
        """Seconds and peak scratch of a loss with both gradients, `active` being the share of tokens not masked.

        Raises:
            ValueError: nothing was fitted for the engine and dtype.
        """
        name = str(dtype).removeprefix("torch.")
        known = self._coefficients.get(engine, {}).get(name)
        if known is None:
            fitted = ", ".join(f"{e} in {d}" for e, by in self._coefficients.items() for d in by)
            raise ValueError(f"no coefficients for {engine} in {name}; fitted: {fitted or 'none'}")
        shape = Shape(N, H, V, active)
        seconds = Coefficients(**known).seconds(work_of(engine, shape, dtype))
        return Prediction(seconds, scratch_bytes(engine, shape, dtype))
