"""Calls the row kernels on a CPU: their functions (row_harness.cpp), or the kernels themselves (emulated_rows.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from grpo_fused.kernels.row_types import KL_ESTIMATORS, Statistics, TokenInputs, Transform
from native.building import shared_library
from torch import Tensor

from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.engines.token_kernels import objective_numbers

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STATISTICS, GRADIENT, LOSS = 0, 1, 2


class Options(ctypes.Structure):
    """ObjectiveOptions<float> of csrc/objective.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("policy", "kl_estimator")),
        *((name, ctypes.c_bool) for name in ("has_old", "has_kl", "bias_correction")),
        *((name, ctypes.c_float) for name in ("epsilon", "epsilon_high", "delta", "dual_clip", "tau_pos", "tau_neg")),
        ("beta", ctypes.c_float),
    )


POINTERS = ("max", "log_sum", "logp", "entropy", "loss", "dlogp", "dentropy", "advantages", "weight", "old_logp",
            "ref_logp", "is_ratio", "entropy_weight")  # fmt: skip


class Arguments(ctypes.Structure):
    """RowArguments of csrc/row_steps.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "out")),
        *((name, ctypes.c_int64) for name in ("stride_logits", "stride_out", "rows")),
        ("vocab_size", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("wide_logits", "wide_out", "stores_land_ahead")),
        *((name, ctypes.c_void_p) for name in ("targets", "bias", "temperatures")),
        *((name, ctypes.c_float) for name in ("temperature", "logit_scale", "softcap")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("options", Options),
    )


class Harness:
    """The three modes of the row kernels."""

    def __init__(self, folder: Path, source: str = "row_harness.cpp") -> None:
        path = shared_library(folder / "rows.so", Path(__file__).parent / source)
        self._library = ctypes.CDLL(str(path))
        assert self._library.size_of_arguments() == ctypes.sizeof(Arguments)

    def statistics(
        self, logits: Tensor, targets: Tensor, transform: Transform, threads: int, *, with_entropy: bool = True
    ) -> Statistics:
        """Statistics of [R, V] logits."""
        stats = _empty_statistics(logits.shape[0], with_entropy)
        self._run(STATISTICS, logits, logits, targets, transform, threads, **stats._asdict())
        return stats

    def gradient(
        self, logits: Tensor, out: Tensor, targets: Tensor, statistics: Statistics, dlogp: Tensor,
        dentropy: Tensor | None, transform: Transform, threads: int,
    ) -> None:  # fmt: skip
        """The gradient from coefficients, written to `out`."""
        tensors = {**statistics._asdict(), "dlogp": dlogp, "dentropy": dentropy}
        self._run(GRADIENT, logits, out, targets, transform, threads, **tensors)

    def loss(
        self, logits: Tensor, out: Tensor, targets: Tensor, inputs: TokenInputs, config: GRPOLossConfig,
        transform: Transform, threads: int,
    ) -> tuple[Statistics, Tensor, Tensor]:  # fmt: skip
        """Statistics, losses and coefficients; the gradient is written to `out`."""
        stats = _empty_statistics(logits.shape[0], True)
        loss, dlogp = torch.empty(2, logits.shape[0])
        options = objective_numbers(config)
        numbers = options._asdict()
        numbers["kl_estimator"] = KL_ESTIMATORS[options.kl_estimator]
        numbers["has_old"] = inputs.old is not None
        numbers["has_kl"] = inputs.ref is not None and options.beta != 0.0
        given = inputs._asdict()
        given["old_logp"], given["ref_logp"] = given.pop("old"), given.pop("ref")
        self._run(LOSS, logits, out, targets, transform, threads, options=Options(**numbers), **stats._asdict(),
                  **given, loss=loss, dlogp=dlogp)  # fmt: skip
        return stats, loss, dlogp

    def _run(
        self, mode: int, logits: Tensor, out: Tensor, targets: Tensor, transform: Transform, threads: int,
        options: Options | None = None, **tensors: Tensor | None,
    ) -> None:  # fmt: skip
        temperature = transform.temperature
        per_row = temperature if isinstance(temperature, Tensor) else None
        arguments = Arguments(
            logits=logits.data_ptr(), out=out.data_ptr(), stride_logits=logits.stride(0), stride_out=out.stride(0),
            rows=logits.shape[0], vocab_size=logits.shape[1], wide_logits=_is_wide(logits), wide_out=_is_wide(out),
            stores_land_ahead=out.itemsize < logits.itemsize and out.data_ptr() == logits.data_ptr(),
            targets=targets.data_ptr(), bias=_pointer(transform.bias), temperatures=_pointer(per_row),
            temperature=1.0 if per_row is not None else temperature, logit_scale=transform.logit_scale,
            softcap=transform.softcap or 0.0, options=options or Options(),
            **{name: _pointer(x) for name, x in tensors.items()},
        )  # fmt: skip
        refused = self._library.run_rows(mode, TYPES[logits.dtype], TYPES[out.dtype], ctypes.byref(arguments), threads)
        assert refused == 0


def _is_wide(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _empty_statistics(rows: int, with_entropy: bool) -> Statistics:
    new = torch.full((4, rows), torch.nan).unbind(0)
    return Statistics(new[0], new[1], new[2], new[3] if with_entropy else None)
