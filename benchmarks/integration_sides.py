"""One side of `benchmarks.integration_steps`, in a process of its own: training steps with one loss head.

It gets commands through a pipe, and answers each with its seconds. A path: loss and gradients of the first batch into
this file. None: a training step. `END`: its answer is the peak memory of the process, in bytes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.memory import peak_of_process
from benchmarks.providers import module_of, of_file
from benchmarks.qwen2 import small_qwen2
from benchmarks.results import ROOT

CLIP = 0.2
END = "end"


@dataclass(frozen=True)
class Setting:
    """A model and a batch; all tokens but the first of a sequence are in the loss."""

    vocab: int = 151936
    hidden: int = 896
    layers: int = 2
    sequences: int = 8
    length: int = 128
    dtype: str = "bfloat16"


class Batch(NamedTuple):
    """Random ids, and old log-probs: the model's with a noise of 0.05 nats."""

    ids: Tensor  # [B, L + 1]
    advantages: Tensor  # [B]
    old: Tensor  # [B, L] nats, fp32

    @property
    def labels(self) -> Tensor:
        """[B, L]: of the state of each token, the next one."""
        return self.ids[:, 1:]


def build_model(setting: Setting) -> Any:
    """A small Qwen2 in fp32, its head tied to the embeddings; the same weights each time."""
    return small_qwen2(
        setting.vocab, setting.hidden, setting.layers, intermediate_size=setting.hidden * 38 // 7,
        num_key_value_heads=max(setting.hidden // 448, 1), max_position_embeddings=2 * setting.length,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
    ).train()  # fmt: skip


@torch.no_grad()
def build_batch(setting: Setting, model: Any) -> Batch:
    """Old log-probs a sequence at a time, so that they do not make the peak of the memory."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, setting.vocab, (setting.sequences, setting.length + 1), generator=g)
    rows = []
    for row in ids.split(1):
        hidden = model.model(row[:, :-1]).last_hidden_state.squeeze(0)
        for states, labels in zip(hidden.split(32), row[0, 1:].split(32), strict=True):
            logits = (states @ model.lm_head.weight.T).float()
            rows.append(logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    old = torch.cat(rows).view(setting.sequences, setting.length)
    old = old + 0.05 * torch.randn(old.shape, generator=g)
    return Batch(ids, torch.randn(setting.sequences, generator=g), old)


def policy_loss(logps: Tensor, batch: Batch) -> Tensor:
    """PPO's clipped loss, mean over tokens, for projects whose head returns log-probs."""
    ratio = (logps - batch.old.view(logps.shape)).exp()
    advantages = batch.advantages.unsqueeze(1).expand_as(batch.old).reshape(logps.shape)
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def liger(ours: bool, setting: Setting, model: Any) -> Callable[[Batch], Tensor]:
    """`LigerFusedLinearGRPOLoss`, not compiled: on a CPU it need not be."""
    if ours:
        from grpo_fused.integrations.liger import FusedLinearGRPOLoss as LigerFusedLinearGRPOLoss
    else:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    head = LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type="dapo", epsilon_low=CLIP, epsilon_high=CLIP, use_ref_model=False, compiled=False
    )

    def loss(batch: Batch) -> Tensor:
        hidden = model.model(batch.ids[:, :-1]).last_hidden_state
        mask = torch.ones_like(batch.old)
        out = head(hidden, model.lm_head.weight, batch.labels, mask, batch.advantages, old_per_token_logps=batch.old)
        return out[0]

    return loss


def torchtitan(ours: bool, setting: Setting, model: Any) -> Callable[[Batch], Tensor]:
    """`ChunkedLossWrapper` with its 8 chunks around `GRPOLoss`, metrics included."""
    from torchtitan.components.loss import ChunkedLossWrapper

    of_file("torchtitan.experiments.rl.losses.dapo")
    losses = of_file("torchtitan.experiments.rl.losses.grpo")
    if ours:
        from grpo_fused.integrations.torchtitan import FusedLossWrapper as ChunkedLossWrapper
    head = ChunkedLossWrapper(ChunkedLossWrapper.Config(loss_fn=losses.GRPOLoss.Config(clip_eps=CLIP)))
    head.set_lm_head(model.lm_head)

    def loss(batch: Batch) -> Tensor:
        hidden = model.model(batch.ids[:, :-1]).last_hidden_state
        advantages = batch.advantages.unsqueeze(1).expand_as(batch.old)
        mask = torch.ones_like(batch.old, dtype=torch.bool)
        return head(
            hidden, batch.labels, float(mask.sum()), generator_logprobs=batch.old, advantages=advantages, loss_mask=mask
        )[0]

    return loss


def prime_rl(ours: bool, setting: Setting, model: Any) -> Callable[[Batch], Tensor]:
    """prime-rl's patch of a model, with its default chunk size."""
    module = prime_rl_file()
    if ours:
        from grpo_fused.integrations.prime_rl import FusedOutputLinear

        module.FusedOutputLinear = FusedOutputLinear
    module.inject_prime_lm_head(model, 8192)
    temperature = torch.ones(setting.sequences, setting.length)

    def loss(batch: Batch) -> Tensor:
        out = model(input_ids=batch.ids[:, :-1], labels=batch.labels, temperature=temperature)
        return policy_loss(out["logprobs"], batch)

    return loss


def prime_rl_file() -> ModuleType:
    """`trainer/models/layers/lm_head.py` of the checkout that `PRIME_RL` names, with doubles of what it imports."""
    path = Path(os.environ["PRIME_RL"]) / "src/prime_rl/trainer/models/layers/lm_head.py"
    logger = SimpleNamespace(info=lambda *_: None)
    doubles = {
        "prime_rl.utils.logger": {"get_logger": lambda: logger},
        "prime_rl.utils.vlm": {"get_final_logit_softcapping": lambda config: None},
    }
    for name in ("prime_rl", "prime_rl.utils", *doubles):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(doubles.get(name, {}))
    return module_of(path, "prime_rl_lm_head")


def plain(project: str, ours: bool, setting: Setting, folder: Path, link: Connection) -> None:
    """A loop around a project's loss head: weights and AdamW in the dtype."""
    model = build_model(setting).to(getattr(torch, setting.dtype))
    batch = build_batch(setting, model)
    head = {"liger": liger, "torchtitan": torchtitan, "prime-rl": prime_rl}[project](ours, setting, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for check in iter(link.recv, END):
        start = time.perf_counter()
        loss = head(batch)
        loss.backward()
        if check is None:
            optimizer.step()
        else:
            gradients = {name: p.grad for name, p in model.named_parameters()}
            torch.save({"loss": loss.item(), "gradients": gradients}, check)
            del gradients
        optimizer.zero_grad()
        link.send(time.perf_counter() - start)


def verl(project: str, ours: bool, setting: Setting, folder: Path, link: Connection) -> None:
    """verl's FSDP2 engine, torch back end, packed sequences: weights and AdamW in fp32, products in the dtype."""
    from with_verl import engine_runs  # verl for the CPU, without ray

    if ours:
        engine_runs.patch_verl()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    model = build_model(setting)
    batch = build_batch(setting, model)
    model.save_pretrained(folder / "model")
    del model
    engine = engine_runs.transformer_impl.FSDPEngineWithLMHead(
        engine_runs.HFModelConfig(
            path=str(folder / "model"), load_tokenizer=False, override_config={"attn_implementation": "sdpa"},
            use_remove_padding=True, enable_gradient_checkpointing=False, use_fused_kernels=True,
            fused_kernel_options={"impl_backend": "torch"},
        ),
        engine_runs.FSDPEngineConfig(
            strategy="fsdp2", model_dtype="fp32", use_torch_compile=False,
            mixed_precision={"param_dtype": setting.dtype, "reduce_dtype": "float32", "buffer_dtype": "float32"},
        ),
        engine_runs.FSDPOptimizerConfig(lr=1e-5),
        engine_runs.CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    fields = {
        "input_ids": list(batch.ids),
        "position_ids": [torch.arange(len(row)) for row in batch.ids],
        "loss_mask": [torch.ones(len(row)) for row in batch.ids],
    }
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in fields.items()}
    data = engine_runs.TensorDict(nested, batch_size=[setting.sequences])
    engine_runs.tensordict_utils.assign_non_tensor(
        data, use_remove_padding=True, use_fused_kernels=True, calculate_entropy=True, temperature=1.0,
        use_dynamic_bsz=False, micro_batch_size_per_gpu=setting.sequences,
    )  # fmt: skip
    losses = []

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        logps = model_output["log_probs"].values().view(setting.sequences, -1)[:, :-1]  # the last has no next token
        losses.append(policy_loss(logps, batch))
        return losses[-1], {}

    for check in iter(link.recv, END):
        start = time.perf_counter()
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, loss, forward_only=False)
            if check is None:
                engine.optimizer_step()
            else:
                gradients = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters()}
                torch.save({"loss": losses[-1].item(), "gradients": gradients}, check)
                del gradients
        link.send(time.perf_counter() - start)


def deepspeed(project: str, ours: bool, setting: Setting, folder: Path, link: Connection) -> None:
    """TRL's trainer under ZeRO-2, on as many processes as the environment says; completions are given, not generated.

    DeepSpeed takes its step inside the backward pass, so that of the gradients there is only the norm.
    """
    from integrations.trl_runs import WORDS, build_tokenizer, dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_fused.integrations.trl import FusedGRPOTrainer

    g = torch.Generator().manual_seed(int(os.environ["RANK"]))
    completion = torch.randint(2, 2 + len(WORDS), (setting.sequences, setting.length), generator=g)

    class Given(FusedGRPOTrainer if ours else GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any, fields: Any, count: int) -> Any:
            return completion[: len(prompt_ids)].tolist(), None

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    todo = iter(link.recv, END)

    class Driven(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.check = next(todo)
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.perf_counter() - self.start

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if self.check is not None:
                norm = {"norm": torch.tensor(logs["grad_norm"])}
                torch.save({"loss": logs["loss"], "gradients": norm}, self.check)
            link.send(self.seconds)

    processes = int(os.environ["WORLD_SIZE"])
    trainer = Given(
        model=build_model(setting), reward_funcs=reward, train_dataset=dataset(), processing_class=build_tokenizer(),
        callbacks=[Driven()],
        args=GRPOConfig(
            str(folder / "out"), per_device_train_batch_size=setting.sequences // processes, num_generations=4,
            max_completion_length=setting.length, max_steps=10_000, learning_rate=1e-5, logging_steps=1,
            report_to="none", use_cpu=True, bf16=setting.dtype == "bfloat16", save_strategy="no", disable_tqdm=True,
            gradient_checkpointing=False,
            deepspeed={
                "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": 2},
            },
        ),
    )  # fmt: skip
    with contextlib.suppress(StopIteration):  # the end of the commands
        trainer.train()


PROJECTS = {"verl": verl, "torchtitan": plain, "prime-rl": plain, "liger": plain, "deepspeed": deepspeed}


def main(project: str, ours: bool, setting: Setting, folder: Path, link: Connection) -> None:
    """All that a process does."""
    sys.path.append(str(ROOT / "tests"))
    PROJECTS[project](project, ours, setting, folder, link)
    link.send(peak_of_process())
