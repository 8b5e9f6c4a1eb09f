"""Liger's options, normaliser, ratios and metrics, converted to ours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from grpo_fused.call.calls import LossInputs
from grpo_fused.call.config import TOKEN_NORMALIZED, USED_BY, GRPOLossConfig
from grpo_fused.call.layout import Layout
from grpo_fused.objective import formulas as objective
from grpo_fused.objective.batch import TokenBatch

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence")

_OUR_NAMES = {"epsilon_low": "epsilon", "eps_low": "epsilon", "eps_high": "epsilon_high"}
_SHARED_DEFAULTS = {
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
MODULE_DEFAULTS = MappingProxyType({**_SHARED_DEFAULTS, "epsilon_low": 0.2, "epsilon_high": 0.2})
LOGITS_DEFAULTS = MappingProxyType({**_SHARED_DEFAULTS, "eps_low": 0.2, "eps_high": 0.4})


def as_config(
    defaults: Mapping[str, Any], *, loss_type: str, importance_sampling_level: str, **options: Any
) -> GRPOLossConfig:
    """Our configuration for Liger's options; `defaults` are those of the options that some loss types do not read."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}; got {loss_type!r}")
    if importance_sampling_level not in LEVELS:
        raise ValueError(
            f"importance_sampling_level must be one of {', '.join(LEVELS)}; got {importance_sampling_level!r}"
        )
    read: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": importance_sampling_level}
    for name, value in options.items():
        ours = _OUR_NAMES.get(name, name)
        users = USED_BY.get(ours)
        if users is not None and loss_type not in users:
            if name in defaults and value not in (None, defaults[name]):
                readers = ", ".join(sorted(users.intersection(LOSS_TYPES)))
                warn_ignored(name, f"loss_type={loss_type!r} does not read it (only {readers})")
            continue
        if value is None and defaults.get(name) is not None:
            raise ValueError(f"{name} must be a number; got None")
        if ours.startswith(("epsilon", "sapo")) and not value > 0:
            raise ValueError(f"{name} must be > 0; got {value}")
        read[ours] = value
    return GRPOLossConfig(**read)


def warn_ignored(name: str, why: str) -> None:
    """Warn once in a process that an argument has no effect; Liger ignores it without a warning."""
    if (name, why) not in _said:
        _said.add((name, why))
        warnings.warn(f"{name} is ignored, as in Liger: {why}", stacklevel=2)


_said: set[tuple[str, str]] = set()


def num_items(value: float | Tensor | None, mask: Tensor, config: GRPOLossConfig) -> float | Tensor | None:
    """This process's divisor: Liger's normaliser is the mean over processes, at least 1."""
    if config.loss_type not in TOKEN_NORMALIZED:
        return None
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if distributed else 1
    if value is None:
        if not distributed:
            return None
        total = (mask != 0).sum().to(torch.float32)
        torch.distributed.all_reduce(total)
        value = total
    if isinstance(value, Tensor):
        return (value.to(mask.device, torch.float32) / processes).clamp(min=1.0)
    return max(float(value) / processes, 1.0)


def rollout_ratio(ratio: Tensor | None, mask: Tensor, config: GRPOLossConfig) -> Tensor | None:
    """`importance_sampling_ratio` for Liger's `vllm_is_ratio`."""
    if ratio is None:
        return None
    B, T = mask.shape
    if not isinstance(ratio, Tensor):
        raise TypeError(f"vllm_is_ratio must be a torch.Tensor; got {type(ratio).__name__}")
    if tuple(ratio.shape) not in ((B,), (B, 1), (B, T)):
        raise ValueError(f"vllm_is_ratio must have shape ({B},) or ({B}, 1) or ({B}, {T}); got {tuple(ratio.shape)}")
    if ratio.dim() == 1:
        ratio = ratio.unsqueeze(1)
    if config.loss_type != "vespo" or ratio.shape[1] == T:
        return ratio
    # VESPO multiplies the ratios of a sequence's tokens: the first token gets the whole ratio
    active = mask != 0
    return torch.where(active & (active.cumsum(1) == 1), ratio, torch.ones_like(ratio))


def liger_metrics(logps: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> list[Tensor]:
    """Liger's metrics: the KL if it is penalised, and the clipped share, over active tokens."""
    inputs = inputs._replace(importance_sampling_ratio=None, num_items_in_batch=None)
    batch = TokenBatch.build(inputs, Layout.of(logps, None), config, logps.dtype)
    tokens = objective.token_loss(logps.reshape(-1), batch, config)
    kl = [] if tokens.kl is None else [tokens.kl]
    count = batch.total.clamp(min=1.0).to(torch.float64)
    means = (x.to(torch.float64).sum() / count for x in (*kl, is_clipped(tokens, batch, config)))
    return [mean.to(torch.float32) for mean in means]


def is_clipped(tokens: objective.TokenLoss, batch: TokenBatch, config: GRPOLossConfig) -> Tensor:
    """[R] bool: active tokens whose ratio, before delta, is beyond the bound for the sign of their advantage."""
    good, bad = batch.advantages > 0, batch.advantages < 0
    if config.loss_type in ("sapo", "vespo"):
        return torch.zeros_like(batch.mask)
    if config.loss_type == "cispo":
        return batch.mask & good & (tokens.ratio > config.epsilon_upper)
    low = bad & (tokens.ratio < 1.0 - config.epsilon)
    return batch.mask & (low | (good & (tokens.ratio > 1.0 + config.epsilon_upper)))
