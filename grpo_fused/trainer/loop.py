"""The GRPO loop: rollout, rewards, advantages, update."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused import check_head, engines, group_advantages
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.metrics import Metrics, append_jsonl, format_row
from grpo_fused.trainer.rollout import Rollout, decode_completions, generate_rollout, special_token_ids
from grpo_fused.trainer.scoring import RewardFunction, Row, reward_names, score_completions
from grpo_fused.trainer.update import update_policy


class GRPOTrainer:
    """Trains a causal LM with GRPO on prompts and reward functions.

    Args:
        model: Hugging Face causal LM, trained in place. It stays in eval mode: with dropout an unchanged policy would
            score its own samples differently, and no importance ratio would be 1.
        tokenizer: Its tokenizer, with an EOS token.
        reward_functions: Each called as `f(prompts=..., completions=..., **columns) -> list[float | None]`.
        train_dataset: Rows with a "prompt"; their other keys are the columns that the reward functions get.
        config: The options of the run.
        reward_weights: One for each reward function, default 1.
        evaluate: Called before the first step and every `config.eval_steps`; its numbers join that step's metrics.
        output_dir: Where `metrics.jsonl` is written, from its beginning; default nowhere.

    Raises:
        ValueError: The data set is too small, its rows disagree, or the weights do not match the functions.
        TypeError: A reward function is not callable.
        TypeError, ValueError: The fused loss cannot express the model's head (`check_head`).
        RuntimeError: The named engine cannot run on the model's device.

    Source: DeepSeekMath (arXiv 2402.03300, algorithm 1).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reward_functions: Sequence[RewardFunction],
        train_dataset: Sequence[Row],
        config: GRPOTrainerConfig,
        *,
        reward_weights: Sequence[float] | None = None,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        output_dir: str | Path | None = None,
    ) -> None:
        check_dataset(train_dataset, config.prompts_per_step)
        special_token_ids(tokenizer)
        if not reward_functions:
            raise ValueError("reward_functions must hold at least one function; got none")
        weights = [1.0] * len(reward_functions) if reward_weights is None else [float(w) for w in reward_weights]
        if len(weights) != len(reward_functions):
            raise ValueError(
                f"reward_weights must have one weight for each of {len(reward_functions)} reward functions; "
                f"got {len(weights)}"
            )
        # an engine that cannot run says so before the first rollout
        engines.choose(config.impl, model.device, model.dtype)
        check_head(model)  # and a head that the fused loss cannot express is refused now
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.reward_functions = dict(zip(reward_names(reward_functions), reward_functions, strict=True))
        self.reward_weights = torch.tensor(weights)
        self.config = config
        self.evaluate = evaluate
        self.metrics_path = None if output_dir is None else Path(output_dir) / "metrics.jsonl"
        self.reference = None if config.loss.beta == 0 else copy.deepcopy(model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            (parameter for parameter in model.parameters() if parameter.requires_grad),
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, config))
        self.batches = shuffled_batches(train_dataset, config.prompts_per_step, config.seed)

    def train(self) -> list[Metrics]:
        """Runs `config.steps` steps; returns their metrics, with step 0 for the evaluation before training."""
        torch.manual_seed(self.config.seed)
        history: list[Metrics] = []
        if self.metrics_path is not None:
            self.metrics_path.parent.mkdir(parents=True, exist_ok=True)
            self.metrics_path.write_text("", encoding="utf-8")
        if self.evaluate is not None:
            self._record(history, {"step": 0} | dict(self.evaluate()))
        for step in tqdm(range(1, self.config.steps + 1), desc="GRPO", unit="step", mininterval=1.0):
            metrics = {"step": step} | self.step()
            if self.evaluate is not None and (step % self.config.eval_steps == 0 or step == self.config.steps):
                metrics |= self.evaluate()
            self._record(history, metrics)
        return history

    def step(self) -> Metrics:
        """One rollout and the optimizer steps on it."""
        started = time.perf_counter()
        rollout, rewards = self.collect()
        groups = group_advantages(
            rewards,
            self.config.num_generations,
            weights=self.reward_weights,
            scale_rewards=self.config.scale_rewards,
        )
        updates = self.update(rollout, groups.advantages.to(rollout.completion_ids.device))
        # The optimizer steps of a rollout count alike, so a clip ratio includes the first, which cannot clip.
        lengths = rollout.completion_mask.sum(dim=1).float()
        return {
            "reward": groups.mean.nanmean().item(),
            "reward_std": groups.std.nanmean().item(),
            **{f"rewards/{name}": rewards[:, i].nanmean().item() for i, name in enumerate(self.reward_functions)},
            "zero_std_groups": float(groups.zero_std_groups) / self.config.prompts_per_step,
            "unjudged": float(groups.unjudged),
            "completion_length": lengths.mean().item(),
            **{name: sum(update[name] for update in updates) / len(updates) for name in updates[0]},
            "seconds": time.perf_counter() - started,
        }

    def collect(self) -> tuple[Rollout, Tensor]:
        """Samples completions for the next prompts and scores them: a rollout of B sequences, rewards [B, F]."""
        rows = next(self.batches)
        rollout = generate_rollout(
            self.model,
            self.tokenizer,
            [str(row["prompt"]) for row in rows],
            num_generations=self.config.num_generations,
            max_completion_length=self.config.max_completion_length,
            temperature=self.config.temperature,
        )
        row_of_completion = [row for row in rows for _ in range(self.config.num_generations)]
        completions = decode_completions(self.tokenizer, rollout)
        return rollout, score_completions(self.reward_functions, row_of_completion, completions)

    def update(self, rollout: Rollout, advantages: Tensor) -> list[Metrics]:
        """The optimizer steps on a rollout, sampled just now or recorded elsewhere; one dictionary for each."""
        return update_policy(
            self.model, self.reference, self.optimizer, self.scheduler, rollout, advantages, self.config
        )

    def _record(self, history: list[Metrics], metrics: Metrics) -> None:
        history.append(metrics)
        if self.metrics_path is not None:
            append_jsonl(self.metrics_path, metrics)
        if metrics["step"] % self.config.logging_steps == 0:
            tqdm.write(format_row(metrics))


def check_dataset(rows: Sequence[Row], prompts_per_step: int) -> None:
    """Raises unless there are enough rows, each with a prompt and all with the same columns."""
    if len(rows) < prompts_per_step:
        raise ValueError(
            f"train_dataset must have at least prompts_per_step = {prompts_per_step} rows; got {len(rows)}"
        )
    columns = set(rows[0])
    for position, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f'row {position} of train_dataset must have a str "prompt"; got {row.get("prompt")!r}')
        if set(row) != columns:
            raise ValueError(
                f"row {position} of train_dataset must have the columns {sorted(columns)}; got {sorted(row)}"
            )
    taken = columns & {"prompts", "completions"}
    if taken:
        raise ValueError(f"train_dataset must not have a column that reward functions get anyway; got {sorted(taken)}")


def shuffled_batches(rows: Sequence[Row], size: int, seed: int) -> Iterator[list[Row]]:
    """Batches without end; each epoch in a new order, an incomplete last batch left out."""
    order, rng = list(range(len(rows))), random.Random(seed)
    while True:
        rng.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield [rows[index] for index in order[start : start + size]]


def learning_rate_factor(optimizer_step: int, config: GRPOTrainerConfig) -> float:
    """Linear warm-up to 1, then constant, or linear to 0 with `config.decay`."""
    if optimizer_step < config.warmup_steps:
        return (optimizer_step + 1) / config.warmup_steps
    if not config.decay:
        return 1.0
    total = config.steps * config.num_iterations
    return max(total - optimizer_step, 0) / max(total - config.warmup_steps, 1)
