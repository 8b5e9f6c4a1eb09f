"""What options do to a step: each is seen at the place where it acts."""

from __future__ import annotations

import math
from collections import UserList
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from trainer.small_model import build_small_model
from trainer.small_trainer import by_position, make_trainer, scores_of
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from grpo_fused import GRPOLossConfig, group_advantages
from grpo_fused.rollouts.huggingface import HuggingFaceEngine
from grpo_fused.trainer import Generation, GRPOTrainer, GRPOTrainerConfig, NonFiniteError, ObjectiveOptions, loop
from grpo_fused.trainer.peers import Peers
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

    trainer = make_trainer(model, tokenizer, rows, [first, second], reward_weights=[-0.25, 2.0], **options)
    trainer.update = lambda rollout, advantages: given.append(advantages)  # type: ignore[assignment, func-returns-value]
    trainer.step()
    more = {name.removeprefix("reward_"): value for name, value in options.items()}
    want = group_advantages(table, 4, weights=torch.tensor([-0.25, 2.0]), **more).advantages
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
    after = [learning_rate(9, config), learning_rate(3, replace(config, steps=3))]  # more updates than the run has
    assert after == pytest.approx([2e-6 if schedule == "constant" else 0.0] * 2)


def test_a_rollout_without_a_gradient_moves_the_schedule_by_all_of_its_iterations(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    trainer = make_trainer(model, tokenizer, rows, num_iterations=3)
    rollout, _ = trainer.collect()
    assert trainer.update(rollout, torch.zeros(8)) == []
    assert (trainer.update.optimizer_steps, trainer.update.weight_changes) == (3, 0)


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
    shifted = rollout._replace(sampling_logps=scores_of(trainer.policy, rollout) - 0.1)
    (metrics,) = trainer.update(shifted, torch.linspace(-1, 1, 8))
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.05)


@pytest.mark.parametrize(("mode", "mean"), [("token_truncate", 7 / 4), ("sequence_truncate", 3 / 2)])
def test_metrics_of_sampling_are_those_of_all_processes(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, monkeypatch: pytest.MonkeyPatch,
    mode: Any, mean: float,
) -> None:  # fmt: skip
    """Another process has three times the tokens, as many sequences and twice the values; a third one has none."""
    trainer = make_trainer(model, tokenizer, rows, importance_sampling=mode)
    rollout, _ = trainer.collect()
    old = torch.zeros(rollout.completion_ids.shape)
    _, alone = trainer.update.correct_sampling(rollout, torch.arange(8), old, old - 0.1)

    def gathered(mine: Tensor) -> Tensor:
        return torch.cat([mine, mine * torch.tensor([3.0, 1.0, *[2.0] * (mine.shape[1] - 2)]), mine * 0])

    monkeypatch.setattr(trainer.accelerator, "gather", gathered)
    _, metrics = trainer.update.correct_sampling(rollout, torch.arange(8), old, old - 0.1)
    factors = {name.removeprefix("sampling/"): value / alone[name] for name, value in metrics.items()}
    assert factors == pytest.approx(
        {
            "sampling_logp_difference/mean": 7 / 4, "sampling_logp_difference/max": 2,
            "importance_sampling_ratio/min": 1, "importance_sampling_ratio/mean": mean,
            "importance_sampling_ratio/max": 2,
        }
    )  # fmt: skip


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


def test_metrics_are_means_over_what_was_trained_on(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    """Of tokens and of sequences; the four that are left out do not dilute them."""
    trainer = make_trainer(model, tokenizer, rows, loss=GRPOLossConfig(loss_type="vespo"), learning_rate=1e-12)
    rollout, _ = trainer.collect()
    half = torch.tensor([1.0, -1.0] * 2)
    (metrics,) = trainer.update(rollout, torch.cat([half, torch.zeros(4)]))
    (alone,) = trainer.update(rollout.rows(slice(0, 4)), half)
    assert metrics["entropy"] == pytest.approx(alone["entropy"], rel=1e-4)
    assert metrics["vespo/phi_seq_mean"] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_drawn_at_random_while_gradients_are_computed(
    tokenizer: PreTrainedTokenizerFast, rows: Rows, checkpointing: bool
) -> None:
    """Falcon reads the dropout of its config in each pass, a PhiMoE draws noise for its router in training mode."""
    size = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    falcon = FalconConfig(**size, hidden_dropout=0.1, parallel_attn=False, new_decoder_architecture=False)
    moe = PhimoeConfig(
        **size, intermediate_size=32, num_key_value_heads=4, router_jitter_noise=0.3, num_local_experts=4
    )
    for model in (FalconForCausalLM(falcon), PhimoeForCausalLM(moe)):
        options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "loss": GRPOLossConfig(beta=0.05)}
        trainer = make_trainer(model, tokenizer, rows, learning_rate=1e-12, importance_sampling=None, **options)
        rollout, _ = trainer.collect()
        (metrics,) = trainer.update(rollout, torch.linspace(-1, 1, 8))
        assert abs(metrics["kl"]) < 1e-6  # of its own copy as the reference


def test_the_models_own_checkpointing_is_off_without_the_option(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    """A layer recomputes its activations in training mode."""
    model.gradient_checkpointing_enable()
    trainer, modes = make_trainer(model, tokenizer, rows, [by_position]), set()
    model.model.layers[0].register_forward_pre_hook(lambda layer, _: modes.add(layer.training))
    trainer.step()
    assert modes == {False}


def test_gradients_of_an_interrupted_pass_are_not_kept(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    trainer = make_trainer(model, tokenizer, rows, learning_rate=1e-12)
    rollout, _ = trainer.collect()
    advantages = torch.linspace(-1, 1, 8)
    (want,) = trainer.update(rollout, advantages)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    (got,) = trainer.update(rollout, advantages)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_any_default_dtype(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, dtype: torch.dtype
) -> None:
    torch.set_default_dtype(dtype)
    try:
        trainer = make_trainer(model, tokenizer, rows, [by_position] * 2, reward_weights=[0.3, 0.9], sample_steps=1)
        assert trainer.step()["reward"] == pytest.approx(1.2 * 3.5)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_padding_of_sampling_log_probs_is_not_read(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    trainer = make_trainer(model, tokenizer, rows, objective=ObjectiveOptions(name="icepop"), learning_rate=1e-12)
    rollout, _ = trainer.collect()
    rollout.completion_mask[::2, -1] = False
    found = []
    for padding in (0.0, math.nan):
        rollout.sampling_logps.masked_fill_(~rollout.completion_mask, padding)
        found += trainer.update(rollout, torch.linspace(-1, 1, 8))
    assert found[0]["sampler_kl"] == pytest.approx(found[1]["sampler_kl"], abs=1e-6)


def test_a_step_that_is_not_taken_leaves_no_gradient(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    trainer = make_trainer(model, tokenizer, rows)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NonFiniteError):
        trainer.update.step_optimizer(math.nan)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_clipped_to_the_norm_of_the_options(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def step() -> None:
        taken.append(float(torch.nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None])))

    trainer = make_trainer(model, tokenizer, rows, max_grad_norm=0.5)
    monkeypatch.setattr(trainer.update.optimizer, "step", step)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert trainer.update.step_optimizer(0.0)["grad_norm"] > 1
    assert taken == [pytest.approx(0.5, rel=1e-4)]


def test_the_optimizer_gets_the_rate_of_the_schedule(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    trainer = make_trainer(model, tokenizer, rows, warmup_steps=2, learning_rate=1e-3)
    assert trainer.update.step_optimizer(0.0)["learning_rate"] == 5e-4
    assert {group["lr"] for group in trainer.update.optimizer.param_groups} == {5e-4}


@pytest.mark.parametrize(
    "options",
    [{"loss": GRPOLossConfig(loss_type=name, entropy_coef=0.1)} for name in ("dapo", "grpo", "bnpo")]
    + [{"objective": ObjectiveOptions(name="icepop")}],
    ids=["dapo", "grpo", "bnpo", "objective"],
)
def test_completions_without_a_token_give_no_gradient(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, options: dict[str, Any]
) -> None:
    trainer = make_trainer(model, tokenizer, rows, **options)
    rollout, _ = trainer.collect()
    rollout.completion_mask[:] = False
    (metrics,) = trainer.update(rollout, torch.linspace(-1, 1, 8))
    assert (metrics["loss"], metrics["grad_norm"]) == (0, 0)
    assert all(map(math.isfinite, metrics.values()))


def test_an_interrupted_optimizer_step_counts_as_a_change(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    trainer = make_trainer(model, tokenizer, rows)
    monkeypatch.setattr(trainer.update.optimizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.update.step_optimizer(0.0)
    assert (trainer.update.weight_changes, trainer.update.optimizer_steps) == (1, 0)


def test_gradients_that_overflow_in_fp16_are_left_to_the_scaler(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model, tokenizer, rows)
    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", lambda *_: torch.tensor(torch.inf))
    with pytest.raises(NonFiniteError):
        trainer.update.step_optimizer(0.0)
    trainer.update.config = replace(trainer.config, mixed_precision="fp16")
    assert trainer.update.step_optimizer(0.0)["grad_norm"] == math.inf


@pytest.mark.parametrize("threshold", [0.05, 0.2])
def test_sequences_far_from_their_rollout_are_masked(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, threshold: float
) -> None:
    loss = GRPOLossConfig(off_policy_mask_threshold=threshold)
    trainer = make_trainer(model, tokenizer, rows, loss=loss, importance_sampling=None)
    rollout, _ = trainer.collect()
    shifted = rollout._replace(sampling_logps=scores_of(trainer.policy, rollout) + 0.1)
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
    """transformers takes no temperature of 2, and AdamW no beta of 0 beside one of 0.95."""
    config = GRPOTrainerConfig(temperature=2, repetition_penalty=2, adam_betas=(0, 0.95))
    assert (repr(config.temperature), repr(config.repetition_penalty)) == ("2.0", "2.0")
    assert repr(config.adam_betas) == "(0.0, 0.95)"


def test_a_list_may_be_of_any_class() -> None:
    """Such as OmegaConf's."""
    config = GRPOTrainerConfig(stop_strings=UserList(["a"]), adam_betas=UserList([0.9, 0.95]))  # type: ignore[arg-type]
    assert list(config.stop_strings) == ["a"]
    assert config.adam_betas == (0.9, 0.95)


def test_the_engine_samples_in_the_batches_that_were_asked_for(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    engine = make_trainer(model, tokenizer, rows, generation_batch_size=3).sampler.engine
    assert isinstance(engine, HuggingFaceEngine)
    assert engine.batch_size == 3


def test_the_engine_of_a_sharded_policy_keeps_the_processes_in_step(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sharded(Peers):
        def __init__(self, accelerator: Accelerator) -> None:
            super().__init__(accelerator)
            self.is_sharded = True

    for peers, is_sharded in ((Sharded, True), (Peers, False)):
        monkeypatch.setattr(loop, "Peers", peers)
        engine = make_trainer(model, tokenizer, rows).sampler.engine
        assert isinstance(engine, HuggingFaceEngine)
        assert (engine.synced, engine.autocast is nullcontext) == (is_sharded, is_sharded)


def test_one_reward_function_needs_no_list(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    def zeros(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    trainer = make_trainer(model, tokenizer, rows, zeros)  # type: ignore[arg-type]
    assert list(trainer.reward_functions) == ["zeros"]


def test_a_reward_model_moves_to_the_device_of_the_policy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows
) -> None:
    class Judge:
        moved_to: torch.device | None = None

        def to(self, device: torch.device) -> None:
            self.moved_to = device

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    judge = Judge()
    trainer = make_trainer(model, tokenizer, rows, [judge])
    assert judge.moved_to == trainer.accelerator.device
