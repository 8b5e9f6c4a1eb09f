"""A minimal GRPO trainer on the fused loss: rollout, rewards, advantages, update."""

from grpo_fused.rewards import RewardFunction
from grpo_fused.rollouts.engine import Generation, RolloutEngine, Sampling
from grpo_fused.rollouts.errors import NonFiniteError
from grpo_fused.rollouts.huggingface import HuggingFaceEngine
from grpo_fused.rollouts.vllm import VLLMEngine
from grpo_fused.trainer.checkpoint import CheckpointError
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.loop import GRPOTrainer
from grpo_fused.trainer.objective import ObjectiveOptions
from grpo_fused.trainer.policy import Policy
from grpo_fused.trainer.rollout import Rollout, roll_out
from grpo_fused.trainer.scoring import score_completions
from grpo_fused.trainer.update import Updater

__all__ = [
    "CheckpointError",
    "GRPOTrainer",
    "GRPOTrainerConfig",
    "Generation",
    "HuggingFaceEngine",
    "NonFiniteError",
    "ObjectiveOptions",
    "Policy",
    "RewardFunction",
    "Rollout",
    "RolloutEngine",
    "Sampling",
    "Updater",
    "VLLMEngine",
    "roll_out",
    "score_completions",
]
