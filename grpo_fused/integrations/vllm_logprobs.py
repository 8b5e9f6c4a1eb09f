"""A plugin of vLLM for other programs (`grpo_fused.rollouts.vllm_logprobs`)."""

from grpo_fused.rollouts.vllm_logprobs import ExactLogprobs

__all__ = ["ExactLogprobs"]
