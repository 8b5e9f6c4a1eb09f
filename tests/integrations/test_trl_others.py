"""`patch_trl` in TRL's other trainers: the same logs and weights as without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from integrations.trl_runs import build_tokenizer, dataset, reward, save_small_model

from grpo_fused.integrations.trl import FusedLogProbFunction, use_fused_head
from grpo_fused.integrations.trl.release import FUSED_HEAD, RELEASE


def rloo(folder, out):
    from trl import RLOOConfig, RLOOTrainer

    return RLOOTrainer, RLOOConfig, {
        "reward_funcs": reward, "train_dataset": dataset(),
        "args": {"num_generations": 4, "max_completion_length": 8, "beta": 0.1},
    }  # fmt: skip


def dpo(folder, out):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": row["prompt"], "chosen": " w1 w2 w3", "rejected": " w4 w5"} for row in dataset()]
    return DPOTrainer, DPOConfig, {"train_dataset": Dataset.from_list(rows), "args": {}}


def kto(folder, out):
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = [
        {"prompt": row["prompt"], "completion": f" w{i} w{i + 1} w{i + 2}", "label": i % 2 == 0}
        for i, row in enumerate(dataset())
    ]
    return KTOTrainer, KTOConfig, {"train_dataset": Dataset.from_list(rows), "args": {}}


def sft(folder, out):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": row["prompt"] + " w1 w2 w3"} for row in dataset()]
    return SFTTrainer, SFTConfig, {"train_dataset": Dataset.from_list(rows), "args": {}}


@pytest.mark.parametrize("which", [rloo, dpo, kto, sft], ids=lambda f: f.__name__)
def test_other_trainers_run_on_our_head(which, tmp_path):
    """The same logs and weights as with TRL's head, and ours was really called where the release lets it."""
    from transformers import set_seed

    folder = save_small_model(tmp_path / "small")
    calls = []

    class Counting(FusedLogProbFunction):
        @classmethod
        def apply(cls, *args: Any) -> Any:
            calls.append(args)
            return super().apply(*args)

    def run() -> Any:
        set_seed(0)
        trainer_class, config_class, given = which(folder, tmp_path)
        options = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 0.003,
            "optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "use_cpu": True,
            "bf16": False, "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0,
            "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"}, **given.pop("args"),
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = trainer_class(
                model=str(folder), args=config_class(**options), processing_class=build_tokenizer(), **given
            )
            before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
            trainer.train()
        moved = max((x - before[name]).abs().max() for name, x in trainer.model.named_parameters())
        return trainer, moved

    want, moved = run()
    with use_fused_head(Counting):
        got, _ = run()
    assert bool(calls) == (RELEASE >= FUSED_HEAD or which is rloo)  # the others read logits themselves before
    assert moved > 1e-5
    for mine, theirs in zip(got.state.log_history, want.state.log_history, strict=True):
        for name in theirs.keys() - {"step_time"}:
            if "runtime" not in name and "per_second" not in name and theirs[name] is not None:
                assert mine[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-5), name
    for (name, mine), theirs in zip(got.model.named_parameters(), want.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=name)
