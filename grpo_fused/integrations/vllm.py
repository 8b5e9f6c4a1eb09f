"""vLLM as the rollout engine of the trainer (`grpo_fused.rollouts.vllm`)."""

from grpo_fused.rollouts.vllm import SyncError, VLLMEngine

__all__ = ["SyncError", "VLLMEngine"]
