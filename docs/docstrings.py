"""What docstrings have and Markdown has not: `::` before an indented block."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LiteralBlocks(griffe.Extension):
    """A paragraph that ends in `::` ends in `:`, and one that is `::` alone goes; the block after it stays code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^::$\n+|(?<=\S):(?=:$)", "", obj.docstring.value, flags=re.MULTILINE)
