"""The `weights` of objectives: how each loss type averages over tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_fused.call import validation as check
from grpo_fused.call.calls import LossInputs
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import Layout
from grpo_fused.call.options import check_choice
from grpo_fused.objective.batch import TokenBatch

Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


@torch.no_grad()
def token_weights(
    mask: Tensor,
    aggregation: Aggregation,
    *,
    num_items_in_batch: float | Tensor | None = None,
    max_completion_length: int | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The factor on each token's loss that makes the sum over tokens the average of a loss type.

        grpo      1 / (n_b B)                  the mean over sequences of the mean over their n_b tokens
        bnpo      1 / n                        the mean over the n active tokens of the call
        dr_grpo   1 / (B max_completion_length)
        dapo      1 / num_items_in_batch
        luspo     1 / B                        the mean over sequences of the sum over their tokens

    B counts sequences without active tokens, too.

    Args:
        mask: `[B, T]`, or packed `[N]`, bool or 0/1: active tokens.
        aggregation: see above.
        num_items_in_batch: Tokens that `dapo` divides by, > 0; default n. With it, gradients of several calls or
            processes sum to that of all their tokens.
        max_completion_length: Tokens that `dr_grpo` divides by, which requires it, > 0.
        cu_seqlens: `[S + 1]` int32/int64, the offsets of packed sequences; B is then S.
        dtype: Of the result: fp16, bf16, fp32 or fp64.

    Returns:
        Like `mask`, 0 where masked.

    Raises:
        ValueError: shapes, masks or offsets that are wrong, an unknown aggregation, or an option that it does not read.
        TypeError: a wrong type or dtype.

    Source: the averages of `GRPOLossConfig(loss_type=aggregation)`, which follow TRL 1.16.
    """
    check_choice(aggregation, "aggregation", Aggregation)
    if dtype not in check.FLOATS:
        raise TypeError(f"dtype must {check.FLOAT.must}; got {dtype}")
    config = GRPOLossConfig(loss_type=aggregation, max_completion_length=max_completion_length)
    check.check_tokens(mask, "mask", check.ZERO_OR_ONE, cu_seqlens)
    check.check_one_device(mask=mask, cu_seqlens=cu_seqlens)
    layout = Layout.of(mask, cu_seqlens)
    items = check.as_num_items(num_items_in_batch, mask.device)
    inputs = LossInputs(torch.zeros(layout.num_sequences, 1, device=mask.device), mask, num_items_in_batch=items)
    check.check_loss_inputs(inputs, layout, config)
    check.check_loss_values(inputs, layout)
    return TokenBatch.build(inputs, layout, config, dtype).weight.view(mask.shape)
