"""The format reward: did the completion think first and answer second?"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_fused.rewards.tags import parse_completion


def format_reward(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """1.0 for a completion that is exactly `<think>…</think><answer>…</answer>`, else 0.0.

    Args:
        prompts: N prompts; one that ends with `<think>` has opened that block for its completion.
        completions: N completions.
        **columns: the other columns of the data set, unused.

    Returns:
        N rewards, 0.0 or 1.0.

    Source: the rule-based format reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2).
    """
    if len(prompts) != len(completions):
        raise ValueError(f"expected as many prompts as completions; got {len(prompts)} and {len(completions)}")
    return [
        float(parse_completion(completion, prompt) is not None)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
