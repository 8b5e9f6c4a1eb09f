"""Tests of the native CPU engine need the extension, and a processor that can run it."""

from __future__ import annotations

import os

import pytest
import torch

from grpo_fused.engines import cpu_library, libraries


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


@pytest.fixture
def threads():
    """Sets the number of threads, and restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=["", "avx2"], ids=["best", "avx2"])
def isa(request, cpu_extension):
    """The instruction set: that of the other tests, then AVX2 with three blocks in a product of dH, as AMX has them."""
    if request.param:
        cpu_library.use_isa(request.param, group=3)
        if cpu_library.missing():
            cpu_library.use_isa(os.environ.get("GRPO_FUSED_ISA", ""))
            pytest.skip(f"{request.param} is missing")
    yield
    cpu_library.use_isa(os.environ.get("GRPO_FUSED_ISA", ""))
