"""An objective of `grpo_fused.objectives` as options of a run, in place of a loss type."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo_fused import objectives
from grpo_fused.call.options import check_options, option
from grpo_fused.objectives import Objective
from grpo_fused.rollouts.records import Records

FACTORIES = {
    name: getattr(objectives, name)
    for name in objectives.__all__
    if name.islower() and name not in ("mixture", "rollout_rejection", "rollout_truncation", "token_weights")
}
"""Objectives that are made from options alone."""

OLD, SAMPLED = "old_per_token_logps", "sampling_per_token_logps"
HAS = {"advantages", OLD, SAMPLED, "sampling_alternative_logps"}
"""Inputs that the trainer has, besides the weights."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """An objective, which is averaged over tokens as `loss.loss_type` is.

    Args:
        name: Of `grpo_fused.objectives`: score_centered_tis, reinforce, icepop, ...
        options: Its keyword options. Those of score centering: `support: mask` takes the tokens that top_p, top_k or
            min_p kept, `support: top_k` the sampler's most likely tokens without truncation.
        num_alternatives: K of `support: top_k`; a smaller vocabulary is taken whole.

    Raises:
        ValueError: There is no such objective, it does not have these options, or the trainer lacks one of its inputs.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    num_alternatives: int = option(128, least=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.name not in FACTORIES:
            raise ValueError(f"name must be one of {', '.join(FACTORIES)}; got {self.name!r}")
        made = self.objective
        if missing := sorted((made.needs | made.of_alternatives) - HAS):
            raise ValueError(
                f"name must be of an objective whose inputs the trainer has ({', '.join(sorted(HAS))}); {self.name} "
                f"needs {', '.join(missing)}"
            )
        if made.scope == "batch":
            raise ValueError(
                f"name must be of an objective of scope token or sequence: a rollout is trained on in parts; got "
                f"{self.name}, scope batch"
            )
        if self.records != "top_k" and self.num_alternatives != 128:
            raise ValueError(f"num_alternatives is only read with support top_k; got {self.num_alternatives}")

    @cached_property
    def objective(self) -> Objective:
        """The objective."""
        try:
            return FACTORIES[self.name](**self.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options must be those of {self.name}: {error}; got {self.options}") from error

    @property
    def records(self) -> Records | None:
        """What a rollout must record of the sampler."""
        if self.objective.of_alternatives:
            return self.options.get("support", "mask")  # that of score_centered_ipo
        return "sampled" if SAMPLED in (self.objective.reads or ()) else None
