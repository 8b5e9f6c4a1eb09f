"""The three products of an lm head on a chunk of tokens, with fp32-exact logits and fp32 accumulation.

The fast and exact way differs by device:

- CUDA multiplies bf16/fp16 operands on tensor cores, with fp32 results (`out_dtype`).
- The CPU's library rounds a bf16 product to bf16, which costs the log-probs 1e-2 to 1e-1. The C++ extension multiplies
  the logits instead. Without it they are multiplied in fp32, from blocks of the weight that are converted one by one,
  at the speed of fp32 (half that of bf16 on AVX512-BF16, less on AMX). The two gradient products take bf16 operands,
  whose rounding is that of the result.
- fp16 has no fast product on the CPU (measured: 1 to 40 GFLOP/s against 150 in fp32), so fp16 is always widened;
  so is bf16 where the processor has no instructions for it (18 x slower than fp32 at V = 3200, H = 896 by AVX2).
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_fused.call.calls import LMHead
from grpo_fused.call.layout import blocks
from grpo_fused.engines import cpu_library, libraries
from grpo_fused.kernels.row_types import Transform

VOCAB_BLOCK_BYTES = 4 * 2**20
"""Size of a widened weight block. Measured (AVX512-BF16, 2 cores, 256 tokens, V = 151936, H = 896): logits in 0.45 s
at 4 MiB, 0.52 s at 8 and 16, 0.70 s at 64."""

VOCAB_BLOCK_BYTES_CUDA = 32 * 2**20
"""Size of a block of fp16's dW on a GPU, where 4 MiB at H = 4096 would be 600 products. Not measured on a GPU yet."""

_FP32_PRECISION_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


_precision_lock = threading.Lock()
_precision_users = 0
_precision_before = ExitStack()
"""puts back the settings of before"""


@contextmanager
def ieee_products() -> Iterator[None]:
    """fp32 products in IEEE precision, with any global TF32 or matmul-precision setting.

    The setting is global: the first of several threads changes it, the last one restores it. A setting made by
    `torch.set_float32_matmul_precision` is changed through that function too: other threads may read the legacy flags,
    which raise if the two interfaces disagree.
    """
    global _precision_users
    with _precision_lock:
        if _precision_users == 0:
            _set_ieee()
        _precision_users += 1
    try:
        yield
    finally:
        with _precision_lock:
            _precision_users -= 1
            if _precision_users == 0:
                _precision_before.close()


def _set_ieee() -> None:
    for backend in _FP32_PRECISION_BACKENDS:
        _precision_before.callback(_restore_precision, backend, backend.fp32_precision)
    # the caller may use the new interface: then the legacy one cannot be read anyway
    with suppress(RuntimeError):
        legacy = torch.get_float32_matmul_precision()
        if legacy != "highest":
            _precision_before.callback(torch.set_float32_matmul_precision, legacy)  # before those of the backends
            torch.set_float32_matmul_precision("highest")
    for backend in _FP32_PRECISION_BACKENDS:
        if backend.fp32_precision not in ("ieee", "none"):
            backend.fp32_precision = "ieee"


def _restore_precision(backend: Any, precision: str) -> None:
    if backend.fp32_precision != precision:
        # a setting equal to the global one is assumed to follow it, and still follows it afterwards
        follows = precision == torch.backends.fp32_precision  # type: ignore[attr-defined]
        backend.fp32_precision = "none" if follows else precision


def compute_dtype(hidden_states: Tensor, lm_head_weight: Tensor) -> torch.dtype:
    """The dtype that inputs are rounded to: autocast's where it applies, else the promoted one."""
    device = hidden_states.device
    dtype = torch.promote_types(hidden_states.dtype, lm_head_weight.dtype)
    return torch.get_autocast_dtype(device.type) if autocast_rounds(dtype, device) else dtype


def autocast_rounds(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast is on, and applies to products in this dtype."""
    return torch.is_autocast_enabled(device.type) and dtype != torch.float64


def has_products_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library's products in `dtype` are fast: on a CPU bf16 needs instructions for it."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    return dtype == torch.bfloat16 and _cpu_multiplies_bf16()


@cache
def _cpu_multiplies_bf16() -> bool:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()


def has_fp32_output(head: LMHead) -> bool:
    """Whether `mm(out_dtype=float32)` takes the head's operands, by the same rules as its own checks.

    Only CUDA has it; bf16 needs compute capability 8.0, and fp16 is refused if fp16 accumulation is allowed.
    """
    dtype, device = head.compute_dtype, head.weight.device
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation


def rounded_bias(head: LMHead) -> LMHead:
    """The head with its bias as the products are rounded: autocast rounds it, else it is added in fp32."""
    if head.bias is None or not head.rounds_bias:
        return head
    return head._replace(bias=head.operand(head.bias), rounds_bias=False)


def rounded_weight(head: LMHead) -> LMHead:
    """The head with its weight in the compute dtype where products take it whole; made once for a call."""
    return head._replace(weight=head.operand(head.weight)) if has_fp32_output(head) and head.base is None else head


def transform(head: LMHead, temperature: Tensor | float = 1.0) -> Transform:
    """The transform from products to z at a temperature: a number, or [R]."""
    bias = None if head.bias is None else head.bias.to(head.statistics_dtype).contiguous()  # as kernels read it
    return Transform(bias, head.logit_scale, head.softcap, temperature)


def gradient_dtype(head: LMHead) -> torch.dtype:
    """Operand dtype of the two gradient products."""
    weight, compute = head.weight, head.compute_dtype
    converts = head.base is not None or weight.dtype != compute  # block by block: their products must not be rounded
    if not has_fp32_output(head) and (converts or not has_products_in(compute, weight.device)):
        return head.statistics_dtype
    return compute


def dhidden_dtype(head: LMHead) -> torch.dtype:
    """Dtype that dH is held in until the upstream gradient multiplies it: its product's, or fp32 for one of fp16, whose
    range a loss scale may leave."""
    dtype = gradient_dtype(head)
    return torch.float32 if has_fp32_output(head) or dtype == torch.float16 else dtype


def has_native_logits(head: LMHead) -> bool:
    """Whether the C++ library multiplies them: narrow operands, without widened copies."""
    narrow, weight = head.compute_dtype in (torch.bfloat16, torch.float16), head.weight
    adjacent = all(x is None or x.stride(1) == 1 or x.shape[1] <= 1 for x in (head.base, weight))
    fits = adjacent and head.base_width % cpu_library.BASE_COLUMNS == head.base_group % cpu_library.BASE_COLUMNS == 0
    return narrow and fits and weight.device.type == "cpu" and libraries.cpu_available() is None


def native_products(head: LMHead, hidden: Tensor) -> cpu_library.HeadProducts:
    """What the C++ library multiplies, for hidden states [N, width]: an adapter's columns in fp32."""
    low_hidden = low_weight = None
    if head.base is not None and head.weight.shape[1] > 0:
        low_hidden = torch.stack([x.float() for x in head.weight_states(hidden)]).sum(0)
        low_weight, hidden = _adjacent(head.weight), hidden[:, : head.base_width]
    weight, rounded = head.weight if head.base is None else head.base, cpu_library.scalar(head.compute_dtype)
    row_scale, group_scale = (None if x is None else x.contiguous() for x in (head.row_scale, head.group_scale))
    return cpu_library.HeadProducts(
        _adjacent(hidden), _adjacent(weight), row_scale, group_scale, head.codes, rounded, low_hidden, low_weight
    )


def _adjacent(x: Tensor) -> Tensor:
    """Rows may have gaps between them, elements of a row not."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def logits_into(head: LMHead, out: Tensor, hidden: Tensor) -> None:
    """out [C, V] (statistics dtype) = hidden [C, H] (compute dtype) @ W^T; row work adds the bias."""
    if has_native_logits(head):
        cpu_library.head_products(native_products(head, hidden), out)
        return
    fp32_output = _fp32_output(head)
    dtype = head.compute_dtype if fp32_output else head.statistics_dtype
    hidden = hidden.to(dtype)
    for block in _blocks(head, dtype):
        torch.mm(hidden, head.rows(block).to(dtype).T, out=out[:, block], **fp32_output)
    if head.row_scale is not None:
        out *= head.row_scale


def hidden_gradient(head: LMHead, dlogits: Tensor) -> Tensor:
    """[C, H] = dlogits [C, V] (gradient dtype) @ [base, weight]."""
    dtype, fp32_output = gradient_dtype(head), _fp32_output(head)
    parts = _blocks(head, dtype)
    if len(parts) == 1:
        return torch.mm(dlogits, head.rows(parts[0]).to(dtype), **fp32_output)
    total = dlogits.new_zeros((dlogits.shape[0], head.width), dtype=head.statistics_dtype)
    for block in parts:
        torch.addmm(total, dlogits[:, block], head.rows(block).to(dtype), out=total, **fp32_output)
    return total


def accumulate_weight_gradient(
    head: LMHead, out: Tensor, dlogits: Tensor, hidden: Tensor, *, first: bool, scale: Tensor | None = None
) -> None:
    """out (shaped like the weight [V, K]) = or += dlogits^T [V, C] @ hidden [C, K] / scale.

    The first chunk is written, not added; if others follow, `out` must be of the statistics dtype.
    """
    hidden, fp32_output = hidden.to(gradient_dtype(head)), _fp32_output(head)
    if scale is None and dlogits.dtype == out.dtype:
        torch.addmm(out, dlogits.T, hidden, beta=0 if first else 1, out=out)
    elif scale is None and fp32_output and out.dtype == torch.float32:
        if first:
            torch.mm(dlogits.T, hidden, out=out, **fp32_output)
        else:
            torch.addmm(out, dlogits.T, hidden, out=out, **fp32_output)
    else:
        for block in blocks(out.shape[0], _block_rows(head)):
            product = torch.mm(dlogits[:, block].T, hidden, **fp32_output)
            if scale is not None:
                product = product.to(head.statistics_dtype).div_(scale)
            out[block].copy_(product) if first else out[block].add_(product)


def _fp32_output(head: LMHead) -> dict[str, Any]:
    """Arguments of `mm` and `addmm` for fp32 results of narrow operands, where there are such products."""
    return {"out_dtype": torch.float32} if has_fp32_output(head) else {}


def widened_bytes(head: LMHead) -> int:
    """Bytes of the blocks of a weight, at most, while they are converted for a product; on a CPU, of a block of dW too.

    On a GPU a plain weight is multiplied as it is.
    """
    if head.weight.is_cuda and head.base is None:
        return 0
    several = 2 if head.weight.is_cuda else 3
    return several * 4 * min(_block_rows(head), head.vocab_size) * head.width


def _blocks(head: LMHead, dtype: torch.dtype) -> list[slice]:
    """Slices of the vocabulary: one if the weight is used without conversion to `dtype`, else blocks to convert."""
    if head.base is None and (has_fp32_output(head) or head.weight.dtype == dtype == head.compute_dtype):
        return [slice(0, head.vocab_size)]
    return blocks(head.vocab_size, _block_rows(head))


def _block_rows(head: LMHead) -> int:
    size = VOCAB_BLOCK_BYTES_CUDA if head.weight.is_cuda else VOCAB_BLOCK_BYTES
    return max(size // (4 * max(head.width, 1)), 256)
