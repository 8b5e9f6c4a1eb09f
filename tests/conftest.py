"""Set-up of the tests: triton interprets (it must be told before a kernel is decorated), seeds are fixed."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
# Threads that spin at every small operation slow the tests manyfold when anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from grpo_fused import engines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole option grid, not only a covering sample")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of the whole grid; run with --full (make test-full)")
    config.addinivalue_line("markers", "gpu: needs a GPU (make gpu)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        left_out = [item for item in items if "full" in item.keywords]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "full" not in item.keywords]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for impl in ("native", "triton"):
        reason = engines.unavailable(impl, torch.device("cpu") if impl == "native" else device, torch.float32)
        for item in items:
            if reason is not None and getattr(item, "callspec", None) and item.callspec.params.get("impl") == impl:
                item.add_marker(pytest.mark.skip(reason=reason))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
