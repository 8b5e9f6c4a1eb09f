"""What runs on this machine, what does not, why, and what it would bring: `python -m grpo_fused doctor`."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from grpo_fused import __version__, _native, engines


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    missing: str | None
    """None if it is there, else why not"""
    brings: str


def findings() -> list[Finding]:
    """Engines and extensions on this machine's device (the GPU if there is one)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [
        Finding(
            "engine native",
            engines.unavailable("native", torch.device("cpu"), torch.bfloat16),
            "on the CPU 2 times the speed of chunked in bf16, 1.4 in fp32; scores bitwise the same in any batch",
        ),
        Finding(
            "engine triton",
            engines.unavailable("triton", device, torch.bfloat16),
            "on a GPU scores without vocab-sized memory, bitwise the same in any batch",
        ),
        Finding(
            "Triton row kernels",
            None if importlib.util.find_spec("triton") is not None and device.type == "cuda" else
            "no GPU" if device.type == "cpu" else "triton is not installed",
            "on a GPU the row work of chunked in one launch; without, in torch operations",
        ),
        Finding(
            "CUDA row kernels",
            _native.cuda_available(),
            "on a GPU one read of each logit, by ChunkedEngine(cuda_row_work) only: not measured yet",
        ),
    ]  # fmt: skip


def report() -> str:
    """The text that `doctor` prints."""
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [f"grpo_fused {__version__} on {machine}"]
    packages = ("torch", "triton", "transformers", "trl", "liger-kernel", "peft")
    lines.append("packages: " + ", ".join(f"{name} {_version(name)}" for name in packages))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines.append(f"device: {name}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        lines.append(
            f"impl='auto' takes for {str(dtype).removeprefix('torch.'):9} {engines.choose('auto', device, dtype)}"
        )
    for found in findings():
        state = "yes" if found.missing is None else f"no: {found.missing}"
        lines.append(f"{found.name}: {state}\n    brings: {found.brings}")
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
