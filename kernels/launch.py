"""Launchers of the row kernels: tensors in, tensors out; no state, no checks beyond what a pointer needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configs import RowConfig, padded, row_config
from .objective import KL_ESTIMATORS, POLICIES
from .rows import row_gradient_bwd_kernel, row_loss_fwd_bwd_kernel, row_statistics_fwd_kernel


class RowTransform(NamedTuple):
    """How raw products become z: softcap(logit_scale * (raw + bias)) / temperature."""

    bias: Tensor | None
    """[V]"""
    logit_scale: float
    softcap: float | None
    temperature: Tensor | float
    """a number, or [R] fp32"""


class RowStatistics(NamedTuple):
    """[R] fp32 each."""

    max: Tensor
    log_sum: Tensor
    logp: Tensor
    entropy: Tensor | None


class TokenInputs(NamedTuple):
    """What the objective reads of each row, [R] fp32 each, None where there is none."""

    advantages: Tensor
    weight: Tensor
    """what a token's loss is multiplied by; 0 where masked"""
    old: Tensor | None
    ref: Tensor | None
    is_ratio: Tensor | None
    entropy_weight: Tensor | None
    """0-d: weight of every active token's entropy in the bonus"""


class ObjectiveNumbers(NamedTuple):
    """The options of a token-level objective; an option that is off is inf (delta, dual_clip) or unread."""

    loss_type: str
    kl_estimator: str
    bias_correction: bool
    epsilon: float
    epsilon_high: float
    delta: float
    dual_clip: float
    tau_pos: float
    tau_neg: float
    beta: float


def row_statistics(logits: Tensor, targets: Tensor, transform: RowTransform, *, with_entropy: bool) -> RowStatistics:
    """Statistics of [R, V] logits (fp32, bf16 or fp16; unit column stride, rows as `padded_width` says)."""
    stats = empty_statistics(logits, with_entropy)
    if logits.shape[0]:
        common, config = _common(logits, transform)
        with device_of(logits):
            row_statistics_fwd_kernel[(logits.shape[0],)](
                logits, common["bias_ptr"], targets, common["temperature_ptr"], stats.max, stats.log_sum, stats.logp,
                stats.entropy, logits.stride(0), *common["sizes"], *common["numbers"], *common["flags"],
                WITH_ENTROPY=with_entropy, BLOCK=config.block, num_warps=config.num_warps,
            )  # fmt: skip
    return stats


def row_gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    statistics: RowStatistics,
    dlogp: Tensor,
    dentropy: Tensor | None,
    transform: RowTransform,
) -> None:
    """Write dL/dlogits to `out` [R, V] from coefficients ([R]); `out` may share the memory of the logits."""
    if logits.shape[0] == 0:
        return
    common, config = _common(logits, transform, out)
    in_place = _shares_memory(logits, out, config.in_place)
    with device_of(logits):
        row_gradient_bwd_kernel[(logits.shape[0],)](
            logits, out, common["bias_ptr"], targets, common["temperature_ptr"], statistics.max, statistics.log_sum,
            statistics.logp, statistics.entropy, dlogp, dentropy, logits.stride(0), out.stride(0), *common["sizes"],
            *common["numbers"], *common["flags"], HAS_DENTROPY=dentropy is not None, IN_PLACE=in_place,
            BLOCK=config.block, num_warps=config.num_warps,
        )  # fmt: skip


def row_loss(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    inputs: TokenInputs,
    options: ObjectiveNumbers,
    transform: RowTransform,
    *,
    with_entropy: bool,
) -> tuple[RowStatistics, Tensor, Tensor]:
    """One launch: statistics, per-token loss and coefficient g ([R]), and dL/dlogits written to `out` [R, V]."""
    has_bonus = inputs.entropy_weight is not None
    stats = empty_statistics(logits, with_entropy or has_bonus)
    loss, dlogp = torch.empty_like(stats.logp), torch.empty_like(stats.logp)
    if logits.shape[0] == 0:
        return stats, loss, dlogp
    common, config = _common(logits, transform, out)
    in_place = _shares_memory(logits, out, config.in_place)
    with device_of(logits):
        row_loss_fwd_bwd_kernel[(logits.shape[0],)](
            logits, out, common["bias_ptr"], targets, common["temperature_ptr"], inputs.advantages, inputs.weight,
            inputs.old, inputs.ref, inputs.is_ratio, inputs.entropy_weight, stats.max, stats.log_sum, stats.logp,
            stats.entropy, loss, dlogp, logits.stride(0), out.stride(0), *common["sizes"], *common["numbers"],
            options.epsilon, options.epsilon_high, options.delta, options.dual_clip, options.tau_pos, options.tau_neg,
            options.beta, POLICY=POLICIES[options.loss_type], KL=KL_ESTIMATORS[options.kl_estimator],
            HAS_OLD=inputs.old is not None, HAS_KL=inputs.ref is not None and options.beta != 0.0,
            BIAS_CORRECTION=options.bias_correction, HAS_IS_RATIO=inputs.is_ratio is not None,
            HAS_BIAS=common["flags"][0], HAS_SOFTCAP=common["flags"][1], HAS_TEMPERATURES=common["flags"][2],
            WITH_ENTROPY=stats.entropy is not None, HAS_DENTROPY=has_bonus, IN_PLACE=in_place, BLOCK=config.block,
            num_warps=config.num_warps,
        )  # fmt: skip
    return stats, loss, dlogp


def check_bias(transform: RowTransform) -> None:
    """A bias is read as one run of numbers."""
    if transform.bias is not None and not transform.bias.is_contiguous():
        raise ValueError(f"the bias must be contiguous; got strides {transform.bias.stride()}")


def padded_width(logits: Tensor) -> int:
    """Columns of a row that may be touched: V rounded up to `PAD` where the row's stride covers that, else V."""
    rows, vocab_size = logits.shape
    stride = logits.stride(0)
    width = padded(vocab_size)
    end = logits.storage_offset() + (rows - 1) * stride + width
    fits = stride >= width and end * logits.itemsize <= logits.untyped_storage().nbytes()
    return width if fits else vocab_size


def _common(logits: Tensor, transform: RowTransform, out: Tensor | None = None) -> tuple[dict[str, Any], RowConfig]:
    for x in (logits,) if out is None else (logits, out):
        if x.shape[1] > 1 and x.stride(1) != 1:
            raise ValueError(f"rows of logits must have unit stride; got strides {x.stride()}")
    check_bias(transform)
    temperatures = transform.temperature if isinstance(transform.temperature, Tensor) else None
    number = 1.0 if isinstance(transform.temperature, Tensor) else float(transform.temperature)
    softcap = transform.softcap
    common = {
        "bias_ptr": transform.bias,
        "temperature_ptr": temperatures,
        # stores run into the padding as loads do, so both must have it
        "sizes": (logits.shape[1], padded_width(logits) if out is None else min(map(padded_width, (logits, out)))),
        "numbers": (number, float(transform.logit_scale), 1.0 if softcap is None else float(softcap)),
        "flags": (transform.bias is not None, softcap is not None, temperatures is not None),
    }
    return common, row_config(logits.device, logits.shape[1])


def empty_statistics(logits: Tensor, with_entropy: bool) -> RowStatistics:
    """Room for the statistics of as many rows as `logits` has."""
    new = [torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(4)]
    return RowStatistics(new[0], new[1], new[2], new[3] if with_entropy else None)


def _shares_memory(logits: Tensor, out: Tensor, allowed: bool) -> bool:
    shared = logits.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    if shared:
        same_rows = logits.data_ptr() == out.data_ptr() and (
            logits.stride(0) * logits.itemsize == out.stride(0) * out.itemsize and out.itemsize <= logits.itemsize
        )
        if not (allowed and same_rows):
            raise ValueError(
                "the gradient may share the memory of the logits only row upon row, and not on this device"
            )
    return shared


@contextmanager
def device_of(x: Tensor) -> Iterator[None]:
    """The device of `x` as the current one: Triton launches there, and it need not be the tensor's."""
    with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
        yield
