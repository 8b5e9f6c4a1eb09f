"""Tests of the native CPU engine need the extension, and a processor that can run it."""

from __future__ import annotations

import pytest

from grpo_fused import _native


@pytest.fixture
def cpu_extension() -> None:
    reason = _native.cpu_available()
    if reason is not None:
        pytest.skip(reason)
