"""Fixtures of the trainer's tests: a small policy, its tokenizer and a data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from trainer.small_model import build_small_model
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.arithmetic.model import build_tokenizer
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer

RECIPE = """
model: {model}
dataset: {data}
output_dir: {out}
rewards:
  - {{name: length, options: {{target_length: 3}}}}
steps: 2
prompts_per_step: 2
num_generations: 2
max_completion_length: 4
learning_rate: 1e-6
loss: {{beta: 0.04, epsilon: 0.3}}
"""


@pytest.fixture(autouse=True)
def _new_accelerator() -> None:
    """Accelerate keeps its set-up until the process ends, and these tests need different ones."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def repo_root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Weights large enough that its answers differ and its distribution is not uniform."""
    return build_small_model(len(tokenizer))


@pytest.fixture
def rows() -> list[dict[str, str]]:
    """Prompts of different lengths, so that batches are padded."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 12, 123) for b in (2, 34)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe file with a model and data next to it."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"question {i}", "answer": str(i)} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(model=tmp_path / "model", data=tmp_path / "data.jsonl", out=tmp_path / "out"))
    return file
