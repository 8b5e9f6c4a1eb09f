"""Results of the native operators for fake tensors: shapes without data, so that torch.compile can trace a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "grpo_fused_C"


def _token_objective(logp: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logp), torch.empty_like(logp)


def _writes_to_its_arguments(*_: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "token_objective": _token_objective,
    "row_statistics": _writes_to_its_arguments,
    "row_gradient": _writes_to_its_arguments,
    "row_loss": _writes_to_its_arguments,
}
_registered: set[str] = set()


def register_fakes() -> None:
    """Register the fakes of operators that a loaded library has defined: once each, also in repeated calls."""
    for name, fake in _FAKES.items():
        if name not in _registered and hasattr(getattr(torch.ops, NAMESPACE), name):
            torch.library.register_fake(f"{NAMESPACE}::{name}")(fake)
            _registered.add(name)
