"""The GPU tests and programs on a test double of CUDA (`cuda_double.py`), as far as it goes, with small problems.

    TRITON_INTERPRET=1 PYTHONPATH=. python tests/rehearsal.py pytest tests/gpu/test_engines.py -x -q
    TRITON_INTERPRET=1 PYTHONPATH=. python tests/rehearsal.py benchmarks.sweep --small --peers --out /tmp/run.json

Big cases shrink; times, errors of tensor cores, memory of an allocator mean nothing here.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any
from unittest import mock

import pytest
from cuda_double import cuda_double


class SmallCases:
    """A plugin of pytest: `big_case` of tests/gpu makes small ones."""

    @pytest.fixture(autouse=True)
    def _small(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        big = getattr(request.module, "big_case", None)
        if big is not None:
            monkeypatch.setattr(
                request.module, "big_case",
                lambda N, H, V, dtype, **options: big(min(N, 16), min(H, 32 + H % 8), min(V, 300), dtype, **options),
            )  # fmt: skip


def main(program: str, *arguments: str) -> Any:
    """Run pytest, or a program by the name of its module."""
    absent = "the CUDA double runs no CUDA C++"  # though the extension may be built
    with cuda_double(), mock.patch("grpo_fused.engines.cuda_rows.unavailable", return_value=absent):
        if program == "pytest":
            return pytest.main(list(arguments), plugins=[SmallCases()])
        with mock.patch.object(sys, "argv", [program, *arguments]):
            return runpy.run_module(program, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if sys.argv[1] == "pytest" else bool(main(*sys.argv[1:])) and 0)
