"""Tests of the native CPU engine need the extension, and a processor that can run it."""

from __future__ import annotations

import pytest

from grpo_fused.engines import libraries


@pytest.fixture(scope="session")
def row_functions(tmp_path_factory):
    """The functions of the row kernels, compiled once for the files that share them (tests/conftest.py)."""
    from native.harness import Harness

    return Harness(tmp_path_factory.mktemp("functions"))


@pytest.fixture
def cpu_extension() -> None:
    reason = libraries.cpu_available()
    if reason is not None:
        pytest.skip(reason)
