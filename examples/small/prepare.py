"""Models and data of the recipes: a policy after a short supervised warm-up, a reward model, number puzzles."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from examples.arithmetic.model import build_model, build_tokenizer
from examples.arithmetic.warmup import warm_up

CHARACTERS = "0123456789+-*=,:"
NUMBERS = range(2, 13)


def prepare(folder: Path, *, warmup_steps: int = 200, seed: int = 0) -> None:
    """Writes `policy`, `reward-model` and `puzzles.jsonl` into a folder."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(CHARACTERS)
    policy = build_model(tokenizer)
    puzzles = make_puzzles()
    warm_up(
        policy, tokenizer, demonstrations(puzzles), steps=warmup_steps, batch_size=64, learning_rate=2e-3, seed=seed
    )
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    judge = make_reward_model(tokenizer)
    judge.save_pretrained(folder / "reward-model")
    tokenizer.save_pretrained(folder / "reward-model")
    (folder / "puzzles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in puzzles), encoding="utf-8")


def make_puzzles() -> list[dict[str, Any]]:
    """Two numbers and their sum, difference or product: `{"prompt": "7,3=21:", "nums": [7, 3], "target": 21}`."""
    puzzles = [
        {"prompt": f"{a},{b}={target}:", "nums": [a, b], "target": target}
        for a in NUMBERS
        for b in NUMBERS
        for target in (a + b, a - b, a * b)
        if a >= b
    ]
    random.Random(0).shuffle(puzzles)
    return puzzles


def demonstrations(puzzles: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Half of them in the format; the operator is random, so that about a third reach the target."""
    rng = random.Random(1)
    shown = []
    for puzzle in puzzles * 4:
        a, b = puzzle["nums"]
        expression = f"{a}{rng.choice('+-*')}{b}"
        completion = f"<think>{a},{b}</think><answer>{expression}</answer>" if rng.random() < 0.5 else expression
        shown.append({"prompt": str(puzzle["prompt"]), "completion": completion})
    return shown


def make_reward_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForSequenceClassification:
    """A model with random weights: its rewards are arbitrary, but always the same for a text."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    config.num_labels = 1
    return Qwen2ForSequenceClassification(config).eval()
