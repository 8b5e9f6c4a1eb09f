"""Pytest set-up of `make bench`: an option for the run's file."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="also put the results into this file of a run")
