"""TRL's trainer with vLLM in its process: stock, patched and ours sample and train alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.test_trl_truncation import masked
from integrations.trl_runs import build, build_tokenizer, sampled_from, train
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from with_vllm.conftest import HAS_MASKS
from with_vllm.models import build_policy, save

from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_fused.rollouts.engine import padded_sets
from grpo_fused.rollouts.vllm import _pack_tied_head

COLOCATED: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 32,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved policy; TRL's vLLM is one for all trainers with or without masks, and works on a CPU.

    TRL passes no `enforce_eager` and no dtype, and its `sync_weights` calls the `load_weights` of vLLM's model, which
    fails there: vLLM has packed the weights and dropped the originals.
    """
    path = tmp_path / "policy"
    save(build_policy(1, tokenizer=build_tokenizer()), path, build_tokenizer())
    whole, engines = vllm_generation.LLM, {}

    def start(**options: Any) -> Any:
        kind = options.get("return_sampling_mask", False)
        if kind not in engines:
            engines[kind] = whole(**options, enforce_eager=True, dtype="float32")
        return engines[kind]

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
        return train(trainer_class, GRPOConfig, folder, tmp_path / "out", **COLOCATED)

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


@pytest.mark.skipif(not HAS_MASKS, reason="sampling masks are of the model runner V2")
@pytest.mark.parametrize("truncated", [{"top_p": 0.8, "temperature": 0.9}, {"top_k": 4}, {"min_p": 0.1}], ids=str)
def test_truncated_rollouts_are_scored_by_what_vllm_sampled_from(
    folder: Path, tmp_path: Path, truncated: dict[str, float]
) -> None:
    """Ratios to vLLM are 1 with its masks, and not without; the run is that of dense masked logits."""
    warpers = {name: x for name, x in truncated.items() if name != "temperature"}

    def run(base: Any, exact: bool) -> Any:
        batches = []

        class Trainer(base):  # type: ignore[misc]
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                batch = super()._generate_and_score_completions(inputs)
                batches.append((batch, *sampled_from(self, batch, **warpers)))
                return batch

        options = {"num_iterations": 2, "beta": 0.1, **COLOCATED, **truncated}
        found = train(Trainer, GRPOConfig, folder, tmp_path / "out", exact_truncation=exact, **options)
        batch, kept, log_q = batches[0]
        mask = batch["completion_mask"] != 0
        apart = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].abs().max()
        assert bool(apart < 1e-3) == exact
        assert (batch["sampling_per_token_logps"] - log_q)[mask].abs().max() < 1e-3
        assert kept.sum(-1)[mask].float().mean() < kept.shape[-1] / 2
        if exact:
            recorded = padded_sets(batch["candidates"], kept.shape[1]).to_mask(kept.shape[-1]).view(kept.shape)
            assert torch.equal(recorded[mask], kept[mask])
        return found

    ours, dense = run(FusedGRPOTrainer, True), run(masked(FusedGRPOTrainer), True)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(dense.losses), rtol=1e-4, atol=1e-5)
    moved = torch.cat([(x - ours.initial[name]).flatten() for name, x in ours.weights.items()]).norm()
    apart = torch.cat([(x - dense.weights[name]).flatten() for name, x in ours.weights.items()]).norm()
    assert apart <= 1e-4 * moved
    assert ours.trainer.loss_counts.recomputed == 0
    run(FusedGRPOTrainer, False)


@pytest.mark.skipif(not HAS_MASKS, reason="sampling masks are of the model runner V2")
def test_what_is_not_truncated_has_no_sets(folder: Path, tmp_path: Path) -> None:
    ours = train(FusedGRPOTrainer, GRPOConfig, folder, tmp_path / "out", exact_truncation=True, **COLOCATED)
    assert ours.trainer._sets is None
    plain = train(FusedGRPOTrainer, GRPOConfig, folder, tmp_path / "out", **COLOCATED)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not HAS_MASKS, reason="sampling masks are of the model runner V2")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"repetition_penalty": 1.5}, "vLLM also has repetition_penalty=1.5"),
        ({"generation_kwargs": {"min_tokens": 3}}, "vLLM also has min_tokens=3"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature of GRPOConfig, 1.0; generate samples at 0.5"),
    ],
    ids=str,
)
def test_options_that_change_the_distribution_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        build(FusedGRPOTrainer, folder, tmp_path / "out", exact_truncation=True, **COLOCATED, **options)
    trainer = build(FusedGRPOTrainer, folder, tmp_path / "out", exact_truncation=True, **COLOCATED)
    trainer.vllm_generation.repetition_penalty = 2.0
    with pytest.raises(ValueError, match="vLLM also has repetition_penalty=2.0"):
        trainer.train()


@pytest.mark.skipif(HAS_MASKS, reason="of the model runner V1")
def test_a_runner_without_masks_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exact_truncation needs the sampling masks of vLLM(?s:.*) Model Runner V2"):
        build(FusedGRPOTrainer, folder, tmp_path / "out", exact_truncation=True, **COLOCATED)
