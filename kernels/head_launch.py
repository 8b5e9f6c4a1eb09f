"""Launchers of the head kernels: tensors in, tensors out; no state, no checks beyond what a pointer needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configs import padded
from .head import (
    DLOGITS,
    EXPONENTIALS,
    SCORE,
    exponentials_bwd_kernel,
    exponentials_factor_kernel,
    finish_scores_fwd_kernel,
    head_fwd_kernel,
)
from .head_configs import COLUMN_MULTIPLE, HeadConfig, aligned_width, finish_config, head_config, pass_config
from .launch import device_of, flags_of
from .row_types import BYTES, NOTHING, Coefficients, Extras, Statistics, Transform

GROUP_BYTES = 16 * 2**20
"""Hidden states of the panels that run together: a share of the L2 (50 MB on an H100, 40 on an A100) that leaves room
for the streamed weight. It changes the order of the work and no result."""


class Exponentials(NamedTuple):
    """E = exp(z - offset) of a chunk; later E with a factor for each row, or in its place dlogits."""

    values: Tensor
    """[N, V], rows padded to `PAD`"""
    offsets: Tensor
    """[N, tiles] fp32"""
    block_v: int
    """columns of a tile"""

    @classmethod
    def empty(cls, num_rows: int, weight: Tensor, dtype: torch.dtype, config: HeadConfig) -> Exponentials:
        """Room for N rows."""
        tiles = config.tiles(weight.shape[0])
        values = torch.empty((num_rows, padded(weight.shape[0])), dtype=dtype, device=weight.device)
        offsets = torch.empty((num_rows, tiles), dtype=torch.float32, device=weight.device)
        return cls(values[:, : weight.shape[0]], offsets, config.block_v)

    def rows(self, count: int) -> Exponentials:
        """The first `count` rows."""
        return Exponentials(self.values[:count], self.offsets[:count], self.block_v)


def aligned(x: Tensor) -> Tensor:
    """Hidden states or a weight [R, H] as kernels read them fast, with columns of 0 up to `aligned_width`.

    It is `x` itself where its rows are contiguous, of that width, and start at a multiple of 16 elements.
    """
    (rows, width), columns = x.shape, aligned_width(x.shape[1], x.dtype)
    whole = columns == width and x.stride(1) == 1 and x.stride(0) % COLUMN_MULTIPLE == 0
    if whole and x.data_ptr() % 16 == 0:
        return x
    copy = x.new_empty((rows, columns))
    copy[:, :width] = x
    copy[:, width:] = 0.0
    return copy


def head_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    transform: Transform,
    *,
    with_entropy: bool,
    exponentials: Exponentials | None = None,
    extras: Extras = NOTHING,
    count: Tensor | None = None,
    config: HeadConfig | None = None,
) -> Statistics:
    """Statistics of N rows, and their exponentials if there is room for them.

    Args:
        hidden: [N, H] or [N, H + C], contiguous, of the dtype of the computation (bf16, fp16 or fp32).
        weight: [V, H], unit column stride, of that dtype; with extras also int8 or float8_e4m3fn.
        targets: [N] int64 in [0, V).
        transform: what turns products into z.
        with_entropy: whether to compute entropies.
        exponentials: where E goes, N rows.
        extras: what a frozen weight has beside it.
        count: 0-d int64, how many of the rows are wanted; the results of the others are undefined. Not for fp32, whose
            kernels would spill a register.
        config: in place of the table's, for tuning.
    """
    stats = Statistics.empty(hidden.shape[0], hidden.device, with_entropy)
    if hidden.shape[0] == 0:
        return stats
    config = config or head_config(hidden, transform, has_extras=extras.any())
    splits, _ = config.splits(*weight.shape)
    # separate tensors: parts of one would be aligned for some N only, and compile again
    part_max, part_rest, part_moment = (
        torch.empty((splits, hidden.shape[0]), dtype=torch.float32, device=hidden.device) if wanted else None
        for wanted in (True, True, with_entropy)
    )
    out, offsets = (None, None) if exponentials is None else (exponentials.values, exponentials.offsets)
    has_row_offsets = out is not None and out.dtype != torch.float16
    near = _sampled_maxima(config, hidden, weight, extras, transform, count) if has_row_offsets else None
    with device_of(hidden):
        _launch(
            config, hidden, weight, extras, out, transform, MODE=SCORE.value if out is None else EXPONENTIALS.value,
            max_ptr=part_max, rest_ptr=part_rest, moment_ptr=part_moment, offset_ptr=offsets, sampled_max_ptr=near,
            count_ptr=count, WITH_ENTROPY=with_entropy, HAS_ROW_OFFSETS=has_row_offsets,
        )  # fmt: skip
        finish = finish_config(hidden.device, hidden.dtype)
        each, *numbers = transform.numbers
        more = extras.more
        finish_scores_fwd_kernel[(-(-hidden.shape[0] // finish.block_n),)](
            hidden, _bytes(weight), more, extras.row_scale, transform.bias, targets, each, part_max,
            part_rest, part_moment, *stats, hidden.stride(0), weight.stride(0), _stride(more), hidden.shape[0],
            *weight.shape, _columns(more), splits, *numbers, **flags_of(transform), **_flags(weight, extras, config),
            WITH_ENTROPY=with_entropy, EVEN_K=weight.shape[1] % config.block_k == 0, UPCAST=_interprets(hidden),
            BLOCK_N=finish.block_n, BLOCK_K=config.block_k, **finish.options,
        )  # fmt: skip
    return stats


def head_dlogits(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    coefficients: Coefficients,
    transform: Transform,
    out: Tensor,
    *,
    extras: Extras = NOTHING,
    config: HeadConfig | None = None,
) -> None:
    """Write dL/d(product) of N >= 1 rows to `out` [N, V] (rows of `padded` elements) from known statistics."""
    config = config or head_config(hidden, transform, has_extras=extras.any(), gradient=True)
    with device_of(hidden):
        _launch(
            config, hidden, weight, extras, out, transform, MODE=DLOGITS.value, targets_ptr=targets,
            **{f"{name}_ptr": x for name, x in coefficients.statistics._asdict().items()},
            dlogp_ptr=coefficients.dlogp, dentropy_ptr=coefficients.dentropy,
            HAS_DENTROPY=coefficients.dentropy is not None,
        )  # fmt: skip
    if _interprets(out):  # PAD says why
        _wide(out, weight.shape[0])[:, weight.shape[0] :] = 0.0


def exponentials_to_dlogits(
    exponentials: Exponentials, targets: Tensor, coefficients: Coefficients, transform: Transform
) -> None:
    """Turn E of N >= 1 rows into dL/d(product) in place, from the coefficients ([N]) on log-probs and entropies.

    Raises:
        ValueError: The head has a softcap, whose slope rounded exponentials do not give.
    """
    if transform.softcap is not None:
        raise ValueError(f"exponentials do not give the gradient of a softcap; got softcap={transform.softcap}")
    values, offsets, block_v = exponentials
    each, number, scale, _ = transform.numbers
    config = pass_config(values.device, block_v)
    with device_of(values):
        exponentials_bwd_kernel[(values.shape[0],)](
            values, offsets, targets, each, *coefficients.statistics, coefficients.dlogp, coefficients.dentropy,
            values.stride(0), padded(values.shape[1]), offsets.shape[1], number, scale,
            HAS_TEMPERATURES=each is not None, HAS_DENTROPY=coefficients.dentropy is not None,
            E_SCALE=_scale_of(values), TILES=config.tiles, BLOCK_V=block_v, num_warps=config.num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip


def exponentials_factor(
    exponentials: Exponentials, targets: Tensor, coefficients: Coefficients, transform: Transform
) -> Tensor:
    """[N] fp32 factors, N >= 1, such that dL/d(product) = factor * E, whose targets' entries are replaced for that.

    Without a pass over E, except for rows whose offset was far too low. Not for an entropy's coefficients, fp16, or a
    head with a softcap.
    """
    values, offsets, block_v = exponentials
    factor = torch.empty(values.shape[0], dtype=torch.float32, device=values.device)
    each, number, scale, _ = transform.numbers
    config, known = pass_config(values.device, block_v), coefficients.statistics
    with device_of(values):
        exponentials_factor_kernel[(values.shape[0],)](
            values, offsets, targets, each, known.max, known.log_sum, known.logp, coefficients.dlogp, factor,
            values.stride(0), values.shape[1], padded(values.shape[1]), offsets.shape[1], number, scale,
            HAS_TEMPERATURES=each is not None, TILES=config.tiles, BLOCK_V=block_v, num_warps=config.num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return factor


def _sampled_maxima(
    config: HeadConfig, hidden: Tensor, weight: Tensor, extras: Extras, transform: Transform, count: Tensor | None
) -> Tensor:
    """[N] the largest z of each row among as many columns as a tile has, spread over the vocabulary."""
    step = max(weight.shape[0] // config.block_v, 1)
    columns = slice(0, step * config.block_v, step)
    bias = None if transform.bias is None else transform.bias[columns].contiguous()
    maxima, rest = (torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device) for _ in range(2))
    with device_of(hidden):
        _launch(
            config, hidden, weight[columns], extras.rows(columns), None, transform._replace(bias=bias),
            MODE=SCORE.value, max_ptr=maxima, rest_ptr=rest, count_ptr=count,
        )  # fmt: skip
    return maxima


_OFF = dict.fromkeys((
    "targets_ptr", "max_ptr", "log_sum_ptr", "logp_ptr", "entropy_ptr", "dlogp_ptr", "dentropy_ptr", "sampled_max_ptr",
    "rest_ptr", "moment_ptr", "offset_ptr", "count_ptr",
)) | dict.fromkeys(("WITH_ENTROPY", "HAS_DENTROPY", "HAS_ROW_OFFSETS"), False)  # fmt: skip
"""Arguments of the head kernel that only some modes take."""


def _check(hidden: Tensor, weight: Tensor, extras: Extras) -> None:
    more, row_scale = extras
    rows = {"weight": weight} if more is None else {"weight": weight, "more": more}
    of_weight = (hidden.dtype,) if row_scale is None else (hidden.dtype, *BYTES)
    one_dtype = weight.dtype in of_weight and (more is None or more.dtype == hidden.dtype)
    adjacent = all(x.shape[1] <= 1 or x.stride(1) == 1 for x in rows.values())
    if not (one_dtype and adjacent and hidden.is_contiguous()):
        of_rows = ", ".join(f"{name} {x.dtype} {x.stride()}" for name, x in rows.items())
        raise ValueError(
            "the head kernel takes contiguous hidden states and weight rows of one dtype, or a weight of int8 or "
            f"float8_e4m3fn with a row scale; got hidden states {hidden.dtype} {hidden.stride()}, {of_rows}"
        )
    vocab_size, columns = len(weight), sum(x.shape[1] for x in rows.values())
    if hidden.shape[1] != columns or any(len(x) != vocab_size for x in rows.values()):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in rows.items())
        raise ValueError(
            f"hidden states [N, H] must have the columns of [V, H] beside them; got {tuple(hidden.shape)}, {shapes}"
        )
    if row_scale is not None:
        is_vector = row_scale.shape == (vocab_size,) and row_scale.is_contiguous()
        if not is_vector or row_scale.dtype != torch.float32:
            raise ValueError(
                f"row_scale must be float32 [{vocab_size}], contiguous; got {row_scale.dtype} {tuple(row_scale.shape)} "
                f"with stride {row_scale.stride()}"
            )


def _flags(weight: Tensor, extras: Extras, config: HeadConfig) -> dict[str, Any]:
    """What is compiled in of a weight and its extras."""
    return {
        "FP8": weight.dtype == torch.float8_e4m3fn,
        "MORE_STEPS": -(-_columns(extras.more) // config.block_k),
        "HAS_ROW_SCALE": extras.row_scale is not None,
    }


def _launch(
    config: HeadConfig, hidden: Tensor, weight: Tensor, extras: Extras, out: Tensor | None, transform: Transform,
    **mode: Any,
) -> None:  # fmt: skip
    num_rows, (vocab_size, width) = hidden.shape[0], weight.shape
    more, row_scale = extras
    _check(hidden, weight, extras)
    panels = -(-num_rows // config.block_n)
    splits, tiles_per_split = config.splits(vocab_size, width)
    each, number, scale, softcap = transform.numbers
    wide = None if out is None else _wide(out, vocab_size)  # kernels write the padding, too
    flags, weight = _flags(weight, extras, config), _bytes(weight)
    x, w, target = hidden, weight, wide
    if config.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x = TensorDescriptor.from_tensor(hidden, [config.block_n, config.block_k])
        w = TensorDescriptor.from_tensor(weight, [config.block_v, config.block_k])
        target = None if wide is None else TensorDescriptor.from_tensor(wide, [config.block_n, config.block_v])
    head_fwd_kernel[(config.programs(panels * splits, hidden.device),)](
        x=x,
        w=w,
        out=target,
        x_ptr=None if more is None else hidden,
        more_ptr=more,
        row_scale_ptr=row_scale,
        bias_ptr=transform.bias,
        temperature_ptr=each,
        stride_xn=hidden.stride(0),
        stride_wv=weight.stride(0),
        stride_mv=_stride(more),
        stride_out=0 if out is None else out.stride(0),
        N=num_rows,
        V=vocab_size,
        H=width,
        C=_columns(more),
        panels=panels,
        group=max(GROUP_BYTES // (config.block_n * hidden.shape[1] * hidden.itemsize), 1),
        splits=splits,
        tiles_per_split=tiles_per_split,
        num_tiles=config.tiles(vocab_size),
        temperature=number,
        logit_scale=scale,
        softcap=softcap,
        **flags_of(transform),
        **flags,
        **(_OFF | mode),
        TMA=config.tma,
        EVEN_K=width % config.block_k == 0,
        E_SCALE=1.0 if out is None else _scale_of(out),
        UPCAST=_interprets(hidden),
        BLOCK_N=config.block_n,
        BLOCK_V=config.block_v,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages if out is None else config.store_stages,
        # a token's score must be the same in all modes, so all round the same: none fuses a product with a sum
        enable_fp_fusion=False,
    )


def _wide(out: Tensor, vocab_size: int) -> Tensor:
    """Rows of the slab with their padding."""
    return out.as_strided((out.shape[0], padded(vocab_size)), out.stride())


def _bytes(weight: Tensor) -> Tensor:
    """A weight as kernels read it: fp8 as bytes."""
    return weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight


def _stride(more: Tensor | None) -> int:
    return 0 if more is None else more.stride(0)


def _columns(more: Tensor | None) -> int:
    return 0 if more is None else more.shape[1]


def _scale_of(values: Tensor) -> float:
    return 2.0**15 if values.dtype == torch.float16 else 1.0


def _interprets(x: Tensor) -> bool:
    return x.device.type == "cpu"
