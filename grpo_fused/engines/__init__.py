"""The engines: implementations of the lm head's scores and gradients, and the choice between them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from grpo_fused.engines import native
from grpo_fused.engines.base import Engine
from grpo_fused.engines.chunked import ChunkedEngine

Impl = Literal["auto", "reference", "chunked", "triton", "native"]

_ENGINES: dict[str, Engine] = {"chunked": ChunkedEngine(), "native": native.NativeEngine()}
_ABSENT = {
    "triton": "the Triton head kernel is not part of this version",
}


def choose(impl: Impl, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation that runs a computation in `dtype`: a named one as named, `auto` the fastest.

    That is `native` on a CPU that it supports, `chunked` elsewhere.

    Raises:
        ValueError: `impl` is no implementation's name.
        RuntimeError: The named implementation cannot run here; it is never replaced silently.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}; got {impl!r}")
    if impl in _ABSENT:
        raise RuntimeError(f"impl={impl!r} cannot run on {device}: {_ABSENT[impl]}; use impl='auto'")
    reason = native.unavailable(device, dtype) if impl in ("native", "auto") else None
    if impl == "native" and reason is not None:
        raise RuntimeError(f"impl='native' cannot run here: {reason}; use impl='auto'")
    if impl == "auto":
        return "native" if reason is None else "chunked"
    return impl


def engine(name: str) -> Engine:
    """The engine that `choose` named."""
    return _ENGINES[name]
