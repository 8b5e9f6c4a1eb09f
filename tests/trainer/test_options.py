"""What options do to a step: each is seen at the place where it acts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from trainer.small_model import build_small_model
from trainer.small_trainer import make_trainer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_fused import GRPOLossConfig, group_advantages
from grpo_fused.trainer import Generation, GRPOTrainer, GRPOTrainerConfig
from grpo_fused.trainer.recipe import LoRA, with_adapter
from grpo_fused.trainer.setup import adamw
from grpo_fused.trainer.update import learning_rate

Rows = list[dict[str, str]]


@pytest.mark.parametrize(
    "options",
    [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"reward_aggregation": "normalize_then_sum"}],
    ids=str,
)
def test_rewards_become_advantages(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, options: dict[str, Any]
) -> None:
    table = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    given: list[Tensor] = []

    def first(completions: list[str]) -> list[float]:
        return table[:, 0].tolist()

    def second(completions: list[str]) -> list[float]:
        return table[:, 1].tolist()

    trainer = make_trainer(model, tokenizer, rows, [first, second], reward_weights=[0.25, 2.0], **options)
    trainer.update = lambda rollout, advantages: given.append(advantages)  # type: ignore[assignment, func-returns-value]
    trainer.step()
    more = {name.removeprefix("reward_"): value for name, value in options.items()}
    want = group_advantages(table, 4, weights=torch.tensor([0.25, 2.0]), **more).advantages
    torch.testing.assert_close(given[0], want)
    assert not torch.allclose(want, group_advantages(table, 4).advantages, atol=0.1)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
    ],
)
def test_the_learning_rate(schedule: Any, factors: list[float]) -> None:
    """Up in three steps of the optimizer, then down: at the last one not yet 0."""
    config = GRPOTrainerConfig(steps=7, warmup_steps=3, learning_rate=2e-6, lr_scheduler_type=schedule)
    rates = [learning_rate(step, config) for step in range(7)]
    assert rates == pytest.approx([2e-6 * factor for factor in factors])
    twice = replace(config, steps=4, num_iterations=2)
    assert learning_rate(7, twice) == learning_rate(7, replace(config, steps=8))


def test_old_log_probs_are_those_of_the_first_iteration(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    trainer = make_trainer(model, tokenizer, rows, num_iterations=3, learning_rate=1e-2)
    own, old, new = trainer.update.loss_of, [], []

    def recording(policy: Any, reference: Any, part: Any) -> Any:
        out = own(policy, reference, part)
        old.append(part.tables.get("old_per_token_logps"))
        new.append(out.per_token_logps.detach())
        return out

    trainer.update.loss_of = recording
    rollout, _ = trainer.collect()
    trainer.update(rollout, torch.linspace(-1, 1, 8))
    assert old[0] is None
    assert torch.equal(old[1], new[0])
    assert torch.equal(old[2], new[0])
    assert not torch.equal(new[1], new[0])


def test_the_bound_of_importance_ratios(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    options = {"importance_sampling": "token_truncate", "importance_sampling_clip": 1.05}
    trainer = make_trainer(model, tokenizer, rows, **options)
    rollout, _ = trainer.collect()
    shifted = rollout._replace(sampling_logps=trainer.policy.score(rollout, torch.arange(8)) - 0.1)
    (metrics,) = trainer.update(shifted, torch.linspace(-1, 1, 8))
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("loss", "trained"), [({}, 4), ({"beta": 0.1}, 8), ({"entropy_coef": 0.1}, 8), ({"top_entropy_quantile": 0.5}, 8)]
)
def test_sequences_without_an_advantage_are_left_out_unless_the_loss_needs_them(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, loss: dict[str, float], trained: int
) -> None:
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(**loss))  # type: ignore[arg-type]
    own, seen = trainer.update.loss_of, []

    def counting(policy: Any, reference: Any, part: Any) -> Any:
        seen.append(len(part.advantages))
        return own(policy, reference, part)

    trainer.update.loss_of = counting
    rollout, _ = trainer.collect()
    trainer.update(rollout, torch.tensor([1.0, -1.0] * 2 + [0.0] * 4))
    assert sum(seen) == trained


@pytest.mark.parametrize("threshold", [0.05, 0.2])
def test_sequences_far_from_their_rollout_are_masked(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, threshold: float
) -> None:
    loss = GRPOLossConfig(off_policy_mask_threshold=threshold)
    trainer = make_trainer(model, tokenizer, rows, loss=loss, importance_sampling=None)
    rollout, _ = trainer.collect()
    shifted = rollout._replace(sampling_logps=trainer.policy.score(rollout, torch.arange(8)) + 0.1)
    (metrics,) = trainer.update(shifted, -torch.linspace(0.5, 1, 8))
    assert (metrics["grad_norm"] == 0) == (threshold < 0.1)


class Lengths:
    """An engine whose completions have 1 to 29 tokens."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def generate(self, prompts: Any, sampling: Any) -> Generation:
        def some(low: int, high: int, count: int) -> list[int]:
            return torch.randint(low, high, (count,), generator=self.generator).tolist()  # type: ignore[no-any-return]

        ids = [some(3, 21, some(1, 30, 1)[0]) for _ in range(len(prompts) * sampling.num_generations)]
        logps = [[-2.0] * len(row) for row in ids]
        return Generation.of_lists(ids, logps, sampling.pad_token_id)

    def sync_weights(self, model: Any) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    "loss",
    [
        GRPOLossConfig(importance_sampling_level="sequence", epsilon=0.001),
        GRPOLossConfig(loss_type="vespo"),
        GRPOLossConfig(epsilon=0.01),
    ],
    ids=["gspo", "vespo", "dapo"],
)
def test_micro_batches_do_not_change_the_clip_ratios(
    tokenizer: PreTrainedTokenizerFast, rows: Rows, loss: GRPOLossConfig
) -> None:
    """Where a sequence has one value, they are means over sequences, however many tokens are in a micro-batch."""

    def metrics(micro_batch_tokens: int) -> dict[str, float]:
        trainer = make_trainer(
            build_small_model(len(tokenizer)), tokenizer, rows, loss=loss, num_iterations=3, learning_rate=1e-2,
            micro_batch_tokens=micro_batch_tokens, max_completion_length=29, importance_sampling=None,
        )  # fmt: skip
        trainer.sampler.engine = Lengths()
        rollout, _ = trainer.collect()
        history = trainer.update(rollout, torch.linspace(-1, 1, 8))
        names = [name for name in loss.kind.metrics if name.endswith("mean")]
        return {name: history[-1][name] for name in names}

    whole, split = metrics(10**6), metrics(60)
    assert whole
    assert split == pytest.approx(whole, rel=1e-4)
    assert any(0 < value != 1 for value in whole.values())


def test_log_probs_that_the_loss_cannot_take_are_named(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    """Those of any engine that returns them."""
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(loss_type="gmpo"))
    trainer.sampler.engine = Lengths()
    with pytest.raises(ValueError, match="importance_sampling must be null with loss_type gmpo"):
        trainer.step()


def test_an_adapter_has_its_options(model: Qwen2ForCausalLM) -> None:
    adapted: Any = with_adapter(model, LoRA(r=4, alpha=6, target_modules=("q_proj",)))
    layers = {name: layer for name, layer in adapted.named_modules() if hasattr(layer, "lora_A")}
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj"}
    assert all(layer.scaling == {"default": 1.5} for layer in layers.values())


def test_biases_and_norms_do_not_decay(model: Qwen2ForCausalLM) -> None:
    matrices, vectors = adamw(model, GRPOTrainerConfig(weight_decay=0.1)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj.weight" in name)
    (alone,) = adamw(model, GRPOTrainerConfig()).param_groups
    assert alone["params"]


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({}, {}, "must have mixed_precision='bf16', as config; got 'no'"),
        ({"mixed_precision": "bf16", "gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps=1 .*; got 4"),
        ({"mixed_precision": "bf16"}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, "=1 .*; got 3"),
    ],
    ids=["precision", "accumulation", "environment"],
)
def test_an_accelerator_that_contradicts_the_options_is_refused(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    environment: dict[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator(cpu=True, **options)
    config = GRPOTrainerConfig(mixed_precision="bf16")
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(model, tokenizer, [len], rows, config, accelerator=accelerator)


def test_numbers_are_of_the_type_of_their_option() -> None:
    """transformers takes no temperature of 2."""
    config = GRPOTrainerConfig(temperature=2, repetition_penalty=2)
    assert (repr(config.temperature), repr(config.repetition_penalty)) == ("2.0", "2.0")


def test_one_reward_function_needs_no_list(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    def zeros(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    trainer = make_trainer(model, tokenizer, rows, zeros)  # type: ignore[arg-type]
    assert list(trainer.reward_functions) == ["zeros"]
