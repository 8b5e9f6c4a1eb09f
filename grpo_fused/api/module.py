"""The loss as a module."""

from __future__ import annotations

from typing import Any

from torch import nn

from grpo_fused.api.fused_linear import fused_linear_grpo_loss
from grpo_fused.api.head import check_names
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.outputs import GRPOLossOutput


class FusedLinearGRPOLoss(nn.Module):
    """`fused_linear_grpo_loss` as a module without parameters, with options that are the same in every call.

    Args:
        config: the objective.
        **options: `with_metrics` and `HeadOptions`; those of a call take precedence.

    Raises:
        TypeError: another option, or a config of another type.

    Example::

        criterion = FusedLinearGRPOLoss(GRPOLossConfig(loss_type="dr_grpo", max_completion_length=512), temperature=0.7)
        loss = criterion(hidden_states, lm_head_weight, completion_ids, advantages, completion_mask).loss
    """

    def __init__(self, config: GRPOLossConfig | None = None, **options: Any) -> None:
        super().__init__()
        self.config = GRPOLossConfig() if config is None else config
        if not isinstance(self.config, GRPOLossConfig):
            raise TypeError(f"config must be a GRPOLossConfig; got {type(config).__name__}")
        check_names(FusedLinearGRPOLoss, {name: x for name, x in options.items() if name != "with_metrics"})
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> GRPOLossOutput:
        """The arguments and the result of `fused_linear_grpo_loss`."""
        return fused_linear_grpo_loss(*args, **{"config": self.config, **self.options, **kwargs})

    def extra_repr(self) -> str:
        """The options, in the module's text."""
        return ", ".join([repr(self.config), *(f"{name}={value!r}" for name, value in self.options.items())])
