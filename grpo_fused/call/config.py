"""The options of a GRPO loss, as one frozen dataclass that all layers share."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

from grpo_fused.call.loss_types import LOSS_TYPES, LossType, users_of
from grpo_fused.call.options import check_options, option

LossTypeName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gmpo"]
ImportanceSamplingLevel = Literal["token", "sequence", "sequence_token"]
KLEstimator = Literal["k1", "k2", "k3", "exact"]


@dataclass(frozen=True, kw_only=True, repr=False)
class GRPOLossConfig:
    """Options of the GRPO loss; names and defaults follow TRL 1.16's `GRPOConfig`.

    An option that the loss type does not use must keep its default: another value is an error, it is never ignored.

    Args:
        loss_type: Objective and aggregation: `grpo`, `bnpo`, `dr_grpo`, `dapo`, `luspo` (PPO's clipped objective under
            five ways of averaging), `cispo`, `sapo`, `vespo` or `gmpo`.
        beta: Weight of the KL penalty towards the reference policy, >= 0. 0 needs no reference.
        epsilon: Lower clip distance: ratios are clipped at `1 - epsilon`. Default 0.2; `gmpo` clips the log-ratio and
            defaults to 0.4.
        epsilon_high: Upper clip distance, default `epsilon`. `cispo` requires it and reads it as the bound on the
            ratio itself.
        delta: Upper bound on the ratio before clipping (INTELLECT-2's two-sided clip), > 0.
        dual_clip: Bound > 1 on the loss of tokens with A < 0, `-dual_clip * A` (verl's `clip_ratio_c`). Excludes
            `delta`.
        importance_sampling_level: `token` (a ratio for each token), `sequence` (GSPO: one for each sequence, the
            geometric mean) or `sequence_token` (the value of `sequence`, with each token's own gradient).
        kl_estimator: `k1`, `k2` or `k3` (Schulman, "Approximating KL divergence") from the log-prob of the token; or
            `exact`, the KL over the whole vocabulary, from hidden states and head of the reference
            (`fused_linear_grpo_loss` only).
        use_bias_correction_kl: Multiply the KL estimate by the importance ratio (DeepSeek-V3.2); on, as TRL since 1.10.
            `gmpo` has no corrected form and never applies it. Nor does `exact`, which does not depend on the token
            that was sampled.
        max_completion_length: The length, in tokens, that `dr_grpo` divides by; it requires this option.
        sapo_temperature_pos: SAPO's gate temperature for tokens with A > 0.
        sapo_temperature_neg: SAPO's gate temperature for the other tokens.
        vespo_k_pos: VESPO's gamma shape k where A >= 0.
        vespo_lambda_pos: VESPO's gamma rate where A >= 0; below 1e-4 it counts as 1e-4.
        vespo_k_neg: VESPO's gamma shape k where A < 0.
        vespo_lambda_neg: VESPO's gamma rate where A < 0; below 1e-4 it counts as 1e-4.
        off_policy_mask_threshold: Remove the policy term of a sequence with A < 0 whose mean `sampling - current`
            log-prob is above this, in nats (DeepSeek-V3.2's off-policy sequence mask).
        top_entropy_quantile: Keep the policy term of this share of the tokens of a call, those of highest entropy; 1 is
            off.
        entropy_coef: Weight of the entropy bonus subtracted from the loss, in 1/nats: a mean over the tokens of a call,
            which `num_items_in_batch` does not divide.

    Raises:
        ValueError: An option is unknown, out of range, missing, or not used by the loss type.
        TypeError: An option has the wrong type.
    """

    loss_type: LossTypeName = "dapo"
    beta: float = option(0.0)
    epsilon: float = option(LOSS_TYPES["dapo"].epsilon, positive=True)
    epsilon_high: float | None = option(None, positive=True)
    delta: float | None = option(None, positive=True)
    dual_clip: float | None = None
    importance_sampling_level: ImportanceSamplingLevel = "token"
    kl_estimator: KLEstimator = "k3"
    use_bias_correction_kl: bool = True
    max_completion_length: int | None = option(None, positive=True)
    sapo_temperature_pos: float = option(1.0, positive=True)
    sapo_temperature_neg: float = option(1.05, positive=True)
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = option(1.0, most=1)
    entropy_coef: float = 0.0
    encoded: ClassVar[str]
    """the options as a Python literal, the form in which a `torch.library` operator takes them; made once, since
    torch.compile cannot trace the repr of a float"""

    def __post_init__(self) -> None:
        check_options(self)
        # not set, perhaps in a config that it copies
        if any(self.epsilon is kind.epsilon for kind in LOSS_TYPES.values()):
            object.__setattr__(self, "epsilon", self.kind.epsilon)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1; got {self.dual_clip}")
        if self.dual_clip is not None and self.delta is not None:
            raise ValueError(f"dual_clip ({self.dual_clip}) and delta ({self.delta}) exclude each other; set one")
        self._check_loss_type_uses_options()
        object.__setattr__(self, "encoded", repr(vars(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.epsilon is self.kind.epsilon:
            del options["epsilon"]
        return partial(type(self), **options), ()

    def __repr__(self) -> str:
        """The options that are not the defaults."""
        changed = [f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join(changed)})"

    @property
    def has_one_value_a_sequence(self) -> bool:
        """Whether the metrics of the loss type, such as clip ratios, are means over sequences."""
        return self.importance_sampling_level == "sequence" or self.kind.one_value_a_sequence

    @property
    def kind(self) -> LossType:
        """The row of its loss type in the table."""
        return LOSS_TYPES[self.loss_type]

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(encoded: str) -> GRPOLossConfig:
        """The configuration whose `encoded` this is."""
        return GRPOLossConfig(**ast.literal_eval(encoded))

    @property
    def epsilon_upper(self) -> float:
        """`epsilon_high`, or `epsilon` where it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_batch(self) -> bool:
        """Whether a token's gradient needs log-probs or entropies of the whole batch."""
        return self.top_entropy_quantile < 1.0

    @property
    def needs_sequence(self) -> bool:
        """Whether a token's gradient needs the log-probs of its whole sequence."""
        return (
            self.importance_sampling_level != "token"
            or self.kind.kernel is None
            or self.off_policy_mask_threshold is not None
        )

    @property
    def token_alone(self) -> bool:
        """Whether a token's gradient depends on that token only."""
        return not (self.needs_batch or self.needs_sequence)

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss itself (not only its metrics) uses entropies."""
        return self.entropy_coef != 0.0 or self.top_entropy_quantile < 1.0

    def _check_loss_type_uses_options(self) -> None:
        for f in fields(self):
            users, value = users_of(f.name), getattr(self, f.name)
            if self.loss_type not in users and value != f.default:
                raise ValueError(
                    f"{f.name}={value!r} is not used by loss_type={self.loss_type!r} "
                    f"(only by {', '.join(users)}); leave it at {f.default!r}"
                )
            if f.name == self.kind.requires and value is None:
                raise ValueError(f"loss_type={self.loss_type!r} requires {f.name}{self.kind.why}; got None")
