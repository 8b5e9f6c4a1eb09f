"""A run as a file: all inputs of `grpo-fused train` as one dataclass, and its trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from accelerate.utils import set_seed
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_fused.call.options import check_options, option
from grpo_fused.rewards import RewardFunction, RewardModel, built_in
from grpo_fused.rewards.calling import raised
from grpo_fused.rewards.registry import bind
from grpo_fused.rollouts.engine import RolloutEngine
from grpo_fused.rollouts.vllm import VLLMEngine
from grpo_fused.trainer.checkpoint import quiet
from grpo_fused.trainer.config import GRPOTrainerConfig, check_for_vllm, check_used
from grpo_fused.trainer.data import Row, Rows, check_rows, from_here, load_rows
from grpo_fused.trainer.hub import check_name
from grpo_fused.trainer.loop import GRPOTrainer
from grpo_fused.trainer.metrics import check_trackers
from grpo_fused.trainer.reasoning_gym import REASONING_GYM, problems
from grpo_fused.trainer.tasks import TASKS, format_rows


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward function of a recipe: exactly one of `name`, `function` and `model`.

    Args:
        name: A built-in one: format, exact_answer, math_accuracy, countdown, ...
        function: A custom one, "module:function" or "path/to/file.py:function"; `grpo-fused train` also finds modules
            in the current folder.
        model: Path or name of a sequence-classification model with one label.
        weight: The weight of this reward in the sum.
        options: Keyword options of the function.
    """

    name: str | None = None
    function: str | None = None
    model: str | None = None
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self)
        sources = [name for name in (self.name, self.function, self.model) if name is not None]
        if len(sources) != 1:
            raise ValueError(f"rewards must each have exactly one of name, function and model; got {sources}")
        if self.model is not None:
            object.__setattr__(self, "model", os.path.expanduser(self.model))

    def load(self) -> RewardFunction:
        """The function, or a reward model."""
        if self.name is not None:
            return built_in(self.name, **self.options)
        if self.model is not None:
            with _naming("rewards.model", self.model):
                return RewardModel(self.model, **self.options)
        return bind(load_function(str(self.function)), self.options)


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter (peft); everything else stays frozen, and the reference is the model without it.

    Args:
        r: Rank.
        alpha: The adapter is scaled by alpha / r.
        target_modules: A list of the names of the layers that get one, such as [q_proj, v_proj]. A text is "all-linear"
            (all except the head), or a regular expression of whole names, such as ".*_proj".
    """

    r: int = option(16, least=1)
    alpha: int = option(32, least=1)
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Recipe(GRPOTrainerConfig):
    """A training run: the model, the data, the rewards, and the options of `GRPOTrainerConfig`.

    Args:
        model: Path or name of a causal LM that `AutoModelForCausalLM` loads; or of a peft adapter of one, which is then
            trained further.
        rewards: The reward functions.
        dataset: A .json, .jsonl, .parquet or .csv file; the name of a data set of the `datasets` library; or
            "module:function" or "path/to/file.py:function", which returns rows, or a function that makes row 0, 1, 2,
            ... without end. With `task: reasoning_gym` the name of its data set. Default that of the task.
        dataset_options: Keyword options of that function, or of the data set of reasoning-gym. Another function of
            `eval_dataset` is called without them.
        task: The form of the raw rows, which become prompts: gsm8k or countdown; or reasoning_gym, whose problems are
            generated, new ones in each step, with their verifiers for the reward score_answer. Default: the rows have a
            "prompt" already, text or chat messages.
        subset: Of a `datasets` name.
        split: Of a `datasets` name.
        limit: Number of first rows to take.
        eval_dataset: Held-out rows, like `dataset`; `subset` and `split` apply only if it is a `datasets` name.
        eval_split: Only of a `datasets` name, default `split`; without `eval_dataset` the rows come from `dataset`.
        eval_limit: Number of first held-out rows to take. With `task: reasoning_gym` the number of held-out problems.
        system_prompt: Put before each prompt, of a task or of your own rows; default that of the task, or none.
        chat: Prompts of a task are chat messages; false for base models without a chat template.
        reference_model: Path or name of a causal LM with the same vocabulary, towards which the KL of the loss is: a
            teacher. Default the policy as it was before training.
        dtype: Of the weights: "float32" (see `mixed_precision`), "bfloat16", or "auto" for the dtype of the files.
        attn_implementation: Attention of the model: "sdpa", "flash_attention_2", ...; None leaves it to transformers.
        lora: Train a low-rank adapter instead of all weights.
        rollout: The rollout engine: "hf" is the policy's own `generate`, "vllm" a vLLM in this process.
        vllm_options: Options of `vllm.LLM` (gpu_memory_utilization, max_model_len, ...).
        output_dir: Folder of metrics, checkpoints and curves.
    """

    model: str
    rewards: tuple[Reward, ...]
    dataset: str | None = None
    dataset_options: dict[str, Any] = field(default_factory=dict)
    task: Literal["gsm8k", "countdown", "reasoning_gym"] | None = None
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
    reference_model: str | None = None
    rollout: Literal["hf", "vllm"] = "hf"
    vllm_options: dict[str, Any] = field(default_factory=dict)
    output_dir: str = "runs/grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "reference_model", "output_dir"):
            if (place := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.path.expanduser(place))
        if not self.output_dir or Path(self.output_dir).is_file():
            raise ValueError(f"output_dir must be a folder; got {self.output_dir!r}")
        if not self.rewards:
            raise ValueError("rewards must name at least one reward function; got none")
        if self.task is None and self.dataset is None:
            raise ValueError("a recipe must name a dataset or a task; got neither")
        if self.is_generated and self.dataset is None:
            raise ValueError("dataset must name a data set of reasoning-gym, such as chain_sum; got none")
        self._check_sources()
        if self.rollout == "vllm":
            check_for_vllm(self)

    def _check_sources(self) -> None:
        """Options of data and rollouts that would change nothing."""
        eval_is_named = self.has_eval and is_named(self.eval_source)
        is_vllm = self.rollout == "vllm"
        named = "a `datasets` name, no file or function"
        other = "a task other than reasoning_gym (eval_limit takes its held-out problems)"
        takes_options = self.is_generated or is_function(self.dataset)
        check_used(self, takes_options, 'task reasoning_gym or a dataset "module:function"', "dataset_options")
        check_used(self, not self.is_generated, other, "subset", "split", "eval_dataset", "eval_split")
        check_used(self, is_named(self.dataset) or eval_is_named, named, "subset", "split")
        check_used(self, eval_is_named, f"held-out rows of {named}", "eval_split")
        held_out = "held-out rows (eval_dataset, eval_split)"
        check_used(self, self.has_eval, held_out, "eval_limit", "eval_samples", "eval_steps")
        check_used(self, is_vllm, "rollout vllm", "vllm_options", "importance_sampling", "importance_sampling_clip")
        check_used(self, not is_vllm, "rollout hf", "generation_batch_size")
        check_used(self, self.task is not None, "a task: other prompts stay as they are", "chat")

    @property
    def is_generated(self) -> bool:
        """Whether the rows are problems of reasoning-gym."""
        return self.task == REASONING_GYM.name

    @property
    def has_eval(self) -> bool:
        """Whether there are held-out rows."""
        return self.eval_limit is not None if self.is_generated else bool(self.eval_dataset or self.eval_split)

    @property
    def eval_source(self) -> str | None:
        """Where held-out rows are from."""
        return self.eval_dataset or self.dataset

    def train_rows(self) -> Rows:
        """The training data: rows, or a function that makes them."""
        rows = self._raw(self.dataset, self.split, self.limit)
        if callable(rows):
            return lambda index: self._format([rows(index)], self.dataset)[0]
        return self._format(rows, self.dataset)

    def eval_rows(self) -> list[Row] | None:
        """The held-out data, if any."""
        if not self.has_eval:
            return None
        rows = self._raw(self.eval_source, self.eval_split or self.split, self.eval_limit, held_out=True)
        if callable(rows):
            raise ValueError("eval_limit must be given for an eval_dataset that makes rows without end; got none")
        return list(self._format(rows, self.eval_source))

    def _raw(self, source: str | None, split: str, limit: int | None, *, held_out: bool = False) -> Rows:
        if self.is_generated:
            problem = problems(str(source), self.dataset_options, seed=self.seed, held_out=held_out)
            return problem if limit is None else [problem(index) for index in range(limit)]
        if is_function(source):
            name, options = ("dataset", self.dataset_options) if source == self.dataset else ("eval_dataset", {})
            function = load_function(str(source), name)
            try:
                rows: Any = function(**options)
                if not callable(rows):
                    rows = list(islice(rows, limit))  # it may be endless
                elif limit is None:
                    return rows  # type: ignore[no-any-return]
                else:
                    rows = [rows(index) for index in range(limit)]
            except Exception as error:
                raise ValueError(f"{name} {source!r} {raised(error)}") from error
            return load_rows(rows)
        if not is_named(source):
            return load_rows(str(source), limit=limit)
        subset = self.subset
        if source is None and self.task is not None:
            source, subset = TASKS[self.task].source, subset or TASKS[self.task].subset
        return load_rows(str(source), subset=subset, split=split, limit=limit)

    def _format(self, rows: Sequence[Row], source: str | None) -> Sequence[Row]:
        if self.task is not None:
            task = REASONING_GYM if self.is_generated else TASKS[self.task]
            return format_rows(task, rows, system_prompt=self.system_prompt, chat=self.chat)
        if not self.system_prompt:
            return rows
        check_rows(rows, 1, name=str(source))
        return [with_system_prompt(row, self.system_prompt) for row in rows]


def is_function(source: str | None) -> bool:
    """Whether a data set is a function's place, "module:function" or "path/to/file.py:function"."""
    place, _, name = (source or "").rpartition(":")
    return bool(place) and name.isidentifier()


def is_named(source: str | None) -> bool:
    """Whether the `datasets` library loads a data set (None: that of the task): it is no function and no file."""
    return source is None or not (is_function(source) or Path(source).expanduser().is_file())


def with_system_prompt(row: Row, system_prompt: str) -> Row:
    """The row with the system prompt as its first message, or before its text."""
    prompt: Any = row["prompt"]
    if isinstance(prompt, str):
        return {**row, "prompt": f"{system_prompt}\n\n{prompt}"}
    if prompt[0]["role"] == "system":
        raise ValueError(f"system_prompt must be left out where rows have a system message; got {prompt[0]!r:.80}")
    return {**row, "prompt": [{"role": "system", "content": system_prompt}, *prompt]}


class Parts(NamedTuple):
    """The loaded parts of a recipe: arguments of `GRPOTrainer`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reward_functions: list[RewardFunction]
    train_dataset: Rows
    eval_dataset: list[Row] | None
    engine: RolloutEngine | None = None
    reference_model: PreTrainedModel | None = None


def load_parts(recipe: Recipe) -> Parts:
    """Loads the parts of a recipe; data and reward functions first, since their errors show quickly."""
    check_trackers(recipe.report_to)
    for package, is_used in (("peft", recipe.lora is not None), ("vllm", recipe.rollout == "vllm")):
        if is_used and find_spec(package) is None:
            raise ModuleNotFoundError(f"this recipe needs the package {package}", name=package)
    set_seed(recipe.seed)  # for the adapter
    with nullcontext() if sys.stderr.isatty() else quiet():
        train_rows, eval_rows = recipe.train_rows(), recipe.eval_rows()
        rewards = [reward.load() for reward in recipe.rewards]
        base, teacher = base_of(recipe), recipe.reference_model
        model: Any = _load_model(recipe, "model", base)
        reference = None if teacher is None else _load_model(recipe, "reference_model", teacher)
        with _naming("model", recipe.model):
            # peft saves an adapter alone
            tokenizer = AutoTokenizer.from_pretrained(recipe.model if get_tokenizer_config(recipe.model) else base)
    if base != recipe.model:
        from peft import PeftModel  # slow to import

        model = PeftModel.from_pretrained(model, recipe.model, is_trainable=True)
    engine = VLLMEngine(base, **recipe.vllm_options) if recipe.rollout == "vllm" else None
    return Parts(with_adapter(model, recipe.lora), tokenizer, rewards, train_rows, eval_rows, engine, reference)


def base_of(recipe: Recipe) -> str:
    """The model that is loaded: that of the recipe, or the one under it if that is an adapter, which is then trained.

    Raises:
        ValueError: It is an adapter, and there shall be a new one, or it does not name the model under it.
    """
    with _naming("model", recipe.model):
        adapter = find_adapter_config_file(recipe.model)
    if adapter is None:
        return recipe.model
    if recipe.lora is not None:
        raise ValueError(
            f"model must be a whole model where lora makes a new adapter; got the adapter {recipe.model!r}: leave lora "
            "out to train it further, or merge it first (peft: merge_and_unload)"
        )
    from peft import PeftConfig  # slow to import

    base = PeftConfig.from_pretrained(recipe.model).base_model_name_or_path
    if not base:  # of a model that was made in code
        raise ValueError(
            f"model must be a whole model, or an adapter that names the model under it; got {recipe.model!r}, whose "
            f"adapter_config.json has base_model_name_or_path {base!r}"
        )
    return str(base)


def _load_model(recipe: Recipe, name: str, place: str) -> PreTrainedModel:
    """A causal language model, all of whose weights are in its files."""
    options: Any = {"dtype": recipe.dtype, "attn_implementation": recipe.attn_implementation}
    with _naming(name, place):
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True, **options)
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{name} must be a causal language model; got {place!r}, which has no weights for "
            f"{', '.join(missing[:3])}: they would be random"
        )
    return model  # type: ignore[no-any-return]


@contextmanager
def _naming(name: str, place: str) -> Iterator[None]:
    try:
        check_name(place)
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{name} must be a path or name that can be loaded; got {place!r}: {error}") from error


def with_adapter(model: PreTrainedModel, lora: LoRA | None) -> PreTrainedModel:
    """The model with a new adapter."""
    if lora is None:
        return model
    from peft import LoraConfig, get_peft_model  # slow to import

    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, config)  # type: ignore[return-value]  # it behaves as the model


def build_trainer(
    recipe: Recipe, parts: Parts | None = None, *, resume: bool = False, overwrite: bool = False
) -> GRPOTrainer:
    """The trainer of a recipe; `parts`, if given, replace those that it names."""
    parts = parts or load_parts(recipe)
    return GRPOTrainer(
        **parts._asdict(),
        config=recipe,
        reward_weights=[reward.weight for reward in recipe.rewards],
        output_dir=recipe.output_dir,
        resume=resume,
        overwrite=overwrite,
    )


def load_function(place: str, option: str = "function") -> Callable[..., Any]:
    """The function at "module:function" or "path/to/file.py:function".

    Args:
        place: The text.
        option: The name of the option, for the error.

    Raises:
        ValueError: The text is not of this form, the module or file cannot be loaded, or has no such function.
    """
    where, _, name = place.rpartition(":")
    must = f'{option} must be "module:function" or "path/to/file.py:function" that can be loaded; got {place!r}'
    must += from_here(Path(where)) if where.endswith(".py") else ""
    try:
        found: Any = _module_of(Path(where).expanduser().resolve()) if where.endswith(".py") else import_module(where)
    except Exception as error:
        raise ValueError(f"{must}, which {raised(error)}") from error
    if not callable(function := getattr(found, name, None)):
        raise ValueError(f"{must}, which has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _module_of(file: Path) -> ModuleType:
    """The module of a file, loaded once for each content: its functions share its state, and forks find it by name.

    Modules beside the file can be imported, after all others.
    """
    stem = "".join(c if c.isalnum() else "_" for c in file.stem)
    name = f"{stem}_{sha256(bytes(file) + file.read_bytes()).hexdigest()}"
    if name not in sys.modules:
        spec: Any = spec_from_file_location(name, file)
        sys.modules[name] = module = module_from_spec(spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
