"""The row kernels of Triton and of CUDA C++, compiled without a GPU: registers, spills, accesses, barriers.

Triton's are compiled one configuration at a time: order of loads, barriers and stores from the PTX, registers and stack
from ptxas. nvcc compiles the CUDA C++ kernels as one library for all architectures: accesses and barriers
are those of the machine code (`cuobjdump`). A stack or local memory above 0 is a spill.
"""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_fused.kernels.configs import ROW_CONFIGS

from benchmarks.compiled import bundled_tool, compile_kernel, output_of, resources

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CUDA_ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MODES = ("statistics", "gradient", "loss")
TYPES = {"f": "fp32", "13__nv_bfloat16": "bf16", "6__half": "fp16"}


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


def variants() -> list[Variant]:
    """Every configuration that ships, with all options on and with none."""
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
    return compile_kernel(
        kernel, variant.arch, types, constexprs, aligned, num_warps=config.num_warps, enable_fp_fusion=True
    )


def inspect(variant: Variant) -> dict[str, Any]:
    """Compile `variant`: its resources, the bits of its widest load, and whether every store of the in-place loop comes
    after a barrier that comes after the load."""
    compiled = compile_variant(variant)
    if variant.arch.startswith("gfx"):
        loads = re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?", compiled.asm["amdgcn"])
        widths, safe = [32 * int(n or 1) for n in loads], True
    else:
        ptx = compiled.asm["ptx"]
        loads = re.findall(r"ld\.global[\w.]*?(?:\.v(\d))?\.[bf](\d+)", ptx)
        widths, safe = [int(v or 1) * int(b) for v, b in loads], barriers_hold(ptx)
    found = {"widest_load_bits": max(widths, default=0), "barrier_before_store": safe}
    return resources(compiled, variant.arch) | found


def barriers_hold(ptx: str) -> bool:
    """Whether every wide store of dlogits is preceded, since the last wide load, by a barrier."""
    since_load = False
    for line in ptx.splitlines():
        if re.search(r"ld\.global[\w.]*\.v[24]", line):
            since_load = False
        elif "bar.sync" in line or "barrier.sync" in line:
            since_load = True
        elif not since_load and re.search(r"st\.global[\w.]*\.v[24]", line):
            return False
    return True


def table() -> list[dict[str, Any]]:
    """A row for each variant."""
    return [{**asdict(variant), **inspect(variant)} for variant in variants()]


USED = {"registers": "REG", "stack": "STACK", "local": "LOCAL", "static_shared": "SHARED"}
"""Resources by their names in the output of cuobjdump; static shared memory is in bytes, with 1 KiB of the system."""
COUNTED = {
    "wide_loads": r"\bLDG\.E\.128",  # 128-bit, from global memory
    "wide_stores": r"\bSTG\.E\.128",  # 128-bit, to global memory
}
"""Instructions of a kernel by what they are in its machine code."""


def missing_tools() -> str | None:
    """Why the kernels cannot be compiled here, or None."""
    if shutil.which("nvcc") is None:
        return "nvcc is not installed"
    return None if _cuobjdump() is not None else "cuobjdump is neither on the path nor in a triton package"


def compile_library(
    target: Path, extra: list[str] | None = None, architectures: Sequence[str] = CUDA_ARCHITECTURES
) -> Path:
    """All CUDA sources as one shared library; some 10 s for each architecture."""
    import torch

    package = Path(torch.__file__).parent
    gencode = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in architectures]
    sources = [str(path) for kind in ("*.cu", "*.cpp") for path in (CSRC / "cuda").glob(kind)]
    command = [
        "nvcc", "-std=c++20", "-O3", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{CSRC}",
        "-isystem", str(package / "include"), *gencode, "-Xcompiler", "-fPIC", "-shared",
        *sources, f"-L{package / 'lib'}", "-ltorch_cpu", *(extra or []),
        "-o", str(target),
    ]  # fmt: skip
    output_of(*command)
    return target


def inspect_library(library: Path) -> list[SimpleNamespace]:
    """Every kernel of a library, on every architecture that it was compiled for: `USED` and `COUNTED`."""
    tool = str(_cuobjdump())
    found = []
    code = _functions(output_of(tool, "-sass", str(library)))
    for (arch, name), usage in _functions(output_of(tool, "--dump-resource-usage", str(library))).items():
        mode, logits, out = _parse(name)
        text = code[arch, name]
        used = dict(re.findall(r"\b([A-Z]+):(\d+)", usage))
        found.append(
            SimpleNamespace(
                mode=mode, arch=arch, logits=logits, out=out,
                **{name: int(used[key]) for name, key in USED.items()},
                **{name: len(re.findall(pattern, text)) for name, pattern in COUNTED.items()},
            )
        )  # fmt: skip
    return sorted(found, key=lambda e: (MODES.index(e.mode), e.logits, e.out, e.arch))


def _functions(dump: str) -> dict[tuple[str, str], str]:
    """(architecture, mangled name) -> the output of cuobjdump for it."""
    parts: dict[tuple[str, str], list[str]] = {}
    arch, name = "", ""
    for line in dump.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch, name = match[1], ""
        elif match := re.match(r"\s*Function\s*:?\s*(\w+)", line):
            name = match[1]
        elif name:
            parts.setdefault((arch, name), []).append(line)
    return {key: "\n".join(lines) for key, lines in parts.items()}


def _parse(mangled: str) -> tuple[str, str, str]:
    match = re.search(r"row_kernelILNS_7RowModeE(\d)E(f|13__nv_bfloat16|6__half)(\w+?)EEv", mangled)
    assert match is not None, mangled
    logits = TYPES[match[2]]
    return MODES[int(match[1])], logits, logits if match[3].startswith("S") else TYPES[match[3]]


def _cuobjdump() -> str | None:
    return shutil.which("cuobjdump") or bundled_tool("cuobjdump")


def cuda_table() -> list[dict[str, Any]]:
    """A row for each kernel and architecture of the library."""
    with tempfile.TemporaryDirectory() as folder:
        return [vars(e) for e in inspect_library(compile_library(Path(folder) / "rows.so"))]
