"""Finding `<think>` and `<answer>` in a completion: the one place that knows the tags.

A completion is text that a policy under optimisation wrote, so it is hostile by construction. The only pattern here
matches a tag and nothing else: it has no repetition, so no input makes it backtrack and parsing takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from grpo_fused.rewards.text import Text, check_column, opens_think, text_of

_TAG = re.compile(r"(</?(?:think|answer)>)")
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]  # in the order of the format


class TaggedCompletion(NamedTuple):
    """What stands between the tags, white space at both ends removed."""

    think: str
    answer: str


def parse_completion(completion: Text, prompt: Text = "") -> TaggedCompletion | None:
    """Splits `<think>…</think><answer>…</answer>`, or returns None if the completion is anything else.

    Strict: each of the four tags once and in this order, nothing but white space before, between and after the two
    blocks. Either block may be empty. A prompt that ends with `<think>` has opened the first block already (the
    R1 chat template does that); the completion then starts inside it.
    """
    text = text_of(completion)
    texts, tags = split_at_tags("<think>" + text if opens_think(prompt) else text)
    if tags != TAGS:
        return None
    before, think, between, answer, after = texts
    if before or between or after:
        return None
    return TaggedCompletion(think, answer)


def extract_answer(completion: Text) -> str | None:
    """The text of the only `<answer>…</answer>` of a completion, stripped, or None.

    Lenient about the rest, so that a right answer counts before the format is learnt; but two answers are no answer,
    or a policy could list its guesses. Another tag inside the answer is no answer either.
    """
    texts, tags = split_at_tags(text_of(completion))
    if tags.count("<answer>") != 1 or tags.count("</answer>") != 1:
        return None
    opening = tags.index("<answer>")
    if tags[opening + 1 : opening + 2] != ["</answer>"]:
        return None
    return texts[opening + 1]


def split_at_tags(text: str) -> tuple[list[str], list[str]]:
    """The T tags of a text and the T + 1 stripped texts around them."""
    pieces = _TAG.split(text)  # text, tag, text, tag, …, text
    return [piece.strip() for piece in pieces[::2]], pieces[1::2]


def whole_completions(
    completions: Sequence[Text], prompts: Sequence[Text] | None, think_opened: bool | None
) -> list[str]:
    """The texts of N completions, each with the `<think>` that its prompt had opened for it.

    Args:
        completions: N texts or chat completions.
        prompts: N prompts, read where `think_opened` is None; None if there are none to read.
        think_opened: True if the chat template opens the block (which the prompt's messages do not show), False if
            nothing does, None to look at the prompts.
    """
    if think_opened is not None and not isinstance(think_opened, bool):
        raise TypeError(f"think_opened must be True, False or None (look at the prompts); got {think_opened!r}")
    texts = [text_of(completion) for completion in completions]
    if prompts is not None:
        check_column("prompts", prompts, completions)
    if think_opened is None:
        opened = [opens_think(prompt) for prompt in prompts] if prompts is not None else [False] * len(texts)
    else:
        opened = [think_opened] * len(texts)
    return ["<think>" + text if first else text for text, first in zip(texts, opened, strict=True)]
