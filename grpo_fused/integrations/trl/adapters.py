"""LoRA adapters on the head, of which TRL's functions do not know: they get the weight and bias of its base layer.

TRL's trainers refuse them there, since their own head would ignore them: in a constructor they ask whether the head is
a `BaseTunerLayer`. `accepting` answers no where our head will score.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from grpo_fused.call.head_parts import HeadAdapter
from grpo_fused.heads.modules import adapters_beside
from grpo_fused.integrations.context import holding

_scored: ContextVar[nn.Module | tuple[HeadAdapter, ...]] = ContextVar("grpo_fused_trl_adapters", default=())


def scored_with(adapted: nn.Module | tuple[HeadAdapter, ...]) -> AbstractContextManager[None]:
    """Tokens are scored with these adapters in the block, or with those that a head has then."""
    return holding(_scored, adapted)


def with_adapters(bias: Tensor | None) -> tuple[Tensor | None, tuple[HeadAdapter, ...]]:
    """The bias, with that of the adapters in force, and these."""
    adapted = _scored.get()
    return (bias, adapted) if isinstance(adapted, tuple) else adapters_beside(adapted, bias)


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
