"""What runs on this machine, what does not and why, and what a call of a given shape is expected to take.

    python -m grpo_fused doctor
    python -m grpo_fused doctor --tokens 8192 --hidden 4096 --vocab 151936 --dtype bfloat16

Scratch follows the engines' own rules; times are predictions (`grpo_fused.tools.predictions`).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from grpo_fused import __version__, _native, engines
from grpo_fused.tools import predictions
from grpo_fused.tools.predictions import Shape

PACKAGES = ("triton", "transformers", "trl", "liger-kernel", "peft")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Those that decide which products the native engine and the CPU's library have."""


BRINGS = {
    "engine native": "on the CPU about twice the speed of chunked in bf16; scores bitwise the same in any batch",
    "engine chunked": "library products anywhere",
    "engine triton": "on a GPU scores without vocab-sized memory, bitwise the same in any batch",
    "Triton row kernels": "on a GPU the row work of chunked in one launch; torch operations without",
    "CUDA row kernels": "on a GPU one read of each logit, by impl='cuda' only: not benchmarked on a GPU yet",
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
    parser.add_argument("--dtype", default="bfloat16", choices=names, help="of hidden states and head weight")
    parser.add_argument("--no-measure", action="store_true", help="do not time a product, and predict no seconds")
    given = parser.parse_args(argv)
    for name in ("tokens", "hidden", "vocab"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(given, name)}")
    shape = Shape(given.tokens, given.hidden, given.vocab, getattr(torch, given.dtype))
    print(report(shape, measure=not given.no_measure))


def report(shape: Shape, *, measure: bool = True) -> str:
    """The text that `doctor` prints."""
    lines = [f"grpo_fused {__version__}", "", *_table(versions()), "", *_table(devices()), ""]
    found = findings()
    lines += _table([(name, "runs" if missing is None else f"no: {missing}") for name, missing in found.items()])
    lines += ["", "what is missing would bring"] if any(found.values()) else []
    lines += _table([(f"  {name}", BRINGS[name]) for name, missing in found.items() if missing])
    for device in map(torch.device, ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)):
        lines += ["", *_auto(device), "", *_predictions(shape, device, measure=measure)]
    return "\n".join(lines)


def versions() -> list[tuple[str, str]]:
    """Name and version of everything that decides what runs."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    found = [("python", python), ("torch", torch.__version__), *((name, _version(name)) for name in PACKAGES)]
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    built = "torch has none" if torch.version.cuda is None and torch.version.hip is None else f"torch has {toolkit}"
    found += [("GPU toolkit", f"{built}; nvcc {_first_line('nvcc', 'release [0-9.]+')}")]
    compiler = os.environ.get("CXX", "c++").split()[0]
    return [*found, ("C++ compiler", f"{compiler}: {_first_line(compiler, '.+')}")]


def devices() -> list[tuple[str, str]]:
    """Name and description of the CPU and of each GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    name, flags = _processor()
    sets = [flag if flag in flags else f"no {flag}" for flag in INSTRUCTION_SETS] if flags else []
    cpu = [f"{name}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}", f"{memory / 2**30:.1f} GiB", *sets]
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
        "CUDA row kernels": _native.cuda_available(),
    }


def _auto(device: torch.device) -> list[str]:
    taken: dict[str, list[str]] = {}
    for dtype in DTYPES:
        taken.setdefault(engines.choose("auto", device, dtype), []).append(_name(dtype))
    chosen = "; ".join(f"{name} for {', '.join(dtypes)}" for name, dtypes in taken.items())
    return [f"impl='auto' on {'the CPU' if device.type == 'cpu' else 'a GPU'} takes {chosen}"]


def _predictions(shape: Shape, device: torch.device, *, measure: bool) -> list[str]:
    bare = shape.flop / predictions.bare_rate(shape, device) if measure else None
    heading = f"{shape.tokens} tokens, H = {shape.hidden}, V = {shape.vocab}, {_name(shape.dtype)}: "
    lines = [heading + "loss and both gradients, or log-probs alone"]
    if bare is not None:
        rate = f"{_rate(shape.flop / bare)}, measured now on part of it"
        lines.append(f"a bare head product takes {_seconds(bare)} here: {rate}")
    rows = [("", "products", "scratch", "training", "scoring")]
    for name, is_auto, cost, ratios in predictions.predict(shape, device):
        memory = _bytes(cost.scratch_bytes)
        if cost.accumulator_bytes:
            memory += f" + {_bytes(cost.accumulator_bytes)} to sum dW in fp32"
        training, scoring = (None, None) if ratios is None else ratios
        times = _time(training, bare, 3), _time(scoring, bare, 1)
        rows.append((f"  {name}{' *' if is_auto else ''}", f"{cost.products:.3g}", memory, *times))
    last = "  * what impl='auto' takes. Times are predictions: bare products times ratios measured before, in"
    return [*lines, *_table(rows), last, f"    {predictions.MEASURED_IN}"]


def _time(ratio: tuple[float, float] | None, bare: float | None, products: int) -> str:
    if ratio is None:
        return "not predicted"
    times = f"{ratio[0]:.2f}-{ratio[1]:.2f} x {'bare' if products == 1 else f'{products} bare'}"
    if bare is None:
        return times
    low, high = (_seconds(bound * products * bare) for bound in ratio)
    return f"{low} to {high} ({times})"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with their columns aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _rate(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _bytes(value: int) -> str:
    return f"{value / 2**20:.0f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _processor() -> tuple[str, set[str]]:
    """The CPU's name and flags, where /proc has them."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name, flags = re.search(r"model name\s*:\s*(.*)", text), re.search(r"flags\s*:\s*(.*)", text)
    return (name[1] if name else platform.machine()), set(flags[1].split()) if flags else set()


def _first_line(program: str, pattern: str) -> str:
    """What `program --version` says of itself."""
    if shutil.which(program) is None:
        return "not found"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(pattern, done.stdout)
    return found[0] if found else "unknown version"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
