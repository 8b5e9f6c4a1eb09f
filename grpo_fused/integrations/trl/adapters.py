"""LoRA adapters on the head: TRL passes the weight under them, by which they are found here.

From 1.15 on TRL's trainers refuse them, since their own head would ignore them: in a constructor they ask whether the
head is a `BaseTunerLayer`. `accepting` answers no where our head will score.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def accepting(tuner_layer: type, scores: Callable[[], bool]) -> type:
    """A class in place of peft's `BaseTunerLayer` in TRL's trainers.

    Args:
        tuner_layer: peft's.
        scores: whether our head will score what the trainer that is being constructed trains.
    """

    class Layers(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            is_layer = isinstance(instance, tuner_layer)
            # not in the function that casts a head to fp32, which would leave the adapter out
            asks = is_layer and scores() and sys._getframe(1).f_code.co_name == "__init__"
            if asks:
                remember(instance)
            return is_layer and not asks

    return Layers("BaseTunerLayer", (), {})
