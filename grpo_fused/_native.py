"""The native libraries: the CPU library is loaded at import, the CUDA library at first use; else the reason is kept.

Both are optional. They are built against torch's stable ABI and register operators in `torch.ops.grpo_fused_C`; here
those get the fake implementations that `torch.compile` needs.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from grpo_fused import _fakes


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
    reason = _load("_C_cuda")
    if reason is None:
        _fakes.register_fakes()
    return reason


def instruction_set() -> str:
    """What the CPU operators multiply bf16 with; the environment variable `GRPO_FUSED_ISA` can choose another."""
    return torch.ops.grpo_fused_C.probe()[1]


def missing() -> str | None:
    """Why the CPU operators are missing although this processor could run them, with the command that builds them.

    None if they are loaded, or could not run here: not Linux on x86-64, or no AVX2.
    """
    return _cpu_reason if _mended_by_a_build else None


def build_command(extension: str = "cpu") -> str:
    """The shell command that reinstalls this package from its source, with the extension `cpu` or `cuda`.

    It needs a compiler and fails with the reason if there is none. A checkout is installed in editable mode.
    """
    root = Path(__file__).resolve().parents[1]
    what, installer = _origin()
    if (root / "setup.py").is_file():
        what = f"-e {shlex.quote(str(root))}"
    if installer == "uv":  # its isolated builds do not see the environment, where torch is
        return (
            f"uv pip install 'setuptools>=77' && GRPO_FUSED_BUILD={extension} uv pip install "
            f"--reinstall --no-deps --no-cache --no-build-isolation {what}"
        )
    return f"GRPO_FUSED_BUILD={extension} pip install --force-reinstall --no-deps --no-cache-dir {what}"


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
    return "--no-binary grpo-fused grpo-fused", installer


def _load(name: str) -> str | None:
    """Load `grpo_fused/<name>.*.so`, or return why it cannot be loaded and the command that builds it."""
    extension = "cuda" if name.endswith("_cuda") else "cpu"
    found = sorted(Path(__file__).parent.glob(f"{name}.*so"))
    if not found:
        return f"the {extension.upper()} extension was not built; to build it: {build_command(extension)}"
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        return f"{found[0].name} could not be loaded: {error}; to build it again: {build_command(extension)}"
    return None


def _load_cpu() -> tuple[str | None, bool]:
    """(why the operators do not run here, None if they do; whether a build would fix that)."""
    reason = _load("_C")
    if reason is None:
        _register_fakes()
        _fakes.register_fakes()
        missing = torch.ops.grpo_fused_C.probe()[0]
        if missing.startswith("GRPO_FUSED_ISA"):  # a wish that cannot be met is not passed over
            raise ValueError(missing)
        return missing or None, False
    unfit = _unfit()
    return unfit or reason, unfit is None


def _unfit() -> str | None:
    """Why no build of the CPU operators runs on this machine, or None; the same check as `csrc/cpu/machine.cpp`."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return f"the native engine is for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    try:
        with open("/proc/cpuinfo") as processors:
            flags = next((line.split() for line in processors if line.startswith("flags")), [])
    except OSError as error:
        return f"the processor's instruction sets are not known: {error}"
    if not {"avx2", "fma", "f16c"} <= set(flags):
        return "the native engine needs AVX2 and FMA (with F16C), which this machine lacks"
    return None


def _register_fakes() -> None:
    @torch.library.register_fake("grpo_fused_C::head_scores")
    def _(  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, temperature, scale, softcap, set_ids, set_ranges, with_entropy, kept, spill
    ):
        block_rows, kept_lanes = kept_layout(hidden, weight, kept, spill)
        statistics = hidden.new_empty((4, hidden.shape[0]), dtype=torch.float32)
        blocks = (weight.shape[0] + block_rows - 1) // block_rows
        return statistics, hidden.new_empty((blocks, kept_lanes), dtype=torch.float32)

    @torch.library.register_fake("grpo_fused_C::head_gradient")
    def _(  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets, temperature, scale, softcap, set_ids, set_ranges, statistics, offsets, rows,
        dlogp, dentropy, dweight, spill, superblock, need_hidden, need_bias,
    ):  # fmt: skip
        dhidden = (rows.shape[0] if need_hidden else 0, hidden.shape[1])
        return (
            hidden.new_empty(dhidden, dtype=torch.float32),
            hidden.new_empty(weight.shape[0] if need_bias else 0, dtype=torch.float32),
        )


LANES = 64
"""Tokens of a panel: exponentials are stored for whole panels."""


def kept_layout(hidden: Tensor, weight: Tensor, kept: Tensor, spill: Tensor) -> tuple[int, int]:
    """(vocabulary rows of a block, tokens whose exponentials fit dW's storage and the spill)."""
    vocab, width = weight.shape
    block_rows, _, item = head_plan(vocab, width, hidden.dtype)
    panels = -(-hidden.shape[0] // LANES)
    in_gradient = min(kept.shape[0] * width * kept.element_size() // (LANES * item * vocab), panels)
    return block_rows, LANES * (in_gradient + min(spill.shape[0] // (LANES * item * vocab), panels - in_gradient))


def head_plan(vocab: int, width: int, compute_dtype: torch.dtype) -> tuple[int, int, int]:
    """(vocabulary rows of a block, bytes of an operand's element, bytes of a kept exponential) for a head [V, H]."""
    block_rows, operand, kept = torch.ops.grpo_fused_C.head_plan(vocab, width, compute_dtype == torch.bfloat16)
    return block_rows, operand, kept


_cpu_reason, _mended_by_a_build = _load_cpu()
