"""A token-level objective in the form that row kernels read, in Triton and in CUDA C++."""

from __future__ import annotations

import math

from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.kernels.row_types import ObjectiveNumbers, TokenInputs
from grpo_fused.objective.batch import TokenBatch


def objective_numbers(config: GRPOLossConfig) -> ObjectiveNumbers:
    """The options of a configuration."""
    return ObjectiveNumbers(
        policy=config.kind.kernel,
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


def token_inputs(batch: TokenBatch, config: GRPOLossConfig) -> TokenInputs:
    """The per-token tensors of a batch."""
    bonus = None if config.entropy_coef == 0.0 else config.entropy_coef / batch.total.clamp(min=1.0)
    return TokenInputs(batch.advantages, batch.weight, batch.old, batch.ref, batch.is_ratio, bonus)
