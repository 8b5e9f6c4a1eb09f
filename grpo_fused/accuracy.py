"""What the engines promise, as numbers: the bounds that the self-check and the tests hold them against.

Bounds come from float64, never from a hand: the contract for log-probs, and for gradients the error of a float64
computation that rounds once what a narrow dtype must round.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOGP_BOUND = 1e-4
"""Nats, while every |z| <= 32: log-probs and entropies of fp32, bf16 and fp16 inputs against float64 on the same."""

GRADIENT_BOUND = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Relative Frobenius error of gradients; in bf16 and fp16 it is `ROUNDINGS` times what rounding costs."""

ROUNDINGS = 2.0
"""Times the error of the best that a narrow dtype allows (`rounding_errors`)."""

COMPANY_BOUND = 1e-5
"""Nats by which a score may change with the tokens that it is computed with."""

BITWISE = ("native", "triton")
"""Engines whose scores do not change at all with their company, nor any result from one run to the next."""


def logp_bound(largest_logit: float) -> float:
    """Nats by which a log-prob or an entropy may be off where |z| reaches `largest_logit`."""
    return LOGP_BOUND * max(1.0, largest_logit / 32.0)


def frobenius_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, or |got| where nothing is wanted."""
    norm = want.double().norm()
    difference = (got.double() - want.double()).norm()
    return float(difference if norm == 0 else difference / norm)


def rounding_errors(dlogits: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Relative Frobenius errors of the best gradients that `dtype` allows: dlogits and results rounded once.

    Args:
        dlogits: `[N, V]` fp64, the exact gradient of the head products; fp16's are lifted by a power of two before they
            are rounded, as the engines do.
        hidden: `[N, H]` fp64.
        weight: `[V, H]` fp64.
        dtype: bf16 or fp16.

    Returns:
        Errors by the names `dhidden` and `dweight`.
    """
    scale = 2.0 ** (8 - dlogits.abs().max().log2().floor()) if dtype == torch.float16 else 1.0
    rounded = (dlogits * scale).to(dtype).double() / scale
    exact = {"dhidden": dlogits @ weight, "dweight": dlogits.T @ hidden}
    best = {"dhidden": (rounded @ weight).to(dtype), "dweight": (rounded.T @ hidden).to(dtype)}
    return {name: frobenius_error(best[name], exact[name]) for name in best}
