"""The report of these tests names the release: Megatron-Core comes from its repository, without metadata."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True, scope="session")
def _megatron_in_report(record_testsuite_property: Callable[[str, str], None]) -> None:
    package_info = pytest.importorskip("megatron.core.package_info")
    record_testsuite_property("megatron-core", package_info.__version__.split("+")[0])  # without the commit
