"""Which folders import which: engines of rollouts know neither the trainer nor the integrations."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_fused"


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("rollouts", {"trainer", "integrations"}),
        ("integrations", {"trainer"}),
        ("trainer", {"integrations"}),
    ],
)
def test_a_folder_does_not_import_others(folder: str, others: set[str]) -> None:
    """Inside of functions and under TYPE_CHECKING neither."""
    for path in (PACKAGE / folder).rglob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = [f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for node in nodes for alias in node.names]
        ours = {name.split(".")[1] for name in names if name.startswith("grpo_fused.")}
        assert not ours & others, path
