"""Heads of several parts as one product.

An adapter adds u B^T to the logits, u = scale * dropout(h) A^T. The engines multiply hidden states [h, u] by the weight
[W, B]: W is frozen (`LMHead.base`), and only B gets a gradient there. u, dA and the low-rank part of dH are products
of plain torch.

A narrow product would round u and B to 8 bits, which costs the log-probs 1e-3 nats. So they are taken as two terms
each, u = u' + u'' and B = B' + B'': u B^T = u' B''^T + u' B'^T + u'' B'^T to 16 bits. Those of u are made here, those
of B block by block in the engines (`LMHead.weight_columns`). `native` adds up the terms of u, and multiplies in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from grpo_fused.call.calls import LMHead
from grpo_fused.call.head_parts import HeadAdapter, QuantizedWeight
from grpo_fused.call.layout import active_tokens
from grpo_fused.engines.products import ieee_products, rounded_bias


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
    head = rounded_bias(head)  # before the dtype changes
    if isinstance(weight, QuantizedWeight):
        if weight.scales_rows:
            scale = weight.scale.detach().to(wide).reshape(-1).contiguous()
            if compute == torch.float16:  # its range holds neither B / scale nor dlogits * scale
                compute = wide
                head = head._replace(compute_dtype=wide)
        else:
            head = head._replace(
                group_scale=weight.scale.detach().to(wide).reshape(len(weight.values), -1).contiguous(),
                codes=None if weight.codes is None else weight.codes.detach().to(wide).contiguous(),
            )
        weight = weight.values
    if not adapters:
        none = hidden_states.new_empty((len(weight), 0), dtype=compute)
        return head._replace(weight=none, base=weight, row_scale=scale), hidden_states.to(compute)
    states, kept = hidden_states.to(compute), hidden_states
    if mask is not None:  # a masked state may be anything, also NaN, which 0 does not remove from dA
        kept = torch.where(active_tokens(mask, mask).unsqueeze(-1), hidden_states, 0.0)
    with torch.autocast(hidden_states.device.type, enabled=False):
        parts = [x.scale * _product(dropout(kept.to(wide), x.dropout), x.a.to(wide)) for x in adapters]
        low_rank = torch.cat(parts, dim=-1)
        columns = adapters[0].b  # not a copy, where a single one is held by the dtype of sums
        if len(adapters) > 1 or torch.promote_types(columns.dtype, wide) != wide:
            columns = torch.cat([x.b.to(wide) for x in adapters], dim=1)
    terms = [low_rank.to(compute)]
    if compute != wide:  # the rounded term carries the whole gradient
        # converted again, not the same tensor: then autograd adds their gradients in the wide dtype
        terms += [low_rank.to(compute), (low_rank - terms[0]).detach().to(compute)]
    if compute == torch.float16:  # the numbers of fp16, but gradients in fp32: with a small B that of u underflows
        rounding = [(term.detach().to(wide) - low_rank.detach()) for term in terms[:2]]
        terms = [*(low_rank + x for x in rounding), terms[2].to(wide)]
        states = states.to(wide)
    head = head._replace(weight=columns, base=weight, row_scale=scale, terms=len(terms))
    return head, torch.cat([states, *terms], dim=-1)


def _product(x: Tensor, a: Tensor) -> Tensor:
    """x [..., H] times a^T, a [r, H], in IEEE fp32 (not in a compiled program: Dynamo cannot trace the setting)."""
    return x @ a.T if torch.compiler.is_compiling() else _IEEEProduct.apply(x, a)  # type: ignore[no-any-return]


class _IEEEProduct(torch.autograd.Function):
    """x a^T. Its backward pass, too, does not depend on TF32 or an autocast that is on at that time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        with ieee_products():
            return x @ a.T

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, a = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False), ieee_products():
            dx = upstream @ a if ctx.needs_input_grad[0] else None
            rows = upstream.reshape(-1, upstream.shape[-1])  # `flatten` has no form for several upstream gradients
            da = rows.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return dx, da
