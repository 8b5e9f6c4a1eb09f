"""The divergence of TRL's DistillationTrainer, from hidden states and the two heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fused.api.divergence import fused_linear_divergence
from grpo_fused.integrations.trl.adapters import with_adapters


def fused_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
    *,
    max_scratch_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stands for `trl.trainer.distillation_trainer._chunked_divergence_loss` (1.16): its arguments and results.

    Args:
        student_hidden_states: [B, T, H]
        teacher_hidden_states: [B, T, H']
        student_lm_head_weight: [V, H]
        teacher_lm_head_weight: [V, H']
        completion_mask: [B, T]
        beta: 0 for KL(teacher, student), 1 for KL(student, teacher), else the teacher's weight in the JSD's mixture
        num_items_in_batch: what the sum over tokens is divided by, default the active tokens of the call
        student_lm_head_bias, teacher_lm_head_bias: [V] or None
        student_logit_scale, teacher_logit_scale: what the logits are multiplied by
        student_final_logit_softcapping, teacher_final_logit_softcapping: softcap, after the scale
        temperature: what the logits of both are divided by
        max_scratch_bytes: see `fused_linear_divergence`

    Returns:
        the 0-d loss, differentiable in the student's tensors; the sum of the student's entropies and the number of
        active tokens, for the metrics

    Raises:
        ValueError: A head that FSDP2 or DeepSpeed ZeRO-3 has partitioned; and as `fused_linear_divergence`.
    """
    for name, weight in (("student", student_lm_head_weight), ("teacher", teacher_lm_head_weight)):
        if isinstance(weight, torch.distributed.tensor.DTensor) or hasattr(weight, "ds_status"):
            raise ValueError(
                f"the {name}'s head is partitioned by FSDP2 or DeepSpeed ZeRO-3, which has not been run with this "
                "divergence: call unpatch_trl() before DistillationTrainer trains"
            )
    student_lm_head_bias, adapters = with_adapters(student_lm_head_bias)
    mask = completion_mask != 0
    active = mask.sum()
    divisor = active if num_items_in_batch is None else num_items_in_batch
    kind: dict[str, Any] = {0.0: {"kind": "forward_kl"}, 1.0: {"kind": "reverse_kl"}}.get(
        beta, {"kind": "jsd", "beta": beta}
    )
    out = fused_linear_divergence(
        student_hidden_states,
        student_lm_head_weight,
        teacher_hidden_states,
        teacher_lm_head_weight,
        mask,
        weights=mask.to(torch.float32) / (divisor.to(mask.device) if isinstance(divisor, Tensor) else divisor),
        temperature=temperature,
        lm_head_bias=student_lm_head_bias,
        lm_head_adapter=adapters,
        logit_scale=student_logit_scale,
        softcap=student_final_logit_softcapping,
        other_lm_head_bias=teacher_lm_head_bias,
        other_logit_scale=teacher_logit_scale,
        other_softcap=teacher_final_logit_softcapping,
        max_scratch_bytes=max_scratch_bytes,
        **kind,
    )
    return out.loss, out.entropies.sum(), active
