"""Liger's options, normaliser, ratios and metrics, converted to ours."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from grpo_fused.call.calls import LossInputs
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import Layout
from grpo_fused.call.loss_types import LOSS_TYPES
from grpo_fused.call.options import check_choice
from grpo_fused.call.validation import ANY, check_tensor
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate

LigerLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
SUPPORTED = get_args(LigerLossType)

OUR_NAMES = {field.name: field.name for field in fields(GRPOLossConfig)}
OUR_NAMES |= {"epsilon_low": "epsilon", "eps_low": "epsilon", "eps_high": "epsilon_high"}
"""What of Liger's options an option of `GRPOLossConfig` is; the others do not change the objective."""

PARTIAL = frozenset().union(*(kind.options for kind in LOSS_TYPES.values()))
"""Of our options those that not all loss types read."""


def defaults_of(interface: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of an interface, which are Liger's."""
    return {name: parameter.default for name, parameter in inspect.signature(interface).parameters.items()}


def as_config(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> GRPOLossConfig:
    """Our configuration for Liger's options, by Liger's names."""
    loss_type = options["loss_type"]
    check_choice(loss_type, "loss_type", LigerLossType)
    check_choice(options["importance_sampling_level"], "importance_sampling_level", Literal["token", "sequence"])
    read: dict[str, Any] = {}
    for name, value in options.items():
        if (ours := OUR_NAMES.get(name)) is None:
            continue
        if ours in PARTIAL and ours not in LOSS_TYPES[loss_type].options:
            if ours != "max_completion_length" and value not in (None, defaults[name]):  # trainers always pass it
                readers = ", ".join(sorted(kind for kind in SUPPORTED if ours in LOSS_TYPES[kind].options))
                warn_ignored(name, f"loss_type={loss_type!r} does not read it (only {readers})")
            continue
        if ours in PARTIAL and value is None and defaults[name] is not None:
            raise ValueError(f"{name} must be a number; got None")
        if ours.startswith(("epsilon", "sapo")) and not value > 0:
            raise ValueError(f"{name} must be > 0; got {value}")
        read[ours] = value
    return GRPOLossConfig(**read)


def warn_ignored(name: str, why: str) -> None:
    """Warn once in a process that an argument has no effect; Liger ignores it without a warning."""
    if (name, why) not in _said:  # no functools.cache: torch.compile warns of one
        _said.add((name, why))
        warnings.warn(f"{name} is ignored, as in Liger: {why}", stacklevel=2)


_said: set[tuple[str, str]] = set()


def num_items(value: float | Tensor | None, mask: Tensor, config: GRPOLossConfig) -> float | Tensor | None:
    """This process's divisor: Liger's normaliser is the mean over processes, at least 1."""
    if LOSS_TYPES[config.loss_type].average != "items":
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
    check_tensor(ratio, "vllm_is_ratio", ANY, (B,), (B, 1), (B, T))
    if ratio.dim() == 1:
        ratio = ratio.unsqueeze(1)
    if LOSS_TYPES[config.loss_type].rule != "vespo" or ratio.shape[1] == T:
        return ratio
    # VESPO multiplies the ratios of a sequence's tokens: the first token gets the whole ratio
    active = mask != 0
    return torch.where(active & (active.cumsum(1) == 1), ratio, torch.ones_like(ratio))


def liger_metrics(logps: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> list[Tensor]:
    """Liger's metrics: the KL if it is penalised, and the clipped share, over active tokens."""
    inputs = inputs._replace(importance_sampling_ratio=None, num_items_in_batch=None)
    batch = TokenBatch.build(inputs, Layout.of(logps, None), config, logps.dtype)
    count = batch.total.clamp(min=1.0).to(torch.float64)
    values = (x for x in kl_and_clipped(logps, batch, config) if x is not None)
    return [(x.to(torch.float64).sum() / count).to(torch.float32) for x in values]


def kl_and_clipped(logps: Tensor, batch: TokenBatch, config: GRPOLossConfig) -> tuple[Tensor | None, Tensor]:
    """Of each token, shaped like the log-probs and 0 where masked: the KL, and whether the ratio is clipped (bool).

    A ratio is clipped if it is beyond the bound for the sign of its advantage; `delta` does not count. Masked tokens
    have an advantage and a log-ratio of 0 in the batch.
    """
    config = replace(config, delta=None)
    found = evaluate(logps.reshape(-1), None, batch, config)
    clipped = torch.zeros_like(batch.mask)
    if config.kind.rule in ("clip", "cispo"):
        for decision in found.seen():
            clipped |= decision
    return None if found.kl is None else found.kl.view_as(logps), clipped.view_as(logps)
