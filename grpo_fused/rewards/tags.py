"""Finding `<think>` and `<answer>` in a completion: the one place that knows the tags.

A completion is text that a policy under optimisation wrote, so it is hostile by construction. The only pattern here
matches a tag and nothing else: it has no repetition, so no input makes it backtrack and parsing takes linear time.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TAG = re.compile(r"(</?(?:think|answer)>)")
_STRICT_ORDER = ["<think>", "</think>", "<answer>", "</answer>"]


class TaggedCompletion(NamedTuple):
    """What stands between the tags, white space at both ends removed."""

    think: str
    answer: str


def parse_completion(completion: str, prompt: str = "") -> TaggedCompletion | None:
    """Splits `<think>…</think><answer>…</answer>`, or returns None if the completion is anything else.

    Strict: each of the four tags once and in this order, nothing but white space before, between and after the two
    blocks. Either block may be empty. A prompt that ends with `<think>` has opened the first block already (the
    R1 chat template does that); the completion then starts inside it.
    """
    _check_text("completion", completion)
    _check_text("prompt", prompt)
    if prompt.rstrip().endswith("<think>"):
        completion = "<think>" + completion
    pieces = _TAG.split(completion)  # text, tag, text, tag, …, text
    if pieces[1::2] != _STRICT_ORDER:
        return None
    before, think, between, answer, after = (text.strip() for text in pieces[::2])
    if before or between or after:
        return None
    return TaggedCompletion(think, answer)


def extract_answer(completion: str) -> str | None:
    """The text of the only `<answer>…</answer>` of a completion, stripped, or None.

    Lenient about the rest, so that a right answer counts before the format is learnt; but two answers are no answer,
    or a policy could list its guesses. Another tag inside the answer is no answer either.
    """
    _check_text("completion", completion)
    pieces = _TAG.split(completion)
    tags = pieces[1::2]
    if tags.count("<answer>") != 1 or tags.count("</answer>") != 1:
        return None
    opening = tags.index("<answer>")
    if tags[opening + 1 : opening + 2] != ["</answer>"]:
        return None
    return pieces[2 * (opening + 1)].strip()


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str (plain text, not chat messages); got {type(text).__name__}")
