"""What runs on this machine, what does not and why, and the predicted time and memory of a call.

    python -m grpo_fused doctor
    python -m grpo_fused doctor --tokens 8192 --hidden 4096 --vocab 151936 --dtype bfloat16

Scratch follows the engines' own rules; times are predictions (`grpo_fused.tools.predictions`).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import torch

from grpo_fused import __version__, engines
from grpo_fused.engines import cpu_library, libraries
from grpo_fused.tools import predictions
from grpo_fused.tools.predictions import Shape

PACKAGES = ("triton", "transformers", "trl", "liger-kernel", "peft")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Flags of x86-64 CPUs that decide which products the native engine and the CPU's library have."""


BRINGS = {
    "engine native": "in bf16 with AMX two to four times the speed of chunked; scores bitwise the same in any batch",
    "engine chunked": "library products on any device",
    "engine triton": "on a GPU scores without vocab-sized memory, bitwise the same in any batch",
    "Triton row kernels": "on a GPU the row work of chunked in one launch; torch operations without",
    "CUDA row kernels": "on a GPU one read of each logit, by impl='cuda' only",
}
"""What each engine and kernel is for."""


def main(argv: list[str] | None = None) -> None:
    """The command `doctor`."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_fused doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="active tokens of a call (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=896, help="hidden size H (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="vocabulary size V (default %(default)s)")
    names = [_name(dtype) for dtype in DTYPES]
    parser.add_argument(
        "--dtype", default="bfloat16", choices=names, help="of hidden states and head weight (default bfloat16)"
    )
    parser.add_argument("--no-measure", action="store_true", help="do not time the engines, and predict no seconds")
    given = parser.parse_args(argv)
    for name in ("tokens", "hidden", "vocab"):
        if not 1 <= getattr(given, name) < 2**31:
            parser.error(f"--{name} must be from 1 to 2^31 - 1; got {getattr(given, name)}")
    shape = Shape(given.tokens, given.hidden, given.vocab, getattr(torch, given.dtype))
    print(report(shape, measure=not given.no_measure))


def report(shape: Shape, *, measure: bool = True) -> str:
    """The text that `doctor` prints."""
    found = findings()
    lines = [f"grpo_fused {__version__}", "", *_table(versions()), "", *_table(devices()), ""]
    lines += _table([(name, f"no: {reason}" if reason else _runs(name)) for name, reason in found.items()])
    missing = [(f"  {name}", BRINGS[name]) for name, reason in found.items() if reason]
    lines += ["", "what is missing would add", *_table(missing)] if missing else []
    for device in map(torch.device, ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)):
        lines += ["", _auto(device, shape.hidden), "", *_predictions(shape, device, measure=measure)]
    return "\n".join(lines)


def versions() -> list[tuple[str, str]]:
    """Names and versions of the software that decides what runs."""
    found = {"python": f"{platform.python_version()} on {platform.system()} {platform.machine()}"}
    found["torch"] = torch.__version__
    found |= {name: next((d.version for d in distributions(name=name)), "not installed") for name in PACKAGES}
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    built = toolkit if torch.version.cuda or torch.version.hip else "none"
    found["GPU toolkit"] = f"torch has {built}; nvcc: {shutil.which('nvcc') or 'not found'}"
    compiler = cpp_compiler()
    found["C++ compiler"] = f"{compiler}: {shutil.which(compiler) or 'not found'}"
    return list(found.items())


def cpp_compiler() -> str:
    """The command of the C++ compiler that a build takes (see setup.py)."""
    return shlex.split(os.environ.get("CXX", "").strip() or sysconfig.get_config_var("CXX") or "g++")[0]


def devices() -> list[tuple[str, str]]:
    """Name and description of the CPU and of each GPU."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.*)", info)
    cpu = [
        model[1] if model else platform.machine(),
        f"{os.cpu_count()} cores",
        f"torch uses {torch.get_num_threads()}",
    ]
    if info and platform.machine() == "x86_64":
        cpu += [name if name in info.split() else f"no {name}" for name in INSTRUCTION_SETS]
    found = [("CPU", ", ".join(cpu))]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        kind = f"compute capability {about.major}.{about.minor}" if torch.version.hip is None else about.gcnArchName
        found.append((f"GPU {index}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {kind}"))
    return found if torch.cuda.is_available() else [*found, ("GPU", "none that torch sees")]


def findings() -> dict[str, str | None]:
    """Why each engine and kernel does not run here, None if it does; those of a GPU on the GPU if there is one."""
    cpu, device = torch.device("cpu"), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = "no GPU" if device.type == "cpu" else None if find_spec("triton") else "triton is not installed"
    return {
        "engine native": engines.unavailable("native", cpu, torch.bfloat16),
        "engine chunked": engines.unavailable("chunked", device, torch.bfloat16),
        "engine triton": engines.unavailable("triton", device, torch.bfloat16),
        "Triton row kernels": rows,
        "CUDA row kernels": libraries.cuda_available(),
    }


def _runs(name: str) -> str:
    return f"runs on {cpu_library.instruction_set()}" if name == "engine native" else "runs"


def _auto(device: torch.device, width: int) -> str:
    taken: dict[str, list[str]] = {}
    for dtype in DTYPES:
        taken.setdefault(engines.fastest(device, dtype, width), []).append(_name(dtype))
    chosen = "; ".join(f"{name} for {', '.join(dtypes)}" for name, dtypes in taken.items())
    return f"impl='auto' on {'the CPU' if device.type == 'cpu' else 'a GPU'} takes {chosen}"


def _predictions(shape: Shape, device: torch.device, *, measure: bool) -> list[str]:
    heading = f"{shape.tokens} tokens, H = {shape.hidden}, V = {shape.vocab}, {_name(shape.dtype)}: "
    rows: list[tuple[str, ...]] = [("", "products", "scratch", "training", "scoring")]
    auto = engines.fastest(device, shape.dtype, shape.hidden)
    for name, cost in predictions.costs(shape, device).items():
        memory = f"{cost.scratch_bytes / 2**20:.3g} MiB"
        if cost.accumulator_bytes:
            memory += f" + {cost.accumulator_bytes / 2**20:.3g} MiB to sum dW in fp32"
        training, scoring = predictions.seconds(shape, device, name) if measure else (None, None)
        times = ("" if x is None else f"{x:.2g} s" for x in (training, scoring))
        rows.append((f"  {name}{' *' if name == auto else ''}", f"{cost.products:.3g}", memory, *times))
    notes = ["  * what impl='auto' takes"]
    if measure:
        timed = f"{shape.part.vocab} of {shape.vocab} rows of the head"
        notes.append(f"  times are predictions, from all tokens and {timed}, measured now")
    return [heading + "loss and both gradients, or log-probs only", *_table(rows), *notes]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
