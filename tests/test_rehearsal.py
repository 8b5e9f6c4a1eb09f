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


@pytest.mark.parametrize(("part", "sections"), [("first", {"tune", "loss"}), ("third", {"loss", "rows"})])
def test_a_part(part, sections, tmp_path):
    """The steps of `make gpu-first` and others, in an order and with a command line that work."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", part, "--rehearse", "--out", str(tmp_path)], cwd=ROOT, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / f"{part}.json").read_text())
    assert run["machine"]["device"] == "cuda"
    assert set(run["sections"]) == sections
    assert "not timed" not in done.stdout
    assert "failed" not in done.stdout
