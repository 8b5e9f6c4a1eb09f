"""Fixtures of the trainer's tests: a small policy, its tokenizer and a data set."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from trainer.small_model import build_small_model
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.arithmetic.model import build_tokenizer


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
