"""The options of `FusedGRPOTrainer` on TRL's command line and in its config files."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig

from grpo_fused.engines import Impl


@dataclass
class FusedGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """`trl.GRPOConfig`, and the arguments that `FusedGRPOTrainer` has beside TRL's trainer."""

    impl: Impl = field(default="auto", metadata={"help": "Engine of the lm-head and the loss."})
    max_scratch_bytes: int | None = field(default=None, metadata={"help": "Temporary memory of the lm-head, in bytes."})
    exact_truncation: bool = field(
        default=False,
        metadata={
            "help": "With top_k, top_p or min_p, score tokens by the distribution that they leave, which was sampled."
        },
    )
