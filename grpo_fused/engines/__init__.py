"""The engines: implementations of the lm head's scores and gradients, and the choice between them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from grpo_fused.engines import triton
from grpo_fused.engines.base import Engine
from grpo_fused.engines.chunked import ChunkedEngine

Impl = Literal["auto", "reference", "chunked", "triton", "native"]

_ENGINES: dict[str, Engine] = {"chunked": ChunkedEngine(), "triton": triton.TritonEngine()}


def choose(impl: Impl, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation that runs for head products in `dtype`: a named one as named, `auto` by device.

    `auto` takes `chunked` on every device. `triton` is not measured on a chip yet: it will be chosen where it is found
    faster, and may be named where scores must not depend on the batch by a single bit.

    Raises:
        ValueError: `impl` is no implementation's name.
        RuntimeError: The named implementation cannot run here; it is never replaced silently.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}; got {impl!r}")
    reason = _unavailable(impl, device, dtype)
    if reason is not None:
        raise RuntimeError(f"impl={impl!r} cannot run on {device}: {reason}; use impl='auto'")
    return "chunked" if impl == "auto" else impl


def choose_without_head(impl: Impl) -> str:
    """The implementation of what has no head product: `auto` or `reference`.

    Raises:
        ValueError: `impl` is neither; engines of the head have nothing to do there.
    """
    if impl not in ("auto", "reference"):
        raise ValueError(f"impl must be auto or reference where there is no head product; got {impl!r}")
    return impl


def engine(name: str) -> Engine:
    """The engine that `choose` named."""
    return _ENGINES[name]


def _unavailable(impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if impl == "triton":
        return triton.unavailable(device, dtype)
    if impl == "native":
        return "the C++ CPU engine is not part of this version"
    return None
