"""The native libraries: the CPU library is loaded at import, the CUDA library at first use; else the reason is kept.

Both are optional. That of the CPU is plain C (`cpu_library.py`). That of CUDA is built against torch's stable ABI and
registers operators in `torch.ops.grpo_fused_C`.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from grpo_fused.engines import cpu_library


def cpu_available() -> str | None:
    """None if the CPU operators can run here, else the reason as text."""
    return _cpu_reason


@cache
def cuda_available() -> str | None:
    """None if the CUDA operators can run here, else the reason as text.

    Not called at import: it initialises CUDA, and a process that is forked after that cannot use CUDA.
    """
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return _load("_C_cuda", torch.ops.load_library)


def missing() -> str | None:
    """Why the CPU operators are missing although this processor could run them, with the command that builds them.

    None if they are loaded, or could not run here: not Linux on x86-64, or no AVX2.
    """
    return _cpu_reason if _mended_by_a_build else None


def build_command(extension: str = "cpu") -> str:
    """The shell command that reinstalls this package from its source, with the extension `cpu` or `cuda`.

    It needs a compiler, and torch for `cuda`; without them it fails with the reason. A checkout is installed in
    editable mode.
    """
    root = Path(__file__).resolve().parents[2]
    what, installer = _origin()
    if (root / "setup.py").is_file():
        what = f"-e {shlex.quote(str(root))}"
    command = "pip install --force-reinstall --no-deps --no-cache-dir"
    if installer == "uv":
        command = "uv pip install --reinstall --no-deps --no-cache"
    if extension == "cuda":  # an isolated build may not see the environment, where torch is
        command += " --no-build-isolation"
    return f"GRPO_FUSED_BUILD={extension} {command} {what}"


def _origin() -> tuple[str, str]:
    """(what the package was installed from, as arguments of pip; the program that installed it)."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        installed = distribution("grpo-fused")
    except PackageNotFoundError:
        return "--no-binary grpo-fused grpo-fused", ""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    url, installer = origin.get("url", ""), (installed.read_text("INSTALLER") or "").strip()
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return shlex.quote(f"{vcs['vcs']}+{url}@{vcs['commit_id']}"), installer
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return editable + shlex.quote(url2pathname(urlsplit(url).path)), installer
    if "archive_info" in origin:  # a wheel has no source
        return "git+https://github.com/grpo-fused/grpo-fused" if url.endswith(".whl") else shlex.quote(url), installer
    return "--no-binary grpo-fused grpo-fused", installer


def _load(name: str, load: Callable[[Path], None]) -> str | None:
    """Load `grpo_fused/<name>.*.so`, or return why it cannot be loaded and the command that builds it."""
    extension = "cuda" if name.endswith("_cuda") else "cpu"
    files = sorted(Path(__file__).parents[1].glob(f"{name}.*so"))
    if not files:
        compiler = "" if extension == "cuda" or shutil.which("g++") else ", for which there is no C++ compiler (g++)"
        return f"the {extension.upper()} extension was not built{compiler}; to build it: {build_command(extension)}"
    try:
        load(files[0])
    except (OSError, AttributeError) as error:  # it cannot be loaded, or is of another version
        return f"{files[0].name} could not be loaded: {error}; to build it again: {build_command(extension)}"
    return None


def _load_cpu() -> tuple[str | None, bool]:
    """(why the operators do not run here, None if they do; whether a build would fix that)."""
    reason = _load("_C", cpu_library.load)
    if reason is None:
        missing = cpu_library.missing()
        if missing.startswith("GRPO_FUSED_ISA"):  # a wish that cannot be met is not passed over
            raise ValueError(missing)
        return missing or None, False
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return f"the native engine is for Linux on x86-64, this is {sys.platform} on {platform.machine()}", False
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":  # less than AVX2 with FMA
        return "the native engine needs AVX2 and FMA (with F16C), which this machine lacks", False
    return reason, True


_cpu_reason, _mended_by_a_build = _load_cpu()
