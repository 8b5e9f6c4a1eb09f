"""Training runs of TRL's GRPO under DeepSpeed, on as many CPU processes as `torchrun` starts.

    torchrun --nproc-per-node 2 tests/with_deepspeed/zero_runs.py FOLDER     # every case of CASES into FOLDER/CASE.pt

Completions are a function of the prompt, so that the number of processes does not change them.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, GradientState
from integrations.trl_runs import WORDS, build_tokenizer, dataset, reward, save_small_model
from peft import LoraConfig
from transformers import set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOConfig, GRPOTrainer

from grpo_fused import engines
from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl

FASTEST = engines.fastest


class Case(NamedTuple):
    """A run."""

    stage: int
    """of ZeRO; 0: without DeepSpeed"""
    program: str
    """stock, patched, fused, or one of a subclass with another loss: stock-altered, recomputed"""
    model: str
    """untied, tied, lora, lora-head: also on the head, or object: made before DeepSpeed's configuration is known"""
    impl: str = "auto"
    """of the head; "auto" is `native`, if it runs here"""

    def __str__(self) -> str:
        name = f"zero{self.stage}-{self.program}-{self.model}"
        return name if self.impl == "auto" else f"{name}-{self.impl}"


OURS = [
    Case(stage, program, model)
    for stage in (2, 3)
    for program in ("patched", "fused", "recomputed")
    for model in ("untied", "tied", "lora")
]
OURS.append(Case(3, "fused", "object"))
ON_THE_HEAD = [Case(stage, program, "lora-head") for stage in (2, 3) for program in ("patched", "fused")]
"""stock TRL refuses these"""
OURS += [Case(3, program, "untied", "chunked") for program in ("patched", "fused", "recomputed")]
CASES = [
    *OURS,
    *ON_THE_HEAD,
    *(Case(3, program, model) for program in ("stock", "stock-altered") for model in ("untied", "tied", "lora")),
]


class Rollouts:
    """Uneven completions of 3 to 7 words."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any, fields: Any, count: int) -> Any:
        completions = []
        for i, ids in enumerate(prompt_ids):
            g = torch.Generator().manual_seed(1000 * sum(ids) + i % count)
            length = int(torch.randint(3, 8, (), generator=g))
            completions.append([*torch.randint(2, 2 + len(WORDS), (length,), generator=g).tolist(), 1])
        return completions, None


class AnotherMask:
    """A choice of tokens that the options do not say."""

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        return (entropies > entropies.mean()) & mask.bool()


def adapters(model: str) -> LoraConfig | None:
    """On the head B begins at random numbers, so that A has a gradient in the first step, too."""
    if model == "lora":
        return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if model == "lora-head":
        return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    return None


def configuration(stage: int) -> dict[str, Any]:
    """Every parameter is partitioned, however small."""
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Logged losses and gradient norms, the weights before and after, and how often the gradients were recomputed."""
    forget_deepspeed()
    engines.fastest = FASTEST if case.impl == "auto" else lambda device, dtype, width: case.impl
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    altered = case.program in ("stock-altered", "recomputed")
    bases = [Rollouts, *([AnotherMask] if altered else [])]
    bases.append(FusedGRPOTrainer if case.program in ("fused", "recomputed") else GRPOTrainer)
    path = str(folder / ("tied" if case.model == "tied" else "untied"))
    model: Any = path
    if case.model == "object":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path)
    set_seed(0)
    if case.program == "patched":
        patch_trl()
    try:
        trainer = type("Trainer", tuple(bases), {})(
            model=model, reward_funcs=reward, train_dataset=dataset(), processing_class=build_tokenizer(),
            peft_config=adapters(case.model),
            args=GRPOConfig(
                str(folder / "out"), per_device_train_batch_size=8 // processes, num_generations=4,
                max_completion_length=8, max_steps=3, num_iterations=2, beta=0.1, learning_rate=3e-4, optim="sgd",
                lr_scheduler_type="constant", logging_steps=1, report_to="none", use_cpu=True, bf16=False,
                save_strategy="no", disable_tqdm=True, max_grad_norm=0.0, gradient_checkpointing="lora" in case.model,
                top_entropy_quantile=0.4 if altered else 1.0,
                **({} if case.model == "object" else {"model_init_kwargs": {"dtype": "float32"}}),
                **({"deepspeed": configuration(case.stage)} if case.stage else {}),
            ),
        )  # fmt: skip
        before = weights(trainer.model)
        trainer.train()
        after = weights(trainer.model)
    finally:
        unpatch_trl()
    logs = [entry for entry in trainer.state.log_history if "kl" in entry]
    counts = getattr(trainer, "loss_counts", None)
    return {
        "logs": {name: [entry[name] for entry in logs] for name in ("loss", "grad_norm", "kl", "entropy")},
        "before": before, "after": after,
        "counts": None if counts is None else (counts.fused, counts.recomputed),
    }  # fmt: skip


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the trainable ones, whole."""
    import deepspeed

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with deepspeed.zero.GatheredParameters([p for p in trained.values() if hasattr(p, "ds_status")]):
        return {name: p.detach().clone() for name, p in trained.items()}


def forget_deepspeed() -> None:
    """Of the run before, in this process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def save_models(folder: Path) -> None:
    """`untied` and `tied`, for all ranks."""
    for tied in (False, True):
        save_small_model(folder / ("tied" if tied else "untied"), tied=tied)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in CASES:
        result = run(case, folder)
        if os.environ["RANK"] == "0":
            torch.save(result, folder / f"{case}.pt")
            print(case, result["logs"]["loss"], result["logs"]["grad_norm"], result["counts"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
