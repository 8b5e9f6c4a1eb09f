"""Pytest set-up of `make bench`: an option for the run's file, and threads that do not spin."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, see benchmarks.cpu

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="also put the results into this file of a run")
