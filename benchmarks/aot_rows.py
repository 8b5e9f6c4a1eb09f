"""The row kernels, compiled: registers, spills, widths of loads, and the barriers of in-place stores.

The order of loads, barriers and stores comes from the PTX. A stack above 0 is a spill.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.compiled import compile_kernel, resources

BYTES_PER_LOGIT = {
    ("row_statistics_fwd_kernel", "fp32"): "4",
    ("row_gradient_bwd_kernel", "bf16"): "4 + 2 = 6",
    ("row_gradient_bwd_kernel", "fp32"): "4 + 4 = 8",
    ("row_loss_fwd_bwd_kernel", "bf16"): "4 + 4 + 2 = 10",
    ("row_loss_fwd_bwd_kernel", "fp32"): "4 + 4 + 4 = 12",
}
"""Loads and stores of a logit, from the kernels' loops: one pass reads, a gradient pass reads and writes."""


@dataclass(frozen=True)
class Variant:
    """One kernel with one set of constexprs on one architecture."""

    kernel: str
    arch: str
    out: str
    """dtype of the gradient: bf16 in place of fp32 logits, or fp32"""
    options: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.arch}-{self.out}-{self.options}"


@dataclass(frozen=True)
class Evidence:
    """What the compiler made of a variant."""

    registers: int
    stack: int
    shared_kib: float
    widest_load_bits: int
    barrier_before_store: bool
    """every store of the in-place loop comes after a barrier that comes after the load"""


def variants() -> list[Variant]:
    """Every configuration that ships, with all options on and with none."""
    from grpo_fused.kernels.configs import ROW_CONFIGS

    archs = [arch for arch in ROW_CONFIGS if arch != "interpreter"]
    made = []
    for arch, options in itertools.product(archs, ("plain", "full")):
        made.append(Variant("row_statistics_fwd_kernel", arch, "fp32", options))
        for kernel, out in itertools.product(("row_gradient_bwd_kernel", "row_loss_fwd_bwd_kernel"), ("bf16", "fp32")):
            made.append(Variant(kernel, arch, out, options))
    return made


def compile_variant(variant: Variant, **changes: Any) -> Any:
    """Triton's compiled kernel for `variant` (with constexprs changed); a second or so each."""
    from grpo_fused.kernels import rows
    from grpo_fused.kernels.configs import ROW_CONFIGS

    kernel = getattr(rows, variant.kernel)
    config = ROW_CONFIGS[variant.arch]
    full = variant.options == "full"
    constexprs = {
        "BLOCK": config.block, "POLICY": 0, "KL": 3, "HAS_OLD": True, "HAS_KL": full, "BIAS_CORRECTION": full,
        "HAS_IS_RATIO": full, "HAS_BIAS": full, "HAS_SOFTCAP": full, "HAS_TEMPERATURES": full, "WITH_ENTROPY": True,
        "HAS_DENTROPY": full, "IN_PLACE": config.in_place, **changes,
    }  # fmt: skip
    types = {name: "*fp32" if name.endswith("_ptr") else "fp32" for name in kernel.arg_names}
    types |= {"targets_ptr": "*i64", "dlogits_ptr": f"*{variant.out}"}
    types |= dict.fromkeys(("stride_r", "stride_dr", "V", "padded"), "i32")
    aligned = {name for name in kernel.arg_names if name.endswith("_ptr")} | {"stride_r", "stride_dr", "padded"}
    return compile_kernel(kernel, variant.arch, types, constexprs, aligned, num_warps=config.num_warps)


def inspect(variant: Variant) -> Evidence:
    """Compile `variant` and read off what matters."""
    compiled = compile_variant(variant)
    registers, stack, shared, _ = resources(compiled, variant.arch)
    if variant.arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        widest = max((32 * int(n or 1) for n in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?", text)), default=0)
        return Evidence(registers, stack, shared, widest, barrier_before_store=True)
    ptx = compiled.asm["ptx"]
    return Evidence(registers, stack, shared, _widest_load(ptx), barriers_hold(ptx))


def _widest_load(ptx: str) -> int:
    widths = [int(v or 1) * int(b) for v, b in re.findall(r"ld\.global[\w.]*?(?:\.v(\d))?\.[bf](\d+)", ptx)]
    return max(widths, default=0)


def barriers_hold(ptx: str) -> bool:
    """Whether every wide store of dlogits is preceded, since the last wide load, by a barrier."""
    safe = True
    since_load = False
    for line in ptx.splitlines():
        if re.search(r"ld\.global[\w.]*\.v[24]", line):
            since_load = False
        elif "bar.sync" in line or "barrier.sync" in line:
            since_load = True
        elif re.search(r"st\.global[\w.]*\.v[24]", line):
            safe = safe and since_load
    return safe


def table() -> list[dict[str, Any]]:
    """Print a line for each variant; returns them."""
    header = ("kernel", "arch", "grad", "options", "regs", "stack", "shared", "load")
    print("{:28} {:8} {:5} {:8} {:>5} {:>6} {:>9} {:>5}  bytes/logit".format(*header))
    rows = []
    for variant in variants():
        e = inspect(variant)
        rows.append({**asdict(variant), **asdict(e)})
        moved = BYTES_PER_LOGIT[variant.kernel, variant.out]
        print(
            f"{variant.kernel:28} {variant.arch:8} {variant.out:5} {variant.options:8} {e.registers:5} {e.stack:6} "
            f"{e.shared_kib:5.1f} KiB {e.widest_load_bits:5}  {moved}"
        )
    return rows
