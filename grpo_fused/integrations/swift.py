"""ms-swift's GRPO on our head: a file of two lines, named on its command line.

    from grpo_fused.integrations.swift import patch_swift
    patch_swift()

`swift rlhf --rlhf_type grpo --external_plugins that_file.py ...`
"""

from __future__ import annotations

from typing import Any

from grpo_fused.heads.patches import Patches
from grpo_fused.integrations.releases import check_release
from grpo_fused.integrations.trl import FusedLogProbFunction, patch_trl, unpatch_trl
from grpo_fused.integrations.trl.head import active_head
from grpo_fused.integrations.trl.logits import stop_at_the_head

SUPPORTED = {"4.6": "_get_per_token_logps_and_entropies of GRPOTrainer"}
"""Release (all patch releases of it) to what of it is replaced."""

_patches = Patches()


def patch_swift(head: type[FusedLogProbFunction] = FusedLogProbFunction) -> None:
    """Score tokens by our kernels in ms-swift's GRPO trainer, until `unpatch_swift`; includes `patch_trl`.

    Log-probs, also old and reference ones, and entropies come without logits. The loss stays ms-swift's, with all its
    options: four head products.

    Args:
        head: `FusedLogProbFunction`, or a subclass with another `impl` or `max_scratch_bytes`.

    Raises:
        ImportError: ms-swift is not installed, or is no release of `SUPPORTED`.
        ValueError: Under sequence parallelism, when tokens are scored: it divides the positions in its own way.
    """
    global _patches
    check_release("ms-swift", SUPPORTED)
    from swift.rlhf_trainers import grpo_trainer

    trainer = grpo_trainer.GRPOTrainer
    replaced = (*stop_at_the_head(grpo_trainer, trainer, active_head), (trainer, "_get_logps_via_sp", _refuse))
    patch_trl(head)
    if not _patches.names:
        _patches = Patches(*replaced)


def _refuse(trainer: Any, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"patch_swift scores whole sequences; sequence_parallel_size is {trainer.template.sequence_parallel_size}: set "
        "it to 1, or leave patch_swift out"
    )


def unpatch_swift() -> None:
    """Put ms-swift's and TRL's own functions back."""
    _patches.undo()
    unpatch_trl()
