"""TRL on our kernels: one line, and the same losses, metrics and weights.

    from grpo_fused.integrations.trl import patch_trl
    patch_trl()                       # GRPO, RLOO, DPO, KTO and SFT trainers score tokens by `fused_linear_logprobs`,
                                      # the distillation trainer takes `fused_linear_divergence`

    from grpo_fused.integrations.trl import FusedGRPOTrainer
    trainer = FusedGRPOTrainer(...)   # in place of GRPOTrainer: loss and gradients in one pass over the head

Releases of TRL that are known: see `SUPPORTED`. Importing this with another one raises.
"""

from __future__ import annotations

from typing import Any

from grpo_fused.integrations.trl.release import GMPO, RELEASE, SUPPORTED  # first: it refuses other releases

# isort: split
from grpo_fused.integrations.trl.head import FusedLogProbFunction, patch_trl, unpatch_trl, use_fused_head
from grpo_fused.integrations.trl.trainer import FusedGRPOTrainer

__all__ = [
    "SUPPORTED",
    "FusedGMPOTrainer",
    "FusedGRPOTrainer",
    "FusedLogProbFunction",
    "patch_trl",
    "unpatch_trl",
    "use_fused_head",
]
if RELEASE >= GMPO:
    from grpo_fused.integrations.trl.gmpo import FusedGMPOTrainer
else:
    __all__.remove("FusedGMPOTrainer")  # `import *` would ask for it


def __getattr__(name: str) -> Any:
    if name == "FusedGMPOTrainer":
        raise ImportError("FusedGMPOTrainer needs trl 1.7 or later, which has GMPOTrainer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
