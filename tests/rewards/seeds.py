"""The countdown exercise's own test cases: completions after a prompt that ends with `<think>`, and their rewards."""

from __future__ import annotations

COMPLETIONS = {
    "reasoned": "Let's use the numbers 4, 8, 2, and 1 to get 15. \nWe can try: 8 * 2 - 1 = 15... </think>\n"
    "<answer> 8 * 2 - 1 </answer>",
    "ellipsis": " ... </think>\n<answer> 8 * 2 - 1 </answer>",
    "no-tags": "Using 4, 8, 2, 1, make 15: 8 * 2 - 1 = 15",
    "wrong-order": "<answer> 8 + 4 + 2 + 1 </answer>\n<think> This should equal 15 </think>",
    "wrong-result": " ... </think>\n<answer> 8 + 4 - 2 </answer>",
    "wrong-numbers": " ... </think>\n<answer> 10 * 2 - 5 </answer>",
}
TARGET = ["15"] * 6
NUMS = [[4, 8, 2, 1]] * 6
PROMPTS = ["Make 15 from 4, 8, 2 and 1.\n<think>\n"] * 6
FORMAT_REWARDS = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
COUNTDOWN_REWARDS = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def as_chat(completion: str) -> list[dict[str, str]]:
    """A chat-formatted completion."""
    return [{"role": "assistant", "content": completion}]
