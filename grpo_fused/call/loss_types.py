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


@dataclass(frozen=True, kw_only=True)
class LossType:
    """One loss type."""

    name: str
    rule: Rule
    """its policy term"""
    average: Average
    """over tokens: the mean over sequences of their means; over all active tokens; over sequences, each divided by
    `max_completion_length`; over sequences of their sums; the sum over `num_items_in_batch`"""
    options: frozenset[str]
    """of `GRPOLossConfig`, those it uses that not every loss type does"""
    requires: str | None = None
    """an option without a default"""
    why: str = ""
    """what it is required for, as the end of a sentence"""
    epsilon: float = 0.2
    """the default"""
    metrics: tuple[str, ...] = _CLIP_RATIOS
    """besides those of all loss types"""
    whole_sequence: bool = False
    """whether the policy term of a token needs its whole sequence, at any level of ratios"""
    one_value_a_sequence: bool = False
    """whether its metrics have one value for each sequence, at any level"""
    takes_ratio: Literal["spread", "token", None] = "spread"
    """`importance_sampling_ratio`: for tokens or sequences, as a factor; for tokens only, in its own way; not at all"""
    masks_inside: bool = False
    """whether `top_entropy_quantile` acts inside its own mean, and not on the policy term"""
    corrects_kl: bool = True
    """whether the KL may be multiplied by the ratio"""
    kernel: int | None = 0
    """its number in row kernels, where a token's loss depends on that token alone; None if it never does"""

    @property
    def takes_items(self) -> bool:
        """Whether it is divided by `num_items_in_batch`."""
        return self.average == "items"


def _clipped(name: str, average: Average, **more: object) -> LossType:
    return LossType(name=name, rule="clip", average=average, **{"options": _CLIP, **more})  # type: ignore[arg-type]


LOSS_TYPES: dict[str, LossType] = {
    kind.name: kind
    for kind in (
        _clipped("grpo", "sequences"),
        _clipped("bnpo", "tokens"),
        _clipped(
            "dr_grpo",
            "length",
            options=_CLIP | {"max_completion_length"},
            requires="max_completion_length",
            why=" (tokens), which it divides by",
        ),
        _clipped("dapo", "items"),
        _clipped("luspo", "sum"),
        LossType(
            name="cispo",
            rule="cispo",
            average="items",
            options=_RATIOS | {"epsilon_high"},
            requires="epsilon_high",
            why=", its bound on the ratio itself",
            metrics=("cispo_clip_ratio",),
            kernel=1,
        ),
        LossType(
            name="sapo",
            rule="sapo",
            average="sequences",
            options=_RATIOS | {"sapo_temperature_pos", "sapo_temperature_neg"},
            metrics=(),
            kernel=2,
        ),
        LossType(
            name="vespo",
            rule="vespo",
            average="items",
            options=_RATIOS | {"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"},
            metrics=("vespo/phi_seq_mean",),
            whole_sequence=True,
            one_value_a_sequence=True,
            takes_ratio="token",
            kernel=None,
        ),
        LossType(
            name="gmpo",
            rule="gmpo",
            average="sequences",
            options=frozenset({"epsilon", "epsilon_high"}),
            epsilon=0.4,
            whole_sequence=True,
            takes_ratio=None,
            masks_inside=True,
            corrects_kl=False,
            kernel=None,
        ),
    )
}


def users_of(option: str) -> list[str]:
    """Loss types that use an option, sorted; all of them if none lists it."""
    listed = sorted(name for name, kind in LOSS_TYPES.items() if option in kind.options)
    return listed or sorted(LOSS_TYPES)
