"""The peers, if they are installed."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def liger():
    return pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss


@pytest.fixture(scope="session")
def liger_triton():
    pytest.importorskip("triton")
    return pytest.importorskip("liger_kernel.transformers.grpo_loss").triton_grpo_loss


@pytest.fixture
def nothing_said(monkeypatch):
    """As in a new process, for warnings that are given once in a process."""
    from grpo_fused.integrations.liger import options

    monkeypatch.setattr(options, "_said", set())
