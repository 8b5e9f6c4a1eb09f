"""The loss types, as data: the rule of a token's loss, how tokens are averaged, and the options it uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossType:
    """One of the loss types."""

    name: str
    rule: str
    """clip, cispo, sapo, vespo or gmpo"""
    average: str
    """sequences: of means over them; tokens: active ones; length: `max_completion_length`; sum: of sequences' sums;
    items: `num_items_in_batch`"""
    options: frozenset[str]
    """fields of `GRPOLossConfig` that not all loss types use, and this one does"""


_CLIP = frozenset(
    {"epsilon", "epsilon_high", "delta", "dual_clip", "importance_sampling_level", "off_policy_mask_threshold"}
)
_SOFT = frozenset({"importance_sampling_level", "off_policy_mask_threshold"})
_VESPO = frozenset({"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"})

LOSS_TYPES = {
    record.name: record
    for record in (
        LossType(name="grpo", rule="clip", average="sequences", options=_CLIP),
        LossType(name="bnpo", rule="clip", average="tokens", options=_CLIP),
        LossType(name="dr_grpo", rule="clip", average="length", options=_CLIP | {"max_completion_length"}),
        LossType(name="dapo", rule="clip", average="items", options=_CLIP),
        LossType(name="luspo", rule="clip", average="sum", options=_CLIP),
        LossType(name="cispo", rule="cispo", average="items", options=_SOFT | {"epsilon_high"}),
        LossType(
            name="sapo",
            rule="sapo",
            average="sequences",
            options=_SOFT | {"sapo_temperature_pos", "sapo_temperature_neg"},
        ),
        LossType(name="vespo", rule="vespo", average="items", options=_SOFT | _VESPO),
        LossType(name="gmpo", rule="gmpo", average="sequences", options=frozenset({"epsilon", "epsilon_high"})),
    )
}
