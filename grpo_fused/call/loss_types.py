"""The loss types, each a row of one table: what distinguishes them, for every module that treats them differently.

The formulas of a rule stand in `objective/formulas.py`, `api/reference.py`, `kernels/objective.py`, `csrc/objective.h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["clip", "cispo", "sapo", "vespo", "gmpo"]
Average = Literal["sequences", "tokens", "length", "sum", "items"]

_RATIOS = frozenset({"importance_sampling_level", "off_policy_mask_threshold"})
_CLIP = _RATIOS | {"epsilon", "epsilon_high", "delta", "dual_clip"}
_CLIP_RATIOS = tuple(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"))


@dataclass(frozen=True)
class LossType:
    """One loss type."""

    average: Average
    """over tokens: the mean over sequences of their means; over all active tokens; over sequences, each divided by
    `max_completion_length`; over sequences of their sums; the sum over `num_items_in_batch`"""
    rule: Rule = "clip"
    """its policy term"""
    options: frozenset[str] = _CLIP
    """of `GRPOLossConfig`, those it uses that not every loss type does"""
    requires: str | None = None
    """an option without a default"""
    why: str = ""
    """what it is required for, as the end of a sentence"""
    epsilon: float = float("0.2")
    """the default, an object of its own: "not set" and "set to 0.2" differ, see `GRPOLossConfig`"""
    metrics: tuple[str, ...] = _CLIP_RATIOS
    """besides those of all loss types"""
    one_value_a_sequence: bool = False
    """whether its metrics have one value for each sequence, at any level"""
    takes_ratio: Literal["spread", "token", None] = "spread"
    """`importance_sampling_ratio`: for tokens or sequences, as a factor; for tokens only, in its own way; not at all"""
    masks_inside: bool = False
    """whether `top_entropy_quantile` acts inside its own mean, and not on the policy term"""
    corrects_kl: bool = True
    """whether the KL may be multiplied by the ratio"""
    kernel: int | None = 0
    """its number in row kernels, where a token's loss depends on that token alone; None if its policy term needs the
    whole sequence, at any level of ratios"""


LOSS_TYPES: dict[str, LossType] = {
    "grpo": LossType("sequences"),
    "bnpo": LossType("tokens"),
    "dr_grpo": LossType(
        "length",
        options=_CLIP | {"max_completion_length"},
        requires="max_completion_length",
        why=" (tokens), which it divides by",
    ),
    "dapo": LossType("items"),
    "luspo": LossType("sum"),
    "cispo": LossType(
        "items",
        "cispo",
        options=_RATIOS | {"epsilon_high"},
        requires="epsilon_high",
        why=", its bound on the ratio itself",
        metrics=("cispo_clip_ratio",),
        kernel=1,
    ),
    "sapo": LossType(
        "sequences",
        "sapo",
        options=_RATIOS | {"sapo_temperature_pos", "sapo_temperature_neg"},
        metrics=(),
        kernel=2,
    ),
    "vespo": LossType(
        "items",
        "vespo",
        options=_RATIOS | {"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"},
        metrics=("vespo/phi_seq_mean",),
        one_value_a_sequence=True,
        takes_ratio="token",
        kernel=None,
    ),
    "gmpo": LossType(
        "sequences",
        "gmpo",
        options=frozenset({"epsilon", "epsilon_high"}),
        epsilon=float("0.4"),
        takes_ratio=None,
        masks_inside=True,
        corrects_kl=False,
        kernel=None,
    ),
}


def users_of(option: str) -> list[str]:
    """Loss types that use an option, sorted; all of them if none lists it."""
    listed = sorted(name for name, kind in LOSS_TYPES.items() if option in kind.options)
    return listed or sorted(LOSS_TYPES)
