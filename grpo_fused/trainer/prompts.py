"""A prompt is a text or a list of chat messages: checks, encoding and display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_fused.rewards.text import Text
from grpo_fused.rollouts.errors import PromptError


def check_prompt(prompt: object, where: str) -> None:
    """Raises unless the prompt is a text that is not blank, or chat messages that a model can answer.

    Chat messages are a list of `{"role": ..., "content": ...}` with texts, further keys allowed; one with `tool_calls`
    may have None for its content. The last message is what the model answers: not blank, and not the assistant's.

    Args:
        prompt: Anything.
        where: The first words of the error, such as "row 3 of train_dataset".

    Raises:
        TypeError: It is neither a str nor a list of at least one chat message.
        ValueError: It is blank, ends with the assistant's turn, or has a lone surrogate.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not (isinstance(messages, (list, tuple)) and messages and all(map(_is_message, messages))):
        raise TypeError(
            f'{where}: expected a prompt that is a str or a list of chat messages {{"role": ..., "content": ...}} with '
            f"texts; got {prompt!r:.200}"
        )
    if messages[-1]["role"] == "assistant" or not (messages[-1]["content"] or "").strip():
        raise ValueError(
            f"{where}: expected a last message that is not blank and not the assistant's; got {prompt!r:.80}"
        )
    text = "".join(message["content"] or "" for message in messages)
    if text != text.encode(errors="ignore").decode():
        raise ValueError(f"{where}: expected texts of whole characters, no lone surrogates; got {prompt!r:.80}")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Text, embeddings: int | None = None) -> list[int]:
    """Token ids of a prompt, up to where the completion starts.

    A text is encoded as the tokenizer does by default. Chat messages go through the tokenizer's chat template, which
    opens the assistant's turn.

    Args:
        tokenizer: Needs a chat template if the prompt is chat messages.
        prompt: One that `check_prompt` accepts.
        embeddings: Rows of the model's embedding, if they are to be checked.

    Returns:
        At least one id.

    Raises:
        PromptError: There is no chat template, the template refuses the messages, the result has no token, or one that
            the model has no embedding for.
    """
    if isinstance(prompt, str):
        encoding: Any = tokenizer(prompt)
    else:
        try:
            # `return_dict` for tokenizers with code of their own, whose default may be that of transformers 4
            encoding = tokenizer.apply_chat_template(
                [dict(message) for message in prompt], add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            roles = [message["role"] for message in prompt]
            raise PromptError(
                f"the tokenizer's chat template refuses messages with the roles {roles}: {error}"
            ) from error
        except ValueError as error:
            if getattr(tokenizer, "chat_template", None) is not None:
                raise
            raise PromptError(
                "chat messages need a tokenizer with a chat template; chat_template is not set. Prompts may be texts, "
                "also those of a task (chat: false)"
            ) from error
    ids: list[int] = list(encoding["input_ids"])
    if not ids:
        raise PromptError(
            f"a prompt must have at least one token; got none from {prompt!r} by a tokenizer of {len(tokenizer)} tokens"
        )
    if embeddings is not None and max(ids) >= embeddings:
        raise PromptError(
            f"token ids must be less than {embeddings}, the rows of the model's embedding; got {max(ids)}, the token "
            f"{tokenizer.convert_ids_to_tokens(max(ids))!r}"
        )
    return ids


def completion_for(prompt: Text, text: str) -> str | list[dict[str, str]]:
    """A completion in the form of its prompt: the text, or for chat messages one message of the assistant."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def prompt_text(prompt: Text) -> str:
    """The prompt as readable text; a chat has one paragraph for each message, `role: content`."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content'] or ''}" for message in prompt)


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    role, content = message.get("role"), message.get("content")
    is_call = content is None and bool(message.get("tool_calls"))
    return isinstance(role, str) and bool(role) and (isinstance(content, str) or is_call)
