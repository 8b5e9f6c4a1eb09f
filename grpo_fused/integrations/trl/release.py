"""What differs between the releases of TRL that the integration serves."""

from __future__ import annotations

from grpo_fused.integrations.releases import check_release

_LOGITS = (
    "_get_per_token_logps_and_entropies of GRPO and RLOO, _compute_loss and its like of DPO and KTO; "
    "selective_log_softmax and its like"
)
SUPPORTED = {
    "0.29": _LOGITS,
    **{f"1.{minor}": _LOGITS for minor in range(15)},
    "1.15": "the same as in 1.16; without Triton TRL itself has no such functions, ours run",
    "1.16": "trl.trainer.utils._ChunkedLogProbFunction, distillation_trainer._chunked_divergence_loss",
}
"""Release (all patch releases of it) to what of it is replaced."""

RELEASE = check_release("trl", SUPPORTED, stacklevel=4)
FUSED_HEAD = (1, 15)
"""Models score tokens in their forward, by `_ChunkedLogProbFunction`. Before, trainers do by functions of logits, and
with `use_liger_kernel` in another way: by Liger's loss up to 1.13, by a function of hidden states in 1.14."""
WINDOWS = (1, 10)
"""`num_items_in_batch` is scaled to a window of accumulation, the entropy bonus is a mean whatever the loss type, and
`luspo` does not count padding."""
GMPO = (1, 7)
"""`trl.experimental.gmpo` exists."""
SCRIPTS = (1, 0)
"""The command line reads the options of a script when it starts the script."""
CONTINUOUS_BATCHING = ("use_transformers_continuous_batching", "use_transformers_paged")
"""From 1.7 on, and before."""
