"""Launchers of the row kernels: tensors in, tensors out; no state, no checks beyond what a pointer needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configs import RowConfig, padded, row_config
from .row_types import (
    KL_ESTIMATORS,
    Coefficients,
    ObjectiveNumbers,
    RowLoss,
    Rows,
    Statistics,
    TokenInputs,
    Transform,
)
from .rows import row_gradient_bwd_kernel, row_loss_fwd_bwd_kernel, row_statistics_fwd_kernel


class TritonRows:
    """Row work as Triton kernels, in one or two passes; logits stay raw until the gradient is written.

    It is the Triton implementation of `grpo_fused.engines.rows.RowWork`.
    """

    is_kernel = True

    def statistics(self, rows: Rows, *, with_entropy: bool) -> Statistics:
        """Statistics of [R, V] logits (fp32, bf16 or fp16; rows as `padded_width` says)."""
        stats = Statistics.empty(rows.raw.shape[0], rows.raw.device, with_entropy)
        if rows.raw.shape[0]:
            common = _Common.of(rows)
            with device_of(rows.raw):
                row_statistics_fwd_kernel[common.grid](
                    rows.raw, common.bias, rows.targets, common.temperatures, *stats, rows.raw.stride(0),
                    *common.numbers, **common.flags, WITH_ENTROPY=with_entropy, **common.launch,
                )  # fmt: skip
        return stats

    def gradient(self, rows: Rows, coefficients: Coefficients, out: Tensor, *, picked: Tensor | None = None) -> None:
        """Write dL/dlogits to `out` [R, V]; it may share the memory of the logits. It processes all rows."""
        if picked is not None:
            raise ValueError("Triton row work takes all rows of a chunk; choose rows before they are scored")
        if rows.raw.shape[0] == 0:
            return
        common = _Common.of(rows, out)
        with device_of(rows.raw):
            row_gradient_bwd_kernel[common.grid](
                rows.raw, out, common.bias, rows.targets, common.temperatures, *coefficients.statistics,
                coefficients.dlogp, coefficients.dentropy, rows.raw.stride(0), out.stride(0), *common.numbers,
                **common.flags, HAS_DENTROPY=coefficients.dentropy is not None, **common.launch,
            )  # fmt: skip

    def loss(
        self, rows: Rows, inputs: TokenInputs, options: ObjectiveNumbers, out: Tensor, *, with_entropy: bool
    ) -> RowLoss:
        """One launch: statistics, per-token loss and coefficient g ([R]), and dL/dlogits written to `out` [R, V]."""
        has_bonus = inputs.entropy_weight is not None
        stats = Statistics.empty(rows.raw.shape[0], rows.raw.device, with_entropy or has_bonus)
        loss, dlogp = torch.empty_like(stats.logp), torch.empty_like(stats.logp)
        if rows.raw.shape[0]:
            common = _Common.of(rows, out)
            with device_of(rows.raw):
                row_loss_fwd_bwd_kernel[common.grid](
                    rows.raw, out, common.bias, rows.targets, common.temperatures, *inputs, *stats, loss, dlogp,
                    rows.raw.stride(0), out.stride(0), *common.numbers, options.epsilon, options.epsilon_high,
                    options.delta, options.dual_clip, options.tau_pos, options.tau_neg, options.beta,
                    POLICY=options.policy, KL=KL_ESTIMATORS[options.kl_estimator],
                    HAS_OLD=inputs.old is not None, HAS_KL=inputs.ref is not None and options.beta != 0.0,
                    BIAS_CORRECTION=options.bias_correction, HAS_IS_RATIO=inputs.is_ratio is not None,
                    **common.flags, WITH_ENTROPY=stats.entropy is not None, HAS_DENTROPY=has_bonus, **common.launch,
                )  # fmt: skip
        return RowLoss(stats if with_entropy else stats._replace(entropy=None), loss, dlogp)


class _Common(NamedTuple):
    """The arguments that all row kernels share."""

    grid: tuple[int]
    bias: Tensor | None
    temperatures: Tensor | None
    numbers: tuple[int | float, ...]
    """V, columns that may be touched, temperature, logit scale, softcap"""
    flags: dict[str, bool]
    launch: dict[str, Any]

    @classmethod
    def of(cls, rows: Rows, out: Tensor | None = None) -> _Common:
        logits, transform = rows.raw, rows.transform
        for x in (logits,) if out is None else (logits, out):
            if x.shape[1] > 1 and x.stride(1) != 1:
                raise ValueError(f"rows of logits must have unit stride; got strides {x.stride()}")
        config = row_config(logits.device, logits.shape[1])
        each, *numbers = transform.numbers
        # stores run into the padding as loads do, so both must have it
        width = padded_width(logits) if out is None else min(padded_width(logits), padded_width(out))
        launch = {"BLOCK": config.block, "num_warps": config.num_warps, "enable_fp_fusion": True}
        if out is not None:
            launch["IN_PLACE"] = _shares_memory(logits, out, config)
        return cls(
            (logits.shape[0],),
            transform.bias,
            each,
            (logits.shape[1], width, *numbers),
            flags_of(transform),
            launch,
        )


def flags_of(transform: Transform) -> dict[str, bool]:
    """The parts of a transform that are compiled in."""
    return {
        "HAS_BIAS": transform.bias is not None,
        "HAS_SOFTCAP": transform.softcap is not None,
        "HAS_TEMPERATURES": isinstance(transform.temperature, Tensor),
    }


def padded_width(logits: Tensor) -> int:
    """Columns of a row that may be touched: V rounded up to `PAD` where the row's stride covers that, else V."""
    rows, vocab_size = logits.shape
    stride = logits.stride(0)
    width = padded(vocab_size)
    end = logits.storage_offset() + (rows - 1) * stride + width
    fits = stride >= width and end * logits.itemsize <= logits.untyped_storage().nbytes()
    return width if fits else vocab_size


def _shares_memory(logits: Tensor, out: Tensor, config: RowConfig) -> bool:
    shared = logits.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    if shared:
        same_rows = logits.data_ptr() == out.data_ptr() and (
            logits.stride(0) * logits.itemsize == out.stride(0) * out.itemsize and out.itemsize <= logits.itemsize
        )
        # in one size, each element is stored after its own load
        if not (same_rows and (config.in_place or out.itemsize == logits.itemsize)):
            sizes = "" if config.in_place else ", on this device only if their elements have one size"
            raise ValueError(
                f"the gradient may share the memory of the logits only row by row{sizes}; "
                f"got {out.dtype} for {logits.dtype}"
            )
    return shared


@contextmanager
def device_of(x: Tensor) -> Iterator[None]:
    """The device of `x` as the current one: Triton launches there, and it may not be the tensor's."""
    with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
        yield
