"""The GRPO loop: rollout, rewards, advantages, update."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused import group_advantages, share_failures
from grpo_fused.rewards import RewardFunction
from grpo_fused.rewards.calling import RewardError
from grpo_fused.rollouts.engine import RolloutEngine
from grpo_fused.rollouts.errors import DivergedError, NonFiniteError
from grpo_fused.rollouts.huggingface import HuggingFaceEngine
from grpo_fused.trainer import setup
from grpo_fused.trainer.checkpoint import CheckpointError, identity
from grpo_fused.trainer.checkpointer import Checkpointer
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.data import Row, RowFilter, Rows, check_same_rows
from grpo_fused.trainer.evaluation import evaluate
from grpo_fused.trainer.interrupt import StopRequest
from grpo_fused.trainer.metrics import COLUMNS, NOT_SHOWN, Metrics, RunLog, check_trackers, format_facts
from grpo_fused.trainer.peers import Peers, check_processes, of_all_processes
from grpo_fused.trainer.policy import Policy, Reference
from grpo_fused.trainer.prompts import encode_prompt, prompt_text
from grpo_fused.trainer.rollout import Rollout
from grpo_fused.trainer.sampler import Sampler
from grpo_fused.trainer.scoring import reward_names, reward_weights_of
from grpo_fused.trainer.update import AVERAGED, Updater


class GRPOTrainer:
    """Trains a causal LM with GRPO on prompts and reward functions.

    Args:
        model: Hugging Face causal LM, with or without a peft adapter, trained in place. Its dropout is set to 0: with
            dropout an unchanged policy would score its own samples differently, and no importance ratio would be 1.
        tokenizer: Its tokenizer.
        reward_functions: One or several. Each is called as `f(prompts=..., completions=..., completion_ids=...,
            **columns)`, sync or async; returns a list of N floats, or None for a sample that it does not judge.
        train_dataset: Rows with a "prompt", text or chat messages; their other keys are the columns that the reward
            functions get. Or a function that makes row 0, 1, 2, ... without end, the same in each process and in a
            resumed run.
        config: The options of the run.
        reward_weights: One for each reward function, default 1.
        eval_dataset: Held-out rows. Scored greedily by the reward functions, and by pass@k (`config.eval_samples`) of
            the one with the largest weight.
        evaluate: A custom function whose numbers are added to a step's metrics, under names that these do not have;
            called after the held-out evaluation.
        reference_model: What the KL of the loss is towards, a teacher with the same vocabulary. Default the policy as
            it was before training.
        engine: The rollout engine; default the policy itself, by `generate`.
        output_dir: Folder of `metrics.jsonl` and checkpoints; default none.
        resume: Continue from the newest checkpoint in `output_dir`, if there is one; prints which, and changed options.
        overwrite: Remove the checkpoints of an earlier run from `output_dir`.
        accelerator: Default one with `config.mixed_precision`.

    Raises:
        ValueError: The data set is too small, its rows differ in form or in number between processes, prompts cannot be
            divided by the processes, an option has no effect, `accelerator` contradicts `config`, the processes share
            the model by other means than DDP or FSDP2 or not at all, the weights do not match the functions, a prompt
            cannot be encoded, has tokens that the model lacks or leaves no room for a completion in vLLM, vLLM would
            sample from another distribution than the loss scores, the head of `reference_model` does not fit or it has
            weights that are trained, the model is not causal, padding of its samples would change its states, peft
            would not save a parameter that is trained, or `output_dir` has a run's checkpoints and `resume` is off.
        ValueError: A tracker of `config.report_to` is unknown, or `accelerator` does not log with it.
        TypeError: A reward function is not callable, or another argument is of the wrong type.
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
        reward_functions: Sequence[RewardFunction] | RewardFunction,
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
        setup.check_kinds(model, tokenizer, config, reference_model, evaluate)
        check_trackers(config.report_to)
        if callable(reward_functions):
            reward_functions = [reward_functions]
        self.config, self.tokenizer, self.evaluate_too = config, tokenizer, evaluate
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.accelerator = accelerator or Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=list(config.report_to) or None,
            project_dir=None if output_dir is None else str(output_dir),
        )
        check_processes(self.accelerator)
        setup.check_accelerator(self.accelerator, config)
        self.peers, self.log = Peers(self.accelerator), RunLog(config, self.accelerator, self.output_dir)
        processes, device = self.accelerator.num_processes, self.accelerator.device
        if config.prompts_per_step % processes:
            raise ValueError(
                f"prompts_per_step must be divisible by the {processes} processes; got {config.prompts_per_step}"
            )
        models = [model] if reference_model is None else [model, reference_model]
        begins_with, *teacher = of_all_processes(self.accelerator, *[identity(x, tokenizer) for x in models])
        self.reward_functions = dict(zip(reward_names(reward_functions), reward_functions, strict=True))
        self.reward_weights = torch.tensor(reward_weights_of(reward_functions, reward_weights), dtype=torch.float32)
        self._silent: set[str] = set()  # reward functions that were named for judging nothing

        setup.check_effects(config, engine, has_rows=eval_dataset is not None, evaluates=evaluate is not None)
        sampling = setup.sampling_of(config, model, tokenizer)
        encode = partial(encode_prompt, tokenizer, embeddings=setup.embeddings_of(model))
        rows = RowFilter(encode, config.max_prompt_length, setup.length_check(engine, model, config), self.log.say)
        self.eval_rows = None if eval_dataset is None else rows.usable(eval_dataset, 1, "eval_dataset")
        self.batches = rows.batches(train_dataset, config.prompts_per_step, config.seed)
        check_same_rows(self.batches, self.eval_rows)

        # an engine that cannot run raises before the first rollout
        self.loss_engine = setup.engine_of_loss(config, model, device)
        self.model = setup.ready(model, config, device)
        if self.output_dir is not None:
            setup.check_saved(model)
        for function in reward_functions:
            if hasattr(function, "to"):  # a reward model
                function.to(device)
        self.policy = Policy(model, self.accelerator, config)
        setup.check_states(model, padded=engine is None or isinstance(engine, HuggingFaceEngine))
        if reference_model is not None and config.loss.beta == 0:
            raise ValueError("reference_model is only used with loss.beta > 0; got beta 0")
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        if reference_model is not None and any(id(p) in trained for p in reference_model.parameters()):
            raise ValueError(
                "reference_model must be another model, with none of the weights that the policy trains; got one that "
                "has some (leave it out for the policy as it was before training)"
            )
        self.reference = None if config.loss.beta == 0 else Reference(self.policy, reference_model)
        self.update = Updater(self.policy, self.reference, self.policy.prepare(setup.adamw(model, config)), config)
        if engine is not None and not isinstance(engine, RolloutEngine):
            raise TypeError(
                f"engine must have the methods generate and sync_weights (RolloutEngine); got {type(engine).__name__}"
            )
        engine = engine or HuggingFaceEngine(
            model,
            tokenizer,
            batch_size=config.generation_batch_size,
            synced=self.peers.is_sharded,
            # of sharded weights, the kept casts would be a whole copy on each process
            autocast=nullcontext if self.peers.is_sharded else self.accelerator.autocast,
        )
        self.sampler = Sampler(engine, sampling, self.update, tokenizer, encode, self.reward_functions, self.peers)
        self.checkpointer = Checkpointer(
            self.output_dir,
            self.update,
            self.batches,
            tokenizer,
            begins_with,
            teacher[0] if teacher else None,
            self.log.say,
        )
        self.stopped_by: int | None = None
        self._stop = StopRequest()
        self._before: Metrics = {}  # step 0, which a first step that fails does not undo
        self.steps_done = self.checkpointer.start(resume, overwrite)

    @share_failures()
    def train(self) -> list[Metrics]:
        """Runs up to `config.steps` steps; returns their metrics, with step 0 for the evaluation before training.

        The first Ctrl-C (or SIGTERM) ends the run after its step, with a checkpoint; `stopped_by` is then its number.

        Raises:
            RewardError: A reward function raised or timed out, or none judged any completion of a step.
            PromptError: The function that makes rows raised, or made one that cannot be sampled from.
            TypeError, ValueError: A reward function returned something other than numbers or None for each completion.
            NonFiniteError: The loss or a gradient is not finite; the batch is in `output_dir`, a file
                `failed-step-<n>-process-<rank>.safetensors`.
            DivergedError: The policy's logits or states are not finite; its weights are not saved.
            CheckpointError: A checkpoint could not be written.
            PeerError: Another process failed; the message has its rank and its reason.
        """
        history: list[Metrics] = []
        started = time.perf_counter()
        self._stop, self.stopped_by = StopRequest(), None
        if self.steps_done == 0:
            set_seed((self.config.seed + self.accelerator.process_index) % 2**32)  # NumPy takes none above
        self.checkpointer.remember()
        self.peers.forget()
        with self.log.open(), self._saving_after_failure(), self._stop as stop:
            self.log.say(format_facts(self.facts()) + "\n")
            if self.steps_done == 0 and self._before:
                history.append(self._before)
            elif self.steps_done == 0 and (before := self.evaluate()):
                self._before = {"step": 0} | before
                self._record(history, self._before)
            progress = tqdm(
                total=self.config.steps, initial=self.steps_done, desc="GRPO", unit="step", mininterval=1.0,
                disable=None if self.accelerator.is_main_process else True,  # None: off if the output is not a terminal
            )  # fmt: skip
            while self.steps_done < self.config.steps and not (stopped_by := self.peers.most(stop.requested)):
                metrics = {"step": self.steps_done + 1} | self.step()
                self.steps_done += 1
                self.checkpointer.remember()
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
            self.log.finish(history, time.perf_counter() - started, self.checkpointer.newest())
            if self.steps_done < self.config.steps:
                self.stopped_by = stopped_by
                how = "" if self.output_dir is None else "; continue with --resume"
                self.log.say(f"stopped after step {self.steps_done} of {self.config.steps}{how}")
        return history

    def step(self) -> Metrics:
        """One rollout and the optimizer steps on it."""
        started = time.perf_counter()
        # the random numbers of a step depend on the run's seed and its place in the data: a resumed run gets those of
        # an uninterrupted one
        place = f"{self.batches.place} {self.accelerator.process_index}"
        set_seed(random.Random(place).getrandbits(32))  # seeded by text, whose hash is the same on every machine
        with self.peers.together():
            rollout, rewards = self.collect()  # B sequences of this process, their rewards [B, F]
        first = self.accelerator.process_index * len(rewards)
        here = slice(first, first + len(rewards))
        rewards = self.accelerator.gather(rewards.to(self.accelerator.device)).cpu()  # [N, F], of all processes
        self._check_judged(rewards)
        groups = group_advantages(
            rewards,
            self.config.num_generations,
            weights=self.reward_weights,
            scale_rewards=self.config.scale_rewards,
            aggregation=self.config.reward_aggregation,
        )
        advantages = groups.advantages[here]  # [B]
        with self.checkpointer.keeping_batch(self.steps_done + 1, rollout, advantages):
            updates = self.update(rollout, advantages) or [{"loss": 0.0, "grad_norm": 0.0}]  # no gradient, no update
        lengths = self.accelerator.gather(rollout.completion_mask.sum(dim=1)).cpu().float()
        seconds = time.perf_counter() - started
        return {
            "reward": groups.mean.nanmean().item(),
            "reward_std": groups.std.nanmean().item(),
            **{f"rewards/{name}": rewards[:, i].nanmean().item() for i, name in enumerate(self.reward_functions)},
            "zero_std_groups": float(groups.zero_std_groups) / self.config.prompts_per_step,
            "unjudged": float(groups.unjudged),
            "completion_length": lengths.mean().item(),
            # equal weights: a clip ratio includes the first optimizer step, which cannot clip
            **{name: sum(update[name] for update in updates) / len(updates) for name in updates[0]},
            "epoch": self.batches.epoch,
            "tokens_per_second": lengths.sum().item() / seconds,
            "seconds": seconds,
        }

    def collect(self) -> tuple[Rollout, Tensor]:
        """Samples completions for this process's next prompts and scores them: B sequences, rewards [B, F]."""
        config, process = self.config, self.accelerator.process_index
        sampling = replace(self.sampler.sampling, seed=random.getrandbits(31))  # for engines with their own generator
        rows = next(self.batches)
        prompts = len(rows) // self.accelerator.num_processes
        rows = rows[process * prompts : (process + 1) * prompts]
        rollout, rewards = self.sampler.sample(rows, sampling)
        if process == 0 and config.sample_steps > 0 and self.steps_done % config.sample_steps == 0:
            first = slice(0, sampling.num_generations)
            texts = self.sampler.texts(rollout.completions()[first])
            columns = {name: rewards[first, i].tolist() for i, name in enumerate(self.reward_functions)}
            totals = (rewards[first].nan_to_num() @ self.reward_weights).tolist()
            self.log.samples(self.steps_done + 1, prompt_text(rows[0]["prompt"]), texts, columns, totals)
        return rollout, rewards

    def evaluate(self) -> Metrics:
        """The metrics of the held-out rows, and those of the caller's function."""
        metrics: Metrics = {}
        if self.eval_rows is not None:
            metrics = evaluate(self.sampler, self.eval_rows, self.config, success=int(self.reward_weights.argmax()))
        own = {} if self.evaluate_too is None else self.evaluate_too()
        if not isinstance(own, Mapping):
            raise TypeError(f"evaluate must return a mapping of names to numbers; got {type(own).__name__}")
        rewards = {f"rewards/{name}" for name in self.reward_functions}
        if taken := sorted(own.keys() & (COLUMNS.keys() | NOT_SHOWN | metrics.keys() | rewards | set(AVERAGED))):
            raise ValueError(f"evaluate must return numbers under names of its own; got {taken}, which a step has")
        return metrics | {name: float(value) for name, value in own.items()}

    def save(self) -> Path | None:
        """Writes a checkpoint of the steps done, unless it exists or `output_dir` is None; all processes call it.

        Raises:
            CheckpointError: It could not be written; the older ones still exist.
        """
        return self.checkpointer.save(self.steps_done)

    def stop(self) -> None:
        """While `train` runs: it ends after its step with a checkpoint, on all processes, as after SIGTERM.

        For a run outside of Python's main thread, where no signal arrives (Ray). One process may call it, in any
        thread, also from a reward function.
        """
        self._stop.requested = signal.SIGTERM

    def facts(self) -> dict[str, str]:
        """The model and its training, for the first lines of a run."""
        config, parameters, processes = self.config, list(self.model.parameters()), self.accelerator.num_processes
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        name = getattr(self.model, "name_or_path", "") or type(self.model).__name__
        tokens = config.prompts_per_step * config.num_generations * config.max_completion_length
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        sampling = {name: getattr(config, name) for name in ("temperature", *off)}
        return {
            "model": f"{name}, {sum(p.numel() for p in parameters):,} parameters ({trained:,} trained)",
            "loss": f"{config.loss_name}, engine {self.loss_engine}, on {self.accelerator.device}, "
            f"{processes} process{'es' if processes > 1 else ''}",
            "step": f"{config.prompts_per_step} prompts x {config.num_generations} completions of at most "
            f"{config.max_completion_length} tokens = at most {tokens:,} tokens",
            "sampling": ", ".join(f"{name} {value}" for name, value in sampling.items() if value != off.get(name)),
            "trackers": ", ".join(config.report_to) or "none",
            "output_dir": "none: nothing is saved" if self.output_dir is None else str(self.output_dir),
        }

    def _record(self, history: list[Metrics], metrics: Metrics) -> None:
        history.append(metrics)
        self.log.record(metrics)

    def _due(self, interval: int) -> bool:
        """Whether an action that is due every `interval` steps, and after the last one, is due now."""
        return self.steps_done == self.config.steps or (interval > 0 and self.steps_done % interval == 0)

    def _check_judged(self, rewards: Tensor) -> None:
        """Raises if no completion of a step [N, F] was judged; a function that judged none is named once."""
        step, silent = self.steps_done + 1, rewards.isnan().all(dim=0).tolist()
        if all(silent):
            raise self.peers.shared(
                RewardError(
                    f"a reward function must judge some of the {len(rewards)} completions of step {step}; got None for "
                    "all of them"
                )
            )
        for name in (name for name, none in zip(self.reward_functions, silent, strict=True) if none):
            if name not in self._silent:
                self.log.say(f"reward function {name!r} judged no completion of step {step}: all are None")
            self._silent.add(name)

    @contextmanager
    def _saving_after_failure(self) -> Iterator[None]:
        """If something fails, a checkpoint of the training so far; not of a policy that has diverged."""
        try:
            yield
        except CheckpointError:
            raise
        except NonFiniteError as error:
            if not isinstance(error, DivergedError):
                self.peers.shared(error)  # the loss and the norm of the gradient
                self._save_after_failure()
            newest = self.checkpointer.newest()
            rest = f"{newest} is kept" if newest else "there is no checkpoint"
            raise type(error)(f"diverged at step {self.steps_done + 1}: {error}; {rest}") from error
        except BaseException:  # a second Ctrl-C and a reward function's sys.exit too
            self._save_after_failure()
            raise

    def _save_after_failure(self) -> None:
        """Several processes can only save if all of them have failed."""
        if self.peers.diverged or not (self.peers.all_failed or self.accelerator.num_processes == 1):
            return
        torn = self.checkpointer.rewind()
        try:
            path = self.save()
        except CheckpointError as failure:
            tqdm.write(str(failure))
        else:
            if path is not None:
                but = "; the step that failed had changed the weights, and will be repeated from them" if torn else ""
                tqdm.write(f"saved the training so far in {path}{but}")
