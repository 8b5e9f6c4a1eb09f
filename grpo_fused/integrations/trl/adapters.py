"""LoRA adapters on the head: TRL passes the weight under them, by which they are found here."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from grpo_fused.call.head_parts import HeadAdapter
from grpo_fused.heads.modules import head_parts

_heads: Any = WeakIdKeyDictionary()
"""Base weight to the layer of peft that holds it."""


def remember(head: nn.Module) -> None:
    """Let `adapters_of` find the adapters of a head; nothing if it can have none."""
    if hasattr(head, "base_layer"):
        _heads[head.weight] = head


def adapters_of(weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, tuple[HeadAdapter, ...]]:
    """The bias and the active adapters of the head with this base weight; the given bias and none if it has none."""
    head = _heads.get(weight)
    if head is None:
        return bias, ()
    parts = head_parts(head)
    return parts.bias, parts.adapters
