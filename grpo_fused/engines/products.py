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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_fused.call.calls import HeadCall
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
_precision_before: list[tuple[Any, str]] = []
_legacy_precision_before = "highest"


@contextmanager
def ieee_products() -> Iterator[None]:
    """fp32 products in IEEE precision, with any global TF32 or matmul-precision setting.

    The setting is global: the first of several threads changes it, the last one restores it. A setting made by
    `torch.set_float32_matmul_precision` is changed through that function too: other threads may read the legacy flags,
    which raise if the two interfaces disagree.
    """
    global _precision_users
    with _precision_lock:
        _precision_users += 1
        if _precision_users == 1:
            _set_ieee()
    try:
        yield
    finally:
        with _precision_lock:
            _precision_users -= 1
            if _precision_users == 0:
                _restore_precision()


def _set_ieee() -> None:
    global _legacy_precision_before
    _precision_before[:] = [(backend, backend.fp32_precision) for backend in _FP32_PRECISION_BACKENDS]
    try:
        _legacy_precision_before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller uses the new interface, so the legacy one cannot be read anyway
        _legacy_precision_before = "highest"
    if _legacy_precision_before != "highest":
        torch.set_float32_matmul_precision("highest")
    for backend in _FP32_PRECISION_BACKENDS:
        if backend.fp32_precision not in ("ieee", "none"):
            backend.fp32_precision = "ieee"


def _restore_precision() -> None:
    if _legacy_precision_before != "highest":
        torch.set_float32_matmul_precision(_legacy_precision_before)
    for backend, precision in _precision_before:
        if backend.fp32_precision != precision:
            # a setting equal to the global one is assumed to follow it, and still follows it afterwards
            follows = precision == torch.backends.fp32_precision  # type: ignore[attr-defined]
            backend.fp32_precision = "none" if follows else precision


def compute_dtype(hidden_states: Tensor, lm_head_weight: Tensor) -> torch.dtype:
    """The dtype that inputs are rounded to: autocast's where it applies, else the promoted one."""
    device = hidden_states.device.type
    dtype = torch.promote_types(hidden_states.dtype, lm_head_weight.dtype)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype


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


def _has_fp32_output(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `mm(out_dtype=float32)` takes operands of `dtype` on `device`, by the same rules as its own checks.

    Only CUDA has it; bf16 needs compute capability 8.0, and fp16 is refused if fp16 accumulation is allowed.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation


@dataclass(frozen=True)
class Head:
    """An lm head and how its products are taken: logits = logit_scale * (h W^T + b), capped, divided by temperature."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""
    logit_scale: float
    softcap: float | None
    compute_dtype: torch.dtype
    """Inputs are rounded to this first: their promoted dtype, or autocast's."""

    @classmethod
    def of(cls, call: HeadCall) -> Head:
        """The head of a call."""
        bias, hidden, weight = call.lm_head_bias, call.hidden_states, call.lm_head_weight
        by_autocast = call.compute_dtype != torch.promote_types(hidden.dtype, weight.dtype)
        if bias is not None and by_autocast:  # a bias is added in fp32, so that nothing else rounds it
            bias = bias.to(call.compute_dtype)
        return cls(weight, bias, call.logit_scale, call.softcap, call.compute_dtype)

    def transform(self, temperature: Tensor | float = 1.0) -> Transform:
        """The transform from products to z at a temperature: a number, or [R]."""
        bias = None if self.bias is None else self.bias.to(self.statistics_dtype)
        return Transform(bias, self.logit_scale, self.softcap, temperature)

    @property
    def vocab_size(self) -> int:
        """V"""
        return self.weight.shape[0]

    @property
    def statistics_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Operand dtype of the two gradient products."""
        converts = self.weight.dtype != self.compute_dtype  # block by block: their products must not be rounded
        if not self._has_fp32_output and (converts or not has_products_in(self.compute_dtype, self.weight.device)):
            return self.statistics_dtype
        return self.compute_dtype

    @property
    def product_dtype(self) -> torch.dtype:
        """Dtype of the gradient products' results, which are rounded after the upstream gradient is multiplied in."""
        return torch.float32 if self._has_fp32_output else self.gradient_dtype

    @property
    def _has_fp32_output(self) -> bool:
        return _has_fp32_output(self.compute_dtype, self.weight.device)

    @property
    def _has_native_logits(self) -> bool:
        """Whether the C++ extension multiplies them: narrow operands, without widened copies."""
        narrow, weight = self.compute_dtype in (torch.bfloat16, torch.float16), self.weight
        adjacent = weight.stride(1) == 1 or weight.shape[1] == 1
        return narrow and adjacent and weight.device.type == "cpu" and libraries.cpu_available() is None

    @cached_property
    def rounded_weight(self) -> Tensor:
        """[V, H]: the weight in the compute dtype; autocast's copy of an fp32 master, made once for a call."""
        return self.operand(self.weight)

    @property
    def shape_in_compute_dtype(self) -> Tensor:
        """A tensor with the shape and dtype of `rounded_weight`, without its memory."""
        return self.weight.new_empty(1, dtype=self.compute_dtype).expand(self.weight.shape)

    def operand(self, x: Tensor) -> Tensor:
        """Hidden states or a weight block in the dtype of the computation."""
        return x.to(self.compute_dtype)

    def logits_into(self, out: Tensor, hidden: Tensor) -> None:
        """out [C, V] (statistics dtype) = hidden [C, H] (compute dtype) @ weight^T; row work adds the bias."""
        if self._has_fp32_output:
            torch.mm(hidden, self.rounded_weight.T, out_dtype=torch.float32, out=out)
        elif self._has_native_logits:
            cpu_library.head_products(hidden.contiguous(), self.weight, out)
        else:
            wide = hidden.to(self.statistics_dtype)
            for block in self._blocks(self.statistics_dtype):
                torch.mm(wide, self._block(block, self.statistics_dtype).T, out=out[:, block])

    def hidden_gradient(self, dlogits: Tensor) -> Tensor:
        """[C, H] = dlogits [C, V] (gradient dtype) @ weight."""
        blocks = list(self._blocks(self.gradient_dtype))
        if len(blocks) == 1:
            return self._product(dlogits, self._block(blocks[0], self.gradient_dtype))
        total = dlogits.new_zeros((dlogits.shape[0], self.weight.shape[1]), dtype=self.statistics_dtype)
        for block in blocks:
            total += self._product(dlogits[:, block], self._block(block, self.gradient_dtype))
        return total

    def accumulate_weight_gradient(
        self, out: Tensor, dlogits: Tensor, hidden: Tensor, *, first: bool, scale: Tensor | None = None
    ) -> None:
        """out [V, H] = or += dlogits^T [V, C] @ hidden [C, H] / scale.

        The first chunk is written, not added; if others follow, `out` must be of the statistics dtype.
        """
        hidden = hidden.to(self.gradient_dtype)
        if scale is None and dlogits.dtype == out.dtype:
            torch.addmm(out, dlogits.T, hidden, beta=0 if first else 1, out=out)
        elif scale is None and self._has_fp32_output and out.dtype == torch.float32:
            if first:
                torch.mm(dlogits.T, hidden, out_dtype=torch.float32, out=out)
            else:
                torch.addmm(out, dlogits.T, hidden, out_dtype=torch.float32, out=out)
        else:
            rows = self._block_rows
            for start in range(0, out.shape[0], rows):
                block = slice(start, start + rows)
                product = self._product(dlogits[:, block].T, hidden)
                if scale is not None:
                    product = product.to(self.statistics_dtype).div_(scale)
                out[block].copy_(product) if first else out[block].add_(product)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if self._has_fp32_output:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b)

    def _blocks(self, dtype: torch.dtype) -> Iterator[slice]:
        """Slices of the vocabulary: one if the weight is used without conversion to `dtype`, else blocks to convert."""
        if self._has_fp32_output or self.weight.dtype == dtype == self.compute_dtype:
            yield slice(0, self.vocab_size)
            return
        for start in range(0, self.vocab_size, self._block_rows):
            yield slice(start, min(start + self._block_rows, self.vocab_size))

    @property
    def _block_rows(self) -> int:
        size = VOCAB_BLOCK_BYTES_CUDA if self.weight.is_cuda else VOCAB_BLOCK_BYTES
        return max(size // (4 * max(self.weight.shape[1], 1)), 256)

    def _block(self, block: slice, dtype: torch.dtype) -> Tensor:
        if self._has_fp32_output:
            return self.rounded_weight[block].to(dtype)
        return self.operand(self.weight[block]).to(dtype)
