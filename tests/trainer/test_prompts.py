"""Prompts as text and as chat messages: errors, encoding, and the form of a completion."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo_fused.trainer.prompts import check_prompt, completion_for, encode_prompt, prompt_text
from grpo_fused.trainer.tiny import tiny_tokenizer

USER = {"role": "user", "content": "1+1?"}
CHAT = [{"role": "system", "content": "Be brief."}, USER]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "[1, 1]"}}]}
CALLED = [USER, CALL, {"role": "tool", "content": "2"}]


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param("1+1=", id="text"),
        pytest.param([USER], id="one-message"),
        pytest.param([*CHAT, {"role": "assistant", "content": "2"}, USER], id="several-turns"),
        pytest.param([{"role": "system", "content": ""}, USER], id="blank-system-message"),
        pytest.param([USER | {"name": "Ada"}], id="another-key"),
        pytest.param(CALLED, id="tool-call"),
        pytest.param("\U0001f600", id="astral-character"),
    ],
)
def test_good_prompts(prompt: Any) -> None:
    check_prompt(prompt, "row 0")


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        pytest.param("", ValueError, "not blank .*; got ''", id="empty"),
        pytest.param(" \n", ValueError, r"not blank .*; got ' \\n'", id="white-space"),
        pytest.param(None, TypeError, "a str or a list of chat messages .*; got None", id="none"),
        pytest.param(7, TypeError, "a str or a list of chat messages .*; got 7", id="number"),
        pytest.param(USER, TypeError, "list of chat messages .*; got {'role'", id="one-bare-message"),
        pytest.param([], TypeError, r"list of chat messages .*; got \[\]", id="no-messages"),
        pytest.param(["1+1?"], TypeError, r"got \['1\+1\?'\]", id="text-message"),
        pytest.param([USER, {"role": "user"}], TypeError, r"got .*{'role': 'user'}\]", id="no-content"),
        pytest.param([{"content": "1+1?"}], TypeError, r"got \[{'content'", id="no-role"),
        pytest.param([{"role": "", "content": "1"}], TypeError, "got .*'role': ''", id="blank-role"),
        pytest.param([USER | {"content": None}], TypeError, "got .*'content': None", id="content-none"),
        pytest.param([CALL | {"tool_calls": []}, USER], TypeError, "got .*'content': None", id="no-tool-call"),
        pytest.param([USER, CALL | {"role": "user"}], ValueError, "last message that is not blank", id="call-last"),
        pytest.param([USER | {"content": [{"type": "text"}]}], TypeError, r"got .*\[{'type'", id="content-in-parts"),
        pytest.param([USER | {"content": " "}], ValueError, "last message that is not blank", id="blank-last-message"),
        pytest.param("1\ud8001", ValueError, r"no lone surrogates; got '1\\ud8001'", id="surrogate"),
        pytest.param([USER | {"content": "\udfff"}], ValueError, "no lone surrogates", id="surrogate-in-chat"),
        pytest.param(
            [USER, {"role": "assistant", "content": "2"}], ValueError, "not the assistant's", id="assistant-last"
        ),
    ],
)
def test_bad_prompts_are_named(prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"row 3 of train_dataset.*{message}"):
        check_prompt(prompt, "row 3 of train_dataset")


def test_text_is_encoded_unchanged() -> None:
    tokenizer = tiny_tokenizer()
    assert encode_prompt(tokenizer, "1+1=") == tokenizer("1+1=").input_ids
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1=")) == "1+1="


def test_chat_messages_open_the_turn_of_the_assistant() -> None:
    tokenizer = tiny_tokenizer()
    ids = encode_prompt(tokenizer, CHAT)
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_call_of_a_tool_has_no_text() -> None:
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(encode_prompt(tokenizer, CALLED))
    assert text.endswith("assistant\n<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_text(CALLED).endswith("\n\nassistant: \n\ntool: 2")


def test_a_template_adds_the_special_tokens_once() -> None:
    """A tokenizer that adds a BOS to every text must not add another one to a rendered chat, which has its own."""
    tokenizer = tiny_tokenizer()
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    tokenizer.chat_template = "<|im_start|>{{ messages[0].content }}"
    assert encode_prompt(tokenizer, "1+1?").count(bos) == 1
    assert encode_prompt(tokenizer, [USER]) == encode_prompt(tokenizer, "1+1?")


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="chat_template is not set"):
        encode_prompt(tokenizer, CHAT)


def test_an_error_of_a_template_names_the_roles() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"roles \['system', 'user'\]: System role not supported"):
        encode_prompt(tokenizer, CHAT)


@pytest.mark.parametrize("prompt", ["", [USER]], ids=["text", "chat"])
def test_a_prompt_of_no_tokens_is_refused(prompt: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(ValueError, match=rf"got none from .* by a tokenizer of {len(tokenizer)} tokens"):
        encode_prompt(tokenizer, prompt)


def test_a_completion_has_the_form_of_its_prompt() -> None:
    assert completion_for("1+1=", "2") == "2"
    assert completion_for(CHAT, "2") == [{"role": "assistant", "content": "2"}]


def test_prompts_as_readable_text() -> None:
    assert prompt_text("1+1=") == "1+1="
    assert prompt_text(CHAT) == "system: Be brief.\n\nuser: 1+1?"
