"""LoRA adapters on the head. From 1.15 on TRL passes the weight under them, by which they are found here.

TRL's trainers refuse them there, since their own head would ignore them: in a constructor they ask whether the head is
a `BaseTunerLayer`. `accepting` answers no where our head will score.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from grpo_fused.call.head_parts import HeadAdapter
from grpo_fused.heads.modules import head_parts

_heads: Any = WeakIdKeyDictionary()
"""Base weight to a weak reference to the layer of peft that holds it."""
_given: ContextVar[tuple[HeadAdapter, ...] | None] = ContextVar("grpo_fused_trl_adapters", default=None)


def remember(head: nn.Module) -> None:
    """Let `adapters_of` find the adapters of a head by its weight; forget those of a layer that was removed."""
    if hasattr(head, "base_layer"):
        _heads[head.weight] = weakref.ref(head)
    elif isinstance(head.weight, Tensor):
        _heads.pop(head.weight, None)


@contextmanager
def scored_with(adapters: tuple[HeadAdapter, ...]) -> Iterator[None]:
    """`adapters_of` gives these in the block, whatever the weight."""
    token = _given.set(adapters)
    try:
        yield
    finally:
        _given.reset(token)


def adapters_of(weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, tuple[HeadAdapter, ...]]:
    """The bias and the active adapters of the head with this base weight; the given bias and none if it has none."""
    if (given := _given.get()) is not None:
        return bias, given
    reference = _heads.get(weight)
    head = None if reference is None else reference()
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
