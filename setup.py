"""Package layout and the optional native extensions.

`GRPO_FUSED_BUILD` chooses what is compiled: `auto` (the default) what the machine allows, and it never fails;
`none` nothing; `cpu` the CPU extension; `cuda` that and the CUDA one. The last two fail with the reason if they cannot.
A build reports in one line what it contains; pip shows that line with `-v`. The CPU extension needs a C++ compiler and
nothing else, no torch: it is built by a plain `pip install`, and serves every version of Python and torch.

`kernels/` is installed as `grpo_fused.kernels`. It has no `__init__.py`: a top-level package of that name would shadow
Hugging Face's `kernels` for programs that run from a checkout.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

MODES = ("auto", "none", "cpu", "cuda")
OLDEST_TORCH = (2, 10)
CUDA_ARCHITECTURES = ("80", "90", "100")
"""Machine code for those that nvcc knows; and PTX of the last of these, which a driver compiles for later GPUs."""
# the stable ABI of the oldest version: a build serves it and all later ones
DEFINES = [("TORCH_TARGET_VERSION", f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000")]
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True))


class Unbuildable(Exception):
    """Why an extension cannot be built here."""


def find_torch() -> Path:
    """PyTorch's folder, found without the seconds that its import takes; only the CUDA extension needs it.

    pip builds in isolation: it removes the environment's packages from `sys.path`, but they are under `sys.prefix`.
    Any PyTorch that is new enough works: a build with its stable ABI runs on all later versions.
    """
    spec = importlib.util.find_spec("torch")
    places = [*site.getsitepackages([sys.prefix, sys.base_prefix]), site.getusersitepackages()]
    roots = [Path(spec.origin).parent] if spec is not None and spec.origin is not None else []
    roots += [Path(place) / "torch" for place in places]
    found = [root for root in roots if (root / "version.py").is_file() and (root / "include").is_dir()]
    for root in found:
        version = re.search(r"__version__ = '(\d+)\.(\d+)", (root / "version.py").read_text())
        if version is not None and (int(version[1]), int(version[2])) >= OLDEST_TORCH:
            return root
    oldest = ".".join(map(str, OLDEST_TORCH))
    raise Unbuildable(f"the torch in {found[0]} is older than {oldest}" if found else f"no torch in {places[0]}")


def cpu_extension() -> Extension:
    """`grpo_fused._C`: the library of the native engine, in plain C++."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise Unbuildable(f"the CPU extension is for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    compiler = shlex.split(os.environ.get("CXX", "").strip() or sysconfig.get_config_var("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        raise Unbuildable(f"no C++ compiler ({compiler}) was found")
    return Extension(
        "grpo_fused._C",
        sorted(glob("csrc/cpu/*.cpp")),
        include_dirs=["csrc"],
        # GCC 12's own AVX-512 header causes the warnings that are turned off
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-pthread",
            "-fvisibility=hidden",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
            "-Wno-ignored-attributes",
        ],
        extra_link_args=["-pthread"],
        depends=[*HEADERS, "setup.py"],
        language="c++",
        py_limited_api=True,
    )


def cuda_extension(mode: str) -> Extension:
    """`grpo_fused._C_cuda`, which nvcc compiles and links."""
    sources = sorted([*glob("csrc/cuda/*.cu"), *glob("csrc/cuda/*.cpp")])
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
        depends=[*HEADERS, "setup.py"],
        py_limited_api=True,
    )


def plan(mode: str) -> tuple[list[Extension], dict[str, str]]:
    """The extensions to build in this mode, and a note about each."""
    if mode not in MODES:
        raise SystemExit(f"GRPO_FUSED_BUILD must be one of {', '.join(MODES)}; got {mode!r}")
    if mode == "none":
        return [], {"CPU": "without the CPU extension (GRPO_FUSED_BUILD=none)"}
    chosen, words = [], {}
    for name, make in (("CPU", cpu_extension), ("CUDA", lambda: cuda_extension(mode))):
        if name == "CUDA" and mode == "cpu":
            continue
        try:
            chosen.append(make())
            words[name] = f"with the {name} extension"
        except Unbuildable as reason:
            if mode != "auto":
                raise SystemExit(f"GRPO_FUSED_BUILD={mode}: {reason}") from None
            words[name] = f"without the {name} extension ({reason})"
    return chosen, words


MODE = os.environ.get("GRPO_FUSED_BUILD", "auto")
EXTENSIONS, WORDS = plan(MODE)


def say(words: dict[str, str]) -> None:
    """The content of a build, in one line."""
    print(f"grpo_fused: {', '.join(words.values())}", flush=True)


class ReportBuild(build_py):
    """Reports the content of this build, if nothing is compiled."""

    def run(self) -> None:
        if not EXTENSIONS:
            say(WORDS)
        super().run()


class BuildNative(build_ext):
    """Compiles the extensions; in `auto` mode one that does not compile is left out."""

    def run(self) -> None:
        self.failed: dict[str, str] = {}
        super().run()
        say(WORDS | self.failed)

    def build_extension(self, ext: Any) -> None:
        name = "CUDA" if ext.name.endswith("_cuda") else "CPU"
        try:
            if name == "CUDA":
                self.compile_cuda(ext)
            else:
                super().build_extension(ext)
        except Exception as error:
            self.failed[name] = f"without the {name} extension (it did not compile: see above)"
            ext.optional = MODE == "auto"  # setuptools reports the error, and continues
            raise CompileError(str(error)) from error

    def compile_cuda(self, ext: Any) -> None:
        """One nvcc command for the whole library, a thread for each architecture."""
        target = Path(self.get_ext_fullpath(ext.name))
        newest = max(Path(name).stat().st_mtime for name in [*ext.sources, *ext.depends])
        if not self.force and target.exists() and target.stat().st_mtime > newest:
            return
        known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
        chosen = [number for number in CUDA_ARCHITECTURES if f"sm_{number}" in known]
        target.parent.mkdir(parents=True, exist_ok=True)
        self.spawn(
            ["nvcc", "-std=c++20", "-O3", "--shared", "--threads", "0", "-DUSE_CUDA", "-Xcompiler", "-fPIC"]
            + [f"-D{name}={value}" for name, value in DEFINES]
            + [f"-gencode=arch=compute_{number},code=sm_{number}" for number in chosen]
            + [f"-gencode=arch=compute_{number},code=compute_{number}" for number in chosen[-1:]]
            + [f"-I{path}" for path in ext.include_dirs]
            + [*ext.sources, "-o", str(target), *[f"-L{path}" for path in ext.library_dirs], "-ltorch_cpu"]
            + ["-ltorch_cuda"] * (Path(ext.library_dirs[0]) / "libtorch_cuda.so").exists()
        )


setup(
    packages=[*find_packages(include=["grpo_fused", "grpo_fused.*"]), "grpo_fused.kernels"],
    package_dir={"grpo_fused.kernels": "kernels"},
    package_data={"grpo_fused": ["py.typed", "engines/measured.json"]},
    ext_modules=EXTENSIONS,
    cmdclass={"build_ext": BuildNative, "build_py": ReportBuild},
    # no Python API is used, so one wheel serves every Python
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if EXTENSIONS else {},
)
