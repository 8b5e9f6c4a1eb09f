"""TRL's trainer with vLLM in its process: stock, patched and ours sample and train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.trl_runs import build_tokenizer, train
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from with_vllm.models import build_policy, save

from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_fused.rollouts.vllm import _pack_tied_head


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved policy; TRL's vLLM is one for all trainers, and works on a CPU.

    TRL passes no `enforce_eager` and no dtype, and its `sync_weights` calls the `load_weights` of vLLM's model, which
    fails there: vLLM has packed the weights and dropped the originals.
    """
    path = tmp_path / "policy"
    save(build_policy(1, tokenizer=build_tokenizer()), path, build_tokenizer())
    whole, engines = vllm_generation.LLM, []

    def start(**options: Any) -> Any:
        if not engines:
            engines.append(whole(**options, enforce_eager=True, dtype="float32"))
        return engines[0]

    def sync_weights(self: Any) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
        self.llm.apply_model(_pack_tied_head)
        self.llm.reset_prefix_cache()

    monkeypatch.setattr(vllm_generation, "LLM", start)
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "sync_weights", sync_weights)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them for vLLM
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    return path


def test_stock_patched_and_ours_are_the_same_run(folder: Path, tmp_path: Path) -> None:
    def run(trainer_class: Any) -> Any:
        return train(
            trainer_class, GRPOConfig, folder, tmp_path / "out", use_vllm=True, vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.1, vllm_max_model_length=32,
        )  # fmt: skip

    stock = run(GRPOTrainer)
    patch_trl()
    try:
        patched = run(GRPOTrainer)
    finally:
        unpatch_trl()
    ours = run(FusedGRPOTrainer)
    assert max((stock.weights[name] - stock.initial[name]).abs().max() for name in stock.weights) > 1e-4
    for other in (patched, ours):
        torch.testing.assert_close(torch.tensor(other.losses), torch.tensor(stock.losses), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(other.logs[:-1], stock.logs[:-1], strict=True):
            for name in ("reward", "completions/mean_length", "sampling/importance_sampling_ratio/mean"):
                assert mine[name] == pytest.approx(theirs[name], abs=1e-4), name
            assert mine["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        for name, weight in stock.weights.items():
            torch.testing.assert_close(other.weights[name], weight, rtol=0, atol=1e-5)
    assert ours.trainer.loss_counts.fused > 0
    assert ours.trainer.loss_counts.recomputed == 0
