"""Tests against vLLM itself, on a CPU: `make vllm` installs it beside the other tests' environment, which has none.

The folder's name is not that of the package, which a folder on the path would hide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import pytest

HAS_MASKS = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []

if find_spec("vllm") is not None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing to compile for models of this size
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of an engine
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if HAS_MASKS:
        os.environ["TRITON_INTERPRET"] = "1"
        from with_vllm import runner_v2

        runner_v2.interpret()

from accelerate.state import AcceleratorState
from with_vllm.models import build_policy, save

from grpo_fused.trainer import VLLMEngine

OPTIONS = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 32}


@pytest.fixture(autouse=True)
def _new_accelerator() -> None:
    """Accelerate keeps its set-up for the life of a process."""
    AcceleratorState._reset_state()


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VLLMEngine]:
    """One engine of a kind for the whole run: it starts in 10 to 30 seconds."""

    @cache
    def make(dtype: str = "float32", tied: bool = False) -> VLLMEngine:
        path = save(build_policy(tied=tied), tmp_path_factory.mktemp("policy"))
        engine = VLLMEngine(path, dtype=dtype, exact_logprobs=True, **OPTIONS)
        assert engine.masks == HAS_MASKS
        engine.exact_logprobs = False  # some tests switch it on
        return engine

    return make


@pytest.fixture
def engine(engine_of: Callable[..., VLLMEngine]) -> VLLMEngine:
    return engine_of()
