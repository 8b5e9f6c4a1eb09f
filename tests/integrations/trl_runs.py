"""Short real training runs of TRL's trainers on a small model, to compare ours with the original ones."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig

from grpo_fused import CandidateSets

WORDS = [f"w{i}" for i in range(40)]
STEPS = 3


def save_small_model(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A two-layer Qwen2 whose head's logits spread over several nats (reference models are reloaded by path)."""
    config = Qwen2Config(
        vocab_size=len(WORDS) + 2, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(25.0 if not tied else 10.0)
    model.to(dtype).save_pretrained(folder)
    return folder


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def dataset() -> Any:
    from datasets import Dataset

    g = random.Random(0)
    return Dataset.from_list([{"prompt": " ".join(g.choices(WORDS, k=g.randint(2, 5)))} for _ in range(16)])


def reward(completions: list[str], **_: Any) -> list[float]:
    """Uneven within a group: the share of low word numbers, and the length."""
    return [
        sum(int(w[1:]) < 13 for w in text.split() if w[1:].isdigit()) / 4 + 0.1 * len(text.split())
        for text in completions
    ]


@dataclass
class Run:
    """The results of a run."""

    losses: list[float]
    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor]
    trainer: Any


@torch.no_grad()
def sampled_from(trainer: Any, batch: dict[str, Any], **warpers: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the completions [B, T] of a generation batch were sampled from, by dense logits.

    bool [B, T, V], the tokens that transformers' warpers keep; and [B, T] fp64, the log-probs of what was sampled.
    """
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    T = batch["completion_ids"].shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # as `generate`
    z = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -T - 1 : -1].float()
    z = z / trainer.temperature
    kept = CandidateSets.from_logits(z, **warpers).to_mask(z.shape[-1]).view(z.shape)
    log_q = z.double().masked_fill(~kept, -torch.inf).log_softmax(-1)
    return kept, log_q.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def build(
    trainer_class: Any, folder: Path, out: Path, *, config_class: Any = GRPOConfig, peft: Any = None, **options: Any
) -> Any:
    """A trainer of a few steps of plain SGD (Adam amplifies rounding where gradients are nearly 0)."""
    set_seed(0)
    extra = {k: options.pop(k) for k in ("impl", "max_scratch_bytes", "exact_truncation") if k in options}
    arguments = {
        "output_dir": str(out), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8,
        "max_steps": STEPS, "learning_rate": 0.003, "optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
        "max_grad_norm": 0.0, "seed": 0, "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"},
        **options,
    }  # fmt: skip
    return trainer_class(
        model=str(folder), reward_funcs=reward, args=config_class(**arguments), train_dataset=dataset(),
        processing_class=build_tokenizer(), peft_config=peft, **extra,
    )  # fmt: skip


def train(trainer_class: Any, config_class: Any, folder: Path, out: Path, *, peft: Any = None, **options: Any) -> Run:
    """Run it."""
    trainer = build(trainer_class, folder, out, config_class=config_class, peft=peft, **options)
    losses: list[float] = []
    original = trainer._compute_loss

    def recording(model: Any, inputs: Any) -> torch.Tensor:
        loss = original(model, inputs)
        losses.append(loss.item())
        return loss

    trainer._compute_loss = recording
    initial = {name: x.detach().clone() for name, x in trainer.model.named_parameters() if x.requires_grad}
    trainer.train()
    weights = {name: x.detach().clone() for name, x in trainer.model.named_parameters() if x.requires_grad}
    return Run(losses, trainer.state.log_history, weights, initial, trainer)


def of_rloo() -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """A trainer of TRL, its config, and of both what this trainer needs beside what all do."""
    from trl import RLOOConfig, RLOOTrainer

    options = {"num_generations": 4, "max_completion_length": 8, "beta": 0.1}
    return RLOOTrainer, RLOOConfig, {"reward_funcs": reward, "train_dataset": dataset()}, options


def of_dpo() -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """The same."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": row["prompt"], "chosen": f" w1 w{i} w3", "rejected": f" w{i} w5"} for i, row in enumerate(dataset())
    ]
    return DPOTrainer, DPOConfig, {"train_dataset": Dataset.from_list(rows)}, {}


def of_kto() -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """The same."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = [
        {"prompt": row["prompt"], "completion": f" w{i} w{i + 1} w{i + 2}", "label": i % 2 == 0}
        for i, row in enumerate(dataset())
    ]
    return KTOTrainer, KTOConfig, {"train_dataset": Dataset.from_list(rows)}, {}


def of_sft() -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """The same."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": row["prompt"] + " w1 w2 w3"} for row in dataset()]
    return SFTTrainer, SFTConfig, {"train_dataset": Dataset.from_list(rows)}, {}


def train_any(which: Any, folder: Path, out: Path, *, given: dict[str, Any] | None = None, **options: Any) -> Any:
    """Two steps of one of the trainers above, with further arguments of it, and options of its config."""
    set_seed(0)
    trainer_class, config_class, arguments, own = which()
    options = {
        "output_dir": str(out), "per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 0.003,
        "optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "bf16": False, "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0,
        "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"}, **own, **options,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_class(
            model=str(folder), args=config_class(**options), processing_class=build_tokenizer(),
            **{**arguments, **(given or {})},
        )  # fmt: skip
        trainer.initial = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        trainer.train()
    return trainer


def assert_same_training(got: Any, want: Any) -> None:
    """All that two trainers logged, and their weights, which moved."""
    for mine, theirs in zip(got.state.log_history, want.state.log_history, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs.keys() - {"step_time"}:
            if "runtime" not in name and "per_second" not in name and theirs[name] is not None:
                assert mine[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-5), name
    moved = 0.0
    for (name, mine), theirs in zip(got.model.named_parameters(), want.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=name)
        moved = max(moved, float((theirs.detach() - want.initial[name]).abs().max()))
    assert moved > 1e-5
