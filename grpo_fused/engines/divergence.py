"""Divergence from another head, beside the scores of a chunk: all of the vocabulary, in torch or C++.

With r_j = log p_j - log q_j, both KL and JSD are sums of terms that are 0 with slope 0 at r = 0:

    KL(p || q) = sum_j p_j r_j = sum_j p_j (r_j + exp(-r_j) - 1)        since the probabilities sum to 1
    JSD        = -sum_j p_j ((1 - beta + beta e_j) log(1 - beta + beta e_j) - beta e_j log e_j),   e_j = exp(-r_j)

So an error common to all r_j (that of the normalisers) has no effect of first order, and a divergence of 1e-4 keeps its
digits. r comes from differences of logits. exp is only taken of -|r|, times the larger of p_j and q_j.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from grpo_fused.call.calls import NO_GRADIENT, LMHead
from grpo_fused.call.layout import values_are_checked
from grpo_fused.engines import cpu_library, libraries
from grpo_fused.engines.base import MANY, Gradients, Tokens, Work, even_chunks, flat_view, no_coefficients
from grpo_fused.engines.chunked import ChunkedEngine, Slab
from grpo_fused.engines.gradients import GradientSums, fp16_scale, slab_rows
from grpo_fused.engines.products import gradient_dtype, rounded_bias, rounded_weight
from grpo_fused.engines.rows import RowWork, TorchRows, chain_, gradient_of_scores, z_
from grpo_fused.kernels.row_types import LOWEST_LOG_P, Rows, Statistics


def torch_rows(device: torch.device, dtype: torch.dtype) -> RowWork:
    """The row work of divergences, on every device."""
    return TorchRows()


class DivergenceEngine(ChunkedEngine):
    """`chunked`, which also computes the divergence of each token from another head. One for each call.

    One product more than `ChunkedEngine`, that of the other head; its logits are a second chunk in memory.
    """

    def __init__(
        self,
        hidden_states: Tensor | None,
        head: LMHead | None,
        divergence: Tensor,
        weights: Tensor,
        *,
        kind: str = "reverse_kl",
        beta: float = 0.5,
        top_k: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """
        Args:
            hidden_states, head: of the other head, at the tokens of the policy's; None if `top_k` is given.
            divergence: [N], where that of each row that is worked on is written.
            weights: [N] dL/dD, 0 where masked.
            kind, beta: see `fused_linear_divergence`.
            top_k: ids and log-probs of a teacher, [.., K] each.
        """
        super().__init__(torch_rows, heads=2 if top_k is None else 1)
        self.divergence, self.weights, self.kind, self.beta = divergence, weights, kind, beta
        self.top_k = None if top_k is None else tuple(x.flatten(0, -2) for x in top_k)
        self.other: tuple[Tensor, LMHead] | None = None
        if hidden_states is not None and head is not None:
            self.other = flat_view(hidden_states), rounded_weight(rounded_bias(head))

    def score(self, work: Work) -> Statistics:
        """See `Engine.score`; the divergence of the rows, too."""
        rows = self.chunk_rows(work.head, MANY, work.max_scratch_bytes)
        return self.fused(replace(work, needs=NO_GRADIENT, chunks=even_chunks(len(work.rows), rows)))[0]

    def fused(self, work: Work) -> tuple[Statistics, Gradients]:
        """See `Engine.fused`; `no_coefficients` mean that the divergence is all there is."""
        tokens, needs, head = work.tokens, work.needs, rounded_weight(work.head)
        # eight temporaries at most; the plan counts three for each head
        plan = self._plan(head, work.one_chunk_of, work.max_scratch_bytes)
        block_rows = max(plan.block_rows // 2, 1)
        if tokens.vocab is not None:  # each block has collectives
            block_rows = tokens.vocab.smallest(block_rows)
        heads = [(head, tokens)]
        if self.other is not None:
            heads.append((self.other[1], tokens._replace(hidden_states=self.other[0])))
        slabs = [Slab(of, slab_rows(work, plan.chunk_rows), block_rows, TorchRows()) for of, _ in heads]
        dtype = GradientSums.weight_dtype(self, work.head, tokens.most_chunks_of, work.max_scratch_bytes)
        sums, scores = GradientSums(head, tokens, needs, dtype), []
        compiled = tokens.vocab is None and self._is_compiled(self.divergence)
        for part, taken in work.parts():
            made = [slab.logits(of, taken) for slab, (_, of) in zip(slabs, heads, strict=True)]
            hidden, chunk = made[0][0], [logits for _, logits in made]
            policy_rows, out = chunk[0], slabs[0].dlogits(len(taken))
            head_statistics = [
                tokens.merged(taken, _statistics(x, work.with_entropy and x is policy_rows, compiled)) for x in chunk
            ]
            scores.append(head_statistics[0])
            factor, dlogp, dentropy, scale = None, None, None, None
            if needs.any():
                factor = self.weights[taken]
                in_fp16 = gradient_dtype(head) == torch.float16
                bound = factor.abs()
                if in_fp16 and self.kind == "reverse_kl":
                    bound = bound * self._largest_slopes(chunk, head_statistics, block_rows, tokens)
                if work.coefficients is not no_coefficients:
                    _, dlogp, dentropy, _ = work.coefficients(part, head_statistics[0])
                    bound = bound + dlogp.abs()
                if in_fp16:
                    scale = fp16_scale(head, policy_rows.transform.temperature, bound, dentropy)
            in_place = compiled and dentropy is None  # without temporaries, unless there is a softcap
            size = len(taken) if in_place and head.softcap is None else block_rows
            for block in even_chunks(len(taken), max(size, 1)):
                parts = [Rows(x.raw[block], x.targets[block], x.transform.select(block)) for x in chunk]
                stats = [x.select(block) for x in head_statistics]
                slopes = [None if x is None else x[block] for x in (factor, dlogp, dentropy)]
                if in_place:
                    value, dz = self._compiled_derivative(parts, stats, *slopes[:2])
                else:
                    value, dz = self._derivative(taken[block], tokens, parts, stats, *slopes)
                self.divergence[taken[block]] = value
                if factor is not None:
                    dz = chain_(dz, parts[0].raw, parts[0].transform)
                    out[block].copy_(dz if scale is None else dz.mul_(scale))
            slabs[0].clear_padding(len(taken))
            if needs.any():
                sums.add(taken, hidden, out, scale)
        return Statistics.concatenate(scores, head.weight, work.with_entropy), sums.result()

    def _largest_slopes(
        self, chunk: list[Rows], statistics: list[Statistics], block_rows: int, tokens: Tokens
    ) -> Tensor:
        """[K] bounds of |dD/dz| in KL(p || q): D + 1, hundreds where q is near 0. In the other kinds it stays small."""
        values = []
        for block in even_chunks(len(chunk[0].raw), block_rows):
            (z, w), (ours, theirs) = [x.raw[block] for x in chunk], [x.select(block) for x in statistics]
            values.append(self._divergence(z, w.clone(), ours, theirs, tokens)[0])
        return torch.cat(values) + 1.0

    def _is_compiled(self, like: Tensor) -> bool:
        """Whether the C++ library does the row work: the two KL divergences of fp32 rows on a CPU."""
        fits = like.dtype == torch.float32 and like.device.type == "cpu" and self.top_k is None
        return fits and self.kind != "jsd" and libraries.cpu_available() is None

    def _compiled_derivative(
        self, rows: list[Rows], statistics: list[Statistics], factor: Tensor | None, dlogp: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(D [R], dL/dz [R, V]); the latter is in the memory of the other head's logits."""
        tables = [x.table for x in statistics]
        slopes = [None if x is None else x.to(torch.float32).contiguous() for x in (factor, dlogp)]
        z, w = rows[0].raw, rows[1].raw
        value = z.new_empty(len(z))
        cpu_library.call("logit_divergence", z, w, *tables, rows[0].targets, self.kind == "forward_kl", *slopes, value)
        return value, w

    def _derivative(
        self,
        where: Tensor,
        tokens: Tokens,
        rows: list[Rows],
        statistics: list[Statistics],
        factor: Tensor | None,
        dlogp: Tensor | None,
        dentropy: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The same in torch operations; `where` [R] are the positions of the rows."""
        z, stats, vocab = rows[0].raw, statistics[0], tokens.vocab
        if self.top_k is not None:
            ids, log_q = (x[where] for x in self.top_k)
            value, dz = _top_k(ids, log_q, where, z, stats, tokens)
        else:
            value, dz = self._divergence(z, rows[1].raw, statistics[0], statistics[1], tokens)
        if factor is None:
            return value, dz
        # dz sums to 0; written so at the maximum, this keeps a confident token accurate
        largest, at = z.max(1, keepdim=True)
        has = torch.ones_like(at, dtype=torch.bool) if vocab is None else vocab.first_of(largest == stats.max[:, None])
        own = dz.gather(1, at)
        rest = tokens.summed(dz.scatter_(1, at, torch.where(has, 0.0, own)).sum(1, keepdim=True))
        dz.scatter_(1, at, torch.where(has, -rest, own)).mul_(factor.unsqueeze(1))
        if dlogp is not None:
            dz.add_(gradient_of_scores(z, rows[0].targets, stats, dlogp, dentropy))
        return value, dz

    def _divergence(
        self, z: Tensor, w: Tensor, ours: Statistics, theirs: Statistics, tokens: Tokens
    ) -> tuple[Tensor, Tensor]:
        """(D [R], dD/dz [R, V]) from z of ours and w of the other head ([R, V] each); `w` is overwritten."""
        forward, jsd = self.kind == "forward_kl", self.kind == "jsd"
        offset = ((ours.max - theirs.max) + (ours.log_sum - theirs.log_sum)).unsqueeze(1)
        r = (w - z).add_(offset) if forward else (z - w).sub_(offset)  # of the first distribution to the second
        # entries that are 0 in both count 0, and so does log 0 of the first; a 0 in the second only is infinite in a KL
        r.nan_to_num_(nan=0.0, posinf=-LOWEST_LOG_P if jsd else math.inf, neginf=LOWEST_LOG_P)
        p = _log_probs(z, ours).exp_()
        top = torch.maximum(p, _log_probs(w, theirs).exp_(), out=w)
        if jsd:
            a = r.abs()
            u = torch.expm1(-a)
            b = (r >= 0).to(z.dtype).mul_(2.0 * self.beta - 1.0).add_(1.0 - self.beta)
            rest = a.mul_(u + 1.0).mul_(b)
            bu = u.mul_(b)
            log_mean = torch.log1p(bu)
            value = rest.addcmul_(log_mean, bu.add_(1.0)).mul_(top).sum(1).neg_()
            x = r.clamp_(max=0.0).sub_(log_mean).mul_(p).mul_(1.0 - self.beta)
        else:
            v = r.abs().neg_().expm1_().copysign_(r)  # (first - second) / top
            value = (r - v).addcmul_(r.clamp(max=0.0), v).mul_(top).sum(1)
            x = v.mul_(top).neg_() if forward else r.mul_(p)
        value, sum_of_x = tokens.summed(torch.stack([value, x.sum(1)]))
        # dz sums to 0: this removes an error common to all r
        return value, x.addcmul_(p, sum_of_x.unsqueeze(1), value=-1.0)


def _statistics(rows: Rows, with_entropy: bool, compiled: bool) -> Statistics:
    """Turns logits into z."""
    if not compiled:
        return TorchRows().statistics(rows, with_entropy=with_entropy)
    z_(rows.raw, rows.transform)
    table = rows.raw.new_zeros((4, len(rows.raw)))
    cpu_library.call("logit_statistics", rows.raw, rows.targets, with_entropy, table)
    return Statistics.of(table, with_entropy)


def check_finite(divergence: Tensor, kind: str) -> None:
    """Raise if a divergence is infinite or NaN: on the CPU, elsewhere with `GRPO_FUSED_DEBUG=1`."""
    if values_are_checked(divergence.device) and not divergence.isfinite().all():
        raise ValueError(
            "hidden states and heads must be finite on active tokens, and in a KL the second distribution must not be "
            f"0 where the first is not; got {int((~divergence.isfinite()).sum())} tokens whose {kind} is inf or NaN"
        )


def _log_probs(z: Tensor, statistics: Statistics) -> Tensor:
    return (z - statistics.max.unsqueeze(1)).sub_(statistics.log_sum.unsqueeze(1))


def _top_k(
    ids: Tensor, log_q: Tensor, where: Tensor, z: Tensor, statistics: Statistics, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """(D [R], dD/dz [R, V]) from z [R, V] and the teacher's top K ([R, K] each) at the positions `where` [R]."""
    log_q = torch.where(tokens.mask[where].unsqueeze(1), log_q.to(z.dtype), -math.inf)
    q = log_q.exp()
    total = q.sum(1, keepdim=True)
    ids = ids.to(torch.int64) - (0 if tokens.vocab is None else tokens.vocab.first)
    here = (ids >= 0) & (ids < z.shape[1])
    ids, q = torch.where(here, ids, 0), torch.where(here, q, 0.0)
    log_p = _log_probs(z, statistics)
    value = tokens.summed(torch.where(q > 0, q * (log_q - log_p.gather(1, ids)), 0.0).sum(1))
    return value, log_p.exp_().mul_(total).scatter_add_(1, ids, -q)
