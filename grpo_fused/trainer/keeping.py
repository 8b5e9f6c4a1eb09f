"""What a run leaves behind: metrics, checkpoints, and the batch of a loss that was not finite; and how it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from grpo_fused.trainer import checkpoint
from grpo_fused.trainer.checkpoint_files import CheckpointError
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.data import Batches
from grpo_fused.trainer.metrics import Metrics, append_jsonl, cut_jsonl, format_row
from grpo_fused.trainer.policy import Policy
from grpo_fused.trainer.rollout import Rollout
from grpo_fused.trainer.update import NonFiniteError, Updater


class KeptRun:
    """The part of `GRPOTrainer` that a reader of its loop can do without. The trainer sets what has no value here."""

    config: GRPOTrainerConfig
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    output_dir: Path | None
    policy: Policy
    optimizer: Optimizer
    update: Updater
    batches: Batches
    steps_done: int = 0
    _saved_at: int = 0
    _remembered: dict[str, Any] | None = None
    _all_failed: bool = False  # all processes are on their way out

    def save(self) -> Path | None:
        """Writes a checkpoint of the steps done, if there is an `output_dir` and no such one; all processes call it."""
        if self.output_dir is None or self._saved_at == self.steps_done:
            return None
        path = checkpoint.save_checkpoint(
            self.output_dir,
            self.steps_done,
            accelerator=self.accelerator,
            model=self.policy.model,
            optimizer=_inner(self.optimizer),
            tokenizer=self.tokenizer,
            state=self._state(),
            keep=self.config.save_total_limit,
        )
        self._saved_at = self.steps_done
        return path

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler  # of fp16
        return {
            "optimizer_steps": self.update.optimizer_steps,
            "batches": self.batches.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def _remember(self) -> None:
        """What a checkpoint of the steps done holds beside the weights, for `_save_after_failure`."""
        self._remembered = self._state() | {"random": checkpoint.random_states()}

    def _open(self, resume: bool, overwrite: bool) -> None:
        """Begins in `output_dir`, or goes on from its newest checkpoint."""
        if resume and overwrite:
            raise ValueError("resume goes on with a run and overwrite removes it: give one of them; got both")
        if self.output_dir is None:
            if resume:
                raise ValueError("resume needs the output_dir of the run; got none")
            return
        newest = checkpoint.latest_checkpoint(self.output_dir)
        if newest is not None and resume:
            self._go_on_from(newest, self.output_dir)
            return
        metrics = self.output_dir / "metrics.jsonl"
        if not overwrite and not resume and (newest is not None or (metrics.exists() and metrics.stat().st_size)):
            what = f", up to {newest.name}" if newest is not None else " that has no checkpoint"
            raise ValueError(f"output_dir {self.output_dir} holds a run{what}: resume or overwrite it")
        if self.accelerator.is_main_process:
            for old in checkpoint.checkpoints(self.output_dir):
                checkpoint.remove(old)
            self.output_dir.mkdir(parents=True, exist_ok=True)
            metrics.write_text("", encoding="utf-8")

    def _go_on_from(self, newest: Path, output_dir: Path) -> None:
        state = checkpoint.load_checkpoint(
            newest, accelerator=self.accelerator, model=self.policy.model, optimizer=_inner(self.optimizer)
        )
        self.steps_done = self._saved_at = state["step"]
        self.update.optimizer_steps = state["optimizer_steps"]
        try:
            if self.accelerator.scaler is not None and state.get("scaler") is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            self.batches.load_state_dict(state["batches"])
            if self.accelerator.is_main_process:
                cut_jsonl(output_dir / "metrics.jsonl", self.steps_done)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise checkpoint.cannot_resume(newest, error) from error

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Seeds and trackers; and where something fails, a checkpoint of what was trained."""
        if self.steps_done == 0:
            set_seed(self.config.seed, device_specific=True)
        if self.config.report_to:
            options = {k: v for k, v in vars(self.config).items() if isinstance(v, (bool, int, float, str))}
            self.accelerator.init_trackers("grpo_fused", config=options | vars(self.config.loss))
        try:
            yield
        except CheckpointError:
            raise
        except BaseException:  # a second Ctrl-C and a reward function's sys.exit too
            self._save_after_failure()
            raise
        finally:
            for tracker in self.accelerator.trackers:  # `end_training` would end the process group, too
                tracker.finish()

    def _save_after_failure(self) -> None:
        """Several processes can only save where all of them have failed."""
        remembered = self._remembered
        if remembered is None or (self.accelerator.num_processes > 1 and not self._all_failed):
            return
        checkpoint.set_random_states(remembered["random"])
        self.batches.load_state_dict(remembered["batches"])
        # a step that failed after its first optimizer step is taken again, from the weights that it has moved
        self.update.optimizer_steps = remembered["optimizer_steps"]
        try:
            path = self.save()
        except CheckpointError as error:
            tqdm.write(str(error))
        else:
            if path is not None:
                tqdm.write(f"what was trained is in {path}")

    @contextmanager
    def _explained(self, rollout: Rollout, advantages: Tensor) -> Iterator[None]:
        """Writes down the batch whose loss is not finite."""
        try:
            yield
        except NonFiniteError as error:
            self._all_failed = True  # they share the loss and the norm of the gradient
            if self.output_dir is None:
                raise
            step = self.steps_done + 1
            path = self.output_dir / f"failed-step-{step}-process-{self.accelerator.process_index}.safetensors"
            tensors = {name: tensor for name, tensor in rollout._asdict().items() if tensor is not None}
            save_file(
                {name: tensor.contiguous() for name, tensor in (tensors | {"advantages": advantages}).items()}, path
            )
            raise NonFiniteError(f"{error} in step {step}; its batch is in {path}") from error

    def _record(self, history: list[Metrics], metrics: Metrics) -> None:
        history.append(metrics)
        if not self.accelerator.is_main_process:
            return
        if self.output_dir is not None:
            append_jsonl(self.output_dir / "metrics.jsonl", metrics)
        if self.config.report_to:
            self.accelerator.log(metrics, step=int(metrics["step"]))
        if metrics["step"] % self.config.logging_steps == 0:
            tqdm.write(format_row(metrics))

    def _due(self, interval: int) -> bool:
        """Whether something that is done every so many steps, and after the last one, is to be done now."""
        return self.steps_done == self.config.steps or (interval > 0 and self.steps_done % interval == 0)

    def _any(self, flag: bool) -> bool:
        """Whether it is set on any process: all of them stop after the same step."""
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum") > 0)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
