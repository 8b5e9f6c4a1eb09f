"""Head kernels: the product hidden [N, H] x weight^T [H, V] with its row work in the epilogue.

A work item is a panel of BLOCK_N tokens times a split, a run of vocabulary tiles. Its tiles and their k steps form one
flat loop, so that the loads of the next tile run during the epilogue of this one. What the epilogue does is MODE:

- SCORE: online statistics in registers. Nothing of the size of the vocabulary is written.
- EXPONENTIALS: the same, and E = exp(z - offset) in a narrow dtype. E has the relative error of one rounding for any
  size of the logit, so it can become a gradient later. The offset is that of the row, a power of two near the maximum
  of some of its logits (`HAS_ROW_OFFSETS`); a tile that is far above it gets its own. Then the library's products take
  E as it is, and a factor for each row. In fp16, whose exponents end early, the offset is the tile's maximum, and E is
  stored 2^15 times as large: down to 27 nats below that.
- DLOGITS: the gradient itself, from statistics that are known already.

A frozen weight may have narrower numbers, which are widened between load and product, a factor for each of its rows,
and further columns, an adapter's: their product is added when a tile's own is complete.

Statistics of splits are merged in their order by `finish_scores_fwd_kernel`, which also makes the targets' logits:
finding them in the epilogue would take 100 more registers. Tiles, splits and steps depend only on (V, H, dtype,
device), and a row of a product does not depend on the other rows: a token's values are bitwise the same in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .objective import LOWEST_LOGP, expm1
from .rows import LN2, LOG2E, PER_ROW_POINTERS, dlogits, finish_statistics, finite, merge_statistics, shares, to_z

SCORE = tl.constexpr(0)
EXPONENTIALS = tl.constexpr(1)
DLOGITS = tl.constexpr(2)

HIGHEST_POWER = tl.constexpr(64.0)
"""E is at most 2^64: a tile whose maximum is further above the offset of its row gets its own."""

LOWEST_Z = tl.constexpr(-1e30)
"""Of columns after the vocabulary: exponentials are 0, and no product with it is infinite or NaN."""


@triton.jit
def load_block(x, row, k, num_rows, stride, H, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
               EVEN_K: tl.constexpr):  # fmt: skip
    """[BLOCK_R, BLOCK_K] of a matrix [num_rows, H], 0 outside."""
    if TMA:
        block = x.load([row, k])
    else:
        rows = row + tl.arange(0, BLOCK_R)
        cols = k + tl.arange(0, BLOCK_K)
        inside = rows[:, None] < num_rows
        if not EVEN_K:
            inside = inside & (cols[None, :] < H)
        block = tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0)
    return block


@triton.jit
def load_rows(w, rows, known, k, stride, H, BLOCK_K: tl.constexpr):
    """[R, BLOCK_K] of some rows [R] of a matrix with H columns, 0 outside and in rows that are not `known`."""
    cols = (k + tl.arange(0, BLOCK_K))[None, :]
    return tl.load(w + rows[:, None] * stride + cols, mask=known[:, None] & (cols < H), other=0)


@triton.jit
def from_e4m3(bits):
    """fp32 numbers of bytes that are float8_e4m3fn, which not all GPUs can convert."""
    wide = bits.to(tl.int32)
    magnitude = wide & 127
    # exponent and fraction where fp32 has them, whose bias is larger by 120; exact for subnormal numbers, too
    x = ((magnitude << 20) | ((wide & 128) << 24)).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where(magnitude == 127, float("nan"), x)


@triton.jit
def dot(a, b, acc, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a x b^T, b widened to the dtype of a. FP8: whether b has bytes that are float8_e4m3fn."""
    if FP8:
        b = from_e4m3(b)
    if UPCAST:  # the interpreter multiplies bf16 as bit patterns
        a = a.to(tl.float32)
    return tl.dot(a, b.to(a.dtype).T, acc, input_precision="ieee")


@triton.jit
def multiply_more(
    acc, x_ptr, more_ptr, row, tile, N, V, H, C, stride_xn, stride_mv, STEPS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc + the product of columns H to H + C of x and `more` [V, C].

    Unrolled, since a loop within that of the k steps would end its pipeline. The loads are not part of that pipeline:
    those by pointers are on their way together, by descriptors one would wait for the other.
    """
    for k in tl.static_range(STEPS):
        a = load_block(x_ptr, row, H + k * BLOCK_K, N, stride_xn, H + C, BLOCK_N, BLOCK_K, False, False)
        b = load_block(more_ptr, tile * BLOCK_V, k * BLOCK_K, V, stride_mv, C, BLOCK_V, BLOCK_K, False, False)
        acc = dot(a, b, acc, False, UPCAST)
    return acc


@triton.jit
def store_block(out, block, row, col, N, stride, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, TMA: tl.constexpr):
    """Write [BLOCK_N, BLOCK_V] of a matrix [N, V] with its padding, `stride` columns in all.

    Masked by V, which may be odd, each element would be a store of its own.
    """
    if TMA:
        out.store([row, col], block.to(out.dtype))
    else:
        rows = row + tl.arange(0, BLOCK_N)
        cols = col + tl.arange(0, BLOCK_V)
        inside = (rows[:, None] < N) & (cols[None, :] < stride)
        pointers = out + rows.to(tl.int64)[:, None] * stride + cols[None, :]
        tl.store(pointers, block.to(out.dtype.element_ty), mask=inside)


@triton.jit
def score_z(raw, bias_ptr, cols, valid, logit_scale, softcap, inv_t, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """z of raw products, for scores: in units of ln 2 if the head has neither bias nor softcap."""
    if HAS_BIAS or HAS_SOFTCAP:
        z, _ = to_z(raw, bias_ptr, cols, valid, logit_scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
        return z
    else:
        return raw * (logit_scale * inv_t * LOG2E)


@triton.jit
def columns_before(end, BLOCK_V: tl.constexpr):
    """[1, BLOCK_V]: which columns of a tile come before `end`.

    Two small ranges in place of one: compilers keep all numbers of a range in registers for the whole loop.
    """
    eights = 8 * tl.arange(0, BLOCK_V // 8)[:, None]
    return tl.reshape(tl.arange(0, 8)[None, :] < end - eights, [1, BLOCK_V])


@triton.jit
def row_power(maxima_ptr, rows, live):
    """The power of two that E of a row is relative to: above the maximum of the columns that were sampled. If none of
    these is possible, it is so low that each tile gets its own."""
    maxima = tl.load(maxima_ptr + rows, mask=live, other=0.0)
    return tl.ceil(tl.maximum(maxima, LOWEST_Z) * LOG2E)


@triton.jit
def epilogue(
    acc, m, rest, moment, row, tile, out, bias_ptr, targets_ptr, temperature_ptr, max_ptr, log_sum_ptr, logp_ptr,
    entropy_ptr, dlogp_ptr, dentropy_ptr, sampled_max_ptr, offset_ptr, stride_out, N, V, num_tiles, temperature,
    logit_scale, softcap, MODE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr, WITH_ENTROPY: tl.constexpr, HAS_DENTROPY: tl.constexpr,
    HAS_ROW_OFFSETS: tl.constexpr, TMA: tl.constexpr, E_SCALE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile of products; returns the running statistics."""
    rows = row + tl.arange(0, BLOCK_N)
    cols = (tile * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    live = rows < N
    inv_t = tl.full([BLOCK_N], 1.0, tl.float32) / temperature
    if HAS_TEMPERATURES:
        inv_t = 1.0 / tl.load(temperature_ptr + rows, mask=live, other=1.0)
    if MODE == DLOGITS:
        z, slope = to_z(acc, bias_ptr, cols, cols < V, logit_scale, softcap, inv_t[:, None], HAS_BIAS, HAS_SOFTCAP)
        dlogp = tl.load(dlogp_ptr + rows, mask=live, other=0.0)
        targets = tl.load(targets_ptr + rows, mask=live, other=-1)
        logp = tl.load(logp_ptr + rows, mask=live, other=0.0)
        at_target = -dlogp * expm1(logp)
        is_target = cols == targets[:, None]
        shifted = z - tl.load(max_ptr + rows, mask=live, other=0.0)[:, None]
        log_p = shifted - tl.load(log_sum_ptr + rows, mask=live, other=0.0)[:, None]
        if HAS_DENTROPY:  # the maximum was rounded, as a power of two
            log_p = tl.where(is_target, logp[:, None], log_p)
        log_p = tl.maximum(log_p, LOWEST_LOGP, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(log_p * LOG2E)
        entropy = dlogp
        dentropy = dlogp
        if HAS_DENTROPY:
            entropy = tl.load(entropy_ptr + rows, mask=live, other=0.0)
            dentropy = tl.load(dentropy_ptr + rows, mask=live, other=0.0)
        dz = dlogits(log_p, p, is_target, at_target[:, None], dlogp[:, None], dentropy[:, None], entropy[:, None],
                     slope, HAS_DENTROPY)  # fmt: skip
        store_block(out, dz, row, tile * BLOCK_V, N, stride_out, BLOCK_N, BLOCK_V, TMA)
        return m, rest, moment
    else:
        LOG2: tl.constexpr = not (HAS_BIAS or HAS_SOFTCAP)
        z = score_z(acc, bias_ptr, cols, cols < V, logit_scale, softcap, inv_t[:, None], HAS_BIAS, HAS_SOFTCAP)
        # not of acc: if it changes under a condition, ptxas makes products on Hopper wait for each other
        if tile == num_tiles - 1:
            z = tl.where(columns_before(V - tile * BLOCK_V, BLOCK_V), z, LOWEST_Z)
        tile_m = tl.max(z, axis=1)
        power = tile_m
        if HAS_ROW_OFFSETS and TMA:  # of sm_90's registers this order takes fewer, of sm_80's the other one
            power = row_power(sampled_max_ptr, rows, live)
        e, tile_rest, tile_moment = shares(z - finite(tile_m)[:, None], WITH_ENTROPY, HAS_INF=HAS_BIAS, LOG2=LOG2)
        top = tile_m
        if LOG2:
            tile_m *= LN2
        if MODE == EXPONENTIALS:
            offset = tile_m
            if HAS_ROW_OFFSETS:
                if not LOG2:
                    top *= LOG2E
                if not TMA:
                    power = row_power(sampled_max_ptr, rows, live)
                power = tl.where(top - power > HIGHEST_POWER, tl.ceil(top), power)
                e *= tl.exp2(top - power)[:, None]
                offset = power * LN2
            store_block(out, e * E_SCALE, row, tile * BLOCK_V, N, stride_out, BLOCK_N, BLOCK_V, TMA)
            tl.store(offset_ptr + rows * num_tiles + tile, offset, mask=live)  # below 2^31: E has 128 bytes for each
        return merge_statistics(m, rest, moment, tile_m, tile_rest, tile_moment, WITH_ENTROPY)


@triton.jit(do_not_specialize=["N", "panels", "group"], do_not_specialize_on_alignment=[*PER_ROW_POINTERS, "count_ptr"])
def head_fwd_kernel(
    x,
    w,
    out,
    x_ptr,
    more_ptr,
    row_scale_ptr,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    entropy_ptr,
    dlogp_ptr,
    dentropy_ptr,
    sampled_max_ptr,
    rest_ptr,
    moment_ptr,
    offset_ptr,
    count_ptr,
    stride_xn,
    stride_wv,
    stride_mv,
    stride_out,
    N,
    V,
    H,
    C,
    panels,
    group,
    splits,
    tiles_per_split,
    num_tiles,
    temperature,
    logit_scale,
    softcap,
    MODE: tl.constexpr,
    FP8: tl.constexpr,
    MORE_STEPS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    HAS_ROW_OFFSETS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    E_SCALE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every work item of [N, H] x [V, H]^T; a program takes items pid, pid + num_programs, and so on.

    `x`, `w` and `out` are tensor descriptors with TMA, else pointers. With MORE_STEPS `more_ptr` has C columns, whose
    hidden states follow the H of `w` in `x_ptr`, the pointer of `x`. Partial statistics go to
    [splits, N]: maxima to `max_ptr`, rests to `rest_ptr`, moments to `moment_ptr` (DLOGITS reads [N] from `max_ptr`).
    With `HAS_ROW_OFFSETS`, `sampled_max_ptr` has the maxima [N] of the sampled columns. `count_ptr` is
    None or has a number of rows: panels that start after them are not multiplied.
    """
    k_steps = tl.cdiv(H, BLOCK_K)
    for item in tl.range(tl.program_id(0), panels * splits, tl.num_programs(0)):
        # panels of a group run together: their hidden states stay in L2 while the weight is streamed
        first = item // (group * splits) * group
        size = tl.minimum(panels - first, group)
        within = item % (group * splits)
        split = within // size
        row = (first + within % size) * BLOCK_N
        first_tile = split * tiles_per_split
        tiles = tl.minimum(num_tiles - first_tile, tiles_per_split)
        if count_ptr is not None:
            tiles = tl.where(row < tl.load(count_ptr).to(tl.int32), tiles, 0)
        m = tl.full([BLOCK_N], -float("inf"), tl.float32)
        rest = tl.zeros([BLOCK_N], tl.float32)
        moment = tl.zeros([BLOCK_N], tl.float32)
        zero = logit_scale * 0.0  # unknown to the compiler, which would set each register by two instructions
        acc = tl.full([BLOCK_N, BLOCK_V], zero, tl.float32)
        # without this flag triton 3.7 to 3.9 read the sums of sm_100 before they have waited for the last product
        for step in tl.range(0, tiles * k_steps, disallow_acc_multi_buffer=True):
            tile = first_tile + step // k_steps
            k = step % k_steps
            a = load_block(x, row, k * BLOCK_K, N, stride_xn, H, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            b = load_block(w, tile * BLOCK_V, k * BLOCK_K, V, stride_wv, H, BLOCK_V, BLOCK_K, TMA, EVEN_K)
            acc = dot(a, b, acc, FP8, UPCAST)
            if k == k_steps - 1:
                acc = multiply_more(
                    acc, x_ptr, more_ptr, row, tile, N, V, H, C, stride_xn, stride_mv, MORE_STEPS, BLOCK_N, BLOCK_V,
                    BLOCK_K, UPCAST,
                )  # fmt: skip
                if HAS_ROW_SCALE:
                    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                    acc *= tl.load(row_scale_ptr + cols, mask=cols < V, other=0.0)[None, :]
                m, rest, moment = epilogue(
                    acc, m, rest, moment, row, tile, out, bias_ptr, targets_ptr, temperature_ptr, max_ptr,
                    log_sum_ptr, logp_ptr, entropy_ptr, dlogp_ptr, dentropy_ptr, sampled_max_ptr, offset_ptr,
                    stride_out, N, V, num_tiles, temperature, logit_scale, softcap, MODE, HAS_BIAS, HAS_SOFTCAP,
                    HAS_TEMPERATURES, WITH_ENTROPY, HAS_DENTROPY, HAS_ROW_OFFSETS, TMA, E_SCALE, BLOCK_N, BLOCK_V,
                )  # fmt: skip
                acc = tl.full([BLOCK_N, BLOCK_V], zero, tl.float32)
        if MODE != DLOGITS:
            rows = row + tl.arange(0, BLOCK_N)
            part = split * N + rows  # below 2^31: at most 128 splits
            tl.store(max_ptr + part, m, mask=rows < N)
            tl.store(rest_ptr + part, rest, mask=rows < N)
            if WITH_ENTROPY:
                tl.store(moment_ptr + part, moment, mask=rows < N)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=PER_ROW_POINTERS)
def finish_scores_fwd_kernel(
    x_ptr,
    w_ptr,
    more_ptr,
    row_scale_ptr,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    part_max_ptr,
    part_rest_ptr,
    part_moment_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    entropy_ptr,
    stride_xn,
    stride_wv,
    stride_mv,
    N,
    V,
    H,
    C,
    splits,
    temperature,
    logit_scale,
    softcap,
    FP8: tl.constexpr,
    MORE_STEPS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(max, log_sum, logp, entropy) of BLOCK_N rows from the partial statistics [splits, N] and the targets' logits.

    A target's product is the diagonal of hidden x weight[targets]^T, in the k steps of the head kernel: summed like its
    row's maximum, so that a confident token's log-prob is exact. It costs BLOCK_N of V columns of a head product.
    """
    row = tl.program_id(0) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_N)
    live = rows < N
    targets = tl.load(targets_ptr + rows, mask=live, other=0)
    known = (targets >= 0) & (targets < V)  # others are not read: their log-probs are NaN
    acc = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for k in tl.range(0, H, BLOCK_K):
        a = load_block(x_ptr, row, k, N, stride_xn, H, BLOCK_N, BLOCK_K, False, EVEN_K)
        b = load_rows(w_ptr, targets, known, k, stride_wv, H, BLOCK_K)
        acc = dot(a, b, acc, FP8, UPCAST)
    for k in tl.static_range(MORE_STEPS):
        a = load_block(x_ptr, row, H + k * BLOCK_K, N, stride_xn, H + C, BLOCK_N, BLOCK_K, False, False)
        b = load_rows(more_ptr, targets, known, k * BLOCK_K, stride_mv, C, BLOCK_K)
        acc = dot(a, b, acc, False, UPCAST)
    diagonal = tl.arange(0, BLOCK_N)[:, None] == tl.arange(0, BLOCK_N)[None, :]
    inv_t = 1.0 / temperature
    if HAS_TEMPERATURES:
        inv_t = 1.0 / tl.load(temperature_ptr + rows, mask=live, other=1.0)
    product = tl.sum(tl.where(diagonal, acc, 0.0), axis=1)
    if HAS_ROW_SCALE:
        product *= tl.load(row_scale_ptr + targets, mask=known, other=0.0)
    product = tl.where(known, product, float("nan"))
    z = score_z(product, bias_ptr, targets, known, logit_scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP)
    if not (HAS_BIAS or HAS_SOFTCAP):
        z *= LN2

    m = tl.full([BLOCK_N], -float("inf"), tl.float32)
    rest = tl.zeros([BLOCK_N], tl.float32)
    moment = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.range(0, splits):
        part = split * N + rows  # below 2^31: at most 128 splits
        part_m = tl.load(part_max_ptr + part, mask=live, other=0.0)
        part_rest = tl.load(part_rest_ptr + part, mask=live, other=0.0)
        part_moment = part_m
        if WITH_ENTROPY:
            part_moment = tl.load(part_moment_ptr + part, mask=live, other=0.0)
        m, rest, moment = merge_statistics(m, rest, moment, part_m, part_rest, part_moment, WITH_ENTROPY)
    log_sum, logp, entropy = finish_statistics(m, rest, moment, z)
    tl.store(max_ptr + rows, m, mask=live)
    tl.store(log_sum_ptr + rows, log_sum, mask=live)
    tl.store(logp_ptr + rows, logp, mask=live)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + rows, entropy, mask=live)


@triton.jit(do_not_specialize_on_alignment=PER_ROW_POINTERS)
def exponentials_bwd_kernel(
    e_ptr,
    offset_ptr,
    targets_ptr,
    temperature_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    entropy_ptr,
    dlogp_ptr,
    dentropy_ptr,
    stride_e,
    padded,
    num_tiles,
    temperature,
    logit_scale,
    HAS_TEMPERATURES: tl.constexpr,
    HAS_DENTROPY: tl.constexpr,
    E_SCALE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dL/d(product) of a row, in place of its exponentials: p = E * exp(offset - lse), log p from log E.

    Not for heads with a softcap: the rounding of E loses the slope 1 - tanh^2 of a saturated logit.
    """
    row = tl.program_id(0).to(tl.int64)
    inv_t = 1.0 / temperature
    if HAS_TEMPERATURES:
        inv_t = 1.0 / tl.load(temperature_ptr + row)
    target = tl.load(targets_ptr + row)
    m = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    dlogp = tl.load(dlogp_ptr + row)
    logp = tl.load(logp_ptr + row)
    at_target = -dlogp * expm1(logp)
    entropy = 0.0
    dentropy = 0.0
    if HAS_DENTROPY:
        entropy = tl.load(entropy_ptr + row)
        dentropy = tl.load(dentropy_ptr + row)
    slope = logit_scale * inv_t
    for first in tl.range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)[:, None]
        cols = tiles * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        offset = tl.load(offset_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=-float("inf"))
        log_scale = (offset - m) - log_sum - tl.log(E_SCALE * 1.0)
        pointers = e_ptr + row * stride_e + cols
        e = tl.load(pointers, mask=cols < padded, other=0.0).to(tl.float32)
        p = e * tl.exp(log_scale)
        log_p = p
        if HAS_DENTROPY:
            log_p = tl.where(cols == target, logp, tl.log(e) + log_scale)
            log_p = tl.maximum(log_p, LOWEST_LOGP, propagate_nan=tl.PropagateNan.ALL)
            p = tl.where(cols == target, tl.exp(log_p), p)
        dz = dlogits(log_p, p, cols == target, at_target, dlogp, dentropy, entropy, slope, HAS_DENTROPY)
        tl.store(pointers, dz.to(e_ptr.dtype.element_ty), mask=cols < padded)


@triton.jit(do_not_specialize_on_alignment=PER_ROW_POINTERS)
def exponentials_factor_kernel(
    e_ptr,
    offset_ptr,
    targets_ptr,
    temperature_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    dlogp_ptr,
    factor_ptr,
    stride_e,
    V,
    padded,
    num_tiles,
    temperature,
    logit_scale,
    HAS_TEMPERATURES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The factor of a row for which dL/d(product) = factor * E; E gets the value of the target for which that holds.

    dL/dz_j = -dlogp * p_j = -dlogp * exp(offset - lse) * E_j, and at the target -dlogp * expm1(logp). Tiles that have
    an offset of their own are brought to the largest one, by a power of two; and all tiles of a slice of the vocabulary
    that is far below the rest to one near lse, since exp(lse - offset) would overflow.
    """
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    # an offset of a whole vocabulary, V < 2^31, is above this
    largest = tl.ceil((m + log_sum) * LOG2E - HIGHEST_POWER - 32) * LN2
    smallest = float("inf")
    for first in tl.range(0, num_tiles, 1024):
        tiles = first + tl.arange(0, 1024)
        inside = tiles < num_tiles
        offset = tl.load(offset_ptr + row * num_tiles + tiles, mask=inside, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(offset, axis=0))
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, offset, float("inf")), axis=0))
    if smallest != largest:
        for first in tl.range(0, num_tiles, TILES):
            tiles = first + tl.arange(0, TILES)[:, None]
            cols = tiles * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
            offset = tl.load(offset_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
            pointers = e_ptr + row * stride_e + cols
            e = tl.load(pointers, mask=cols < padded, other=0.0).to(tl.float32)
            e *= tl.exp2((offset - largest) * LOG2E)
            tl.store(pointers, e.to(e_ptr.dtype.element_ty), mask=cols < padded)
        tl.debug_barrier()  # before the target's entry is written again
    inv_t = 1.0 / temperature
    if HAS_TEMPERATURES:
        inv_t = 1.0 / tl.load(temperature_ptr + row)
    log_scale = (largest - m) - log_sum
    dlogp = tl.load(dlogp_ptr + row)
    target = tl.load(targets_ptr + row)
    at_target = expm1(tl.load(logp_ptr + row)) * tl.exp(-log_scale)
    tl.store(e_ptr + row * stride_e + target, at_target.to(e_ptr.dtype.element_ty), mask=(target >= 0) & (target < V))
    tl.store(factor_ptr + row, tl.where(dlogp == 0.0, 0.0, -dlogp * logit_scale * inv_t * tl.exp(log_scale)))
