"""The kernels of candidate sets, and that which scales a gradient, compiled without a GPU: registers and spills on
every architecture."""

from __future__ import annotations

import itertools
from typing import Any

from grpo_fused.kernels.candidates import BLOCK_COLUMNS, BLOCK_ROWS, pair_products_kernel, segment_sums_kernel
from grpo_fused.kernels.scale import BLOCK, scale_bwd_kernel

from benchmarks.compiled import compile_kernel, resources

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
DTYPES = ("bf16", "fp32")

_TYPES = {
    "scale": {"factor_ptr": "*fp32", "count": "i64", "blocks": "i32"},
    "pair_products": {
        "i": "*i64", "j": "*i64", "out": "*fp32", "count": "i32", "columns": "i32", "a_stride": "i64",
        "b_stride": "i64",
    },
    "segment_sums": {
        "index": "*i64", "factor": "*fp32", "offsets": "*i64", "out": "*fp32", "columns": "i32", "stride": "i64",
    },
}  # fmt: skip


def table() -> list[dict[str, Any]]:
    """A row for each kernel, dtype and architecture."""
    rows = []
    tile = {"ROWS": BLOCK_ROWS, "COLUMNS": BLOCK_COLUMNS}
    kernels = (
        (pair_products_kernel, "pair_products", ("a", "b"), tile, 4),
        (segment_sums_kernel, "segment_sums", ("x",), tile, 4),
        (scale_bwd_kernel, "scale", ("x_ptr",), {"BLOCK": BLOCK}, 8),
    )
    for (kernel, name, matrices, sizes, num_warps), arch, dtype in itertools.product(kernels, ARCHITECTURES, DTYPES):
        types = {**_TYPES[name], **dict.fromkeys(matrices, f"*{dtype}")}
        compiled = compile_kernel(
            kernel, arch, types, sizes, set(types) - {"count"}, num_warps=num_warps, enable_fp_fusion=True
        )
        rows.append({"kernel": name, "arch": arch, "dtype": dtype, **resources(compiled, arch)})
    return rows
