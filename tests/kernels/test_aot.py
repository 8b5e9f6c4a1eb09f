"""Every shipped row configuration compiles for every architecture, without a GPU, to what was meant.

Compiling needs triton as a compiler, not as an interpreter, so that this runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def compiled(code: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def evidence(tmp_path_factory, request) -> list[dict]:
    """All variants with --full, else those of the architectures that differ in kind."""
    archs = None if request.config.getoption("--full") else ["sm_80", "sm_90", "sm_100", "gfx942"]
    return json.loads(
        compiled(f"""
import json
from dataclasses import asdict
from benchmarks.aot import inspect, variants
archs = {archs!r}
chosen = [v for v in variants() if archs is None or v.arch in archs]
print(json.dumps([{{**asdict(v), **asdict(inspect(v))}} for v in chosen]))
""")
    )


def test_no_spill_and_wide_loads(evidence):
    assert len(evidence) >= 40
    for row in evidence:
        assert row["stack"] == 0, row
        assert row["widest_load_bits"] == 128, row
        assert row["registers"] <= 128, f"8 warps of more leave less than 2 programs an SM: {row}"


def test_shared_memory_within_limits(evidence):
    from benchmarks.aot import SHARED_LIMIT

    for row in evidence:
        assert row["shared_kib"] <= SHARED_LIMIT[row["arch"]], row


def test_in_place_gradient_has_its_barrier(evidence):
    """A load, a barrier, a store, in this order, in every iteration; without the barrier the check sees the race."""
    in_place = [row for row in evidence if row["kernel"] != "row_statistics_fwd_kernel" and row["arch"] != "gfx942"]
    assert in_place
    assert all(row["barrier_before_store"] for row in in_place)
    unsafe = compiled("""
from benchmarks.aot import Variant, barriers_hold, compile_variant
variant = Variant("row_gradient_bwd_kernel", "sm_90", "fp32", "plain")
print(barriers_hold(compile_variant(variant, IN_PLACE=False).asm["ptx"]))
""")
    assert unsafe.strip() == "False"
