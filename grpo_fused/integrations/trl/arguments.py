"""The options of `FusedGRPOTrainer` on TRL's command line and in its config files."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from grpo_fused.integrations.trl.head import HeadImpl


@dataclass
class FusedGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """`trl.GRPOConfig`, and the arguments that `FusedGRPOTrainer` has beside TRL's trainer."""

    impl: HeadImpl = field(default="auto", metadata={"help": "Engine of the lm-head and the loss."})
    max_scratch_bytes: int | None = field(default=None, metadata={"help": "Temporary memory of the lm-head, in bytes."})
    exact_truncation: bool = field(
        default=False,
        metadata={
            "help": "With top_k, top_p or min_p, score tokens by the distribution that they leave, which was sampled."
        },
    )

    def fused_options(self) -> dict[str, Any]:
        """These arguments, and none of TRL's."""
        names = {option.name for option in fields(self)} - {option.name for option in fields(GRPOConfig)}
        return {name: getattr(self, name) for name in names}
