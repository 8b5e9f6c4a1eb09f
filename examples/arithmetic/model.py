"""The policy: a Qwen2 of half a million parameters (531,072) and its character-level tokenizer, built in code."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "0123456789+-=,"


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character and one per tag; the tags are ordinary tokens, so decoding keeps them."""
    vocab = {token: index for index, token in enumerate((PAD, EOS, UNK, *TAGS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(TAGS) + "|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, quick: bool = False) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 (seed torch first); `quick` is a toy for smoke tests."""
    hidden_size = 32 if quick else 128
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=1 if quick else 2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.06,  # the default of 0.02 is for models ten times as wide
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # sequences have 30 tokens, not 30,000
    )
    return Qwen2ForCausalLM(config)
