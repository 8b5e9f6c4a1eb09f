"""TRL's GMPO trainer (1.7) with the whole loss fused."""

from __future__ import annotations

from trl.experimental.gmpo import GMPOTrainer

from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.integrations.trl.trainer import FusedLoss


class FusedGMPOTrainer(FusedLoss, GMPOTrainer):
    """`trl.experimental.gmpo.GMPOTrainer` with the loss fused; see `FusedGRPOTrainer`."""

    def loss_config(self) -> GRPOLossConfig:
        """The options of the loss; TRL's GMPO applies no bias correction, no entropy bonus and no off-policy mask."""
        return GRPOLossConfig(
            loss_type="gmpo",
            beta=self.beta,
            epsilon=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            top_entropy_quantile=self.top_entropy_quantile,
        )
