"""The engines: implementations of the lm head's scores and gradients, and the choice between them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from grpo_fused.engines.base import Engine
from grpo_fused.engines.chunked import ChunkedEngine

Impl = Literal["auto", "reference", "chunked", "triton", "native"]

_ENGINES: dict[str, Engine] = {"chunked": ChunkedEngine()}
_ABSENT = {
    "triton": "the Triton head kernel is not part of this version",
    "native": "the C++ CPU engine is not part of this version",
}


def choose(impl: Impl, device: torch.device) -> str:
    """The implementation that runs: a named one as named, `auto` by device (`chunked` on every one).

    Raises:
        ValueError: `impl` is no implementation's name.
        RuntimeError: The named implementation cannot run here; it is never replaced silently.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}; got {impl!r}")
    if impl in _ABSENT:
        raise RuntimeError(f"impl={impl!r} cannot run on {device}: {_ABSENT[impl]}; use impl='auto'")
    return "chunked" if impl == "auto" else impl


def engine(name: str) -> Engine:
    """The engine that `choose` named."""
    return _ENGINES[name]
