"""The output of a run: metrics, checkpoints, and the batch of a loss that was not finite; and how a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from grpo_fused.ranks.handshake import reason_of
from grpo_fused.ranks.parallel import PeerError
from grpo_fused.rollouts.errors import DivergedError, NonFiniteError
from grpo_fused.trainer import checkpoint
from grpo_fused.trainer.checkpoint import CheckpointError
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.data import Batches, Stream
from grpo_fused.trainer.metrics import RUN_NAMES, Metrics, append_jsonl, cut_jsonl, format_row
from grpo_fused.trainer.policy import Policy
from grpo_fused.trainer.rollout import Rollout
from grpo_fused.trainer.update import Updater


class RunState:
    """The parts of `GRPOTrainer` besides its loop. The trainer sets the attributes without a value here."""

    config: GRPOTrainerConfig
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    output_dir: Path | None
    policy: Policy
    optimizer: AcceleratedOptimizer
    update: Updater
    identity: dict[str, str]
    batches: Batches | Stream
    steps_done: int = 0
    _saved_at: int = 0
    _rows_printed: int = 0
    _remembered: dict[str, Any] | None = None
    _all_failed: bool = False  # all processes have failed and will exit
    _alone: bool = False  # in a rollout with collectives, of a model that is sharded

    def save(self) -> Path | None:
        """Writes a checkpoint of the steps done, unless it exists or `output_dir` is None; all processes call it.

        Raises:
            CheckpointError: It could not be written; the older ones still exist.
        """
        if self.output_dir is None or self._saved_at == self.steps_done:
            return None
        final = self.output_dir / f"{checkpoint.PREFIX}{self.steps_done:06d}"
        model, adamw = self.policy.model, self.optimizer.optimizer
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        # collective if the model is sharded; the result is complete on the main process and empty on the others
        weights = dcp.get_model_state_dict(model, options=options)
        optimizer_state: dict[str, Any] = {"state": {}}
        # for an optimizer without a step, torch would create moments by a step with zero gradients, which counts
        if adamw.state:
            optimizer_state = dcp.get_optimizer_state_dict(model, adamw, options=options)
        random_states = gather_object([checkpoint.random_states()])

        def write(folder: Path) -> None:
            with checkpoint.quiet():
                self.accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
            moments = checkpoint.flat(optimizer_state)
            save_file(moments, folder / checkpoint.OPTIMIZER)
            for rank, tensors in enumerate(random_states):
                save_file(tensors, folder / checkpoint.rng_file(rank))
            about: dict[str, Any] = {"step": self.steps_done, "processes": len(random_states), "moments": len(moments)}
            about |= {"options": checkpoint.options_of(self.config)} | self.identity
            checkpoint.write_state(folder, about | self._state())

        failure = [""]
        if self.accelerator.is_main_process:
            try:
                checkpoint.publish(final, write, self.config.save_total_limit)
            except Exception as error:  # the other processes wait for this one
                failure[0] = str(error)
        if broadcast_object_list(failure)[0]:
            raise CheckpointError(failure[0])
        self._saved_at = self.steps_done
        return final

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler  # of fp16
        return {
            "optimizer_steps": self.update.optimizer_steps,
            "batches": self.batches.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def _remember(self) -> None:
        """The content of a checkpoint of the steps done, except the weights, for `_save_after_failure`.

        None if there should be none: the policy has diverged.
        """
        self._remembered = self._state() | {"random": checkpoint.random_states()}

    def _open(self, resume: bool, overwrite: bool) -> None:
        """Starts in `output_dir`, or continues from its newest checkpoint."""
        if resume and overwrite:
            raise ValueError("resume continues a run and overwrite removes it: give one of them; got both")
        if self.output_dir is None:
            if resume:
                raise ValueError("resume needs the output_dir of the run; got none")
            return
        found = checkpoint.checkpoints(self.output_dir)
        if found and resume:
            hint = f" (an older one exists: {found[-2].name})" if len(found) > 1 else ""
            with checkpoint.naming(f"cannot resume from {found[-1]}{hint}"):
                self._go_on_from(found[-1])
            return
        if resume:
            self._say(f"no checkpoint in {self.output_dir} to resume from: the run starts at step 1")
        metrics = self.output_dir / "metrics.jsonl"
        if not (resume or overwrite) and (found or (metrics.exists() and metrics.stat().st_size)):
            raise ValueError(f"output_dir must not hold a run: resume or overwrite it; got {self.output_dir}")
        if self.accelerator.is_main_process:
            for old in found:
                checkpoint.remove(old)
            self.output_dir.mkdir(parents=True, exist_ok=True)
            metrics.write_text("", encoding="utf-8")

    def _go_on_from(self, newest: Path) -> None:
        """Restores weights, optimizer, random states, the position in the data and the metrics so far."""
        state = checkpoint.read_state(newest)
        if state["processes"] != self.accelerator.num_processes:
            raise CheckpointError(
                f"{state['processes']} processes wrote it, each with its own random state; "
                f"got {self.accelerator.num_processes}"
            )
        if self.config.steps < state["step"]:
            raise CheckpointError(
                f"steps must be at least {state['step']}, those that are done; got {self.config.steps}"
            )
        model = self.policy.model
        unwrapped = self.accelerator.unwrap_model(model)
        if hasattr(unwrapped, "peft_config"):
            checkpoint.load_adapter(newest, state, unwrapped)
        else:
            checkpoint.load_weights(newest, state, unwrapped, model)
        for name, digest in self.identity.items():
            if state[name] != digest:
                raise CheckpointError(f"expected the {name} that the run began with; got another one")
        checkpoint.load_moments(newest, state, model, self.optimizer.optimizer)
        checkpoint.load_random_states(newest, state, self.accelerator.process_index)
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.batches.load_state_dict(state["batches"])
        self.steps_done = self._saved_at = state["step"]
        self.update.optimizer_steps = state["optimizer_steps"]
        if self.accelerator.is_main_process:
            cut_jsonl(newest.with_name("metrics.jsonl"), self.steps_done)
        left = "" if self.steps_done < self.config.steps else ": nothing is left to do"
        self._say(f"resumed from {newest}, {self.steps_done} of {self.config.steps} steps done{left}")
        changes = checkpoint.changes(state["options"], checkpoint.options_of(self.config))
        if changes:
            self._say("\n  ".join(["options that are not those of the checkpoint:", *changes]))

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text)

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Seeds and trackers; and if something fails, a checkpoint of the training so far."""
        if self.steps_done == 0:
            set_seed(self.config.seed, device_specific=True)
        if self.config.report_to:
            options = {k: v for k, v in vars(self.config).items() if isinstance(v, (bool, int, float, str))}
            name = self.config.run_name
            names = {tracker: {option: name} for tracker, option in RUN_NAMES.items() if name is not None}
            self.accelerator.init_trackers(self.config.project, options | vars(self.config.loss), names)
        try:
            yield
        except CheckpointError:
            raise
        except NonFiniteError as error:
            if isinstance(error, DivergedError):
                self._remembered = None
            self._save_after_failure()
            kept = [] if self.output_dir is None else checkpoint.checkpoints(self.output_dir)
            rest = f"{kept[-1]} is kept" if kept else "there is no checkpoint"
            raise type(error)(f"diverged at step {self.steps_done + 1}: {error}; {rest}") from error
        except BaseException:  # a second Ctrl-C and a reward function's sys.exit too
            self._save_after_failure()
            raise
        finally:
            for tracker in self.accelerator.trackers:  # `end_training` would end the process group, too
                tracker.finish()

    def _save_after_failure(self) -> None:
        """Several processes can only save if all of them have failed."""
        remembered = self._remembered
        if remembered is None or (self.accelerator.num_processes > 1 and not self._all_failed):
            return
        checkpoint.set_random_states(remembered["random"])
        self.batches.load_state_dict(remembered["batches"])
        # a step that failed after its first optimizer step is repeated, from the weights that it has changed
        self.update.optimizer_steps = remembered["optimizer_steps"]
        try:
            path = self.save()
        except CheckpointError as error:
            tqdm.write(str(error))
        else:
            if path is not None:
                tqdm.write(f"saved the training so far in {path}")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """If one process fails, all of them raise, so that none waits for it and they can save together.

        Not where others are in collectives of the rollout: a process that fails there raises alone (`share_failures`).
        """
        error, self._alone = None, False
        try:
            yield
        except Exception as own:
            if self._alone:
                raise
            error = own
        self._all_failed = self._any(error is not None)
        if self._all_failed:
            if self._any(isinstance(error, DivergedError)):
                self._remembered = None
            every = enumerate(gather_object([reason_of(error)]))
            raise error or PeerError.of({rank: reason for rank, reason in every if reason is not None})

    @contextmanager
    def _explained(self, rollout: Rollout, advantages: Tensor) -> Iterator[None]:
        """Saves the batch whose loss is not finite."""
        try:
            yield
        except NonFiniteError as error:
            # they share the loss and the norm of the gradient, but not the states
            self._all_failed = not isinstance(error, DivergedError)
            if self.output_dir is None:
                raise
            step = self.steps_done + 1
            path = self.output_dir / f"failed-step-{step}-process-{self.accelerator.process_index}.safetensors"
            tensors = rollout.tensors() | {"advantages": advantages}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, path)
            raise type(error)(f"{error} in step {step}; its batch is in {path}") from error

    def _record(self, history: list[Metrics], metrics: Metrics) -> None:
        history.append(metrics)
        if not self.accelerator.is_main_process:
            return
        if self.output_dir is not None:
            append_jsonl(self.output_dir / "metrics.jsonl", metrics)
        if self.config.report_to:
            self.accelerator.log(metrics, step=int(metrics["step"]))
        if metrics["step"] % self.config.logging_steps == 0:
            tqdm.write(format_row(metrics, titles=self._rows_printed % 20 == 0))
            self._rows_printed += "reward" in metrics

    def _due(self, interval: int) -> bool:
        """Whether an action that is due every `interval` steps, and after the last one, is due now."""
        return self.steps_done == self.config.steps or (interval > 0 and self.steps_done % interval == 0)

    def _any(self, flag: bool) -> bool:
        """Whether it is set on any process: all of them stop after the same step."""
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum") > 0)
