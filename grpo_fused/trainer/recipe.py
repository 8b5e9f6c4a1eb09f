"""A run as a file: everything that `grpo-fused train` needs, as one dataclass, and the trainer that it describes."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused.rewards import RewardModel, built_in
from grpo_fused.trainer.config import GRPOTrainerConfig, option
from grpo_fused.trainer.data import Row, is_file, load_rows
from grpo_fused.trainer.loop import GRPOTrainer
from grpo_fused.trainer.rollout import RolloutEngine
from grpo_fused.trainer.scoring import RewardFunction
from grpo_fused.trainer.tasks import find_task, format_rows
from grpo_fused.trainer.vllm import VLLMEngine, check_options


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward function of a recipe: exactly one of `name`, `function` and `model`.

    Args:
        name: A built-in one: format, exact_answer, math_accuracy, countdown, ...
        function: One of your own, "module:function" or "path/to/file.py:function"; `grpo-fused train` finds modules of
            the folder that it is called in, too.
        model: Path or name of a sequence-classification model with one label.
        weight: Of this reward in the sum.
        options: Keyword options of the function.
    """

    name: str | None = None
    function: str | None = None
    model: str | None = None
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in ("name", "function", "model") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a reward must have exactly one of name, function and model; got {given or 'none'}")

    def load(self) -> RewardFunction:
        """The function, or the model behind one."""
        if self.name is not None:
            return built_in(self.name, **self.options)
        if self.model is not None:
            return RewardModel(self.model, **self.options)
        assert self.function is not None
        function = load_function(self.function)
        if not self.options:
            return function
        bound = partial(function, **self.options)
        bound.__name__ = getattr(function, "__name__", self.function)  # type: ignore[attr-defined]
        return bound


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter (peft); everything else stays frozen, and the reference is the model without it.

    Args:
        r: Rank.
        alpha: The adapter is scaled by alpha / r.
        target_modules: Names of the layers that get one, or "all-linear" (all but the head).
    """

    r: int = 16
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Recipe(GRPOTrainerConfig):
    """What to train, on what, for which rewards; the options of `GRPOTrainerConfig` beside them.

    Args:
        model: Path or name of a causal LM that `AutoModelForCausalLM` loads.
        rewards: The reward functions.
        dataset: A .json, .jsonl, .parquet or .csv file, or the name of a data set of the `datasets` library. Default
            that of the task.
        task: What the raw rows are, and how they become prompts: gsm8k or countdown. Default: the rows have a "prompt"
            already, text or chat messages.
        subset: Of a `datasets` name.
        split: Of a `datasets` name.
        limit: Take the first rows only.
        eval_dataset: Held-out rows, like `dataset`; `subset` and `split` count for it only if it is a `datasets` name.
        eval_split: Of a `datasets` name, default `split`; alone it takes the held-out rows from `dataset`.
        eval_limit: Take the first held-out rows only.
        system_prompt: Put before each prompt; default that of the task.
        chat: Prompts of a task are chat messages; false for base models without a chat template.
        dtype: Of the weights: "float32" (see `mixed_precision`), "bfloat16", or "auto" for that of the files.
        attn_implementation: Attention of the model: "sdpa", "flash_attention_2", ...; None leaves it to transformers.
        lora: Train a low-rank adapter instead of all weights.
        rollout: What samples: "hf" is the policy's own `generate`, "vllm" a vLLM in this process.
        vllm_options: Options of `vllm.LLM` (gpu_memory_utilization, max_model_len, ...).
        output_dir: Where metrics, checkpoints and curves go.
    """

    model: str
    rewards: tuple[Reward, ...]
    dataset: str | None = None
    task: str | None = None
    subset: str | None = None
    split: str = "train"
    limit: int | None = option(None, least=1)
    eval_dataset: str | None = None
    eval_split: str | None = None
    eval_limit: int | None = option(None, least=1)
    system_prompt: str | None = None
    chat: bool = True
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    attn_implementation: str | None = None
    lora: LoRA | None = None
    rollout: Literal["hf", "vllm"] = "hf"
    vllm_options: dict[str, Any] = field(default_factory=dict)
    output_dir: str = "runs/grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rewards:
            raise ValueError("rewards must name at least one reward function; got none")
        if self.task is not None:
            find_task(self.task)
        elif self.dataset is None:
            raise ValueError("a recipe must name a dataset or a task; got neither")
        if self.rollout == "vllm":
            check_options(self)

    @property
    def training(self) -> GRPOTrainerConfig:
        """The trainer's part of it."""
        return GRPOTrainerConfig(**{f.name: getattr(self, f.name) for f in fields(GRPOTrainerConfig)})

    def train_rows(self) -> list[Row]:
        """The training data."""
        return self._rows(self.dataset, self.subset, self.split, self.limit)

    def eval_rows(self) -> list[Row] | None:
        """The held-out data, if any."""
        if self.eval_dataset is None and self.eval_split is None:
            return None
        if self.eval_dataset is not None and is_file(self.eval_dataset):
            return self._rows(self.eval_dataset, None, self.eval_split or "train", self.eval_limit)
        return self._rows(
            self.eval_dataset or self.dataset, self.subset, self.eval_split or self.split, self.eval_limit
        )

    def _rows(self, source: str | None, subset: str | None, split: str, limit: int | None) -> list[Row]:
        if self.task is None:
            assert source is not None
            rows = load_rows(source, subset=subset, split=split, limit=limit)
            return rows if self.system_prompt is None else [with_system_prompt(row, self.system_prompt) for row in rows]
        task = find_task(self.task)
        subset = subset if source is not None else subset or task.subset
        rows = load_rows(source or task.source, subset=subset, split=split, limit=limit)
        return format_rows(task, rows, system_prompt=self.system_prompt, chat=self.chat)


def with_system_prompt(row: Row, system_prompt: str) -> Row:
    """The row with the system prompt as its first message, or before its text."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return {**row, "prompt": f"{system_prompt}\n\n{prompt}"}
    messages = list(prompt) if isinstance(prompt, Sequence) else []  # an empty prompt is refused later, by its row
    return {**row, "prompt": [{"role": "system", "content": system_prompt}, *messages] if messages else prompt}


class Parts(NamedTuple):
    """What a recipe names, loaded."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rewards: list[RewardFunction]
    train_rows: list[Row]
    eval_rows: list[Row] | None
    engine: RolloutEngine | None = None


def load_parts(recipe: Recipe) -> Parts:
    """Everything that the recipe names; data and reward functions first, since they are quick to be wrong."""
    set_seed(recipe.seed)  # of the adapter, and of weights that a model's files lack
    train_rows, eval_rows = recipe.train_rows(), recipe.eval_rows()
    rewards = [reward.load() for reward in recipe.rewards]
    options = {} if recipe.attn_implementation is None else {"attn_implementation": recipe.attn_implementation}
    dtype = recipe.dtype if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=dtype, **options)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    engine = VLLMEngine(recipe.model, **recipe.vllm_options) if recipe.rollout == "vllm" else None
    return Parts(with_adapter(model, recipe.lora), tokenizer, rewards, train_rows, eval_rows, engine)


def with_adapter(model: PreTrainedModel, lora: LoRA | None) -> PreTrainedModel:
    """The model with a fresh adapter on it."""
    if lora is None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("lora needs peft (pip install peft)") from error
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, config)  # type: ignore[return-value]  # it behaves as the model


def build_trainer(
    recipe: Recipe, parts: Parts | None = None, *, resume: bool = False, overwrite: bool = False
) -> GRPOTrainer:
    """The trainer of a recipe; `parts` in place of what it names, if given."""
    parts = parts or load_parts(recipe)
    return GRPOTrainer(
        parts.model,
        parts.tokenizer,
        parts.rewards,
        parts.train_rows,
        recipe.training,
        reward_weights=[reward.weight for reward in recipe.rewards],
        eval_dataset=parts.eval_rows,
        engine=parts.engine,
        output_dir=recipe.output_dir,
        resume=resume,
        overwrite=overwrite,
    )


def load_function(place: str) -> RewardFunction:
    """The function at "module:function" or "path/to/file.py:function".

    Raises:
        ValueError: The text is not of this form, or there is no such module, file or function.
    """
    where, colon, name = place.rpartition(":")
    if not (where and colon and name.isidentifier()):
        raise ValueError(f'function must be "module:function" or "path/to/file.py:function"; got {place!r}')
    try:
        function = runpy.run_path(where)[name] if where.endswith(".py") else getattr(import_module(where), name)
    except (ImportError, OSError, KeyError, AttributeError) as error:
        raise ValueError(f"there is no function {name} in {where} ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise ValueError(f"{place} must be a function; got {type(function).__name__}")
    return function
