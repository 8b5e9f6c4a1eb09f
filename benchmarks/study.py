"""What the studies share: the file that their figures go to, and the peak memory of a call."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SCHEMA = 2


def record(section: str, data: dict[str, Any], out: Path) -> None:
    """Write `data` as a section of the JSON file `out`; its other sections stay."""
    report = json.loads(out.read_text()) if out.exists() else {"schema": SCHEMA, "sections": {}}
    if report.get("schema") != SCHEMA:
        raise ValueError(f"{out} must be a result file of schema {SCHEMA}; got schema {report.get('schema')}")
    report["sections"][section] = data
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


def peak_bytes(call: Callable[[], object], device: str) -> float:
    """Peak memory of a call beyond what was there before it, in bytes: resident memory on the CPU, the allocator's on
    CUDA. nan where it cannot be read. The call is made twice: the first one takes the libraries' own memory."""
    call()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident_bytes("VmHWM")
    except OSError:
        return math.nan
    call()
    return resident_bytes("VmHWM") - before


def resident_bytes(which: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process, in bytes."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(f"/proc/self/status has no {which}")
    return 1024 * int(found[1])
