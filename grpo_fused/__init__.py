# ruff: noqa: E402 (imports need the path of `grpo_fused.kernels`)
"""GRPO losses from hidden states and the lm-head weight, without the logits of the whole batch in memory."""

from __future__ import annotations

import os as _os

# In a checkout `grpo_fused.kernels` is next to this package, at the top level; installed, it is inside.
_root = _os.path.dirname(__path__[0])
if _os.path.isfile(_os.path.join(_root, "setup.py")) and _os.path.isdir(_os.path.join(_root, "kernels")):
    __path__.append(_root)

from grpo_fused.api.custom_objective import fused_linear_objective
from grpo_fused.api.divergence import fused_linear_divergence
from grpo_fused.api.from_logits import grpo_loss, selective_logprobs
from grpo_fused.api.fused_linear import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.api.head import HeadOptions
from grpo_fused.api.module import FusedLinearGRPOLoss
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.outputs import (
    AdvantageOutput,
    DivergenceOutput,
    GRPOLossOutput,
    ImportanceSamplingOutput,
    LogprobOutput,
    ObjectiveOutput,
)
from grpo_fused.heads import capture_head_input, check_head, head_hidden_states, lm_head_inputs
from grpo_fused.heads.causal_lm import grpo_loss_of, logprobs_of
from grpo_fused.objective.custom import check_objective
from grpo_fused.objectives.advantages import group_advantages
from grpo_fused.objectives.corrections import importance_sampling_correction
from grpo_fused.ranks.failures import share_failures
from grpo_fused.ranks.parallel import ParallelGroups, PeerError

__version__ = "0.1.0"

__all__ = [
    "AdvantageOutput",
    "CandidateSets",
    "DivergenceOutput",
    "FusedLinearGRPOLoss",
    "GRPOLossConfig",
    "GRPOLossOutput",
    "HeadAdapter",
    "HeadOptions",
    "ImportanceSamplingOutput",
    "LogprobOutput",
    "ObjectiveOutput",
    "ParallelGroups",
    "PeerError",
    "QuantizedWeight",
    "capture_head_input",
    "check_head",
    "check_objective",
    "fused_linear_divergence",
    "fused_linear_grpo_loss",
    "fused_linear_logprobs",
    "fused_linear_objective",
    "group_advantages",
    "grpo_loss",
    "grpo_loss_of",
    "head_hidden_states",
    "importance_sampling_correction",
    "lm_head_inputs",
    "logprobs_of",
    "selective_logprobs",
    "share_failures",
]

_MODULES = ("engines", "heads", "integrations", "objectives", "rewards", "testing", "trainer")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
