"""The row work of a logits chunk as CUDA C++: a cluster of thread blocks holds a row, read once and written once."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from grpo_fused._fakes import register_fakes
from grpo_fused.batch import TokenBatch
from grpo_fused.config import GRPOLossConfig
from grpo_fused.engines.rows import Statistics, Transform
from grpo_fused.engines.triton_rows import objective_numbers, token_inputs
from grpo_fused.kernels.objective import KL_ESTIMATORS, POLICIES


def unavailable() -> str | None:
    """Why the CUDA operators cannot be called, in words, or None; loads them if they are not loaded yet."""
    if not hasattr(torch.ops.grpo_fused_C, "row_loss"):
        if importlib.util.find_spec("grpo_fused._native") is None:
            return "this installation has no native extension"
        reason: str | None = importlib.import_module("grpo_fused._native").cuda_available()
        if reason is not None:
            return reason
    register_fakes()
    return None


class CudaRows:
    """See `rows.RowWork`; logits stay raw until the gradient is written."""

    picks_rows = False
    only_reads = True

    def __init__(self, blocks: int = 0, threads: int = 0) -> None:
        """Launch clusters of `blocks` blocks of `threads`; 0 lets the kernel choose, `blocks=-1` streams rows.

        Raises:
            RuntimeError: The operators cannot be loaded here.
        """
        reason = unavailable()
        if reason is not None:
            raise RuntimeError(f"CUDA row work cannot run here: {reason}")
        self._layout = (blocks, threads)

    def statistics(
        self, raw: Tensor, targets: Tensor, transform: Transform, *, with_entropy: bool, block_rows: int
    ) -> Statistics:
        """See `rows.RowWork.statistics`."""
        stats = _empty_statistics(raw, with_entropy)
        torch.ops.grpo_fused_C.row_statistics(raw, targets, *_numbers(transform), *stats, *self._layout)
        return stats

    def gradient(
        self,
        raw: Tensor,
        rows: Tensor | None,
        targets: Tensor,
        statistics: Statistics,
        dlogp: Tensor,
        dentropy: Tensor | None,
        transform: Transform,
        out: Tensor,
        *,
        block_rows: int,
    ) -> None:
        """See `rows.RowWork.gradient`; rows whose coefficients are 0 are not even read."""
        if rows is not None:
            raise ValueError("CUDA row work takes all rows of a chunk; choose rows before they are scored")
        torch.ops.grpo_fused_C.row_gradient(
            raw, out, targets, *_numbers(transform), *statistics, dlogp, dentropy, *self._layout
        )

    def has_one_pass(self, config: GRPOLossConfig) -> bool:
        """Whether tokens alone decide the objective."""
        return config.loss_type in POLICIES and not config.needs_sequence and not config.needs_batch

    def loss(
        self,
        raw: Tensor,
        targets: Tensor,
        batch: TokenBatch,
        config: GRPOLossConfig,
        transform: Transform,
        out: Tensor,
        *,
        with_entropy: bool,
    ) -> Statistics:
        """See `rows.RowWork.loss`: one launch."""
        stats, _loss, _dlogp = self.row_loss(raw, targets, batch, config, transform, out, with_entropy=with_entropy)
        return stats if with_entropy else stats._replace(entropy=None)

    def row_loss(
        self,
        raw: Tensor,
        targets: Tensor,
        batch: TokenBatch,
        config: GRPOLossConfig,
        transform: Transform,
        out: Tensor,
        *,
        with_entropy: bool,
    ) -> tuple[Statistics, Tensor, Tensor]:
        """The statistics, and the loss and coefficient of each row, of `loss`."""
        inputs, options = token_inputs(batch, config), objective_numbers(config)
        bonus = inputs.entropy_weight
        stats = _empty_statistics(raw, with_entropy or bonus is not None)
        loss, dlogp = torch.empty_like(stats.logp), torch.empty_like(stats.logp)
        torch.ops.grpo_fused_C.row_loss(
            raw, out, targets, *_numbers(transform), inputs.advantages, inputs.weight, inputs.old, inputs.ref,
            inputs.is_ratio, None if bonus is None else bonus.reshape(1), POLICIES[options.loss_type],
            KL_ESTIMATORS[options.kl_estimator], options.bias_correction, options.epsilon, options.epsilon_high,
            options.delta, options.dual_clip, options.tau_pos, options.tau_neg, options.beta, *stats, loss, dlogp,
            *self._layout,
        )  # fmt: skip
        return stats, loss, dlogp


def _numbers(transform: Transform) -> tuple[Any, ...]:
    """(bias, temperatures, temperature, logit_scale, softcap) as the operators take them."""
    temperature = transform.temperature
    per_row = temperature.to(torch.float32) if isinstance(temperature, Tensor) else None
    number = 1.0 if isinstance(temperature, Tensor) else float(temperature)
    return transform.bias, per_row, number, float(transform.logit_scale), float(transform.softcap or 0.0)


def _empty_statistics(logits: Tensor, with_entropy: bool) -> Statistics:
    new = [torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(4)]
    return Statistics(new[0], new[1], new[2], new[3] if with_entropy else None)
