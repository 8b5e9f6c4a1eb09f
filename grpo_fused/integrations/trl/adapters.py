"""LoRA adapters on the head, of which TRL's functions do not know: they get the weight and bias of its base layer.

TRL's trainers refuse them there, since their own head would ignore them: in a constructor they ask whether the head is
a `BaseTunerLayer`. `accepting` answers no where our head will score.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from grpo_fused.call.head_parts import HeadAdapter
from grpo_fused.heads.modules import adapters_beside

adapted: ContextVar[nn.Module | tuple[HeadAdapter, ...]] = ContextVar("grpo_fused_trl_adapters", default=())
"""The adapters that tokens are scored with in a block, or a head: then those that it has at a score."""


def with_adapters(bias: Tensor | None) -> tuple[Tensor | None, tuple[HeadAdapter, ...]]:
    """The bias, with that of the adapters in force, and these."""
    adapters = adapted.get()
    return (bias, adapters) if isinstance(adapters, tuple) else adapters_beside(adapters, bias)


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
            return is_layer and not (scores() and sys._getframe(1).f_code.co_name == "__init__")

    return Layers("BaseTunerLayer", (), {})
