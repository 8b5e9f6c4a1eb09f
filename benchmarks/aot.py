"""Ahead-of-time evidence: every shipped Triton configuration compiled for every architecture, without a GPU.

    python -m benchmarks.aot            # the table
    python -m benchmarks.aot --json F   # the same as JSON

Registers and stack come from ptxas (`cuobjdump`) or the AMD assembler, shared memory from Triton, and the order of
loads, barriers and stores from the PTX. A stack above 0 is a spill.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHARED_LIMIT = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB of shared memory (LDS) that a program may use."""

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
    import triton
    from grpo_fused.kernels import rows
    from grpo_fused.kernels.configs import ROW_CONFIGS
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(rows, variant.kernel)
    config = ROW_CONFIGS[variant.arch]
    full = variant.options == "full"
    constexprs = {
        "BLOCK": config.block, "POLICY": 0, "KL": 3, "HAS_OLD": True, "HAS_KL": full, "BIAS_CORRECTION": full,
        "HAS_IS_RATIO": full, "HAS_BIAS": full, "HAS_SOFTCAP": full, "HAS_TEMPERATURES": full, "WITH_ENTROPY": True,
        "HAS_DENTROPY": full, "IN_PLACE": config.in_place, **changes,
    }  # fmt: skip
    pointers = {"targets_ptr": "*i64", "dlogits_ptr": f"*{variant.out}"}
    integers = {"stride_r": "i32", "stride_dr": "i32", "V": "i32", "padded": "i32"}
    floats = {"temperature", "logit_scale", "softcap", "epsilon", "epsilon_high", "delta", "dual_clip", "tau_pos",
              "tau_neg", "beta"}  # fmt: skip
    signature, taken, attrs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
            taken[(index,)] = constexprs[name]
        elif name in integers or name in floats:
            signature[name] = integers.get(name, "fp32")
        else:
            signature[name] = pointers.get(name, "*fp32")
        aligned = name in ("stride_r", "stride_dr", "padded") or signature[name].startswith("*")
        if aligned and signature[name] != "constexpr":
            attrs[(index,)] = [["tt.divisibility", 16]]
    if variant.arch.startswith("gfx"):
        target = GPUTarget("hip", variant.arch, 64)
    else:
        target = GPUTarget("cuda", int(variant.arch[3:]), 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=taken, attrs=attrs)
    return triton.compile(source, target=target, options={"num_warps": config.num_warps})


def inspect(variant: Variant) -> Evidence:
    """Compile `variant` and read off what matters."""
    compiled = compile_variant(variant)
    shared = compiled.metadata.shared / 1024
    if variant.arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        stack = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
        widest = max((32 * int(n or 1) for n in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?", text)), default=0)
        return Evidence(registers, stack, shared, widest, barrier_before_store=True)
    registers, stack = _resources(compiled.asm["cubin"])
    return Evidence(registers, stack, shared, _widest_load(compiled.asm["ptx"]), barriers_hold(compiled.asm["ptx"]))


def _resources(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found is not None, text.stdout
    return int(found[1]), int(found[2])


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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the evidence to this file")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: kernels are interpreted then, and cannot be compiled")
    rows = []
    header = ("kernel", "arch", "grad", "options", "regs", "stack", "shared", "load")
    print("{:28} {:8} {:5} {:8} {:>5} {:>6} {:>9} {:>5}  bytes/logit".format(*header))
    for variant in variants():
        e = inspect(variant)
        rows.append({**asdict(variant), **asdict(e)})
        moved = BYTES_PER_LOGIT[variant.kernel, variant.out]
        print(
            f"{variant.kernel:28} {variant.arch:8} {variant.out:5} {variant.options:8} {e.registers:5} {e.stack:6} "
            f"{e.shared_kib:5.1f} KiB {e.widest_load_bits:5}  {moved}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
