"""Reward functions: `f(prompts=..., completions=..., completion_ids=..., **columns) -> list[float | None]`."""

from grpo_fused.rewards.answer import exact_answer_reward
from grpo_fused.rewards.arithmetic import Arithmetic, evaluate_arithmetic
from grpo_fused.rewards.calling import RewardError, RewardFunction
from grpo_fused.rewards.code_format import code_format_reward
from grpo_fused.rewards.countdown import countdown_reward
from grpo_fused.rewards.format import format_reward, reasoning_steps_reward, soft_format_reward, tag_count_reward
from grpo_fused.rewards.length import length_reward, relative_length_reward
from grpo_fused.rewards.math_accuracy import math_accuracy_reward
from grpo_fused.rewards.mixture import only_for
from grpo_fused.rewards.model import RewardModel
from grpo_fused.rewards.registry import BUILT_INS, built_in
from grpo_fused.rewards.text import Message, TaggedCompletion, Text, extract_answer, parse_completion, text_of
from grpo_fused.rewards.verifier import score_answer_reward

__all__ = [
    "BUILT_INS",
    "Arithmetic",
    "Message",
    "RewardError",
    "RewardFunction",
    "RewardModel",
    "TaggedCompletion",
    "Text",
    "built_in",
    "code_format_reward",
    "countdown_reward",
    "evaluate_arithmetic",
    "exact_answer_reward",
    "extract_answer",
    "format_reward",
    "length_reward",
    "math_accuracy_reward",
    "only_for",
    "parse_completion",
    "reasoning_steps_reward",
    "relative_length_reward",
    "score_answer_reward",
    "soft_format_reward",
    "tag_count_reward",
    "text_of",
]
