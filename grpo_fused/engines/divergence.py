"""Divergence between two heads: token chunk x full vocabulary, by library products and torch operations on any device.

With r_j = log p_j - log q_j, both KL and JSD are sums of terms that are 0 with slope 0 at r = 0:

    KL(p || q) = sum_j p_j r_j = sum_j p_j (r_j + exp(-r_j) - 1)        since the probabilities sum to 1
    JSD        = -sum_j p_j ((1 - beta + beta e_j) log(1 - beta + beta e_j) - beta e_j log e_j),   e_j = exp(-r_j)

So an error common to all r_j (that of the normalisers) has no effect of first order, and a divergence of 1e-4 keeps its
digits. r comes from differences of logits. exp is only taken of -|r|, times the larger of p_j and q_j.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_fused.calls import DivergenceCall
from grpo_fused.engines.base import Gradients, Tokens, even_chunks
from grpo_fused.engines.chunked import _Plan, _Slab
from grpo_fused.engines.gradients import GradientSums, fp16_scale
from grpo_fused.engines.products import Head
from grpo_fused.engines.rows import LOWEST_LOG_P, TorchRows, _chain_
from grpo_fused.kernels.row_types import Rows, Statistics
from grpo_fused.layout import Layout, values_are_checked


def run_divergence(
    call: DivergenceCall, targets: Tensor, layout: Layout, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Gradients]:
    """(loss, divergence [N], entropies [N], gradients): a product for each head, two for the gradients.

    Args:
        call: `head.max_scratch_bytes` is the budget for each head.
        targets: int64 zeros in the shape of the tokens: there are none.
        layout: of the tokens.
        weight_dtype: of dW.
    """
    head, needs, row_work = Head.of(call.head), call.needs, TorchRows()
    heads = [call.head] if call.other_head is None else [call.head, call.other_head]
    tokens, *others = [Tokens.of(x, targets, call.mask, layout, None) for x in heads]
    weights = torch.where(tokens.mask, call.weights.reshape(-1), 0.0).to(head.statistics_dtype)
    if values_are_checked(targets.device) and not weights.isfinite().all():
        raise ValueError("weights must be finite on active tokens; got inf or NaN")
    rows = tokens.mask.nonzero().squeeze(1) if call.head.compact else torch.arange(len(weights), device=targets.device)
    plan = _Plan.of(head, call.head.max_scratch_bytes, lambda device, dtype: TorchRows())
    # eight temporaries at most; `_Plan` counts three for each head
    block_rows, longest = max(plan.block_rows // 2, 1), min(plan.chunk_rows, len(rows))
    slabs = [_Slab(Head.of(x), longest, block_rows, row_work) for x in heads]
    sums = GradientSums(head, tokens, needs, weight_dtype)
    divergence, entropies = torch.zeros_like(weights), torch.zeros_like(weights)
    for taken in rows.split(plan.chunk_rows):
        chunk = [x.logits(of, taken) for x, of in zip(slabs, (tokens, *others), strict=True)]
        out = slabs[0].dlogits(len(taken))
        factor, scale = weights[taken], None
        if head.gradient_dtype == torch.float16:
            scale = fp16_scale(head, chunk[0].transform.temperature, factor, factor)
            factor = factor * scale
        for block in even_chunks(len(taken), block_rows):
            parts = [Rows(x.raw[block], x.targets[block], x.transform.select(block), block_rows) for x in chunk]
            found = [row_work.statistics(x, with_entropy=x is parts[0]) for x in parts]
            z, where = parts[0].raw, taken[block]
            if call.other_ids is not None and call.other_logprobs is not None:
                ids, log_q = (x.flatten(0, -2)[where] for x in (call.other_ids, call.other_logprobs))
                divergence[where], dz = _top_k(ids, log_q, tokens.mask[where], z, found[0])
            else:
                divergence[where], dz = _divergence(call, z, parts[1].raw, *found)
            entropies[where] = found[0].entropy  # type: ignore[assignment]
            at = z.argmax(1, keepdim=True)  # dz sums to 0; this keeps a confident token accurate
            dz.scatter_(1, at, 0.0).scatter_(1, at, -dz.sum(1, keepdim=True))
            if needs.any():
                out[block].copy_(_chain_(dz.mul_(factor[block].unsqueeze(1)), z, parts[0].transform))
        slabs[0].clear_padding(len(taken))
        if needs.any():
            sums.add(taken, out, scale)
    divergence, entropies = (torch.where(tokens.mask, x, 0.0) for x in (divergence, entropies))
    check_finite(divergence, call.kind)
    loss = (weights * divergence).sum(dtype=torch.float64).to(weights.dtype)
    return loss, divergence, entropies, sums.result()


def check_finite(divergence: Tensor, kind: str) -> None:
    """Raise if a divergence is infinite or NaN: on the CPU, elsewhere with `GRPO_FUSED_DEBUG=1`."""
    if values_are_checked(divergence.device) and not divergence.isfinite().all():
        raise ValueError(
            "hidden states and heads must be finite on active tokens, and in a KL the second distribution must not be "
            f"0 where the first is not; got {int((~divergence.isfinite()).sum())} tokens whose {kind} is inf or NaN"
        )


def _log_probs(z: Tensor, found: Statistics) -> Tensor:
    return (z - found.max.unsqueeze(1)).sub_(found.log_sum.unsqueeze(1))


def _divergence(
    call: DivergenceCall, z: Tensor, w: Tensor, ours: Statistics, theirs: Statistics
) -> tuple[Tensor, Tensor]:
    """(D [R], dD/dz [R, V]) from z of ours and w of the other head ([R, V] each); `w` is overwritten."""
    forward, jsd = call.kind == "forward_kl", call.kind == "jsd"
    offset = ((ours.max - theirs.max) + (ours.log_sum - theirs.log_sum)).unsqueeze(1)
    r = (w - z).add_(offset) if forward else (z - w).sub_(offset)  # of the first distribution to the second
    # entries that are 0 in both count 0, and so does log 0 of the first; a 0 in the second only is infinite in a KL
    r.nan_to_num_(nan=0.0, posinf=-LOWEST_LOG_P if jsd else math.inf, neginf=LOWEST_LOG_P)
    p = _log_probs(z, ours).exp_()
    top = torch.maximum(p, _log_probs(w, theirs).exp_(), out=w)
    if jsd:
        a = r.abs()
        u = torch.expm1(-a)
        b = (r >= 0).to(z.dtype).mul_(2.0 * call.beta - 1.0).add_(1.0 - call.beta)
        rest = a.mul_(u + 1.0).mul_(b)
        bu = u.mul_(b)
        log_mean = torch.log1p(bu)
        value = rest.addcmul_(log_mean, bu.add_(1.0)).mul_(top).sum(1).neg_()
        x = r.clamp_(max=0.0).sub_(log_mean).mul_(p).mul_(1.0 - call.beta)
    else:
        v = r.abs().neg_().expm1_().copysign_(r)  # (first - second) / top
        value = (r - v).addcmul_(r.clamp(max=0.0), v).mul_(top).sum(1)
        x = v.mul_(top).neg_() if forward else r.mul_(p)
    # dz sums to 0: this removes an error common to all r
    return value, x.addcmul_(p, x.sum(1, keepdim=True), value=-1.0)


def _top_k(ids: Tensor, log_q: Tensor, mask: Tensor, z: Tensor, found: Statistics) -> tuple[Tensor, Tensor]:
    """(D [R], dD/dz [R, V]) from z [R, V] and the teacher's top K ([R, K] each)."""
    log_q = torch.where(mask.unsqueeze(1), log_q.to(z.dtype), -math.inf)
    q = log_q.exp()
    ids = torch.where(q > 0, ids.to(torch.int64), 0)
    if values_are_checked(z.device) and not (((ids >= 0) & (ids < z.shape[1])).all() and (q.sum(1) <= 1.001).all()):
        raise ValueError(
            f"other_ids must be in [0, {z.shape[1]}), and exponentials of other_logprobs must sum to 1 at most; got "
            f"ids from {int(ids.min())} to {int(ids.max())}, sums up to {float(q.sum(1).max())}"
        )
    log_p = _log_probs(z, found)
    value = torch.where(q > 0, q * (log_q - log_p.gather(1, ids)), 0.0).sum(1)
    return value, log_p.exp_().mul_(q.sum(1, keepdim=True)).scatter_add_(1, ids, -q)
