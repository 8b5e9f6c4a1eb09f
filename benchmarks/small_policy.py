"""A small policy that learns a task by GRPO, in our trainer or in TRL's: what the studies of learning share.

All arms of a seed begin with the same weights, after a short supervised warm-up, and get the same problems in the same
order, the same reward function and the same options. Each samples with its own generator.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.arithmetic.evaluate import evaluate
from examples.arithmetic.model import CHARACTERS, build_tokenizer
from examples.arithmetic.task import split_questions
from examples.arithmetic.warmup import warm_up
from grpo_fused import CandidateSets, GRPOLossConfig
from grpo_fused.rewards import exact_answer_reward
from grpo_fused.rollouts.engine import Generation, Sampling, length_mask
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, HuggingFaceEngine, ObjectiveOptions
from grpo_fused.trainer.reasoning_gym import problems

ARMS = ("ours", "fused_trl", "patched_trl", "trl")
VOCAB, HIDDEN, LAYERS, HEADS = 512, 96, 2, 4
WARMUP_BATCH, WARMUP_RATE = 48, 2e-3
HELD_OUT, DEMONSTRATIONS = 1000, 3000
COUNTDOWN = {
    "min_numbers": 3, "max_numbers": 3, "min_value": 1, "max_value": 20, "min_target": 1, "max_target": 60,
    "operators": ("+", "-"),
}  # fmt: skip
RIGHT_SHARE = 0.35
"""Of the demonstrations of countdown whose expression has the target; the others use the numbers in any way."""

Row = dict[str, Any]


class Data(NamedTuple):
    """Rows of a task. `prompt` goes to the policy; the rest is what its judge needs."""

    demonstrations: list[dict[str, str]]
    rows: Callable[[int, int], list[Row]]
    """a seed and a number to the problems of a run, in their order"""
    held_out: list[Row]
    judge: Callable[[str, Row], float]
    """a completion and its row to 1.0 if it is right, else 0.0"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run. Names are those of `GRPOTrainerConfig`; `loss` has options that TRL's `GRPOConfig` has, too."""

    task: str = "sums"
    warmup: int = 300
    steps: int = 50
    prompts_per_step: int = 8
    num_generations: int = 8
    num_iterations: int = 2
    max_completion_length: int = 28
    learning_rate: float = 2e-4
    temperature: float = 1.0
    top_p: float = 1.0
    bf16: bool = False
    share_prompts: bool = False
    keeps_sets: bool = True
    """whether our loss takes the candidate sets of a rollout by top-p"""
    loss: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] | None = None
    """options of `ObjectiveOptions`, in place of a loss type"""
    lag: int = 0
    """optimizer steps by which the sampler's weights are older than the policy's, once as many were taken"""
    fp8: bool = False
    """whether the sampler's weights are rounded to fp8"""
    lora: int = 0
    """rank of an adapter on all linear layers and the head; 0: all weights are trained"""
    int8_head: bool = False
    """whether the frozen head is in int8, one scale a row (torchao)"""


@dataclass
class Trained:
    """A trained policy, and of each rollout the mean reward, the lengths of completions in tokens and their ids."""

    model: PreTrainedModel
    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    """means"""
    lengths_right: list[float | None] = field(default_factory=list)
    """means of the right ones; None if there are none"""
    lengths_wrong: list[float | None] = field(default_factory=list)
    completion_ids: list[list[list[int]]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    """of each rollout, of our trainer only"""


def sums() -> Data:
    """Sums and differences of two-digit numbers, with the work shown or not; the answer is compared as text."""
    split = split_questions(DEMONSTRATIONS, HELD_OUT)

    def rows(seed: int, number: int) -> list[Row]:
        return random.Random(seed).sample(split.train, number)

    def judge(text: str, row: Row) -> float:
        return exact_answer_reward([text], [row["answer"]])[0] or 0.0

    return Data(split.demonstrations, rows, split.held_out, judge)


def countdown() -> Data:
    """`3,5,7=22:` → `3*5+7`: reasoning-gym's Countdown, its problems and its verifier; only the prompt is shorter."""
    rng = random.Random(0)

    def row(problem: Any) -> Row:
        numbers, target = problem["metadata"]["numbers"], problem["metadata"]["target"]
        prompt = f"{','.join(map(str, numbers))}={target}:"
        return {"prompt": prompt, "numbers": numbers, "answer": problem["answer"], "score": problem["score_answer"]}

    def demonstration(shown: Row) -> dict[str, str]:
        numbers = [str(number) for number in rng.sample(shown["numbers"], len(shown["numbers"]))]
        expression = numbers[0] + "".join(rng.choice("+-") + number for number in numbers[1:])
        right = rng.random() < RIGHT_SHARE
        return {"prompt": shown["prompt"], "completion": shown["answer"].replace(" ", "") if right else expression}

    shown = _first(problems("countdown", COUNTDOWN, seed=2047), DEMONSTRATIONS, row)
    drawn = _first(problems("countdown", COUNTDOWN, held_out=True), HELD_OUT, row)
    held_out = list({one["prompt"]: one for one in drawn}.values())  # each once
    taken = {one["prompt"] for one in held_out}

    def rows(seed: int, number: int) -> list[Row]:
        drawn = _first(problems("countdown", COUNTDOWN, seed=seed), 2 * number, row)
        return [one for one in drawn if one["prompt"] not in taken][:number]

    demonstrations = [demonstration(one) for one in shown if one["prompt"] not in taken]
    return Data(demonstrations, rows, held_out, lambda text, row: float(row["score"](text) == 1.0))


def answer_first() -> Data:
    """`7+5=` → `12...`: a sum of two digits, and then dots that count for nothing: only the answer is judged.

    Half of the demonstrations are off by one, so that the warm policy is often wrong, and can know when.
    """
    rng = random.Random(0)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]

    def demonstration(row: Row) -> dict[str, str]:
        answer = int(row["answer"]) + rng.choice((0, 0, -1, 1))
        return {"prompt": row["prompt"], "completion": str(answer) + "." * rng.randint(0, 12)}

    return Data(
        [demonstration(rng.choice(rows)) for _ in range(DEMONSTRATIONS)],
        lambda seed, number: random.Random(seed).choices(rows, k=number),
        rows,
        lambda text, row: float(text.rstrip(".") == row["answer"]),
    )


def _first(problem: Callable[[int], Any], number: int, row: Callable[[Any], Row]) -> list[Row]:
    return [row(problem(index)) for index in range(number)]


TASKS: dict[str, tuple[Callable[[], Data], type[PreTrainedModel]]] = {
    "sums": (sums, Qwen2ForCausalLM),
    "countdown": (countdown, LlamaForCausalLM),
    "answer_first": (answer_first, Qwen2ForCausalLM),
}
"""Name to its rows, and to the policy that learns it."""


@lru_cache
def data_of(task: str) -> Data:
    """The rows of a task, made once."""
    return TASKS[task][0]()


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character."""
    return build_tokenizer(CHARACTERS + "*/():.")


def start(task: str, seed: int, warmup: int) -> PreTrainedModel:
    """The policy of a seed after its supervised warm-up: all arms begin here. It has more tokens than the tokenizer."""
    torch.manual_seed(seed)
    _, model_type = TASKS[task]
    words = tokenizer()
    model = model_type(
        model_type.config_class(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=64,
            tie_word_embeddings=False, pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id,
            bos_token_id=None, initializer_range=0.06, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        )
    )  # fmt: skip
    shown = data_of(task).demonstrations
    warm_up(model, words, shown, steps=warmup, batch_size=WARMUP_BATCH, learning_rate=WARMUP_RATE, seed=seed)
    return model


class Judge:
    """The reward function of a run, which records what it judges; the same for all arms."""

    __name__ = "right"

    def __init__(self, recipe: Recipe, rows: list[Row], model: PreTrainedModel) -> None:
        self.judge, self.rows, self.group = data_of(recipe.task).judge, rows, recipe.num_generations
        self.seen = Trained(model)
        self.indices: list[int] = []

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any
    ) -> list[float]:
        """1 for a right completion, 0 for another."""
        found = [self.judge(text, self.rows[i]) for text, i in zip(completions, index, strict=True)]
        self.seen.rewards.append(sum(found) / len(found))
        self.seen.lengths.append(fmean(map(len, completion_ids)))
        for means, reward in ((self.seen.lengths_right, 1.0), (self.seen.lengths_wrong, 0.0)):
            chosen = [len(ids) for ids, got in zip(completion_ids, found, strict=True) if got == reward]
            means.append(fmean(chosen) if chosen else None)
        self.seen.completion_ids.append([list(ids) for ids in completion_ids])
        self.indices += index[:: self.group]
        return found


def train(
    arm: str, recipe: Recipe, seed: int, model: PreTrainedModel, replay: list[list[list[int]]] | None = None
) -> Trained:
    """A run of one arm, from the given weights, which stay as they are.

    Args:
        arm: One of `ARMS`.
        recipe: The options of the run.
        seed: Of the problems and of the sampling.
        model: Where it begins.
        replay: For `ours`: completions for each rollout, in place of sampled ones.

    Raises:
        ValueError: The arm is unknown.
        RuntimeError: The trainer took the problems in another order.
    """
    if arm not in ARMS:
        raise ValueError(f"arm must be one of {', '.join(ARMS)}; got {arm!r}")
    model, number = adapted(copy.deepcopy(model), recipe, seed), recipe.steps * recipe.prompts_per_step
    judge = Judge(recipe, data_of(recipe.task).rows(seed, number), model)
    rows = [{"prompt": row["prompt"], "index": index} for index, row in enumerate(judge.rows)]
    AcceleratorState._reset_state(reset_partial_state=True)  # a process may train in fp32 and then in bf16
    if arm == "ours":
        judge.seen.metrics = train_ours(recipe, seed, model, judge, rows, replay)
    else:
        train_trl(arm, recipe, seed, model, judge, rows)
    if judge.indices != list(range(number)):
        raise RuntimeError(f"{arm} must take the {number} problems in their order; it took {judge.indices[:20]}, ...")
    return judge.seen


def adapted(model: PreTrainedModel, recipe: Recipe, seed: int) -> PreTrainedModel:
    """The model with the recipe's adapter and head, if it has any."""
    if recipe.int8_head:
        quantize_head(model)
    return with_adapters(model, recipe.lora, seed) if recipe.lora else model


def quantize_head(model: Any) -> None:
    """To int8, by torchao, with one scale a row."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(version=2), filter_fn=lambda _, name: name == "lm_head")


def with_adapters(model: Any, rank: int, seed: int) -> Any:
    """The model with LoRA on all linear layers, the head's included."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    names = sorted({name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM"))


def train_ours(
    recipe: Recipe, seed: int, model: Any, judge: Judge, rows: list[Row], replay: list[list[list[int]]] | None
) -> list[dict[str, float]]:
    """In our trainer; the metrics of its steps."""
    named = asdict(recipe)
    for name in ("task", "warmup", "bf16", "keeps_sets", "loss", "objective", "lag", "fp8", "lora", "int8_head"):
        del named[name]
    config = GRPOTrainerConfig(
        **named, mixed_precision="bf16" if recipe.bf16 else "no", lr_scheduler_type="linear", seed=seed,
        logging_steps=10**6, loss=GRPOLossConfig(**recipe.loss),
        objective=None if recipe.objective is None else ObjectiveOptions(**recipe.objective),
    )  # fmt: skip
    words = tokenizer()
    engine: HuggingFaceEngine | None = None if replay is None else Replay(model, words, replay)
    if not recipe.keeps_sets:
        engine = WithoutSets(model, words)
    if recipe.lag or recipe.fp8:
        engine = Other(model, words, recipe.lag, fp8=recipe.fp8)
    return GRPOTrainer(model, words, [judge], lambda index: rows[index], config, engine=engine).train()


class Replay(HuggingFaceEngine):
    """Returns recorded completions, rollout by rollout."""

    def __init__(self, model: Any, words: Any, rollouts: list[list[list[int]]]) -> None:
        super().__init__(model, words)
        self.rollouts = iter(rollouts)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """The next ones."""
        rows = [torch.tensor(ids) for ids in next(self.rollouts)]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=sampling.pad_token_id)
        return Generation(ids, length_mask(torch.tensor([len(row) for row in rows]), ids.shape[1]), None, None)


class Other(HuggingFaceEngine):
    """Samples with older weights of the policy, or rounded ones."""

    def __init__(self, model: Any, words: Any, lag: int, *, fp8: bool) -> None:
        super().__init__(copy.deepcopy(model), words)
        self.lag, self.fp8 = lag, fp8
        self.weights: list[dict[str, Tensor]] = []
        """of the newest syncs, the oldest first"""

    def sync_weights(self, model: PreTrainedModel) -> None:
        """Takes those of `lag` syncs ago, or the first."""
        self.weights.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        self.weights = self.weights[-1 - self.lag :]
        self.model.load_state_dict(self.weights[0])
        if self.fp8:
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data = rounded_to_fp8(module.weight.data)


def rounded_to_fp8(weight: Tensor) -> Tensor:
    """A matrix rounded to e4m3, with a scale for each row."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


class WithoutSets(HuggingFaceEngine):
    """Rollouts whose sets are the whole vocabulary, so that the loss does not know what was cut off."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Generation:
        """See `RolloutEngine`."""
        found = super().generate(prompts, sampling)
        everything = CandidateSets(found.ids.new_empty(0), torch.zeros(found.ids.numel() + 1, dtype=torch.int64))
        return found if found.candidates is None else found._replace(candidates=everything)


def train_trl(arm: str, recipe: Recipe, seed: int, model: Any, judge: Judge, rows: list[Row]) -> None:
    """In TRL's trainer: stock, after `patch_trl()`, or `FusedGRPOTrainer`."""
    from datasets import Dataset
    from trl import GRPOConfig
    from trl import GRPOTrainer as Stock

    from grpo_fused.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl

    if recipe.share_prompts or not recipe.keeps_sets:
        raise ValueError(f"share_prompts and keeps_sets are options of our trainer; got them with {arm}")
    loss = {"loss_type": "dapo"} | recipe.loss
    loss.pop("max_completion_length", None)  # `dr_grpo` of TRL divides by its own
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            folder, max_steps=recipe.steps * recipe.num_iterations, num_iterations=recipe.num_iterations,
            per_device_train_batch_size=recipe.prompts_per_step * recipe.num_generations,
            gradient_accumulation_steps=1, num_generations=recipe.num_generations,
            max_completion_length=recipe.max_completion_length, temperature=recipe.temperature, top_p=recipe.top_p,
            top_k=0, learning_rate=recipe.learning_rate, lr_scheduler_type="linear", seed=seed, shuffle_dataset=False,
            bf16=recipe.bf16, use_cpu=True, report_to="none", logging_steps=10**6, disable_tqdm=True,
            save_strategy="no", gradient_checkpointing=False, **loss,
        )  # fmt: skip
        if arm == "patched_trl":
            patch_trl()
        try:
            (FusedGRPOTrainer if arm == "fused_trl" else Stock)(
                model, judge, options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
            ).train()
        finally:
            unpatch_trl()


def accuracy(model: PreTrainedModel, recipe: Recipe) -> float:
    """The share of held-out problems whose greedy completion is right."""
    data, length = data_of(recipe.task), recipe.max_completion_length
    texts = evaluate(model, tokenizer(), data.held_out, max_completion_length=length).completions
    return sum(data.judge(text, row) for text, row in zip(texts, data.held_out, strict=True)) / len(texts)


def weights(model: PreTrainedModel) -> Tensor:
    """All weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
