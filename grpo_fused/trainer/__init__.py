"""A minimal GRPO trainer on the fused loss: rollout, rewards, advantages, update."""

from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.loop import GRPOTrainer
from grpo_fused.trainer.rollout import Rollout, decode_completions, generate_rollout
from grpo_fused.trainer.update import update_policy

__all__ = [
    "GRPOTrainer",
    "GRPOTrainerConfig",
    "Rollout",
    "decode_completions",
    "generate_rollout",
    "update_policy",
]
