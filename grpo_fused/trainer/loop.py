"""The GRPO loop: rollout, rewards, advantages, update."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused import engines, group_advantages, share_failures
from grpo_fused.rewards import RewardFunction, RewardModel
from grpo_fused.rewards.calling import RewardError
from grpo_fused.rollouts.engine import RolloutEngine, Sampling
from grpo_fused.rollouts.errors import PromptError
from grpo_fused.rollouts.huggingface import HuggingFaceEngine
from grpo_fused.rollouts.vllm import VLLMEngine
from grpo_fused.trainer.checkpoint import identity
from grpo_fused.trainer.config import GRPOTrainerConfig, check_for_vllm
from grpo_fused.trainer.data import Batches, Row, Rows, Stream, check_rows
from grpo_fused.trainer.evaluation import evaluate
from grpo_fused.trainer.interrupt import StopRequest
from grpo_fused.trainer.metrics import Metrics, check_trackers, format_facts, print_samples
from grpo_fused.trainer.policy import Policy, Reference, disable_dropout
from grpo_fused.trainer.prompts import completion_for, encode_prompt, prompt_text
from grpo_fused.trainer.rollout import Rollout, ending_token_ids, roll_out
from grpo_fused.trainer.scoring import reward_names, reward_weights_of, score_completions
from grpo_fused.trainer.state import RunState
from grpo_fused.trainer.update import Updater


class GRPOTrainer(RunState):
    """Trains a causal LM with GRPO on prompts and reward functions.

    Args:
        model: Hugging Face causal LM, with or without a peft adapter, trained in place. Its dropout is set to 0: with
            dropout an unchanged policy would score its own samples differently, and no importance ratio would be 1.
        tokenizer: Its tokenizer.
        reward_functions: Each called as `f(prompts=..., completions=..., completion_ids=..., **columns)`, sync or
            async; returns a list of N floats, or None for a sample that it does not judge.
        train_dataset: Rows with a "prompt", text or chat messages; their other keys are the columns that the reward
            functions get. Or a function that makes row 0, 1, 2, ... without end, the same in each process and in a
            resumed run.
        config: The options of the run.
        reward_weights: One for each reward function, default 1.
        eval_dataset: Held-out rows. Scored greedily by the reward functions, and by pass@k (`config.eval_samples`) of
            the one with the largest weight.
        evaluate: A custom function whose numbers are added to a step's metrics; called after the held-out evaluation.
        reference_model: What the KL of the loss is towards, a teacher with the same vocabulary. Default the policy as
            it was before training.
        engine: The rollout engine; default the policy itself, by `generate`.
        output_dir: Folder of `metrics.jsonl` and checkpoints; default none.
        resume: Continue from the newest checkpoint in `output_dir`, if there is one; prints which, and changed options.
        overwrite: Remove the checkpoints of an earlier run from `output_dir`.
        accelerator: Default one with `config.mixed_precision`.

    Raises:
        ValueError: The data set is too small, its rows differ in form or in number between processes, prompts cannot be
            divided by the processes, the processes share the model by other means than DDP or FSDP2 or not at all, the
            weights do not match the functions, a prompt cannot be encoded, has tokens that the model lacks or leaves no
            room for a completion in vLLM, vLLM would sample from another distribution than the loss scores, the head of
            `reference_model` does not fit, or `output_dir` has the checkpoints of a run and `resume` is off.
        ValueError: A tracker of `config.report_to` is unknown, or `accelerator` does not log with it.
        TypeError: A reward function is not callable.
        TypeError, ValueError: The fused loss cannot express the model's head (`check_head`).
        ImportError: The package of a tracker of `config.report_to` is not installed.
        RuntimeError: The named engine of the loss cannot run on the model's device.
        CheckpointError: The checkpoint cannot be read.

    Source: DeepSeekMath (arXiv 2402.03300, algorithm 1).
    """

    @share_failures()
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reward_functions: Sequence[RewardFunction],
        train_dataset: Rows,
        config: GRPOTrainerConfig,
        *,
        reward_weights: Sequence[float] | None = None,
        eval_dataset: Sequence[Row] | None = None,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        reference_model: PreTrainedModel | None = None,
        engine: RolloutEngine | None = None,
        output_dir: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        accelerator: Accelerator | None = None,
    ) -> None:
        check_trackers(config.report_to)
        self.accelerator = accelerator or Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=list(config.report_to) or None,
            project_dir=None if output_dir is None else str(output_dir),
        )
        _check_distribution(self.accelerator)
        self._sharded = self.accelerator.distributed_type == DistributedType.FSDP
        active = {
            getattr(tracker, "value", tracker.name) for tracker in self.accelerator.log_with
        }  # an enum or a tracker
        if not set(config.report_to) <= active | {"all"}:
            raise ValueError(f"accelerator must log with report_to, {list(config.report_to)}; got {sorted(active)}")
        self._vllm = engine if isinstance(engine, VLLMEngine) else None
        if self._vllm is not None:
            check_for_vllm(config)
        self.config, self.tokenizer = config, tokenizer
        self.identity: dict[str, str] = broadcast_object_list([identity(model, tokenizer)])[0]
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.reward_functions = dict(zip(reward_names(reward_functions), reward_functions, strict=True))
        self.reward_weights = torch.tensor(reward_weights_of(reward_functions, reward_weights))
        embeddings = len(cast(Tensor, model.get_input_embeddings().weight))
        self.encode = partial(encode_prompt, tokenizer, embeddings=embeddings)
        processes = self.accelerator.num_processes
        if config.prompts_per_step % processes:
            raise ValueError(
                f"prompts_per_step must be divisible by the {processes} processes; got {config.prompts_per_step}"
            )
        self.prompts_per_process = config.prompts_per_step // processes
        self.eval_rows = None if eval_dataset is None else self._usable(eval_dataset, 1, "eval_dataset")
        self.evaluate_too = evaluate
        self._silent: set[str] = set()  # reward functions that were named for judging nothing
        size, seed = config.prompts_per_step, config.seed
        self.batches: Batches | Stream
        if callable(train_dataset):
            self.batches = Stream(train_dataset, size, self._fits, seed)
            self._usable(next(Stream(train_dataset, 1, self._fits, seed)), 1, "train_dataset")  # its first row
        else:
            self.batches = Batches(self._usable(train_dataset, size, "train_dataset"), size, seed)
        self._check_same_rows()
        ends = ending_token_ids(model, tokenizer)
        self.sampling = Sampling.of(config, ends, ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
        if self.sampling.pad_token_id >= embeddings:
            raise ValueError(
                f"the pad token's id must be less than {embeddings}, the rows of the model's embedding; got "
                f"{self.sampling.pad_token_id}"
            )

        disable_dropout(model)
        if config.gradient_checkpointing:
            # transformers 5.2x renames it, with the same default: non-reentrant
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        # an engine that cannot run raises before the first rollout
        self.loss_engine = engines.choose(config.impl, self.accelerator.device, model.dtype)
        self.model = model.to(self.accelerator.device).eval()
        for function in reward_functions:
            if isinstance(function, RewardModel):
                function.to(self.accelerator.device)
        self.policy = Policy(model, self.accelerator, config)
        if reference_model is not None and config.loss.beta == 0:
            raise ValueError("reference_model is only used with loss.beta > 0; got beta 0")
        self.reference = None if config.loss.beta == 0 else Reference(self.policy, reference_model)
        optimizer = torch.optim.AdamW(
            (parameter for parameter in model.parameters() if parameter.requires_grad),
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            # one pass over weights, gradients and moments; accelerate does not notice the steps that it skips in fp16
            fused=config.mixed_precision != "fp16",
        )
        self.policy.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.policy.model.eval()
        self.update = Updater(self.policy, self.reference, self.optimizer, config)
        self.engine = engine or HuggingFaceEngine(
            model,
            tokenizer,
            batch_size=config.generation_batch_size,
            synced=self._sharded,
            # of sharded weights, the kept casts would be a whole copy on each process
            autocast=nullcontext if self._sharded else self.accelerator.autocast,
        )
        self.stopped_by: int | None = None
        self._stop = StopRequest()
        self._synced_at: int | None = None  # the optimizer step whose weights the engine has
        self._open(resume, overwrite)

    @share_failures()
    def train(self) -> list[Metrics]:
        """Runs up to `config.steps` steps; returns their metrics, with step 0 for the evaluation before training.

        The first Ctrl-C (or SIGTERM) ends the run after its step, with a checkpoint; `stopped_by` is then its number.

        Raises:
            RewardError: A reward function raised or timed out, or none judged any completion of a step.
            PromptError: A row that a function made has a prompt that cannot be sampled from.
            TypeError, ValueError: A reward function returned something other than numbers or None for each completion.
            NonFiniteError: The loss or a gradient is not finite; the batch is in `output_dir`, a file
                `failed-step-<n>-process-<rank>.safetensors`.
            DivergedError: The policy's logits or states are not finite; its weights are not saved.
            CheckpointError: A checkpoint could not be written.
            PeerError: Another process failed; the message has its rank and its reason.
        """
        history: list[Metrics] = []
        self._stop = stop = StopRequest()
        with self._run(), stop:
            if self.accelerator.is_main_process:
                tqdm.write(format_facts(self.facts()) + "\n")
            if self.steps_done == 0 and (before := self.evaluate()):
                self._record(history, {"step": 0} | before)
            progress = tqdm(
                total=self.config.steps, initial=self.steps_done, desc="GRPO", unit="step", mininterval=1.0,
                disable=None if self.accelerator.is_main_process else True,  # None: off if the output is not a terminal
            )  # fmt: skip
            while self.steps_done < self.config.steps and not self._any(stop.requested > 0):
                metrics = {"step": self.steps_done + 1} | self.step()
                self.steps_done += 1
                self._remember()
                try:
                    if self._due(self.config.eval_steps):
                        metrics |= self.evaluate()
                finally:  # the step counts, also if the evaluation fails
                    self._record(history, metrics)
                if self._due(self.config.save_steps):
                    self.save()
                progress.set_postfix_str(f"reward {metrics['reward']:.3f}")
                progress.update()
            progress.close()
            self.save()
            if self.steps_done < self.config.steps:
                self.stopped_by = stop.requested or signal.SIGINT  # of another process
                tqdm.write(f"stopped after step {self.steps_done} of {self.config.steps}; continue with --resume")
        return history

    def stop(self) -> None:
        """While `train` runs: it ends after its step with a checkpoint, on all processes, as after SIGTERM.

        For a run outside of Python's main thread, where no signal arrives (Ray). One process may call it, in any
        thread, also from a reward function.
        """
        self._stop.requested = signal.SIGTERM

    def facts(self) -> dict[str, str]:
        """The model and its training, for the first lines of a run."""
        config, parameters = self.config, list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        name = getattr(self.model, "name_or_path", "") or type(self.model).__name__
        tokens = config.rollout_size * config.max_completion_length
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        changed = {name: getattr(config, name) for name in off if getattr(config, name) != off[name]}
        sampling = {"temperature": config.temperature} | changed
        return {
            "model": f"{name}, {sum(p.numel() for p in parameters):,} parameters ({trained:,} trained)",
            "loss": f"{config.loss.loss_type}, engine {self.loss_engine}, on {self.accelerator.device}",
            "step": f"{config.prompts_per_step} prompts x {config.num_generations} completions of at most "
            f"{config.max_completion_length} tokens = at most {tokens:,} tokens",
            "sampling": ", ".join(f"{name} {value}" for name, value in sampling.items()),
            "trackers": ", ".join(config.report_to) or "none",
            "output_dir": "none: nothing is saved" if self.output_dir is None else str(self.output_dir),
        }

    def step(self) -> Metrics:
        """One rollout and the optimizer steps on it."""
        started = time.perf_counter()
        self._remember()
        with self._together():
            rollout, rewards = self.collect()
        all_rewards = self.accelerator.gather(rewards)
        self._check_judged(all_rewards)
        groups = group_advantages(
            all_rewards.cpu(),
            self.config.num_generations,
            weights=self.reward_weights,
            scale_rewards=self.config.scale_rewards,
            aggregation=self.config.reward_aggregation,
        )
        first = self.accelerator.process_index * len(rewards)
        advantages = groups.advantages[first : first + len(rewards)].to(self.accelerator.device)
        with self._explained(rollout, advantages):
            updates = self.update(rollout, advantages) or [{"loss": 0.0, "grad_norm": 0.0}]  # no gradient, no update
        # All optimizer steps of a rollout have equal weight, so a clip ratio includes the first, which cannot clip.
        lengths = self.accelerator.gather(rollout.completion_mask.sum(dim=1)).float()
        seconds = time.perf_counter() - started
        return {
            "reward": groups.mean.nanmean().item(),
            "reward_std": groups.std.nanmean().item(),
            **{f"rewards/{name}": all_rewards[:, i].nanmean().item() for i, name in enumerate(self.reward_functions)},
            "zero_std_groups": float(groups.zero_std_groups) / self.config.prompts_per_step,
            "unjudged": float(groups.unjudged),
            "completion_length": lengths.mean().item(),
            **{name: sum(update[name] for update in updates) / len(updates) for name in updates[0]},
            "epoch": self.batches.epoch,
            "tokens_per_second": lengths.sum().item() / seconds,
            "seconds": seconds,
        }

    def collect(self) -> tuple[Rollout, Tensor]:
        """Samples completions for this process's next prompts and scores them: B sequences, rewards [B, F]."""
        rows = next(self.batches)
        first = self.accelerator.process_index * self.prompts_per_process
        # for engines with their own generator: another seed for each completion of the run
        seed = (self.config.seed * self.config.steps + self.steps_done) * self.config.rollout_size
        interval = self.config.sample_steps
        shows = self.accelerator.is_main_process and interval > 0 and self.steps_done % interval == 0
        sampling = replace(self.sampling, seed=seed + first * self.config.num_generations)
        return self.sample(rows[first : first + self.prompts_per_process], sampling, show=shows)

    def sample(self, rows: Sequence[Row], sampling: Sampling, *, show: bool = False) -> tuple[Rollout, Tensor]:
        """Completions of some rows, and their rewards."""
        self._alone = self._sharded
        if self._synced_at != self.update.optimizer_steps:
            self.engine.sync_weights(self.model)
            self._synced_at = self.update.optimizer_steps
        rollout = roll_out(self.engine, [self.encode(row["prompt"]) for row in rows], sampling)
        rollout = rollout.to(self.accelerator.device)
        self._alone = False
        ids = rollout.completions()
        texts = [str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in ids]
        repeated = [row for row in rows for _ in range(sampling.num_generations)]
        completions = [completion_for(row["prompt"], text) for row, text in zip(repeated, texts, strict=True)]
        rewards = score_completions(
            self.reward_functions, repeated, completions, ids, timeout=self.config.reward_timeout
        )
        if show:
            shown = slice(0, sampling.num_generations)
            prompts = [prompt_text(row["prompt"]) for row in repeated[shown]]
            columns = {name: rewards[shown, i].tolist() for i, name in enumerate(self.reward_functions)}
            print_samples(self.steps_done + 1, prompts, texts[shown], columns)
        return rollout, rewards.to(self.accelerator.device)

    def _check_judged(self, rewards: Tensor) -> None:
        """Raises if no completion of a step [N, F] was judged; a function that judged none is named once."""
        silent = rewards.isnan().all(dim=0).tolist()
        if all(silent):
            self._all_failed = True  # they share the rewards
            raise RewardError(
                f"a reward function must judge some of the {len(rewards)} completions of step {self.steps_done + 1}; "
                "got None for all of them"
            )
        for name in (name for name, none in zip(self.reward_functions, silent, strict=True) if none):
            if name not in self._silent:
                self._say(f"reward function {name!r} judged no completion of step {self.steps_done + 1}: all are None")
            self._silent.add(name)

    def evaluate(self) -> Metrics:
        """The metrics of the held-out rows, and those of the caller's function."""
        metrics = evaluate(self)
        return metrics if self.evaluate_too is None else metrics | dict(self.evaluate_too())

    def _fits(self, row: Row) -> bool:
        longest = self.config.max_prompt_length
        return longest is None or len(self.encode(row["prompt"])) <= longest

    def _usable(self, dataset: Sequence[Row], at_least: int, name: str) -> Sequence[Row]:
        """The rows, checked; without those whose prompt is too long."""
        check_rows(dataset, at_least, name=name)
        longest, lengths = self.config.max_prompt_length, []
        for position, row in enumerate(dataset):
            try:
                lengths.append(len(self.encode(row["prompt"])))
                if self._vllm is not None and (longest is None or lengths[-1] <= longest):
                    self._vllm.check_length(lengths[-1], self.config.max_completion_length)
            except PromptError as error:
                raise PromptError(f"row {position} of {name}: {error}") from error
        if longest is None:
            return dataset
        rows = [row for row, length in zip(dataset, lengths, strict=True) if length <= longest]
        dropped = len(dataset) - len(rows)
        if dropped and self.accelerator.is_main_process:
            tqdm.write(f"dropped {dropped} of {len(dataset)} rows: their prompts have more than {longest} tokens")
        check_rows(rows, at_least, name=f"{name} with prompts of at most {longest} tokens")
        return rows

    def _check_same_rows(self) -> None:
        """Each process takes its part of every batch, by position."""
        train = len(self.batches.rows) if isinstance(self.batches, Batches) else 0
        mine = (train, 0 if self.eval_rows is None else len(self.eval_rows))
        counts = gather_object([mine])
        if len(set(counts)) > 1:
            found = ", ".join(f"process {i}: {train} and {held_out}" for i, (train, held_out) in enumerate(counts))
            raise ValueError(f"all processes must have the same rows for training and evaluation; got {found}")


def _check_distribution(accelerator: Accelerator) -> None:
    """The loss reads the head's weight outside the model's forward, where other methods have only a part of it."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP must be version 2 (accelerate launch --use_fsdp --fsdp_version 2); got version 1")
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"processes must share a model by DDP or FSDP2; got {kind.value}")
    started = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if started > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"accelerate must share the run among the {started} processes that were started; got 1. Without a GPU it "
            "needs Accelerator(cpu=True), or ACCELERATE_USE_CPU=true in the environment"
        )
