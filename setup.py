"""Package layout and the optional native extensions.

`GRPO_FUSED_BUILD` chooses what is compiled: `auto` (the default) what the machine allows, and never fails for it;
`none` nothing; `cpu` the CPU extension; `cuda` that and the CUDA one. The last two fail with the reason if they cannot.

`kernels/` is installed as `grpo_fused.kernels`. It has no `__init__.py`: a top-level package of that name would shadow
Hugging Face's `kernels` for everybody who runs from a checkout.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

MODES = ("auto", "none", "cpu", "cuda")
OLDEST_TORCH = (2, 10)
CUDA_ARCHITECTURES = {"sm_80": "80", "sm_90a": "90a", "sm_100": "100"}
# the stable ABI of the oldest version: a build serves it and all later ones
DEFINES = [("TORCH_TARGET_VERSION", f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000")]
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True))


class Unbuildable(Exception):
    """Why an extension cannot be built here."""


def find_torch() -> Path:
    """PyTorch's folder, found without the seconds that its import takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unbuildable("torch is not installed where this is built (pip needs --no-build-isolation)")
    root = Path(spec.origin).parent
    version = re.search(r"__version__ = '(\d+)\.(\d+)", (root / "version.py").read_text())
    if version is None or (int(version[1]), int(version[2])) < OLDEST_TORCH:
        raise Unbuildable(f"torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or later is needed")
    return root


def cpu_extension() -> Extension:
    """`grpo_fused._C`: the operators of the native engine."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise Unbuildable(f"the CPU extension is for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    torch = find_torch()
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        raise Unbuildable(f"no C++ compiler ({compiler}) was found")
    return Extension(
        "grpo_fused._C",
        sorted(glob("csrc/cpu/*.cpp")),
        include_dirs=["csrc", str(torch / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu", "dl"],
        define_macros=DEFINES,
        # GCC 12's own AVX-512 header draws the warnings that are turned off
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-fvisibility=hidden",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
            "-Wno-ignored-attributes",
        ],
        depends=HEADERS,
        language="c++",
        py_limited_api=True,
    )


def cuda_extension(mode: str) -> Extension:
    """`grpo_fused._C_cuda`, which nvcc compiles and links."""
    sources = sorted(glob("csrc/cuda/*.cu"))
    if not sources:
        raise Unbuildable("this version has no CUDA sources")
    torch = find_torch()
    if mode == "auto" and re.search(r"^cuda.*= '", (torch / "version.py").read_text(), re.MULTILINE) is None:
        raise Unbuildable("torch was built without CUDA")
    if shutil.which("nvcc") is None:
        raise Unbuildable("nvcc was not found")
    return Extension(
        "grpo_fused._C_cuda",
        sources,
        include_dirs=["csrc", str(torch / "include"), str(torch / "include/torch/csrc/api/include")],
        library_dirs=[str(torch / "lib")],
        depends=HEADERS,
        py_limited_api=True,
    )


def plan(mode: str) -> tuple[list[Extension], str]:
    """What to build in this mode, and the line that says so."""
    if mode not in MODES:
        raise SystemExit(f"GRPO_FUSED_BUILD must be one of {', '.join(MODES)}; got {mode!r}")
    if mode == "none":
        return [], "pure Python (GRPO_FUSED_BUILD=none)"
    chosen, words = [], []
    for name, make in (("CPU", cpu_extension), ("CUDA", lambda: cuda_extension(mode))):
        if name == "CUDA" and mode == "cpu":
            continue
        try:
            chosen.append(make())
            words.append(f"with the {name} extension")
        except Unbuildable as reason:
            if mode != "auto":
                raise SystemExit(f"GRPO_FUSED_BUILD={mode}: {reason}") from None
            words.append(f"without the {name} extension ({reason})")
    return chosen, ", ".join(words)


MODE = os.environ.get("GRPO_FUSED_BUILD", "auto")
EXTENSIONS, LINE = plan(MODE)


class SayWhatIsBuilt(build_py):
    """Says in one line what this build contains."""

    def run(self) -> None:
        print(f"grpo_fused: {LINE}")
        super().run()


class BuildNative(build_ext):
    """Compiles the extensions; in `auto` mode one that does not compile is left out."""

    def run(self) -> None:
        if not EXTENSIONS or self.inplace:
            print(f"grpo_fused: {LINE}")
        super().run()

    def build_extension(self, ext: Any) -> None:
        if MODE == "auto":
            ext.optional = True  # a failure is reported, and the rest goes on
        if ext.name.endswith("_cuda"):
            self.compile_cuda(ext)
        else:
            super().build_extension(ext)

    def compile_cuda(self, ext: Any) -> None:
        """One nvcc command for the whole library, a thread for each architecture."""
        target = Path(self.get_ext_fullpath(ext.name))
        newest = max(Path(name).stat().st_mtime for name in [*ext.sources, *ext.depends])
        if not self.force and target.exists() and target.stat().st_mtime > newest:
            return
        known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
        target.parent.mkdir(parents=True, exist_ok=True)
        self.spawn(
            ["nvcc", "-std=c++20", "-O3", "--shared", "--threads", "0", "-DUSE_CUDA", "-Xcompiler", "-fPIC"]
            + [f"-D{name}={value}" for name, value in DEFINES]
            + [f"-gencode=arch=compute_{a},code={sm}" for sm, a in CUDA_ARCHITECTURES.items() if sm in known]
            + [f"-I{path}" for path in ext.include_dirs]
            + [*ext.sources, "-o", str(target), *[f"-L{path}" for path in ext.library_dirs], "-ltorch_cpu"]
            + ["-ltorch_cuda"] * (Path(ext.library_dirs[0]) / "libtorch_cuda.so").exists()
        )


setup(
    packages=[
        "grpo_fused",
        "grpo_fused.engines",
        "grpo_fused.functional",
        "grpo_fused.heads",
        "grpo_fused.integrations",
        "grpo_fused.integrations.liger",
        "grpo_fused.integrations.trl",
        "grpo_fused.kernels",
        "grpo_fused.objectives",
        "grpo_fused.rewards",
        "grpo_fused.tools",
        "grpo_fused.trainer",
    ],
    package_dir={"grpo_fused.kernels": "kernels"},
    package_data={"grpo_fused": ["py.typed"]},
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": BuildNative, "build_py": SayWhatIsBuilt},
    # no Python API is used, so one wheel serves every Python
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if EXTENSIONS else {},
)
