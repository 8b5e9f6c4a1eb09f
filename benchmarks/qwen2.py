"""The small Qwen2 of the studies."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def small_qwen2(vocab: int, hidden: int, layers: int, **options: Any) -> Qwen2ForCausalLM:
    """In fp32, the same weights each time; it has no token that ends a completion unless `options` give one."""
    sizes: dict[str, Any] = {
        "intermediate_size": 4 * hidden, "num_attention_heads": max(hidden // 64, 1),
        "num_key_value_heads": max(hidden // 128, 1), "tie_word_embeddings": False,
        "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    config = Qwen2Config(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, **(sizes | options))
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)
