"""`make gpu` on a test double of CUDA (rehearsal.py): its tests and programs run, on small problems."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("part", "sections"), [("first", {"tune", "loss"}), ("second", {"graphs"}), ("third", {"loss", "rows"})]
)
def test_a_part(part, sections, tmp_path):
    """The steps of `make gpu-first` and others, in an order and with a command line that work."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", part, "--rehearse", "--limit", "900", "--out",
         str(tmp_path)],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / f"{part}.json").read_text())
    assert run["machine"]["device"] == "cuda"
    assert set(run["sections"]) == sections
    assert "not timed" not in done.stdout
    assert "failed" not in done.stdout
    if part == "second":
        assert " passed" in done.stdout
    if part == "third":
        for case in run["sections"]["loss"]["cases"].values():
            assert {"chunked", "triton", "eager"} <= case["providers"].keys()
            assert all(row["memory_mib"].keys() == {"allocator"} for row in case["providers"].values())
