"""`make gpu` on a test double of CUDA (rehearsal.py): its tests and programs run, on small problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.full


def rehearse(*arguments: str) -> str:
    """What tests/rehearsal.py prints; fails if it fails."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/rehearsal.py", *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_gpu_tests():
    """One of each; those whose size is their purpose need a GPU."""
    chosen = "fp32 and dapo-chunked or dapo-triton or 903 or options or depend_on or bitwise or stream or sync or graph"
    assert " passed" in rehearse("pytest", "tests/gpu/test_engines.py", "-q", "-x", "-k", chosen)


@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        ("loss", ("benchmarks.sweep", "--no-peers", "--no-memory", "--cases", "bf16-80-64-2048-half")),
        ("rows", ("benchmarks.rows",)),
        ("tune", ("benchmarks.tune",)),
    ],
)
def test_a_program(section, arguments, tmp_path):
    out = tmp_path / "run.json"
    printed = rehearse(*arguments, "--small", "--rounds", "1", "--out", str(out))
    run = json.loads(out.read_text())
    assert run["machine"]["device"] == "cuda"
    assert section in run["sections"]
    assert "not timed" not in printed
    assert "failed" not in printed
