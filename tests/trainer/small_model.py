"""A policy of a few thousand parameters."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def build_small_model(vocab_size: int, seed: int = 0, *, tied: bool = False) -> Qwen2ForCausalLM:
    """The same weights for the same seed; large ones, so that its distribution is not uniform."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=None,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()
