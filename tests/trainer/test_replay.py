"""Recorded rollouts, replayed: engines, micro-batches and the on-policy shortcut must not change an update."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from trainer.small_model import build_small_model
from transformers import PreTrainedTokenizerFast

from grpo_fused import GRPOLossConfig, group_advantages
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, Rollout

OPTIONS = {
    "steps": 5,
    "prompts_per_step": 3,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 8,
    "temperature": 0.9,
    "learning_rate": 1e-3,
}


class Recording(NamedTuple):
    rollout: Rollout
    advantages: Tensor


def make_trainer(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], **options: Any) -> GRPOTrainer:
    """A trainer of a model with the same weights each time."""

    def count_ones(completions: list[str], **columns: object) -> list[float]:
        return [float(text.count("1")) - 0.1 * len(text) for text in completions]

    config = GRPOTrainerConfig(**(OPTIONS | options))
    return GRPOTrainer(build_small_model(len(tokenizer)), tokenizer, [count_ones], rows, config)


def record(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], steps: int) -> list[Recording]:
    """The rollouts of the first steps of a policy that learns while they are taken."""
    trainer = make_trainer(tokenizer, rows)
    torch.manual_seed(0)
    recordings = []
    for _ in range(steps):
        rollout, rewards = trainer.collect()
        advantages = group_advantages(rewards, trainer.config.num_generations).advantages
        trainer.update(rollout, advantages)
        recordings.append(Recording(rollout, advantages))
    return recordings


def replay(trainer: GRPOTrainer, recordings: list[Recording], *names: str) -> Tensor:
    """Those metrics, or the loss, of every optimizer step: [steps, metrics]."""
    steps = [metrics for recording in recordings for metrics in trainer.update(*recording)]
    return torch.tensor([[metrics[name] for name in names or ("loss",)] for metrics in steps])


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(GRPOLossConfig(), id="dapo"),
        pytest.param(GRPOLossConfig(beta=0.05), id="dapo-kl"),
        pytest.param(GRPOLossConfig(loss_type="grpo", beta=0.05), id="grpo-kl"),
        pytest.param(GRPOLossConfig(beta=0.05, kl_estimator="exact"), id="dapo-exact-kl"),
        pytest.param(GRPOLossConfig(loss_type="bnpo", importance_sampling_level="sequence"), id="bnpo-gspo"),
    ],
)
def test_the_first_ten_losses_agree_with_the_reference(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], loss: GRPOLossConfig
) -> None:
    """Two trainings on the same rollouts; 1e-4 is the trainer's bound for ten steps, with accumulated errors."""
    recordings = record(tokenizer, rows, 5)
    fused = replay(make_trainer(tokenizer, rows, loss=loss), recordings)
    reference = replay(make_trainer(tokenizer, rows, loss=loss, impl="reference"), recordings)
    assert len(fused) == 10
    assert fused.abs().max() > 1e-3  # the losses are not zero, so the comparison is meaningful
    torch.testing.assert_close(fused, reference, rtol=0, atol=1e-4)


@pytest.mark.gate(keep=lambda loss_type, **_: loss_type in ("dapo", "grpo", "bnpo"))  # one for each kind of share
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "luspo", "dr_grpo"])
def test_micro_batches_do_not_change_the_update(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], loss_type: str
) -> None:
    """12 sequences at once or in batches of a few: the same losses and gradient norms up to fp32 rounding."""
    more = {"max_completion_length": 8} if loss_type == "dr_grpo" else {}
    if loss_type in ("dapo", "grpo"):
        more["entropy_coef"] = 0.1  # a mean over tokens and one over sequences
    loss = GRPOLossConfig(loss_type=loss_type, beta=0.05, **more)  # type: ignore[arg-type]
    recordings = record(tokenizer, rows, 2)
    names = ("loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean")
    whole = replay(make_trainer(tokenizer, rows, loss=loss), recordings, *names)
    split = replay(make_trainer(tokenizer, rows, loss=loss, micro_batch_tokens=60), recordings, *names)
    torch.testing.assert_close(split, whole, rtol=1e-3, atol=1e-5)


def test_a_step_makes_its_micro_batches_once(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    """For the scores of the reference and both iterations."""
    trainer = make_trainer(tokenizer, rows, loss=GRPOLossConfig(beta=0.05), micro_batch_tokens=60)
    make, made = trainer.policy.micro_batches, []
    trainer.policy.micro_batches = lambda *given: made.append(make(*given)) or made[-1]  # type: ignore[method-assign]
    assert len(trainer.update(*record(tokenizer, rows, 1)[0])) == 2
    assert [len(pieces) > 1 for pieces in made] == [True]


def test_one_iteration_needs_no_old_log_probs(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    """The first of two iterations, with scored old log-probabilities, is the on-policy step without them."""
    recordings = record(tokenizer, rows, 1)
    once = replay(make_trainer(tokenizer, rows, num_iterations=1), recordings, "grad_norm")
    twice = replay(make_trainer(tokenizer, rows, num_iterations=2), recordings, "grad_norm")
    torch.testing.assert_close(once, twice[:1], rtol=1e-4, atol=0)


def test_an_unchanged_policy_is_not_clipped(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    recordings = record(tokenizer, rows, 1)
    ratios = replay(make_trainer(tokenizer, rows, learning_rate=1e-2), recordings, "clip_ratio/region_mean")
    assert ratios[0] == 0
    assert ratios[1] > 0


@pytest.mark.parametrize("kind", ["copy", "lora", "teacher"])
def test_the_exact_kl_is_that_of_all_logits(
    tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], kind: str
) -> None:
    """To the policy as it was, to it with its adapter switched off, or to another model."""
    loss = GRPOLossConfig(beta=0.05, kl_estimator="exact")
    trainer = make_trainer(tokenizer, rows, loss=loss, num_iterations=1, micro_batch_tokens=60, learning_rate=1e-2)
    given = tokenizer, list(trainer.reward_functions.values()), rows, trainer.config
    before = build_small_model(len(tokenizer)).eval()
    if kind == "lora":
        peft = pytest.importorskip("peft")
        model = build_small_model(len(tokenizer))
        # without the adapter the head has no bias
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], lora_bias=True)
        trainer = GRPOTrainer(peft.get_peft_model(model, lora), *given)
    elif kind == "teacher":
        with torch.no_grad():
            for parameter in before.parameters():
                parameter.mul_(1.1)
        teacher = copy.deepcopy(before)
        trainer = GRPOTrainer(build_small_model(len(tokenizer)), *given, reference_model=teacher)
    kls = []
    for rollout, advantages in record(tokenizer, rows, 3):
        ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], 1)
        attention = torch.cat([rollout.prompt_mask, rollout.completion_mask], 1).long()
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        start = rollout.prompt_ids.shape[1] - 1
        with torch.no_grad():
            log_p, log_q = (
                (model(ids, attention, position_ids=positions).logits[:, start:-1].double() / 0.9).log_softmax(-1)
                for model in (trainer.model.eval(), before)
            )
        mask = rollout.completion_mask
        kls.append((((log_p.exp() * (log_p - log_q)).sum(-1) * mask).sum() / mask.sum()).item())
        (metrics,) = trainer.update(rollout, advantages)
        assert metrics["kl"] == pytest.approx(kls[-1], rel=1e-3, abs=1e-8)
    assert kls[2] > 1e-4
    assert kind == "teacher" or kls[0] == pytest.approx(0.0, abs=1e-8)


def test_a_policy_comes_closer_to_its_teacher(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    """On-policy distillation: no reward counts, and the KL falls."""
    torch.manual_seed(3)
    teacher = build_small_model(len(tokenizer), seed=1)
    loss = GRPOLossConfig(beta=1.0, kl_estimator="exact")
    config = GRPOTrainerConfig(**{**OPTIONS, "steps": 25, "learning_rate": 1e-2, "loss": loss})
    model = build_small_model(len(tokenizer))
    history = GRPOTrainer(
        model, tokenizer, [lambda completions, **_: [0.0] * len(completions)], rows, config, reference_model=teacher
    ).train()
    assert history[-1]["kl"] < 0.5 * history[0]["kl"]
