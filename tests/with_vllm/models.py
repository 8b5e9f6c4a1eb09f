"""Policies of a shape that vLLM's CPU kernels take (heads of 32 dimensions), saved where vLLM reads their configuration."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_fused.trainer.tiny import tiny_tokenizer


def build_policy(
    seed: int = 0,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Qwen2ForCausalLM:
    """The same weights for the same seed, large enough that its log-probabilities are not flat."""
    tokenizer = tokenizer or tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval().to(dtype)


def save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """The folder, with the model's files and its tokenizer's."""
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)
