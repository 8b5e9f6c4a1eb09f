"""A policy, a reward model and a tokenizer of a few thousand parameters, built in code: for dry runs and tests."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

HIDDEN_SIZE = 32
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

# ChatML. END closes a turn and is the EOS, so that the policy ends its turn as it ends a text.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte of UTF-8 and three special ones, 259 in all; decoding returns every text unchanged.

    Saved with a Qwen2 and loaded with `AutoTokenizer` it has the same tokens, but composes characters (NFC) first:
    transformers 5 loads the tokenizer of every Qwen2 as a `Qwen2Tokenizer`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable character for each of the 256 bytes
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,  # never used; without one, a tokenizer loaded from a Qwen2's folder grows by the token of Qwen2
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 in eval mode, fp32; the same weights for the same seed.

    Args:
        tokenizer: Gives the size of the vocabulary and the EOS and pad tokens.
        seed: For the weights; torch's global generator is not changed.
    """
    return _seeded(Qwen2ForCausalLM, tokenizer, seed)


def tiny_reward_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForSequenceClassification:
    """A randomly initialised reward model in eval mode, fp32: one score for a sequence; always the same weights."""
    return _seeded(Qwen2ForSequenceClassification, tokenizer, 0, num_labels=1)


def _seeded(kind: Any, tokenizer: PreTrainedTokenizerFast, seed: int, **options: Any) -> Any:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # with the default of 0.02 every token would be about as likely as every other
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed those of GPUs, too
        return kind(config).eval()
