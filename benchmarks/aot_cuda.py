"""Ahead-of-time evidence for the CUDA C++ row kernels: compiled for every architecture, without a GPU.

    python -m benchmarks.aot_cuda            # the table
    python -m benchmarks.aot_cuda --json F   # the same as JSON

Registers, stack and static shared memory come from ptxas (`cuobjdump`), accesses and barriers from the machine code.
A stack or local memory above 0 is a spill.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
ARCHITECTURES = {"sm_80": "80", "sm_90a": "90a", "sm_100": "100"}
MODES = ("statistics", "gradient", "loss")
TYPES = {"f": "fp32", "13__nv_bfloat16": "bf16", "6__half": "fp16"}


@dataclass(frozen=True)
class Evidence:
    """What the compiler made of one kernel."""

    kernel: str
    """cluster or stream"""
    mode: str
    arch: str
    logits: str
    out: str
    registers: int
    stack: int
    local: int
    static_shared: int
    """bytes, 1 KiB of the system's among them"""
    wide_loads: int
    """128-bit loads from global or shared memory"""
    wide_stores: int
    """128-bit stores to global memory"""
    bulk_copies: int
    cluster_arrivals: int
    cluster_waits: int
    remote_stores: int
    """128-bit stores to the shared memory of other blocks"""
    stores_follow_barrier: bool
    """no store to global memory stands before the last wait for the cluster"""


def missing_tools() -> str | None:
    """Why there can be no evidence here, or None."""
    if shutil.which("nvcc") is None:
        return "nvcc is not installed"
    return None if _cuobjdump() is not None else "cuobjdump is neither on the path nor in a triton package"


def compile_library(target: Path, extra: list[str] | None = None, architectures: Iterable[str] = ARCHITECTURES) -> Path:
    """All CUDA sources as one shared library; some 10 s for each architecture."""
    import torch

    package = Path(torch.__file__).parent
    gencode = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in map(ARCHITECTURES.get, architectures)]
    command = [
        "nvcc", "-std=c++20", "-O3", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{CSRC}",
        "-isystem", str(package / "include"), *gencode, "-Xcompiler", "-fPIC", "-shared",
        *sorted(map(str, (CSRC / "cuda").glob("*.cu"))), f"-L{package / 'lib'}", "-ltorch_cpu", *(extra or []),
        "-o", str(target),
    ]  # fmt: skip
    _run(*command)
    return target


def inspect(library: Path) -> list[Evidence]:
    """Every kernel of a library, on every architecture that it was compiled for."""
    tool = _cuobjdump()
    assert tool is not None
    found = []
    code = _functions(_run(tool, "-sass", str(library)))
    for (arch, name), usage in _functions(_run(tool, "--dump-resource-usage", str(library))).items():
        kernel, mode, logits, out = _parse(name)
        if kernel == "cluster" and arch == "sm_80":
            continue  # empty: there are no clusters
        text = code[arch, name]

        def count(pattern: str, text: str = text) -> int:
            return len(re.findall(pattern, text))

        def used(key: str, usage: str = usage) -> int:
            match = re.search(rf"\b{key}:(\d+)", usage)
            assert match is not None, usage
            return int(match[1])

        found.append(
            Evidence(
                kernel,
                mode,
                arch,
                logits,
                out,
                used("REG"),
                used("STACK"),
                used("LOCAL"),
                used("SHARED"),
                count(r"\bLD[GS]\.(?:E\.)?128"),
                count(r"\bSTG\.E\.128"),
                count(r"\bUBLKCP"),
                count(r"\bUCGABAR_ARV"),
                count(r"\bUCGABAR_WAIT"),
                count(r"\bST(?:\.E|AS)?\.128"),
                text.find("STG.") > text.rfind("UCGABAR_WAIT"),
            )
        )
    return sorted(found, key=lambda e: (e.kernel, MODES.index(e.mode), e.logits, e.out, e.arch))


def _functions(dump: str) -> dict[tuple[str, str], str]:
    """(architecture, mangled name) -> what cuobjdump prints about it."""
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


def _parse(mangled: str) -> tuple[str, str, str, str]:
    match = re.search(r"row_(cluster|stream)_kernelILNS_7RowModeE(\d)E(f|13__nv_bfloat16|6__half)(\w+?)EEv", mangled)
    assert match is not None, mangled
    logits = TYPES[match[3]]
    return match[1], MODES[int(match[2])], logits, logits if match[4].startswith("S") else TYPES[match[4]]


def _cuobjdump() -> str | None:
    if found := shutil.which("cuobjdump"):
        return found
    try:
        import triton
    except ImportError:
        return None
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(tool) if tool.exists() else None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def print_table(rows: list[Evidence]) -> None:
    """One line a kernel and architecture."""
    header = ("kernel", "mode", "logits", "grad", "arch", "regs", "stack", "local", "shared", "ld128", "st128")
    line = "{:8} {:11} {:6} {:5} {:7} {:>5} {:>6} {:>6} {:>7} {:>6} {:>6} {:>5} {:>8}"
    print(line.format(*header, "bulk", "clusters"))
    for e in rows:
        gradient = "-" if e.mode == "statistics" else e.out
        print(
            line.format(
                e.kernel,
                e.mode,
                e.logits,
                gradient,
                e.arch,
                e.registers,
                e.stack,
                e.local,
                e.static_shared,
                e.wide_loads,
                e.wide_stores,
                e.bulk_copies,
                f"{e.cluster_arrivals}/{e.cluster_waits}",
            )
        )


def table() -> list[dict[str, object]]:
    """Compile, and print a line for each kernel and architecture; returns them."""
    with tempfile.TemporaryDirectory() as folder:
        rows = inspect(compile_library(Path(folder) / "rows.so"))
    print_table(rows)
    return [asdict(e) for e in rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the evidence to this file")
    arguments = parser.parse_args()
    if reason := missing_tools():
        raise SystemExit(reason)
    rows = table()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
