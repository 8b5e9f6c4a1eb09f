"""The checkpointer: saves a run, restores it, and keeps what a failure needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from transformers import PreTrainedTokenizerBase

from grpo_fused.rollouts.errors import NonFiniteError
from grpo_fused.trainer import checkpoint
from grpo_fused.trainer.checkpoint import CheckpointError
from grpo_fused.trainer.data import Batches, Stream
from grpo_fused.trainer.metrics import cut_jsonl
from grpo_fused.trainer.rollout import Rollout
from grpo_fused.trainer.update import Updater


@dataclass
class Checkpointer:
    """Saves a run into its folder, and restores it.

    Args:
        output_dir: The folder; None saves nothing.
        updater: Policy, optimizer and options of the run.
        batches: Their position is a part of a checkpoint.
        tokenizer: Saved with the model.
        identity: `checkpoint.identity` of what the run begins with.
        teacher: The identity of its `reference_model`, if any; a resume says whether it is another one.
        say: Prints a text, on one process.
    """

    output_dir: Path | None
    updater: Updater
    batches: Batches | Stream
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, str]
    teacher: dict[str, str] | None
    say: Callable[[str], None]
    _saved_at: int = 0

    def __post_init__(self) -> None:
        self.accelerator, self.config = self.updater.accelerator, self.updater.config

    def save(self, steps_done: int) -> Path | None:
        """Writes a checkpoint of the steps done, unless it exists or `output_dir` is None; all processes call it.

        Raises:
            CheckpointError: It could not be written; the older ones still exist.
        """
        if self.output_dir is None or self._saved_at == steps_done:
            return None
        final = self.output_dir / f"{checkpoint.PREFIX}{steps_done:06d}"
        model, adamw = self.updater.policy.model, self.updater.optimizer.optimizer
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        # collective if the model is sharded; the result is complete on the main process and empty on the others
        weights = dcp.get_model_state_dict(model, options=options)
        # for an optimizer without a step, torch would create moments by a step with zero gradients, which counts
        optimizer_state = dcp.get_optimizer_state_dict(model, adamw, options=options) if adamw.state else {"state": {}}

        def write(folder: Path) -> None:
            with checkpoint.quiet():
                self.accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
            moments = checkpoint.flat(optimizer_state)
            save_file(moments, folder / checkpoint.OPTIMIZER)
            processes = self.accelerator.num_processes
            about: dict[str, Any] = {"step": steps_done, "processes": processes, "moments": len(moments)}
            about |= {"options": self._options()} | self.identity
            checkpoint.write_state(folder, about | self._state())

        failure = [""]
        if self.accelerator.is_main_process:
            try:
                checkpoint.publish(final, write, self.config.save_total_limit)
            except Exception as error:  # the other processes wait for this one
                failure[0] = str(error)
        if broadcast_object_list(failure)[0]:
            raise CheckpointError(failure[0])
        self._saved_at = steps_done
        return final

    def _options(self) -> dict[str, Any]:
        """The options of the run, and the SHA-256 (its first digits) of the weights of `reference_model`."""
        weights = None if self.teacher is None else self.teacher["model"][:16]
        return checkpoint.options_of(self.config) | {"weights of reference_model": weights}

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler  # of fp16
        return {
            "optimizer_steps": self.updater.optimizer_steps,
            "batches": self.batches.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def remember(self) -> None:
        """Keeps where the run is between two steps, for `rewind`."""
        self._between_steps = self._state() | {"weight_changes": self.updater.weight_changes}

    def rewind(self) -> bool:
        """Goes back to what `remember` kept, so that a checkpoint is one of the steps done.

        The weights stay: a step that failed after its first optimizer step is repeated, from those that it has changed.
        Returns whether it has.
        """
        self.batches.load_state_dict(self._between_steps["batches"])
        self.updater.optimizer_steps = self._between_steps["optimizer_steps"]
        return bool(self.updater.weight_changes > self._between_steps["weight_changes"])

    def start(self, resume: bool, overwrite: bool) -> int:
        """Starts in `output_dir`, or continues from its newest checkpoint; the number of steps that are done."""
        if resume and overwrite:
            raise ValueError("resume continues a run and overwrite removes it: give one of them; got both")
        if self.output_dir is None:
            if resume:
                raise ValueError("resume needs the output_dir of the run; got none")
            return 0
        existing = checkpoint.checkpoints(self.output_dir)
        if resume and len(set(found := gather_object([str(self.newest())]))) > 1:
            raise CheckpointError(f"all processes must see the same newest checkpoint, on a shared disk; got {found}")
        if existing and resume:
            hint = f" (an older one exists: {existing[-2].name})" if len(existing) > 1 else ""
            with checkpoint.naming(f"cannot resume from {existing[-1]}{hint}"):
                return self._go_on_from(existing[-1])
        if resume:
            self.say(f"no checkpoint in {self.output_dir} to resume from: the run starts at step 1")
        metrics = self.output_dir / "metrics.jsonl"
        if not (resume or overwrite) and (existing or (metrics.exists() and metrics.stat().st_size)):
            raise ValueError(
                f"output_dir must not hold a run; got {self.output_dir}: resume or overwrite it (--resume, --overwrite)"
            )
        if self.accelerator.is_main_process:
            for old in existing:
                checkpoint.remove(old)
            for batch in self.output_dir.glob("failed-step-*.safetensors"):
                batch.unlink()
            self.output_dir.mkdir(parents=True, exist_ok=True)
            metrics.write_text("", encoding="utf-8")
        return 0

    def _go_on_from(self, newest: Path) -> int:
        """Restores weights, optimizer, the position in the data and the metrics so far."""
        state = checkpoint.read_state(newest)
        if state["processes"] != self.accelerator.num_processes:
            raise CheckpointError(
                f"{state['processes']} processes wrote it, each with its own random numbers; "
                f"got {self.accelerator.num_processes}"
            )
        if self.config.steps < state["step"]:
            raise CheckpointError(
                f"steps must be at least {state['step']}, those that are done; got {self.config.steps}"
            )
        model = self.updater.policy.model
        unwrapped = self.accelerator.unwrap_model(model)
        if hasattr(unwrapped, "peft_config"):
            checkpoint.load_adapters(newest, state, unwrapped)
        else:
            checkpoint.load_weights(newest, state, unwrapped, model)
        for name, digest in self.identity.items():
            if state[name] != digest:
                raise CheckpointError(f"expected the {name} that the run began with; got another one")
        checkpoint.load_moments(newest, state, model, self.updater.optimizer.optimizer)
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.batches.load_state_dict(state["batches"])
        self.updater.optimizer_steps = state["optimizer_steps"]  # the schedule continues
        self._saved_at = steps_done = int(state["step"])
        if self.accelerator.is_main_process:
            cut_jsonl(newest.with_name("metrics.jsonl"), steps_done)
        left = "" if steps_done < self.config.steps else ": nothing is left to do"
        self.say(f"resumed from {newest}, {steps_done} of {self.config.steps} steps done{left}")
        if changes := checkpoint.changes(state["options"], self._options()):
            self.say("\n  ".join(["options that are not those of the checkpoint:", *changes]))
        return steps_done

    def newest(self) -> Path | None:
        """The newest checkpoint, if any."""
        existing = [] if self.output_dir is None else checkpoint.checkpoints(self.output_dir)
        return existing[-1] if existing else None

    @contextmanager
    def keeping_batch(self, step: int, rollout: Rollout, advantages: Tensor) -> Iterator[None]:
        """Saves the batch whose loss is not finite; the error says where, or why it could not be written."""
        try:
            yield
        except NonFiniteError as error:
            if self.output_dir is None:
                raise
            path = self.output_dir / f"failed-step-{step}-process-{self.accelerator.process_index}.safetensors"
            tensors = rollout.tensors() | {"advantages": advantages}
            # an engine's tensors may share memory, of which safetensors writes none
            copies = {x: tensor.clone(memory_format=torch.contiguous_format) for x, tensor in tensors.items()}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)  # the main process makes the folder of its own disk
                save_file(copies, path)
                batch = f"its batch is in {path}"
            except (OSError, SafetensorError) as failure:  # which must not hide that the policy has diverged
                batch = f"its batch could not be written to {path}: {failure}"
            raise type(error)(f"{error} in step {step}; {batch}") from error
