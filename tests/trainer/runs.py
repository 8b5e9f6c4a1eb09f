"""Programs that tests start as subprocesses: a run that is killed, resumed, or shared by two processes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from trainer.small_model import build_small_model

from examples.arithmetic.model import build_tokenizer
from grpo_fused import CandidateSets, GRPOLossConfig
from grpo_fused.rollouts.errors import DivergedError
from grpo_fused.rollouts.records import ScoredSets
from grpo_fused.trainer import (
    Generation,
    GRPOTrainer,
    GRPOTrainerConfig,
    HuggingFaceEngine,
    ObjectiveOptions,
    checkpointer,
)

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 12, 123) for b in (2, 34)]
OPTIONS: dict[str, Any] = {
    "steps": 6,
    "prompts_per_step": 2,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 5,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "loss": GRPOLossConfig(beta=0.02),
}


def count_ones(completions: list[str], **columns: object) -> list[float]:
    """A reward that an untrained model can increase."""
    return [text.count("1") - 0.1 * len(text) for text in completions]


class Recording:
    """An engine that always returns the same completions for a prompt, with different lengths and log-probs."""

    def generate(self, prompts: Any, sampling: Any) -> Generation:
        rows = []
        for prompt in prompts:
            g = torch.Generator().manual_seed(sum((i + 1) * token for i, token in enumerate(prompt)))
            for _ in range(sampling.num_generations):
                length = int(torch.randint(1, sampling.max_completion_length + 1, (), generator=g))
                rows.append(torch.randint(3, 21, (length,), generator=g).tolist())
        logps = [[-3.0 - token % 3 for token in row] for row in rows]
        generation = Generation.of_lists(rows, logps, sampling.pad_token_id)
        if sampling.records is None:
            return generation
        n = generation.ids.numel()
        sets = CandidateSets(torch.tensor([3, 9, 12]).repeat(n), torch.arange(0, 3 * n + 1, 3))
        return generation._replace(alternatives=ScoredSets(sets, torch.tensor([-1.0, -2.0, -3.0]).repeat(n)))

    def sync_weights(self, model: Any) -> None:
        """Does nothing: no result depends on the weights."""


def make(folder: Path | None, *, adapter: bool = False, tied: bool = False, **options: Any) -> GRPOTrainer:
    """A trainer of the small model."""
    tokenizer = build_tokenizer()
    model: Any = build_small_model(len(tokenizer), tied=tied)
    if adapter:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    arguments = ("resume", "overwrite", "engine", "accelerator", "evaluate", "reference_model")
    trainer = {key: options.pop(key) for key in arguments if key in options}
    return GRPOTrainer(
        model, tokenizer, [count_ones], ROWS, GRPOTrainerConfig(**(OPTIONS | options)), output_dir=folder, **trainer
    )


def killed_while_saving(folder: str, step: str) -> None:
    """Is killed during the save after that step, with the weights written and the rest not."""
    whole = checkpointer.save_file

    def die(tensors: Any, path: Path) -> None:
        if f"{int(step):06d}" in str(path) and Path(path).name == "optimizer.safetensors":
            Path(path).write_bytes(b"half")
            os.kill(os.getpid(), 9)
        whole(tensors, path)

    checkpointer.save_file = die  # type: ignore[assignment]
    make(Path(folder), save_steps=1).train()


def fsdp_accelerator(**options: Any) -> Accelerator:
    """FSDP2 on the CPU: accelerate applies the plugin on accelerators only."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    if accelerator.num_processes > 1:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        assert accelerator.is_fsdp2
    return accelerator


def shared(folder: str, kind: str, loss_type: str) -> None:
    """Two steps on fixed rollouts by as many processes as there are; rank 0 writes losses and weights."""
    more = {"max_completion_length": 5} if loss_type == "dr_grpo" else {}
    accelerator = fsdp_accelerator() if kind == "fsdp" else Accelerator(cpu=True)
    options: dict[str, Any] = {
        "adapter": kind == "lora",
        "steps": 2,
        "engine": Recording(),
        "accelerator": accelerator,
        "micro_batch_tokens": 40,
    }
    if loss_type == "centered":
        options["objective"] = ObjectiveOptions(name="score_centered_tis", options={"support": "top_k"})
        options["loss"] = GRPOLossConfig(loss_type="grpo")
    else:
        options["importance_sampling"] = "sequence_truncate"
        options["loss"] = GRPOLossConfig(loss_type=loss_type, beta=0.02, **more)  # type: ignore[arg-type]
    trainer = make(Path(folder) / "run", save_steps=1, **options)
    assert is_sharded(trainer) == (kind == "fsdp" and accelerator.num_processes > 1)
    number = {1: "1 process", 2: "2 processes"}[accelerator.num_processes]
    assert trainer.facts()["loss"].endswith(f", {number}")
    history = trainer.train()
    state = weights_of(trainer)
    if accelerator.is_main_process:
        torch.save(state, Path(folder) / "weights.pt")
        kept = [{k: v for k, v in row.items() if "second" not in k} for row in history]
        (Path(folder) / "history.json").write_text(json.dumps(kept))
        shutil.rmtree(Path(folder) / "run" / "checkpoint-000002")
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    if kind == "fsdp":  # its settings do not last for another trainer
        options["accelerator"] = accelerator = fsdp_accelerator()
    resumed = make(Path(folder) / "run", resume=True, **options)
    assert resumed.steps_done == 1
    assert is_sharded(resumed) == is_sharded(trainer)
    resumed.train()
    again = weights_of(resumed)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    resumed.sampler.engine = HuggingFaceEngine(resumed.model, resumed.tokenizer, synced=kind == "fsdp")
    assert resumed.step()["completion_length"] > 0  # sampling works on the model that accelerate prepared
    leave(accelerator)


def is_sharded(trainer: GRPOTrainer) -> bool:
    """Whether FSDP2 has split the weights."""
    return any(isinstance(x, DTensor) for x in trainer.policy.model.parameters())


def leave(accelerator: Accelerator) -> None:
    """Ends the process if there are several: gloo may wait forever in the destructors of DDP's reducers."""
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        sys.stdout.flush()
        os._exit(0)


def fails_on_one(folder: str, how: str) -> None:
    """In the third step the reward function breaks on the last process, or it is killed, or finds NaN in its logits."""
    trainer = make(Path(folder), accelerator=Accelerator(cpu=True))
    whole, generate = trainer.reward_functions["count_ones"], trainer.sampler.engine.generate

    def samples(*arguments: Any) -> Generation:
        if how == "diverged" and trainer.steps_done == 2 and trainer.accelerator.is_last_process:
            raise DivergedError("NaN")
        return generate(*arguments)

    def breaks(**columns: Any) -> Any:
        if trainer.steps_done == 2 and trainer.accelerator.is_last_process and how != "diverged":
            if how == "killed":
                os.kill(os.getpid(), 9)
            raise ConnectionError("the judge is offline")
        return whole(**columns)

    trainer.reward_functions["count_ones"] = breaks
    trainer.sampler.engine.generate = samples  # type: ignore[method-assign]
    trainer.train()


def weights_of(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """All weights, whole, on every process."""
    state = trainer.accelerator.unwrap_model(trainer.policy.model).state_dict()
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in state.items()}


if __name__ == "__main__":
    programs = {"killed_while_saving": killed_while_saving, "fails_on_one": fails_on_one}
    programs[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]  # each has its own arguments
