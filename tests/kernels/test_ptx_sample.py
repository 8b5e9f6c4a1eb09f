"""A sample of the kernels as NVIDIA's machine code, in the interpreter of PTX; all of it is `make emulate-nvidia`.

Compiling needs triton as a compiler, not as an interpreter, so this runs in its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

PYTEST = "import os, sys, pytest; done = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(done)"
"""Leaves at once: to free millions of decoded operands one by one takes a fifth of the time."""


def test_sample():
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", PYTEST, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/with_ptx"],
        cwd=ROOT, env=env | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
