"""Reading a policy's text: chat messages as one string, and the tags `<think>` and `<answer>` in it.

A policy in training may write hostile text. The only pattern here matches a tag: it has no repetition, so no input
makes it backtrack and parsing takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Text = str | Sequence[Message]

_TAG = re.compile(r"(</?(?:think|answer)>)")
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]  # in the order of the format


def text_of(text: Text) -> str:
    """The text itself, or the assistant's text in a list of chat messages.

    Messages of other roles (a tool's output inside a completion) are not the policy's text and are left out; several
    assistant messages are joined by a new line. A message's content is a str, None (a bare tool call), or a list of
    parts, of which those with a "text" count.

    Raises:
        TypeError: Neither a str nor a list of messages with "role" and "content".
    """
    if isinstance(text, str):
        return text
    if not isinstance(text, (list, tuple)):
        raise TypeError(f"expected a str or a list of chat messages; got {type(text).__name__}")
    return "\n".join([_content(message) for message in text if _role(message) == "assistant"])


def opens_think(prompt: Text) -> bool:
    """Whether a prompt has opened the think block for its completion, as the R1 chat template does.

    A chat prompt has opened it if its last message is the assistant's and ends with the tag; a tag in a user's message
    does not count.
    """
    if not isinstance(prompt, str) and prompt and _role(prompt[-1]) != "assistant":
        return False
    return text_of(prompt).rstrip().endswith("<think>")


def check_column(name: str, values: Sized, completions: Sized) -> None:
    """Raises ValueError unless a column has a value for each completion."""
    if len(values) != len(completions):
        raise ValueError(f"expected one of {name!r} for each of {len(completions)} completions; got {len(values)}")


def judge_each(
    judge: Callable[..., float | None], completions: Sequence[Any], **columns: Sequence[Any]
) -> list[float | None]:
    """`judge(completion, *values)` for each completion and its values of the columns.

    Returns:
        N rewards; None, "not judged", where one of the columns holds None or `judge` returns it.

    Raises:
        ValueError: A column has another length than the completions.
    """
    for name, values in columns.items():
        check_column(name, values, completions)
    rows = zip(completions, *columns.values(), strict=True)
    return [None if any(value is None for value in row[1:]) else judge(*row) for row in rows]


class TaggedCompletion(NamedTuple):
    """The texts between the tags, white space at both ends removed."""

    think: str
    answer: str


def parse_completion(completion: Text, prompt: Text = "") -> TaggedCompletion | None:
    """Splits `<think>…</think><answer>…</answer>`, or returns None if the completion is anything else.

    Strict: each of the four tags once and in this order, only white space before, between and after the two blocks.
    Either block may be empty. A prompt that ends with `<think>` has opened the first block already (the
    R1 chat template does that); the completion then starts inside it.
    """
    text = text_of(completion)
    texts, tags = split_at_tags("<think>" + text if opens_think(prompt) else text)
    if tags != TAGS or any(texts[::2]):  # before, between and after the blocks
        return None
    return TaggedCompletion(think=texts[1], answer=texts[3])


def extract_answer(completion: Text) -> str | None:
    """The text of the only `<answer>…</answer>` of a completion, stripped, or None.

    Lenient about the rest, so that a right answer counts before the format is learnt; but two answers count as none,
    or a policy could list its guesses. An answer with another tag inside counts as none, too.
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
        prompts: N prompts, read if `think_opened` is None; None if there are none to read.
        think_opened: True if the chat template opens the block (which the prompt's messages do not show), False if
            not, None to look at the prompts.
    """
    if think_opened is not None and not isinstance(think_opened, bool):
        raise TypeError(f"think_opened must be True, False or None (look at the prompts); got {think_opened!r}")
    prompts = [""] * len(completions) if prompts is None else prompts
    check_column("prompts", prompts, completions)
    opened = [opens_think(prompt) if think_opened is None else think_opened for prompt in prompts]
    texts = [text_of(completion) for completion in completions]
    return ["<think>" + text if first else text for text, first in zip(texts, opened, strict=True)]


def _role(message: Message) -> str:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise TypeError(f'a chat message must be a mapping with "role" and "content"; got {message!r:.200}')
    return str(message["role"])


def _content(message: Message) -> str:
    content = message["content"]
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content):
        # `datasets` gives a part the keys of the others, with None
        return "".join(str(part["text"]) for part in content if part.get("text") is not None)
    raise TypeError(f"the content of a chat message must be a str or a list of parts; got {content!r:.200}")
