"""A prompt is a text or a list of chat messages: checking it, encoding it, showing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Prompt = str | Sequence[Message]


def check_prompt(prompt: object, where: str) -> None:
    """Raises unless the prompt is a text that is not blank, or chat messages that a model can answer.

    Chat messages are a list of `{"role": ..., "content": ...}` with texts, further keys allowed. The last message is
    what the model answers: it must not be blank and not be the assistant's.

    Args:
        prompt: Anything.
        where: Begins the message of the error, such as "row 3 of train_dataset".

    Raises:
        TypeError: It is neither a str nor a list of mappings with texts.
        ValueError: It is empty, lacks a key, or ends with the assistant's turn.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{where}: expected a prompt that is not blank; got {prompt!r}")
        return
    if not isinstance(prompt, (list, tuple)):
        raise TypeError(f"{where}: expected a prompt that is a str or a list of chat messages; got {_short(prompt)}")
    if not prompt:
        raise ValueError(f"{where}: expected a prompt of at least one chat message; got an empty list")
    for position, message in enumerate(prompt):
        _check_message(message, f"{where}, message {position} of the prompt")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{where}: expected a prompt whose last message is not the assistant's; got {prompt[-1]!r}")
    if not prompt[-1]["content"].strip():
        raise ValueError(f"{where}: expected a prompt whose last message is not blank; got {prompt[-1]!r}")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, ready for the completion to follow.

    A text is encoded as the tokenizer does by default. Chat messages go through the tokenizer's chat template, which
    opens the assistant's turn.

    Args:
        tokenizer: Needs a chat template if the prompt is chat messages.
        prompt: One that `check_prompt` accepts.

    Returns:
        At least one id.

    Raises:
        ValueError: There is no chat template, the template refuses the messages, or no token comes out.
    """
    if isinstance(prompt, str):
        ids: list[int] = list(tokenizer(prompt).input_ids)
    else:
        ids = _encode_chat(tokenizer, prompt)
    if not ids:
        raise ValueError(f"a prompt must have at least one token; got none from {prompt!r}")
    return ids


def completion_for(prompt: Prompt, text: str) -> str | list[dict[str, str]]:
    """A completion in the form of its prompt: the text, or for chat messages one message of the assistant."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def prompt_text(prompt: Prompt) -> str:
    """The prompt for people to read; a chat has one paragraph a message, `role: content`."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "chat messages need a tokenizer with a chat template; got one without. Use an instruction-tuned model's "
            "tokenizer, set `tokenizer.chat_template`, or give the prompts as plain text"
        )
    try:
        encoding: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,  # said, because its default is False in transformers 4 and True in 5
        )
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise ValueError(f"the tokenizer's chat template refuses messages with the roles {roles}: {error}") from error
    return list(encoding["input_ids"])


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(f'{where}: expected {{"role": ..., "content": ...}}; got {_short(message)}')
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f'{where}: expected the keys "role" and "content"; got {sorted(map(str, message))}')
        if not isinstance(message[key], str):
            raise TypeError(f"{where}: expected {key!r} to be a str; got {_short(message[key])}")
    if not message["role"]:
        raise ValueError(f"{where}: expected a role such as 'user'; got ''")


def _short(value: object) -> str:
    """The value and its type, cut to a length that an error message can carry."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
