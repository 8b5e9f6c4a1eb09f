"""The row work of a logits chunk as Triton kernels: what `rows.py` does in torch operations, in one or two passes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_fused.batch import TokenBatch
from grpo_fused.config import GRPOLossConfig
from grpo_fused.engines.rows import Statistics, Transform
from grpo_fused.kernels import launch
from grpo_fused.kernels.objective import POLICIES


def objective_numbers(config: GRPOLossConfig) -> launch.ObjectiveNumbers:
    """The options of a token-level configuration as the kernel reads them."""
    return launch.ObjectiveNumbers(
        loss_type=config.loss_type,
        kl_estimator=config.kl_estimator,
        bias_correction=config.use_bias_correction_kl,
        epsilon=float(config.epsilon),  # an int would be compiled in
        epsilon_high=float(config.epsilon_upper),
        delta=math.inf if config.delta is None else float(config.delta),
        dual_clip=math.inf if config.dual_clip is None else float(config.dual_clip),
        tau_pos=float(config.sapo_temperature_pos),
        tau_neg=float(config.sapo_temperature_neg),
        beta=float(config.beta),
    )


def token_inputs(batch: TokenBatch, config: GRPOLossConfig) -> launch.TokenInputs:
    """The per-token tensors of `batch` as the kernel reads them."""
    bonus = None if config.entropy_coef == 0.0 else config.entropy_coef / batch.total.clamp(min=1.0)
    return launch.TokenInputs(
        advantages=batch.advantages,
        weight=batch.weight,
        old=batch.old,
        ref=batch.ref,
        is_ratio=batch.is_ratio,
        entropy_weight=bonus,
    )


class TritonRows:
    """See `rows.RowWork`; logits stay raw until the gradient is written."""

    picks_rows = False
    only_reads = True

    def statistics(
        self, raw: Tensor, targets: Tensor, transform: Transform, *, with_entropy: bool, block_rows: int
    ) -> Statistics:
        """See `rows.RowWork.statistics`."""
        return Statistics(*launch.row_statistics(raw, targets, _transform(transform), with_entropy=with_entropy))

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
        """See `rows.RowWork.gradient`."""
        if rows is not None:
            raise ValueError("Triton row work takes all rows of a chunk; choose rows before they are scored")
        stats = launch.RowStatistics(*statistics)
        launch.row_gradient(raw, out, targets, stats, dlogp, dentropy, _transform(transform))

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
        stats, _loss, _dlogp = launch.row_loss(
            raw, out, targets, token_inputs(batch, config), objective_numbers(config), _transform(transform),
            with_entropy=with_entropy,
        )  # fmt: skip
        return Statistics(stats.max, stats.log_sum, stats.logp, stats.entropy if with_entropy else None)


def _transform(transform: Transform) -> launch.RowTransform:
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(torch.float32)
    bias = None if transform.bias is None else transform.bias.contiguous()
    return launch.RowTransform(bias, transform.logit_scale, transform.softcap, temperature)
