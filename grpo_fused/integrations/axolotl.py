"""axolotl's GRPO with the whole loss fused: one line of its YAML.

    trainer_cls: grpo_fused.integrations.axolotl.FusedAxolotlGRPOTrainer

axolotl 0.18 and 0.19 pin TRL 1.8.0 and 1.9.0; all options of `FusedGRPOTrainer`'s releases hold.
"""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers.grpo import AxolotlGRPOTrainer
from axolotl.core.trainers.grpo.args import AxolotlAsyncGRPOConfig

from grpo_fused.integrations.releases import check_release

SUPPORTED = dict.fromkeys(("0.18", "0.19"), "AxolotlGRPOTrainer")
"""Release (all patch releases of it) to what our trainer is derived from."""

check_release("axolotl", SUPPORTED)

from grpo_fused.integrations.trl.trainer import FusedLoss  # noqa: E402


class FusedAxolotlGRPOTrainer(FusedLoss, AxolotlGRPOTrainer):  # type: ignore[misc]
    """axolotl's `AxolotlGRPOTrainer` with the loss fused; see `grpo_fused.integrations.trl.FusedGRPOTrainer`.

    Raises:
        ValueError: At construction, with axolotl's asynchronous GRPO (`async_prefetch`, `use_data_producer`) or
            `context_parallel_size` above 1: its trainers for these score tokens in ways of their own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs["args"]
        off = {
            "async_prefetch and use_data_producer": isinstance(config, AxolotlAsyncGRPOConfig),
            "context_parallel_size above 1": (config.context_parallel_size or 1) > 1,
        }
        for name in (name for name, value in off.items() if value):
            raise ValueError(f"{type(self).__name__} does not support {name}; leave trainer_cls out for axolotl's own")
        super().__init__(*args, **kwargs)
