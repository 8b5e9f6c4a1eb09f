"""Training runs of other programs, ours beside their own: logged lines and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
