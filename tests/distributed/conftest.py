"""Four processes for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed.workers import Workers


@pytest.fixture(scope="session")
def workers(tmp_path_factory) -> Iterator[Workers]:
    made = Workers(4, tmp_path_factory.mktemp("gloo"))
    yield made
    made.stop()
