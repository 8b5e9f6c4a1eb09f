"""verl without ray, which none of the functions that are called here uses."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from unittest.mock import MagicMock

import pytest


def import_verl(*names: str) -> None:
    """Imports verl and the named modules, with a test double of ray where ray is missing, removed afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("ray") is None:
            ray = MagicMock(__path__=[], __spec__=importlib.machinery.ModuleSpec("ray", None))
            patch.setitem(sys.modules, "ray", ray)
        for name in ("verl.models.transformers.monkey_patch", *names):
            importlib.import_module(name)
