"""Rule-based reward functions, called as `f(prompts=..., completions=..., **columns) -> list[float | None]`."""

from grpo_fused.rewards.answer import exact_answer_reward
from grpo_fused.rewards.format import format_reward
from grpo_fused.rewards.tags import TaggedCompletion, extract_answer, parse_completion

__all__ = ["TaggedCompletion", "exact_answer_reward", "extract_answer", "format_reward", "parse_completion"]
