"""Compilers and headers for the tests of native sources: each source is compiled once, into a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
TORCH = Path(torch.__file__).parent
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10, the oldest that is supported


def tool(name: str) -> str:
    """The path of a compiler, or a skipped test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str | Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def shared_library(target: Path, *sources: Path, torch_abi: bool = False) -> Path:
    """C++ sources as a shared library; with `torch_abi` against torch's stable ABI."""
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        f"-I{CSRC}",
    ]
    if torch_abi:
        # torch's headers are not ours to warn about
        flags += [STABLE_ABI, "-isystem", str(TORCH / "include"), f"-L{TORCH / 'lib'}", "-ltorch_cpu"]
    run(tool(os.environ.get("CXX", "g++")), *sources, *flags, "-o", target)
    return target
