"""The row work of a logits chunk as CUDA C++: a thread block for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused.engines import libraries
from grpo_fused.kernels.row_types import (
    KL_ESTIMATORS,
    Coefficients,
    ObjectiveNumbers,
    RowLoss,
    Rows,
    Statistics,
    TokenInputs,
)


def unavailable(device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the CUDA operators cannot be called, or None; loads them if they are not loaded yet."""
    if device is not None and device.type != "cuda":
        return f"its row kernels run on CUDA devices, the tensors are on {device}"
    if dtype == torch.float64:
        return "its row kernels take float32 logits, not float64"
    is_loaded = hasattr(torch.ops.grpo_fused_C, "row_loss")
    return None if is_loaded else libraries.cuda_available()


class CudaRows:
    """See `rows.RowWork`; logits stay raw until the gradient is written."""

    is_kernel = True

    def __init__(self) -> None:
        """Load the operators.

        Raises:
            RuntimeError: They cannot be loaded here.
        """
        reason = unavailable()
        if reason is not None:
            raise RuntimeError(f"CUDA row work cannot run here: {reason}")

    def statistics(self, rows: Rows, *, with_entropy: bool) -> Statistics:
        """See `rows.RowWork.statistics`."""
        stats = Statistics.empty(rows.raw.shape[0], rows.raw.device, with_entropy)
        torch.ops.grpo_fused_C.row_statistics(
            rows.raw, rows.targets, rows.transform.bias, *rows.transform.numbers, *stats
        )
        return stats

    def gradient(self, rows: Rows, coefficients: Coefficients, out: Tensor, *, picked: Tensor | None = None) -> None:
        """See `rows.RowWork.gradient`; rows whose coefficients are 0 are not read."""
        if picked is not None:
            raise ValueError("CUDA row work takes all rows of a chunk; choose rows before they are scored")
        stats, dlogp, dentropy, _ = coefficients
        torch.ops.grpo_fused_C.row_gradient(
            rows.raw, out, rows.targets, rows.transform.bias, *rows.transform.numbers, *stats, dlogp, dentropy
        )

    def loss(
        self, rows: Rows, inputs: TokenInputs, options: ObjectiveNumbers, out: Tensor, *, with_entropy: bool
    ) -> RowLoss:
        """See `rows.RowWork.loss`: one launch."""
        *tensors, bonus = inputs
        stats = Statistics.empty(rows.raw.shape[0], rows.raw.device, with_entropy or bonus is not None)
        loss, dlogp = torch.empty_like(stats.logp), torch.empty_like(stats.logp)
        policy, estimator, *numbers = options
        torch.ops.grpo_fused_C.row_loss(
            rows.raw, out, rows.targets, rows.transform.bias, *rows.transform.numbers, *tensors,
            None if bonus is None else bonus.reshape(1), policy, KL_ESTIMATORS[estimator], *numbers, *stats, loss,
            dlogp,
        )  # fmt: skip
        return RowLoss(stats if with_entropy else stats._replace(entropy=None), loss, dlogp)
