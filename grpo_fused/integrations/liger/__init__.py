"""Liger's GRPO interfaces on our kernels: change the import, keep the call.

    from grpo_fused.integrations.liger import FusedLinearGRPOLoss as LigerFusedLinearGRPOLoss
    from grpo_fused.integrations.liger import grpo_loss_from_logits as triton_grpo_loss
    from grpo_fused.integrations.liger import (
        FusedLinearScaledCrossEntropyFunction as LigerFusedLinearScaledCrossEntropyFunction,
    )

The interfaces are those of liger-kernel 0.8.5, which need not be installed. Names, argument order, defaults and results
are Liger's. Its defaults are not TRL's: `beta` 0.04 (TRL 0), `use_bias_correction_kl` False (TRL True), and in
`grpo_loss_from_logits` also `temperature` 0.9 and `eps_high` 0.4 (TRL 1.0 and 0.2). For cispo `epsilon_high` is the
bound on the ratio itself, and Liger's default of 0.2 (0.4) clips nearly everything: set it.

Intended differences from Liger:

- logits of bf16 and fp16 models are not rounded before the log-sum-exp (Liger's log-probs are off by up to 0.08 nats);
- luspo is the mean over sequences of their summed losses, masked, as in TRL. Liger weights each token by its sequence's
  length, divides by the padded length and, in `LigerFusedLinearGRPOLoss`, counts masked positions;
- advantages may be `[B, T]`; Liger mixes up the sequences of a chunk if `chunk_size` > 1;
- any number of tokens in a sequence; Liger's kernels stop at 65,535, CUDA's limit on that axis of a grid;
- masked positions add nothing and get no gradient, for any values; log-ratios are clamped at +-20 before they are
  exponentiated, where Liger overflows to inf and NaN;
- a bad token with a ratio between `delta` and 1 + `eps_high` keeps its gradient, which `triton_grpo_loss` drops;
- vespo's `vllm_is_ratio` counts on active tokens only;
- an argument that is set but has no effect gets a warning, once in a process;
- cispo, sapo and vespo work at `importance_sampling_level="sequence"`, too, which Liger refuses.
"""

from __future__ import annotations

from grpo_fused.integrations.liger.fused_linear import FusedLinearGRPOLoss
from grpo_fused.integrations.liger.logits import grpo_loss_from_logits
from grpo_fused.integrations.liger.scaled_cross_entropy import FusedLinearScaledCrossEntropyFunction

__all__ = ["FusedLinearGRPOLoss", "FusedLinearScaledCrossEntropyFunction", "grpo_loss_from_logits"]
