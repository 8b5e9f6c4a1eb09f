"""The engines: implementations of the lm head's scores and gradients, and the choice between them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.options import check_choice
from grpo_fused.engines import choice, cpu_library, cuda_rows, libraries, native, triton
from grpo_fused.engines.base import Engine
from grpo_fused.engines.chunked import ChunkedEngine
from grpo_fused.engines.pairs import NativePairs, Pairs, TritonPairs
from grpo_fused.kernels.configs import architecture
from grpo_fused.kernels.row_types import BYTES

Impl = Literal["auto", "reference", "chunked", "cuda", "triton", "native"]

_ENGINES: dict[str, Engine] = {
    "chunked": ChunkedEngine(),
    "cuda": ChunkedEngine(lambda _device, _dtype: cuda_rows.CudaRows()),
    "native": native.NativeEngine(),
    "triton": triton.TritonEngine(),
}


class WeightForm(NamedTuple):
    """A weight that has an adapter or is quantised."""

    dtype: torch.dtype
    """of its numbers"""
    group: int
    """columns with one scale; H without scales"""
    has_codes: bool = False

    @classmethod
    def of(cls, weight: Tensor | QuantizedWeight, adapters: tuple[HeadAdapter, ...]) -> WeightForm | None:
        """That of a checked weight [V, H]; None if it is plain."""
        width = weight.shape[1]
        if isinstance(weight, Tensor):
            return cls(weight.dtype, width) if adapters else None
        groups = weight.scale.shape[1] if weight.scale.dim() == 2 else 1
        return cls(weight.values.dtype, width // groups, weight.codes is not None)


def choose(impl: Impl, device: torch.device, dtype: torch.dtype, width: int, form: WeightForm | None = None) -> str:
    """The implementation that runs for head products in `dtype`: a named one as named, `auto` the fastest.

    That is `native` on a CPU that it supports, else `chunked`; if `native` would run but was not built, one warning
    says so. On a GPU it is `chunked` or `triton`, by architecture and `width`, the H of the hidden states: see
    `grpo_fused.engines.choice`. Name `triton` if scores must be bitwise independent of the batch. For a head with an
    adapter or a quantised weight it is `chunked` in place of an engine that does not take its form.

    Raises:
        ValueError: `impl` is not the name of an implementation.
        RuntimeError: The named implementation cannot run here; it is never replaced silently.
    """
    check_choice(impl, "impl", Impl)
    if impl == "auto":
        reason = unavailable("native", device, dtype)
        # a traced warning would break the graph of torch.compile
        if reason is not None and reason == libraries.missing() and not torch.compiler.is_compiling():
            _warn_once(reason)
        name = fastest(device, dtype, width)
        return name if _refuses(name, dtype, width, form) is None else "chunked"
    reason = unavailable(impl, device, dtype) or _refuses(impl, dtype, width, form)
    if reason is not None:
        raise RuntimeError(f"impl={impl!r} cannot run on {device}: {reason}; use impl='auto'")
    return impl


def fastest(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """What `choose` returns for `auto`, without its warning."""
    name = choice.on_gpu(architecture(device), dtype, width) if device.type == "cuda" else "native"
    return name if unavailable(name, device, dtype) is None else "chunked"


@cache
def _warn_once(reason: str) -> None:
    slower = "which takes two to four times as long as native in bf16 with AMX (docs/benchmarks.md)"
    warnings.warn(f"impl='auto' takes chunked, {slower}: {reason}", stacklevel=5)


def choose_from_logits(impl: Impl) -> str:
    """The implementation of a function without head products: `auto` or `reference`.

    Raises:
        ValueError: `impl` is neither: engines compute head products only.
    """
    if impl not in ("auto", "reference"):
        raise ValueError(f"impl must be auto or reference where there is no head product; got {impl!r}")
    return impl


def pairs(name: str, device: torch.device, dtype: torch.dtype) -> Pairs:
    """What computes candidate sets beside an engine that multiplies in `dtype`."""
    if name == "chunked" and native.unavailable(device, dtype) is None:
        return NativePairs()
    return {"native": NativePairs, "triton": TritonPairs}.get(name, Pairs)()


def largest_sparse_set(name: str, vocab_size: int) -> int:
    """Tokens of the largest candidate set that is worked by the rows of its tokens; larger ones go to the whole head.

    Only `native` has a mask for them there. With bf16 on AMX a call of such sets alone takes twice the dense time at
    V / 96 and 19 times at V / 8; in fp32 the two are equal at V / 40.
    """
    return min(vocab_size // 8, max(vocab_size // 96, 64)) if name == "native" else vocab_size


def _refuses(name: str, dtype: torch.dtype, width: int, form: WeightForm | None) -> str | None:
    """Why an engine cannot run a head with a weight of that form, for products in `dtype` on H = `width`, or None."""
    most = cpu_library.BASE_COLUMNS
    if form is None:
        return None
    if name in ("native", "triton") and width % most != 0:
        return f"{name} takes an adapter or a quantised weight where H is a multiple of {most}; it is {width}"
    if name == "native" and form.group % most != 0:
        return f"native takes groups of a multiple of {most} columns with a scale; they have {form.group}"
    if name == "triton" and (form.has_codes or form.group != width):
        return "triton takes quantised weights of int8 and fp8 with one scale a row"
    # fp32 products with widened bytes: triton 3.7 rounds hidden states to TF32 for sm_100, and spills on the others
    if name == "triton" and form.dtype in BYTES and dtype != torch.bfloat16:
        return f"triton takes quantised weights where products are of bfloat16; they are of {dtype}"
    return None


def engine(name: str) -> Engine:
    """The engine that `choose` named."""
    return _ENGINES[name]


def unavailable(impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why an implementation cannot run for head products in `dtype` on `device`, or None if it can."""
    checks = {"cuda": cuda_rows.unavailable, "native": native.unavailable, "triton": triton.unavailable}
    return checks[impl](device, dtype) if impl in checks else None
