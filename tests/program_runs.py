"""Training runs of other programs, ours beside their own: how they are run, logged lines and weights."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

Logs = Sequence[Mapping[str, float]]
Weights = Mapping[str, Tensor]


def assert_same_run(got: Logs, want: Logs, mine: Weights, theirs: Weights, initial: Weights) -> None:
    """Numbers as they were printed, with four digits; weights, which must have moved."""
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=1e-5, nan_ok=True), name
    assert max((theirs[name] - x).abs().max() for name, x in initial.items()) > 1e-4
    for name, x in theirs.items():
        torch.testing.assert_close(mine[name], x, rtol=1e-5, atol=1e-6)


def run_in(folder: Path, *command: str, timeout: float = 500, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a folder, whose modules it finds, as those of this process; without a network."""
    path = os.pathsep.join([str(folder), *(p for p in sys.path if p)])
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def logged(output: str, first: str, times: Sequence[str]) -> list[dict[str, float]]:
    """The lines of a log that begin with one of these keys (a pattern), without what is a time."""
    rows = [ast.literal_eval(line) for line in re.findall(rf"\{{'(?:{first})'.*?\}}", output)]
    return [{key: float(x) for key, x in row.items() if not any(t in key for t in times)} for row in rows]
