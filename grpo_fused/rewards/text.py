"""Texts and chat messages: what a policy wrote, as one string; and the length check that reward functions share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

Message = Mapping[str, Any]
Text = str | Sequence[Message]


def text_of(text: Text) -> str:
    """The text itself, or what the assistant says in a list of chat messages.

    Messages of other roles (a tool's output inside a completion) are not the policy's words and are left out; several
    assistant messages are joined by a new line. A message's content is a str, None (a bare tool call), or a list of
    parts, of which those with a "text" count.

    Raises:
        TypeError: Anything else than a str or a list of messages with "role" and "content".
    """
    if isinstance(text, str):
        return text
    if not isinstance(text, (list, tuple)):
        raise TypeError(f"expected a str or a list of chat messages; got {type(text).__name__}")
    return "\n".join([_content(message) for message in text if _role(message) == "assistant"])


def opens_think(prompt: Text) -> bool:
    """Whether a prompt has opened the think block for its completion, as the R1 chat template does.

    A chat prompt has if it ends with the assistant's own unfinished message; a user who mentions the tag has not.
    """
    if not isinstance(prompt, str) and prompt and _role(prompt[-1]) != "assistant":
        return False
    return text_of(prompt).rstrip().endswith("<think>")


def check_column(name: str, values: Sized, completions: Sized) -> None:
    """Raises ValueError unless a column has a value for each completion."""
    if len(values) != len(completions):
        raise ValueError(f"expected one of {name!r} for each of {len(completions)} completions; got {len(values)}")


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
        return "".join(str(part["text"]) for part in content if "text" in part)
    raise TypeError(f"the content of a chat message must be a str or a list of parts; got {content!r:.200}")
