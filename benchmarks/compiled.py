"""Triton kernels compiled for a GPU that may be absent, and the resources of the result."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SHARED_LIMIT = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB of shared memory (LDS) that a program may use."""


def compile_kernel(
    kernel: Any, arch: str, types: dict[str, str], constexprs: dict[str, Any], aligned: set[str], **options: Any
) -> Any:
    """Triton's compiled kernel; a second or so each.

    Args:
        kernel: a `triton.jit` function.
        arch: `sm_90`, `gfx942`, and so on.
        types: the type of every argument that is not in `constexprs`.
        constexprs: compile-time arguments; those that the kernel does not have are ignored.
        aligned: arguments that are multiples of 16 (pointers: in bytes).
        options: num_warps, num_stages, enable_fp_fusion.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: kernels are interpreted then, and cannot be compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, taken, attrs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
            taken[(index,)] = constexprs[name]
        else:
            signature[name] = types[name]
            if name in aligned:
                attrs[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=taken, attrs=attrs)
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any, arch: str) -> dict[str, float]:
    """What a program takes of a multiprocessor: from ptxas (`cuobjdump`) or the AMD assembler, and Triton's metadata.

    `registers` of a thread; `stack`, the bytes of a thread that spilled, for AMD registers; `shared_kib`; `num_warps`,
    with those that warp specialisation adds.
    """
    if arch.startswith("gfx"):
        text, pattern = compiled.asm["amdgcn"], r"\.vgpr_count:\s+(\d+)\s+\.vgpr_spill_count:\s+(\d+)"
    else:
        text, pattern = _of_cubin(compiled, "cuobjdump", "--dump-resource-usage"), r"REG:(\d+) STACK:(\d+)"
    found = re.search(pattern, text)
    assert found is not None, text
    shared, warps = compiled.metadata.shared / 1024, compiled.metadata.num_warps
    return {"registers": int(found[1]), "stack": int(found[2]), "shared_kib": shared, "num_warps": warps}


def machine_code(compiled: Any) -> str:
    """The instructions that ptxas made for an NVIDIA GPU, by `nvdisasm`; its own ptxas is in no way called again."""
    return _of_cubin(compiled, "nvdisasm", "-c")


def bundled_tool(name: str) -> str | None:
    """Path of one of NVIDIA's programs that come with triton, or None."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    return str(tool) if tool.exists() else None


def _of_cubin(compiled: Any, name: str, option: str) -> str:
    tool = bundled_tool(name)
    assert tool is not None, f"triton has no {name}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return output_of(tool, option, file.name)


def output_of(*command: str) -> str:
    """What a program prints.

    Raises:
        RuntimeError: It fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout
