"""A recipe without its model and data: a check of its options and rewards, in seconds and on any machine."""

from __future__ import annotations

import math
import tempfile
import textwrap
from dataclasses import replace

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel

from grpo_fused import engines
from grpo_fused.rewards import RewardModel
from grpo_fused.rewards.calling import RewardError
from grpo_fused.rewards.text import Text
from grpo_fused.trainer.config import GRPOTrainerConfig
from grpo_fused.trainer.data import Row, Stream, check_rows, is_file
from grpo_fused.trainer.metrics import Metrics, format_facts
from grpo_fused.trainer.recipe import LoRA, Parts, Recipe, Reward, build_trainer, is_function, with_adapter
from grpo_fused.trainer.scoring import score_completions
from grpo_fused.trainer.tasks import TASKS, format_rows
from grpo_fused.trainer.tiny import HIDDEN_SIZE, tiny_model, tiny_reward_model, tiny_tokenizer

PROMPTS = ("Name a colour.", "What is 2 + 2?")
STAND_IN = "grpo_fused.trainer.dry_run:every_other"


def every_other(completions: list[Text]) -> list[float]:
    """0, 1, 0, 1, ...: random text often gets equal rewards, and then there is nothing to learn from."""
    return [float(position % 2) for position in range(len(completions))]


def dry_run(recipe: Recipe) -> Metrics:
    """One step, evaluation and checkpoint included; returns its metrics. Nothing is kept.

    The policy and reward models are tiny random ones with a byte-level tokenizer. The rows are the examples of the
    recipe's task, those of its file or function if it has one, or a few prompts without further columns. An engine of
    the loss that cannot run on this machine is replaced by that of impl auto. A reward that differs within each group
    is added to the recipe's, and the step takes two optimizer steps at a large learning rate: with the second, ratios
    differ from 1, and no loss is 0.

    Raises:
        RuntimeError: The gradient is 0 all the same.
    """
    tokenizer, rows, skipped = tiny_tokenizer(), rows_of(recipe), [x for x, _ in unchecked_rewards(recipe)]
    kept = (*(reward for reward in recipe.rewards if reward not in skipped), Reward(function=STAND_IN))
    rewards = [
        RewardModel(tiny_reward_model(tokenizer), tokenizer, **reward.options)
        if reward.model is not None
        else reward.load()
        for reward in kept
    ]
    model = adapted(tiny_model(tokenizer), recipe.lora)
    reference = None if recipe.reference_model is None else tiny_model(tokenizer, seed=1)
    parts = Parts(model, tokenizer, rewards, rows, held_out_rows(recipe), None, reference)
    with tempfile.TemporaryDirectory() as folder:
        small = replace(
            recipe,
            rewards=kept,
            steps=1,
            prompts_per_step=len(rows),
            num_iterations=max(recipe.num_iterations, 2),
            max_prompt_length=None,
            max_completion_length=min(recipe.max_completion_length, 16),
            impl=recipe.impl if why_not_here(recipe) is None else "auto",
            learning_rate=1e-3,
            warmup_steps=0,
            mixed_precision="bf16" if recipe.mixed_precision == "bf16" else "no",
            report_to=(),
            project=GRPOTrainerConfig.project,
            run_name=None,
            logging_steps=0,
            sample_steps=0,
            output_dir=folder,
        )
        *_, metrics = build_trainer(small, parts).train()
    if not metrics["grad_norm"] > 0:
        raise RuntimeError(
            "rewards that differ must give a gradient; got 0: can only one token be sampled (top_k 1, a small top_p), "
            "or is no parameter trained?"
        )
    return metrics


def adapted(model: PreTrainedModel, lora: LoRA | None) -> PreTrainedModel:
    """The tiny model with the recipe's adapter; on all linear layers if it has none of those that are named."""
    try:
        return with_adapter(model, lora)
    except ValueError:  # peft found nothing to adapt
        assert lora is not None
        return with_adapter(model, replace(lora, target_modules="all-linear"))


def why_not_here(recipe: Recipe) -> str | None:
    """Why the engine of the loss cannot run the tiny model on this machine; None if it can."""
    device = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")).device
    try:
        engines.choose(recipe.impl, device, torch.float32, HIDDEN_SIZE)
    except RuntimeError as error:
        return str(error)
    return None


def report(recipe: Recipe, metrics: Metrics) -> str:
    """What a dry run has checked, and what not."""
    not_checked = [f"the reward {place_of(x)} ({why})" for x, why in unchecked_rewards(recipe)]
    if (reason := why_not_here(recipe)) is not None:
        not_checked.append(f"the engine of the loss ({reason})")
    if recipe.lora is not None and recipe.lora.target_modules != "all-linear":
        not_checked.append("whether the model has lora.target_modules")
    if recipe.has_eval and not is_local(recipe, recipe.eval_source):
        not_checked.append("held-out rows")
    names = [name for name in metrics if name.startswith("rewards/") and not name.endswith("every_other")]
    rewards = {name.removeprefix("rewards/"): metrics[name] for name in names}
    not_checked += [f"the reward {name} (it judged nothing)" for name, mean in rewards.items() if math.isnan(mean)]
    means = ", ".join(f"{name} {mean:.3f}" for name, mean in rewards.items())
    is_own = is_local(recipe, recipe.dataset)
    rows = f"at most two of {recipe.dataset}" if is_own else "two examples, in place of your data"
    model = "a random model of 35,000 parameters" + (" with your LoRA options" if recipe.lora else "")
    lines = {
        "options": "each is known, of its type and in its range",
        "rows": rows,
        "model": f"{model}, in place of {recipe.model}",
        "rollout": f"{recipe.num_generations} completions of each prompt, {metrics['completion_length']:.0f} tokens",
        "rewards": f"{means}; on random text many are 0",
        "stand-in": "a reward of 0, 1, 0, 1, ... is added, so that rewards differ",
        "advantages": f"differ from 0: rewards in a group have a standard deviation of {metrics['reward_std']:.3f}",
        "loss": f"{recipe.loss_name}, {metrics['loss']:.2e}; two optimizer steps, so that ratios differ from 1",
        "gradient": f"norm {metrics['grad_norm']:.3f}",
        **({"evaluation": "done before and after the step"} if recipe.has_eval else {}),
        "checkpoint": "written and removed",
    }
    rest = "memory, speed, downloads, vLLM, trackers, a resume, your chat template, prompts' lengths, what is learned"
    checked = textwrap.indent(format_facts(lines), "  ")
    return f"dry run, one step:\n{checked}\nnot checked: {', '.join([rest, *not_checked])}\ndry run: ok"


def is_local(recipe: Recipe, source: str | None) -> bool:
    """Whether the rows of a data set can be had without a download."""
    return source is not None and (recipe.is_generated or is_function(source) or is_file(source))


def held_out_rows(recipe: Recipe) -> list[Row] | None:
    """Two rows, if the recipe has any."""
    if recipe.has_eval and is_local(recipe, recipe.eval_source):
        return (recipe.eval_rows() or [])[:2]
    return rows_of(recipe) if recipe.has_eval else None


def unchecked_rewards(recipe: Recipe) -> list[tuple[Reward, str]]:
    """Rewards that prompts alone, in place of the recipe's rows, cannot show, and why."""
    found: list[tuple[Reward, str]] = []
    if recipe.task is not None or is_local(recipe, recipe.dataset):
        return found
    for reward in (reward for reward in recipe.rewards if reward.model is None):
        function = {place_of(reward): reward.load()}
        try:
            score_completions(function, rows_of(recipe)[:1], [""])
        except (ValueError, RewardError) as error:
            found.append((reward, str(error)))
    return found


def place_of(reward: Reward) -> str:
    """The name of a reward, or the place of its function or model."""
    return str(reward.name or reward.function or reward.model)


def rows_of(recipe: Recipe) -> list[Row]:
    """Two rows."""
    if is_local(recipe, recipe.dataset):
        rows = recipe.train_rows()
        if callable(rows):
            return next(Stream(rows, 2))
        check_rows(rows, recipe.prompts_per_step)
        return list(rows[:2])
    if recipe.task is None:
        return [{"prompt": prompt} for prompt in PROMPTS]
    task = TASKS[recipe.task]
    return format_rows(task, task.examples, system_prompt=recipe.system_prompt, chat=recipe.chat)
