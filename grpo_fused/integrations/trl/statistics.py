"""Statistics of the softmax that TRL logs for some of its trainers, none of them differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fused.call.calls import LogprobsCall
from grpo_fused.call.layout import blocks
from grpo_fused.engines import products
from grpo_fused.engines.rows import z_
from grpo_fused.engines.scratch import scratch_budget

_TEMPORARIES = 3  # z, its exponentials, and what is made of them


@torch.no_grad()
def extra_statistics(call: LogprobsCall, names: Sequence[str]) -> dict[str, Tensor]:
    """Each of `names` as [N]: `log_sum_sq_probs`, `mean_logits` (fp32), `is_top1`, `argmax`; one head product.

    With z the logits after scale, cap and temperature and p their softmax: log sum_j p_j^2; the mean of z_j; whether
    the target is the first j where z_j is largest (bool); and that j (int64).
    """
    if not names:
        return {}
    hidden, targets, head = call.hidden_states, call.token_ids, products.rounded_bias(call.lm_head)
    weight, transform = head.weight, products.transform(head, head.temperature)
    head = products.rounded_weight(head)
    budget = scratch_budget(hidden.device, call.run.max_scratch_bytes)
    rows = max(budget // (4 * _TEMPORARIES * max(weight.shape[0], 1)), 1)
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    with torch.autocast(hidden.device.type, enabled=False), products.ieee_products():
        for part in blocks(max(hidden.shape[0], 1), rows):
            block = head.operand(hidden[part])
            z = torch.empty((block.shape[0], weight.shape[0]), dtype=head.statistics_dtype, device=hidden.device)
            products.logits_into(head, z, block)
            z_(z, transform)
            if "mean_logits" in parts:
                parts["mean_logits"].append(z.mean(1))
            if "is_top1" in parts:
                parts["is_top1"].append(z.argmax(1) == targets[part])
            if "argmax" in parts:
                parts["argmax"].append(z.argmax(1))
            if "log_sum_sq_probs" in parts:
                e = z.sub_(z.amax(1, keepdim=True)).exp_()
                parts["log_sum_sq_probs"].append(e.square().sum(1).log() - 2 * e.sum(1).log())
    return {name: torch.cat(values) for name, values in parts.items()}
