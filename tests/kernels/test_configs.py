"""The choice of a table by device."""

from __future__ import annotations

import pytest
import torch
from grpo_fused.kernels import head_configs
from grpo_fused.kernels.configs import architecture


@pytest.mark.parametrize(
    ("capability", "key"),
    [((7, 5), "sm_80"), ((8, 6), "sm_86"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 0), "sm_89")],
)
def test_the_nearest_older_architecture(capability, key, monkeypatch):
    """Consumer Blackwell (12.0) has less shared memory than the other (10.x)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert architecture(torch.device("cuda")) == key


@pytest.mark.parametrize(
    ("version", "pipelined"), [("3.6.0", False), ("3.7.0+git1", False), ("3.7.1", True), ("3.10.0", True)]
)
def test_pipelines_without_a_fence_are_not_used(version, pipelined, monkeypatch):
    """Before triton 3.7.1 a product of bf16 may read what `cp.async` has not made visible to it."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    head_configs.fences_copies.cache_clear()
    try:
        finish = head_configs.finish_config(torch.device("cuda"), torch.bfloat16)
        assert ("num_stages" not in finish.options) == finish.pipelined == pipelined
        assert head_configs.finish_config(torch.device("cuda"), torch.float32).pipelined, "on the fp32 units"
    finally:
        head_configs.fences_copies.cache_clear()
