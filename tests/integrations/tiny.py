"""Small random causal LMs of many architectures, with logits large enough that scales, caps and biases show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from grpo_fused import fused_linear_logprobs, head_hidden_states, lm_head_inputs

VOCAB = 120
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL: dict[str, Any] = {
    name: COMMON[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
}
GPT: dict[str, Any] = {**SPECIAL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


class Architecture(NamedTuple):
    """A config, and the head that its model has."""

    config: dict[str, Any]
    logit_scale: float = 1.0
    softcap: float | None = None
    has_bias: bool = False
    vocab_size: int = VOCAB


ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": Architecture(COMMON),
    "qwen3": Architecture(COMMON),
    "llama": Architecture(COMMON),
    "gemma2": Architecture({**COMMON, "final_logit_softcapping": 20.0}, softcap=20.0),
    "gemma3_text": Architecture({**COMMON, "final_logit_softcapping": 25.0}, softcap=25.0),
    "nanochat": Architecture(COMMON, softcap=15.0),
    "recurrent_gemma": Architecture({**COMMON, "lru_width": 32, "logits_soft_cap": 12.0}, softcap=12.0),
    "phi": Architecture(COMMON, has_bias=True),
    "gptj": Architecture({**GPT, "rotary_dim": 4}, has_bias=True),
    "codegen": Architecture({**GPT, "rotary_dim": 4}, has_bias=True),
    "cohere": Architecture({**COMMON, "logit_scale": 0.25}, logit_scale=0.25),
    "granite": Architecture({**COMMON, "logits_scaling": 8.0}, logit_scale=0.125),
    "hyperclovax": Architecture({**COMMON, "logits_scaling": 0.5}, logit_scale=0.5),
    # here logits_scaling divides the hidden states, before the head
    "minicpm3": Architecture(
        {
            **COMMON,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "num_key_value_heads": 4,
        }
    ),
    "falcon_h1": Architecture(
        {
            **COMMON,
            "lm_head_multiplier": 0.3,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
        logit_scale=0.3,
    ),
    # the config has a logit_scale that the model never reads
    "mpt": Architecture({**SPECIAL, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "logit_scale": 0.4}),
    "gpt_neo": Architecture(
        {
            **SPECIAL,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
        }
    ),
    "gpt2": Architecture(GPT),
    "opt": Architecture({**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 24}),
    "xlstm": Architecture(
        {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "output_logit_soft_cap": 10.0},
        softcap=10.0,
    ),
    "modernbert-decoder": Architecture({**COMMON, "sep_token_id": 2, "cls_token_id": 1}, has_bias=True),
    "bert-generation": Architecture({**COMMON, "is_decoder": True}, has_bias=True),
    "gemma3n_text": Architecture(
        {
            **COMMON,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        softcap=30.0,
    ),
    "gemma4_text": Architecture(
        {**COMMON, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 8, "final_logit_softcapping": 25.0},
        softcap=25.0,
    ),
    # divides the hidden states by a width multiplier, before the head
    "inkling_text": Architecture(
        {**COMMON, "unpadded_vocab_size": 101, "logits_mup_width_multiplier": 3.0}, vocab_size=101
    ),
    "inkling2_text": Architecture(
        {**COMMON, "unpadded_vocab_size": 101, "final_logit_softcapping": 18.0}, softcap=18.0, vocab_size=101
    ),
}


def build(name: str, **options: Any) -> Any:
    """The architecture's model, in eval mode, with random weights whose logits are far above its cap."""
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**ARCHITECTURES[name].config, **options})
    return sharpen(AutoModelForCausalLM.from_config(config).eval())


def build_vision(name: str, **text: Any) -> Any:
    """A vision-language model, whose head is described by a nested config."""
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    config = AutoConfig.for_model(
        name,
        text_config={**COMMON, **text},
        vision_config=vision,
        image_token_index=5,
        image_token_id=5,
        boi_token_index=6,
        eoi_token_index=7,
        mm_tokens_per_image=4,
    )
    return sharpen(AutoModelForImageTextToText.from_config(config).eval())


@torch.no_grad()
def sharpen(model: Any, peak: float = 60.0) -> Any:
    """Scales the head so that its largest products are about `peak`, and gives its bias values."""
    head = model.get_output_embeddings()
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, output: seen.append(output))
    model(input_ids=token_ids(), use_cache=False)
    handle.remove()
    head.weight.mul_(peak / seen[0].abs().max())
    if getattr(head, "bias", None) is not None:
        torch.nn.init.normal_(head.bias, std=3.0)
    return model


def token_ids(vocab: int = VOCAB - 20, shape: tuple[int, int] = (2, 9)) -> Tensor:
    """Ordinary tokens."""
    return torch.randint(8, vocab, shape, generator=torch.Generator().manual_seed(1))


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """[B, T - 1] of the tokens after the first, as a trainer computes them from logits."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def fused(model: Any, ids: Tensor) -> Tensor:
    """The same without logits, as the package computes them."""
    hidden_states = head_hidden_states(model, ids)
    return fused_linear_logprobs(hidden_states[:, :-1], token_ids=ids[:, 1:], **lm_head_inputs(model)).logps


class LinearLM(nn.Module):
    """A causal LM that is not registered: an embedding table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.lm_head = nn.Linear(16, 40, bias=False)
        self.calls = 0

    def forward(self, input_ids: Tensor) -> Any:
        self.calls += 1
        return SimpleNamespace(logits=self.lm_head(self.table(input_ids)))
