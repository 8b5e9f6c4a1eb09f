"""The format rewards: think block first, then the answer; and reasoning in steps."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_fused.rewards.text import TAGS, Text, parse_completion, split_at_tags, text_of, whole_completions

_MIN_THOUGHT = 20  # characters; a shorter thought earns half, as in the Hugging Face course
# "Step 1:", "1." and bullets at the start of a line, and the words that join steps. Digits are counted, not repeated
# without bound, so that no digits are read more than four times.
_MARKER = re.compile(r"Step [0-9]{1,4}:|^(?:[0-9]{1,4}\.|[-*])|\b(?:First|Second|Next|Finally),", re.MULTILINE)
_ENOUGH = 3


def format_reward(
    prompts: Sequence[Text] | None,
    completions: Sequence[Text],
    *,
    think_opened: bool | None = None,
    **columns: object,
) -> list[float]:
    """1.0 for a completion that is exactly `<think>…</think><answer>…</answer>`, else 0.0.

    Args:
        prompts: N prompts; one that ends with `<think>` has opened that block for its completion.
        completions: N completions.
        think_opened: True if the chat template opens the think block, which messages do not show; default: by prompt.
        **columns: the other columns of the data set, unused.

    Returns:
        N rewards, 0.0 or 1.0.

    Source: the rule-based format reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2).
    """
    texts = whole_completions(completions, prompts, think_opened)
    return [float(parse_completion(text) is not None) for text in texts]


def soft_format_reward(
    completions: Sequence[Text],
    prompts: Sequence[Text] | None = None,
    *,
    think_opened: bool | None = None,
    **columns: object,
) -> list[float]:
    """1.0 for a think block of more than 20 characters and an answer that is not empty; 0.5 for only the tags.

    The four tags may be anywhere in the text, but in their order, with only white space between the blocks. The first
    such place counts. 0.0 if there is none.

    Args:
        completions: N completions.
        prompts: N prompts; one that ends with `<think>` has opened that block for its completion.
        think_opened: As in `format_reward`.
        **columns: the other columns of the data set, unused.

    Returns:
        N rewards, 0.0, 0.5 or 1.0.

    Source: the format reward of the Hugging Face LLM course, chapter 12 (without its pattern, which is quadratic).
    """
    return [_soft(text) for text in whole_completions(completions, prompts, think_opened)]


def tag_count_reward(
    completions: Sequence[Text],
    prompts: Sequence[Text] | None = None,
    *,
    think_opened: bool | None = None,
    **columns: object,
) -> list[float]:
    """0.25 for each of the four tags that occurs exactly once, at any place.

    Args:
        completions: N completions.
        prompts: N prompts; one that ends with `<think>` has written that tag for its completion.
        think_opened: As in `format_reward`.
        **columns: the other columns of the data set, unused.

    Returns:
        N rewards in 0.0, 0.25, …, 1.0.

    Source: the tag count reward of Open-R1 (which also requires a new line at each tag).
    """
    split = [split_at_tags(text)[1] for text in whole_completions(completions, prompts, think_opened)]
    return [sum(0.25 for tag in TAGS if tags.count(tag) == 1) for tags in split]


def reasoning_steps_reward(completions: Sequence[Text], **columns: object) -> list[float]:
    """`min(1, markers / 3)`: "Step 1:", numbered or bulleted lines, "First,", "Second,", "Next,", "Finally,".

    Args:
        completions: N completions.
        **columns: prompts and the other columns of the data set, unused.

    Returns:
        N rewards from 0.0 to 1.0.

    Source: the reasoning steps reward of Open-R1.
    """
    return [min(1.0, len(_MARKER.findall(text_of(completion))) / _ENOUGH) for completion in completions]


def _soft(text: str) -> float:
    texts, tags = split_at_tags(text)
    for start in range(len(tags) - len(TAGS) + 1):
        think, between, answer = texts[start + 1 : start + 4]
        if tags[start : start + len(TAGS)] == TAGS and not between:
            return 1.0 if len(think) > _MIN_THOUGHT and answer else 0.5
    return 0.0
