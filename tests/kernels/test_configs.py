"""The choice of a table by device."""

from __future__ import annotations

import pytest
import torch
from grpo_fused.kernels.configs import architecture


@pytest.mark.parametrize(
    ("capability", "key"),
    [((7, 5), "sm_80"), ((8, 6), "sm_86"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 0), "sm_89")],
)
def test_the_nearest_older_architecture(capability, key, monkeypatch):
    """Consumer Blackwell (12.0) has less shared memory than the other (10.x)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert architecture(torch.device("cuda")) == key
