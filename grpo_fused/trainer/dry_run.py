"""One step of a recipe without its model and data: a check of its options, in seconds and on any machine."""

from __future__ import annotations

import tempfile
from dataclasses import replace

from grpo_fused.rewards import RewardModel
from grpo_fused.trainer.data import Row, is_file
from grpo_fused.trainer.metrics import Metrics
from grpo_fused.trainer.recipe import Parts, Recipe, build_trainer, is_function, with_adapter
from grpo_fused.trainer.tasks import TASKS, format_rows
from grpo_fused.trainer.tiny import tiny_model, tiny_reward_model, tiny_tokenizer

PROMPTS = ("Name a colour.", "What is 2 + 2?")


def dry_run(recipe: Recipe) -> list[Metrics]:
    """One full step, evaluation and checkpoint included; returns the metrics. Nothing is kept.

    The policy and reward models are tiny random ones with a byte-level tokenizer. The rows are the examples of the
    recipe's task, those of its file or function if it has one, or a few prompts without further columns.
    """
    tokenizer, rows = tiny_tokenizer(), _rows(recipe)
    rewards = [
        RewardModel(tiny_reward_model(tokenizer), tokenizer) if reward.model is not None else reward.load()
        for reward in recipe.rewards
    ]
    model = with_adapter(tiny_model(tokenizer), recipe.lora)
    reference = None if recipe.reference_model is None else tiny_model(tokenizer, seed=1)
    parts = Parts(model, tokenizer, rewards, rows, rows if recipe.has_eval else None, None, reference)
    with tempfile.TemporaryDirectory() as folder:
        small = replace(
            recipe,
            steps=1,
            prompts_per_step=len(rows),
            max_prompt_length=None,
            max_completion_length=min(recipe.max_completion_length, 16),
            mixed_precision="bf16" if recipe.mixed_precision == "bf16" else "no",
            report_to=(),
            logging_steps=1,
            output_dir=folder,
        )
        return build_trainer(small, parts).train()


def _rows(recipe: Recipe) -> list[Row]:
    if recipe.task is not None and not recipe.is_generated:
        task = TASKS[recipe.task]
        return format_rows(task, task.examples, system_prompt=recipe.system_prompt, chat=recipe.chat)[:2]
    if recipe.dataset is None or not (recipe.is_generated or is_function(recipe.dataset) or is_file(recipe.dataset)):
        return [{"prompt": prompt} for prompt in PROMPTS]
    rows = recipe.train_rows()
    return [rows(0), rows(1)] if callable(rows) else list(rows[:2])
