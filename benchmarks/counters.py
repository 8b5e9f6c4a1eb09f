"""Hardware counters of one launch of the head kernel (scores at H = 896), by NVIDIA's ncu if it is here.

python -m benchmarks.counters --out r.json
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.results import ROOT, Device
from benchmarks.study import Section, main

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")
SHOWN = {
    "gpu__time_duration.sum": "time",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "launch__registers_per_thread": "registers",
}
"""Metric to its name in the printed line; the file has all of the sections."""


def run(device: Device = "cuda") -> Iterator[Section]:
    """The section `counters`; nothing without ncu."""
    ncu = shutil.which("ncu")
    if ncu is None:
        print("no counters: ncu is not installed")
        return
    tuner = [sys.executable, "-m", "benchmarks.tune", "--no-candidates", "--rounds", "1"]
    command = [ncu, "--csv", "--page", "raw", *(word for name in SECTIONS for word in ("--section", name))]
    command += ["--kernel-name", "regex:head_fwd", "--launch-count", "1", "--kill", "yes", "--clock-control", "none"]
    done = subprocess.run([*command, *tuner], cwd=ROOT, capture_output=True, text=True, check=False)
    launch = parsed(done.stdout)
    if launch is None:
        sys.exit(f"ncu gave no counters (status {done.returncode}): {(done.stdout + done.stderr)[-1000:]}")
    metrics = launch["metrics"]
    shown = (f"{word} {' '.join(metrics[name])}" for name, word in SHOWN.items() if name in metrics)
    print(f"{launch['kernel']}: {', '.join(shown)}", flush=True)
    yield launch


def parsed(text: str) -> dict[str, Any] | None:
    """The kernel's name, and value and unit of each metric, from ncu's CSV: names, units, values; None without them."""
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 2:
        return None
    units, values = rows[:2]
    metrics = {name: [value, units[name]] for name, value in values.items() if "__" in name and value}
    return {"kernel": values["Kernel Name"], "metrics": metrics}


if __name__ == "__main__":
    main("counters")
