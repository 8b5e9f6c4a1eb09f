"""The native libraries: that of the CPU is loaded at import, that of CUDA when it is asked for; and why not, if not.

Both are optional. They are built against torch's stable ABI and register operators in `torch.ops.grpo_fused_C`; here
those get the fake implementations that `torch.compile` needs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from grpo_fused import _fakes


def cpu_available() -> str | None:
    """None if the CPU operators can run here, else the reason in words."""
    return _cpu_reason


@cache
def cuda_available() -> str | None:
    """None if the CUDA operators can run here, else the reason in words.

    Not at import: asking for a device initialises CUDA, and a process that is forked after that cannot use it.
    """
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    reason = _load("_C_cuda")
    if reason is None:
        _fakes.register_fakes()
    return reason


def _load(name: str) -> str | None:
    """Load `grpo_fused/<name>.*.so`, or say why that cannot be."""
    found = sorted(Path(__file__).parent.glob(f"{name}.*so"))
    if not found:
        return f"the extension grpo_fused.{name} was not built (python setup.py build_ext --inplace says why)"
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        return f"{found[0].name} could not be loaded: {error}"
    return None


def _load_cpu() -> str | None:
    reason = _load("_C")
    if reason is None:
        _register_fakes()
        _fakes.register_fakes()
        reason = torch.ops.grpo_fused_C.probe()[0] or None
    return reason


def _register_fakes() -> None:
    @torch.library.register_fake("grpo_fused_C::head_scores")
    def _(  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, temperature, scale, softcap, with_entropy, kept, spill
    ):
        block_rows, kept_lanes = kept_layout(hidden, weight, kept, spill)
        statistics = hidden.new_empty((4, hidden.shape[0]), dtype=torch.float32)
        blocks = (weight.shape[0] + block_rows - 1) // block_rows
        return statistics, hidden.new_empty((blocks, kept_lanes), dtype=torch.float32)

    @torch.library.register_fake("grpo_fused_C::head_gradient")
    def _(  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, temperature, scale, softcap, statistics, offsets, rows, dlogp, dentropy,
        dweight, spill, superblock, need_hidden, need_bias,
    ):  # fmt: skip
        dhidden = (rows.shape[0] if need_hidden else 0, hidden.shape[1])
        return (
            hidden.new_empty(dhidden, dtype=torch.float32),
            hidden.new_empty(weight.shape[0] if need_bias else 0, dtype=torch.float32),
        )


LANES = 64
"""Tokens of a panel: exponentials are kept by whole panels."""


def kept_layout(hidden: Tensor, weight: Tensor, kept: Tensor, spill: Tensor) -> tuple[int, int]:
    """(vocabulary rows of a block, tokens whose exponentials fit dW's storage and the spill)."""
    vocab, width = weight.shape
    block_rows, item = head_plan(vocab, width, hidden.dtype)
    panels = -(-hidden.shape[0] // LANES)
    in_gradient = min(kept.shape[0] * width * kept.element_size() // (LANES * item * vocab), panels)
    return block_rows, LANES * (in_gradient + min(spill.shape[0] // (LANES * item * vocab), panels - in_gradient))


def head_plan(vocab: int, width: int, compute_dtype: torch.dtype) -> tuple[int, int]:
    """(vocabulary rows of a block, bytes of a kept exponential) for a head [vocab, width]."""
    block_rows, item = torch.ops.grpo_fused_C.head_plan(vocab, width, compute_dtype == torch.bfloat16)
    return block_rows, item


_cpu_reason = _load_cpu()
