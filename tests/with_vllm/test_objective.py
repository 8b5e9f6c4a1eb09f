"""Score centering on rollouts of vLLM: its log-probs of sets and of most likely tokens are those of our own engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from with_vllm.models import build_policy

from grpo_fused.rollouts import records as drawing
from grpo_fused.trainer import (
    Generation,
    GRPOTrainer,
    GRPOTrainerConfig,
    HuggingFaceEngine,
    Sampling,
    VLLMEngine,
    roll_out,
)
from grpo_fused.trainer.objective import ObjectiveOptions
from grpo_fused.trainer.tiny import tiny_tokenizer

PROMPTS = [[72, 101, 108], [3, 4, 5, 6, 7, 8]]
RECORDS: list[dict[str, Any]] = [
    {"records": "sampled"},
    {"records": "mask", "top_k": 5},
    {"records": "mask", "top_p": 0.8, "temperature": 0.7},
    {"records": "mask", "min_p": 0.05},
    {"records": "top_k", "num_alternatives": 6, "temperature": 1.3},
    {"records": "top_k", "num_alternatives": 10**6},
]


class Replayed(HuggingFaceEngine):
    """Our own engine, which draws the tokens that vLLM sampled."""

    def __init__(self, engine: VLLMEngine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(copy.deepcopy(model), tiny_tokenizer())
        self.vllm, self.monkeypatch = engine, monkeypatch

    def sync_weights(self, model: Any) -> None:
        self.vllm.sync_weights(model)
        self.model.load_state_dict(model.state_dict())

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        self.sampled = self.vllm.generate(prompts, sampling)
        columns = iter(self.sampled.ids.T)

        def draw(p: Tensor) -> Tensor:
            tokens = next(columns)
            return torch.where(p.gather(1, tokens.unsqueeze(1))[:, 0] > 0, tokens, p.argmax(1))  # after the end: any

        self.monkeypatch.setattr(drawing, "draw", draw)
        return super().generate(prompts, sampling)


@pytest.mark.parametrize("options", RECORDS, ids=str)
def test_the_records_are_those_of_our_own_engine(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = build_policy(9)
    replayed = Replayed(engine, model, monkeypatch)
    replayed.sync_weights(model)
    ends = (tiny_tokenizer().eos_token_id, 70)
    sampling = Sampling(num_generations=4, max_completion_length=10, seed=21, eos_token_ids=ends, **options)
    ours = roll_out(replayed, PROMPTS, sampling)
    vllm = replayed.sampled
    mask, V = vllm.mask, model.config.vocab_size
    assert torch.equal(ours.completion_mask, mask)
    assert torch.equal(ours.completion_ids[mask], vllm.ids[mask])
    assert ours.sampling_logps is not None
    assert vllm.sampling_logps is not None
    torch.testing.assert_close(vllm.sampling_logps[mask], ours.sampling_logps[mask], rtol=0, atol=1e-4)
    if options["records"] == "sampled":
        assert vllm.alternatives is ours.alternatives is None
        return
    active = mask.reshape(-1)
    dense = []
    for others in (vllm.alternatives, ours.alternatives):
        assert others is not None
        assert (others.sets.sizes[active] > 0).all()
        table = torch.full((len(active), V), -torch.inf)
        dense.append(table.index_put((others.sets.positions, others.sets.ids), others.logps)[active])
    torch.testing.assert_close(*dense, rtol=0, atol=1e-4)  # -inf at the same tokens
    mass = dense[0].exp().sum(1)
    if options["records"] == "mask" or options["num_alternatives"] > V:
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)
    else:
        assert (mass < 1 - 1e-3).all()


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (ObjectiveOptions(name="score_centered_tis", options={"cap": 1.1}), {"top_p": 0.8}),
        (ObjectiveOptions(name="score_centered_ipo"), {"top_k": 6}),
        (ObjectiveOptions(name="score_centered_tis", options={"support": "top_k"}, num_alternatives=8), {}),
    ],
    ids=["mask", "ipo", "top_k"],
)
def test_steps_are_those_on_our_own_engine(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, objective: ObjectiveOptions, options: dict[str, Any]
) -> None:
    """Two rollouts of two optimizer steps each, on the same tokens: in the second the sampler is one step old.

    AdamW makes steps of one size from gradients of any: a rounding of 5e-6 in a log-prob moves the second loss by 1 %.
    """
    histories = []
    for own in (False, True):
        model = build_policy(4)
        config = GRPOTrainerConfig(
            steps=2, prompts_per_step=2, num_generations=6, max_completion_length=8, learning_rate=5e-3, seed=3,
            num_iterations=2, objective=objective, **options,
        )  # fmt: skip
        rows = [{"prompt": prompt} for prompt in ("1+1=", "Hello")]
        used = Replayed(engine, model, monkeypatch) if own else engine
        trainer = GRPOTrainer(model, tiny_tokenizer(), [low_tokens], rows, config, engine=used)
        histories.append(trainer.train())
    for metrics, same in zip(*histories, strict=True):
        assert metrics["grad_norm"] > 0
        for name in ("loss", "grad_norm", "sampler_kl", "reward"):
            assert metrics[name] == pytest.approx(same[name], rel=1e-3, abs=3e-4), name


def low_tokens(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """The share of the first half of the vocabulary."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]
