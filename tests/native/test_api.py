"""A library that was built from other sources is not called."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from grpo_fused.engines import cpu_library, libraries

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "cpu" / "api.cpp"


def test_signature_is_that_of_the_functions():
    """Whoever changes a declaration gets the new signature here, for api.cpp and cpu_library.py."""
    text = SOURCE.read_text()
    functions = " ".join(" ".join(re.findall(r"^API ([^{]*)\{", text, re.MULTILINE)).split())
    assert functions.count("grpo_") > 10
    expected = hashlib.sha256(functions.encode()).hexdigest()[:8]
    assert expected == cpu_library.SIGNATURE
    assert f'grpo_signature() {{ return "{expected}"; }}' in text


def test_a_library_of_other_sources_is_refused(monkeypatch):
    """As after a `git pull` without a new build, where a call would crash."""
    before = cpu_library._library
    monkeypatch.setattr(cpu_library, "SIGNATURE", "00000000")
    if before is None:
        pytest.skip("the library is not built")
    found = libraries._load("_C", cpu_library.load)
    assert "could not be loaded: it was built from other sources" in found
    assert "to build it again" in found
    assert cpu_library._library is before
