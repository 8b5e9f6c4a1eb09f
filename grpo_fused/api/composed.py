"""Heads of several parts as one product.

An adapter adds u B^T to the logits, u = scale * dropout(h) A^T. The engines multiply hidden states [h, u] by the weight
[W, B]: W is frozen (`LMHead.base`), and only the columns of B get a gradient there. u is made by plain torch, whose
autograd makes dA, and dH of the low-rank part.

A narrow product would round u and B to 8 bits, which costs the log-probs 1e-3 nats. So they are given as two terms
each, u = u' + u'' and B = B' + B'': u B^T = u' B'^T + u'' B'^T + u' B''^T to 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import dropout

from grpo_fused.call.calls import LMHead
from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.layout import active_tokens


def composed(
    head: LMHead,
    weight: Tensor | QuantizedWeight,
    adapters: Sequence[HeadAdapter],
    hidden_states: Tensor,
    mask: Tensor | None,
) -> tuple[LMHead, Tensor]:
    """The head of a checked weight and its adapters, and the hidden states that it multiplies."""
    if isinstance(weight, Tensor) and not adapters:
        return head, hidden_states
    compute, wide, scale = head.compute_dtype, head.statistics_dtype, None
    own = weight.dtype if isinstance(weight, Tensor) else hidden_states.dtype
    if head.bias is not None and compute != torch.promote_types(hidden_states.dtype, own):  # see `rounded_bias`
        head = head._replace(bias=head.operand(head.bias))
    if isinstance(weight, QuantizedWeight):
        if weight.scales_rows:
            scale = weight.scale.detach().to(wide).reshape(-1)
            if compute == torch.float16:  # its range holds neither B / scale nor dlogits * scale
                compute = wide
                head = head._replace(compute_dtype=wide)
        else:
            head = head._replace(
                group_scale=weight.scale.detach().to(wide).reshape(len(weight.values), -1).contiguous(),
                codes=None if weight.codes is None else weight.codes.detach().to(wide).contiguous(),
            )
        weight = weight.values
    states, columns = [hidden_states.to(compute)], []
    if adapters and mask is not None:  # a masked state may be anything, also NaN, which 0 does not remove from dA
        hidden_states = torch.where(active_tokens(mask, mask).unsqueeze(-1), hidden_states, 0.0)
    for adapter in adapters:
        a, b = adapter.a.to(wide), adapter.b.to(wide)
        with torch.autocast(hidden_states.device.type, enabled=False):
            low_rank = adapter.scale * (dropout(hidden_states.to(wide), adapter.dropout) @ a.T)
            if scale is not None:
                b = b / scale.unsqueeze(1)
        is_exact = scale is None and adapter.b.dtype == compute
        rest_of_states, rest_of_b = _rest(low_rank, compute), None if is_exact else _rest(b, compute)
        terms = [(low_rank, b), (rest_of_states, b), (low_rank, rest_of_b)]
        for x, y in terms:
            if x is not None and y is not None:
                states.append(x.to(compute))
                columns.append(y.to(compute))
    none = hidden_states.new_empty((len(weight), 0), dtype=compute)
    head = head._replace(weight=torch.cat(columns, dim=1) if columns else none, base=weight, row_scale=scale)
    return head, torch.cat(states, dim=-1)


def _rest(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What rounding to `dtype` takes from x, if anything. Detached: the rounded term carries the whole gradient."""
    if dtype == x.dtype:
        return None
    x = x.detach()
    return x - x.to(dtype).to(x.dtype)
