"""TRL on our kernels: one line, and the same losses, metrics and weights.

    from grpo_fused.integrations.trl import patch_trl
    patch_trl()                       # GRPO, RLOO, DPO, KTO and SFT trainers score tokens by `fused_linear_logprobs`,
                                      # the distillation trainer takes `fused_linear_divergence`

    from grpo_fused.integrations.trl import FusedGRPOTrainer
    trainer = FusedGRPOTrainer(...)   # in place of GRPOTrainer: loss and gradients in one pass over the head

Releases of TRL whose fused head is known: see `SUPPORTED`. Importing this with another one raises.
"""

from __future__ import annotations

from grpo_fused.integrations.releases import check_release

SUPPORTED = {
    "1.15": "the same; without Triton TRL itself has no such functions, ours run",
    "1.16": "trl.trainer.utils._ChunkedLogProbFunction, distillation_trainer._chunked_divergence_loss",
}
"""Release (all patch releases of it) to what of it is replaced."""

check_release("trl", SUPPORTED)

from grpo_fused.integrations.trl.head import FusedLogProbFunction, patch_trl, unpatch_trl, use_fused_head  # noqa: E402
from grpo_fused.integrations.trl.trainer import FusedGMPOTrainer, FusedGRPOTrainer  # noqa: E402

__all__ = [
    "SUPPORTED",
    "FusedGMPOTrainer",
    "FusedGRPOTrainer",
    "FusedLogProbFunction",
    "patch_trl",
    "unpatch_trl",
    "use_fused_head",
]
