"""Programs of this repository as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}


def torchrun(*program: object, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program, as a file or as `-m` and a module, with its arguments, in two processes that torchrun starts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *map(str, program)], cwd=ROOT, env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
