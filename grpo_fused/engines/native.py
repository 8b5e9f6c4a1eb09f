"""The C++ engine of the CPU: three head products, four if coefficients need the scores of the whole batch first.

Scoring stores the exponentials of the logits in the memory that dW will be written to: that of a bf16 head holds those
of H tokens. The rest goes to scratch, and what does not fit there is computed again. So all rows can be scored before
the first coefficient is needed, and rows without a coefficient cost no gradient work.

With a frozen head dH is summed, up to factors of its tokens, while they are scored: two products, and nothing is
stored. An adapter beside it has its gradient from stored exponentials, for parts of the tokens that fit.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from grpo_fused.call.calls import LMHead
from grpo_fused.engines import cpu_library, libraries
from grpo_fused.engines.base import MANY, Cost, Gradients, Tokens, Work, all_rows, even_chunks, longest_chunk
from grpo_fused.engines.gradients import GradientSums
from grpo_fused.engines.products import dhidden_dtype, native_products
from grpo_fused.engines.rows import z_
from grpo_fused.kernels.row_types import Coefficients, Entries, Statistics

SCRATCH_BYTES, SCRATCH_BYTES_A_THREAD = 64 * 2**20, 12 * 2**20
"""Scratch of a call without `max_scratch_bytes`: the first, the second for each thread, or the size of dW, whichever
is most. Operands and sums of dH take their part of it first (12 to 20 bytes for each of N·H, up to 8 MiB for several
sums, and 1 to 5 MiB a thread), with any budget; the rest stores exponentials, as far as they do not fit dW's
memory."""

SAMPLE, HEADROOM = 128, 48.0
"""dH's sums are of exponentials relative to the largest z of every 128th row of the head, plus 48, or to the target's
own z where that is higher. So a token's maximum may be 48 nats above that of the sample, and exponentials down to e-39
of the largest are still normal numbers; dH of a token with a higher maximum is computed again. The sample takes 0.8 %
of a product. It leaves the target out, as the sums do: what is left beside a confident one keeps its digits."""

STORED = 5 / 8
"""Of scratch, for exponentials of an adapted head: 128 tokens at V = 151936 in bf16."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the engine cannot run on `device` in the compute dtype `dtype`, or None if it can."""
    if device.type != "cpu":
        return f"the native engine runs on the CPU, the tensors are on {device}"
    if dtype not in DTYPES:
        return f"the native engine computes in float32, bfloat16 and float16, not in {dtype}"
    return libraries.cpu_available()


class NativeEngine:
    """See the module. Scores, without an adapter, are bitwise independent of the batch and of the number of threads."""

    def chunk_rows(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> int:
        """See `Engine.chunk_rows`: a call is one chunk, since all of it is scored first.

        With a gradient of an adapter, as many tokens as exponentials are stored of: each chunk reads the weight again,
        but tokens beyond would cost a product. Slices of a vocabulary are not cut. If the threads' blocks fit beside
        `STORED` of scratch, the number of threads changes nothing.
        """
        if head.base is None or head.weight.shape[1] == 0 or num_tokens == MANY:
            return MANY
        nothing = head.weight.new_empty(0)
        budget = _budget(max_scratch_bytes, nothing)
        of_token = head.vocab_size * (2 if _product_dtype(head) == torch.bfloat16 else 4)
        panel = _layout(head).panel_tokens
        stored = STORED * (SCRATCH_BYTES if max_scratch_bytes is None else max_scratch_bytes)

        def too_many(panels: int) -> bool:
            return _plan(head, panels * panel, nothing, budget).kept_tokens < panels * panel

        most = range(1, int(stored) // (of_token * panel) + 1)
        return bisect_left(most, True, key=too_many) * panel or MANY

    def cost(self, head: LMHead, num_tokens: int, max_scratch_bytes: int | None) -> Cost:
        """See `Engine.cost`: operands, partial results, the threads' blocks; then exponentials, as far as they fit."""
        dtype = GradientSums.weight_dtype(self, head, num_tokens, max_scratch_bytes)
        storage = _storage(head, head.weight.new_empty(1, dtype=dtype).expand(head.weight.shape))
        rows = min(num_tokens, longest_chunk(num_tokens, self.chunk_rows(head, num_tokens, max_scratch_bytes)))
        plan = _plan(head, rows, storage, _budget(max_scratch_bytes, storage))
        sums_alone = head.base is not None and head.weight.shape[1] == 0
        products, spill = 3.0 if head.base is None else 2.0, 0 if sums_alone else plan.spill_bytes
        if not sums_alone:
            products += (rows - plan.kept_tokens) / max(rows, 1)
        return Cost(products, plan.fixed_bytes + spill, GradientSums.accumulator_bytes(head, dtype))

    def score(self, work: Work) -> Statistics:
        """See `Engine.score`."""
        weight = work.head.weight
        nothing_kept = weight.new_empty(0), weight.new_empty(0, dtype=torch.uint8)
        inputs = _inputs(work.head, work.tokens, work.rows)
        table, _, _ = cpu_library.head_scores(inputs, work.with_entropy, *nothing_kept)
        return Statistics.of(table, work.with_entropy)

    def fused(self, work: Work) -> tuple[Statistics, Gradients]:
        """See `Engine.fused`. Known scores are computed again where dW's memory holds exponentials: one product."""
        head, tokens, needs = work.head, work.tokens, work.needs
        shape, nothing = (tokens.ids.shape[0], head.width), head.weight.new_empty(0)
        dtype = GradientSums.weight_dtype(self, head, shape[0], work.max_scratch_bytes)
        new = head.weight.new_empty if head.base is None else head.weight.new_zeros  # chunks add to an adapter's
        dweight = new(head.weight.shape, dtype=dtype) if needs.need_weight else None
        dhidden: Tensor | None = None  # not before a part's own: that is when most memory is in use
        dbias = head.weight.new_zeros(head.vocab_size, dtype=torch.float32) if needs.need_bias else None
        storage = nothing if dweight is None else _storage(head, dweight)
        budget = _budget(work.max_scratch_bytes, storage)
        worked, scores, memory = 0, [], head.weight.new_empty(0, dtype=torch.uint8)
        if work.known is not None:  # then parts would save nothing
            work = replace(work, chunks=even_chunks(len(work.rows), MANY))
        by_sums = _by_sums(work, _plan(head, work.longest, storage, budget).kept_tokens >= work.longest)
        everything = _inputs(head, tokens, work.rows)
        sum_offset = _sum_offset(work, everything) if by_sums else None
        for part, rows in work.parts():
            plan = _plan(head, len(rows), storage, budget)
            layout = _layout(head, len(rows), storage)
            scored, sums = work.known is None or layout.kept_panels > 0, None
            stores = scored and (not by_sums or needs.need_weight or needs.need_bias)
            inputs = everything.of_tokens(part)
            bytes_stored = plan.spill_bytes if stores else 0
            if len(memory) < bytes_stored:  # pages of a chunk's memory serve the next one, too
                memory = head.weight.new_empty(bytes_stored, dtype=torch.uint8)
            spill = memory[:bytes_stored]
            if scored:
                offset = None if sum_offset is None else sum_offset[part]
                table, offsets, sums = cpu_library.head_scores(inputs, work.with_entropy, storage, spill, offset)
                stats = tokens.merged(rows, Statistics.of(table, work.with_entropy))
            else:  # no large dW holds the exponentials, so they are computed again either way
                assert work.known is not None
                stats, offsets = work.known.select(part), head.weight.new_empty(layout.blocks, 0, dtype=torch.float32)
            scores.append(stats)
            coefficients = work.coefficients(part, stats)
            chosen = _rows_with_gradient(head, coefficients) if work.skip_zeros else all_rows(stats.logp)
            _, dlogp, dentropy, entries = coefficients
            if entries is not None:  # the target is one of them
                inputs = inputs._replace(targets=inputs.targets.index_fill(0, entries.rows, -1))
                entries = entries if len(chosen) == len(dlogp) else entries.select(chosen)
                entries = _in_blocks(head, tokens.own_entries(entries, head.vocab_size))
            del coefficients  # its entries would be in memory twice
            dlogp = dlogp.to(torch.float32).contiguous()
            dentropy = None if dentropy is None else dentropy.to(torch.float32).contiguous()
            part_dhidden, part_dbias = cpu_library.head_gradient(
                inputs, stats.table, offsets, chosen, dlogp, dentropy, entries, nothing if dweight is None else dweight,
                spill, sums, needs.need_hidden, needs.need_bias,
            )  # fmt: skip
            if sums is not None and part_dhidden is not None and not (table[0] <= sums.offset).all():
                far = ~(table[0] <= sums.offset)[chosen]
                part_dhidden[far] = cast(Tensor, cpu_library.head_gradient(
                    inputs, stats.table, offsets, chosen[far], dlogp, None, None, nothing, spill, None, True, False,
                )[0])  # fmt: skip
            worked += chosen.shape[0]
            if part_dhidden is not None:
                dhidden = _zeros(shape, head) if dhidden is None else dhidden
                _copy_rows(tokens.summed(part_dhidden), dhidden, rows[chosen])
            if dbias is not None and part_dbias is not None:
                dbias += part_dbias
        if not scores:
            dhidden = _zeros(shape, head) if needs.need_hidden else None
            if dweight is not None:
                dweight.zero_()
        gradients = Gradients(dhidden, dweight, dbias, worked)
        return Statistics.concatenate(scores, head.weight, work.with_entropy), gradients


def _inputs(head: LMHead, tokens: Tokens, rows: Tensor) -> cpu_library.HeadInputs:
    """The arguments that scoring and gradient share."""
    transform = tokens.transform(head, rows)
    products = native_products(head, head.operand(_hidden(tokens, rows)).to(_product_dtype(head)))
    targets, sets = tokens.gradient_targets(rows, tokens.target_rows(rows)), _sets(tokens, head, rows)
    temperature, scale, softcap = transform.numbers_of(rows)
    return cpu_library.HeadInputs(products, targets, temperature, scale, softcap, transform.bias, *sets)


def _by_sums(work: Work, all_kept: bool) -> bool:
    """Whether dH is summed while rows are scored: a product less where no other gradient needs them computed again.

    Clipped rows are summed in vain. With dW of a head it would save no product, only reading the weight a second time.
    """
    if work.known is not None or work.tokens.candidates is not None or not work.only_logps:
        return False
    needs, frozen = work.needs, work.head.base is not None
    alone = not needs.need_weight and not needs.need_bias
    return needs.need_hidden and (alone or (frozen and all_kept))


def _sum_offset(work: Work, inputs: cpu_library.HeadInputs) -> Tensor:
    """[R]: above the largest z of the sampled rows of the head, and above the target's own."""
    ids, weight = inputs.targets, work.head.weight
    sampled = (ids >= 0) & (ids % SAMPLE == 0)
    of_sample = inputs.of_every_row(SAMPLE)._replace(targets=torch.where(sampled, ids // SAMPLE, -1))
    nothing = weight.new_empty(0), weight.new_empty(0, dtype=torch.uint8)
    (maxima, log_sums, logps, _), _, _ = cpu_library.head_scores(of_sample, False, *nothing)
    others = torch.where(sampled, maxima + log_sums + (-logps.expm1()).log(), maxima)
    return torch.maximum(others + HEADROOM, _target_z(work, inputs) + 1.0)


def _target_z(work: Work, inputs: cpu_library.HeadInputs) -> Tensor:
    """[R]: z of the targets, to some digits; of any row where another rank has it."""
    head, ids, products = work.head, inputs.targets.clamp(min=0), inputs.products
    rows_of = head.rows if head.base is None else head.base_rows
    z = torch.cat([
        (h.float() * rows_of(part).float()).sum(1)
        for h, part in zip(products.hidden.split(256), ids.split(256), strict=True)
    ])  # fmt: skip
    if products.row_scale is not None:
        z *= products.row_scale[ids]
    if products.low_hidden is not None and products.low_weight is not None:
        z += (products.low_hidden * products.low_weight[ids].float()).sum(1)
    if inputs.bias is not None:
        z += inputs.bias[ids]
    return z_(z.unsqueeze(1), work.tokens.transform(head, work.rows)._replace(bias=None)).squeeze(1)


def _hidden(tokens: Tokens, rows: Tensor) -> Tensor:
    """[K, H]: `Tokens.hidden_rows`; not a copy if they are all rows in their order."""
    states = tokens.hidden_states
    whole = tokens.only_active and states.dim() == 2 and len(rows) == len(states) and bool((rows.diff() == 1).all())
    return states if whole else tokens.hidden_rows(rows)


def _layout(head: LMHead, count: int = 0, kept: Tensor | None = None) -> cpu_library.HeadLayout:
    return cpu_library.head_layout(_shape(head), _product_dtype(head), count, kept)


def _plan(head: LMHead, count: int, kept: Tensor, budget: int) -> cpu_library.ScratchPlan:
    return cpu_library.scratch_plan(_shape(head), _product_dtype(head), count, kept, budget)


def _shape(head: LMHead) -> cpu_library.HeadShape:
    width, columns = head.base_width, head.weight.shape[1]
    return (head.vocab_size, columns, 0) if head.base is None else (head.vocab_size, width, columns)


def _sets(tokens: Tokens, head: LMHead, rows: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Candidate sets of `rows` [R]: ids on this head, ascending within a set, and [R, 2] from where to where.

    A row without a set has -1. (None, None) if no row has one.
    """
    if tokens.candidates is None or not (tokens.candidates.sizes[rows] > 0).any():
        return None, None
    sets = tokens.candidates.select(rows)
    whole = sets.sizes == 0
    if tokens.vocab is not None:
        sets, _ = sets.within(tokens.vocab.first, head.vocab_size)
    ranges = torch.stack([sets.offsets[:-1], sets.offsets[1:]], dim=1)
    return sets.keys(head.vocab_size) % head.vocab_size, torch.where(whole.unsqueeze(1), -1, ranges)


def _product_dtype(head: LMHead) -> torch.dtype:
    """A softcap's slope comes from kept exponentials; where it is flat, their rounding to bf16 loses it."""
    return head.compute_dtype if head.softcap is None else torch.float32


def _budget(max_scratch_bytes: int | None, storage: Tensor) -> int:
    if max_scratch_bytes is not None:
        return max_scratch_bytes
    return max(SCRATCH_BYTES, SCRATCH_BYTES_A_THREAD * torch.get_num_threads(), storage.nbytes)


def _storage(head: LMHead, dweight: Tensor) -> Tensor:
    """What exponentials are stored in besides scratch: a dW, but not one that chunks add to."""
    return dweight if head.base is None else dweight.new_empty(0)


def _rows_with_gradient(head: LMHead, coefficients: Coefficients) -> Tensor:
    """[K] int64: rows with a gradient; all rows if leaving some out would not save a panel."""
    has = coefficients.any_of_row()
    rows = has.nonzero().squeeze(1)
    tokens = _layout(head).panel_tokens
    return rows if -(-len(rows) // tokens) < -(-len(has) // tokens) else all_rows(has)


def _zeros(shape: tuple[int, int], head: LMHead) -> Tensor:
    return head.weight.new_zeros(shape, dtype=dhidden_dtype(head))


def _copy_rows(dhidden: Tensor, out: Tensor, rows: Tensor) -> None:
    """To `rows` of out [N, width]; those of an adapter's u go where u rounded is, and no others of its columns.

    Few rows at a time, for which torch takes one thread: others would spin afterwards, on a core of the next part.
    """
    columns = dhidden.shape[1]
    few = max(32767 // columns, 1)
    for source, to in zip(dhidden.split(few), rows.split(few), strict=True):
        out[:, :columns].index_copy_(0, to, source.to(out.dtype))


def _in_blocks(head: LMHead, entries: Entries) -> Entries:
    """As the library takes them: int32 and fp32, by the block of the vocabulary that holds them, then by row."""
    order = (entries.ids.to(torch.int32) // _layout(head).block_rows).sort(stable=True).indices
    dtypes = torch.int32, torch.int32, torch.float32
    return Entries(*(x[order].to(dtype) for x, dtype in zip(entries, dtypes, strict=True)))
