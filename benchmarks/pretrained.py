"""A pretrained language model learns a task of reasoning-gym by GRPO: our trainer, TRL's stock one, `FusedGRPOTrainer`.

    python -m benchmarks.gemma ~/gemma-3-270m                                     # the model, once
    python -m benchmarks.pretrained ~/gemma-3-270m --work runs/pretrained --out results.json

The whole vocabulary, where a run of stock TRL takes 40 minutes; `benchmarks.pretrained_cut` has many seeds. Every run
is a line of `WORK/runs.jsonl`; the program continues after the last one, and `--since` takes the runs of a file of
results.

1. A short supervised start (`WORK/start`): the base model sees `STARTING_EXAMPLES` worked sums once, so that it writes
   the steps and the tags. All runs begin with its weights.
2. GRPO on new problems in each step. The trainers of a seed get the same problems in the same order and the same
   options, and sample with their own generators.
3. Held-out accuracy (greedy) of the start and of each run, on problems that no run has seen.

Each step's time is split by hooks: `generation` is that of `model.generate`, `body` the forward and backward passes of
the layers, `head` what is between them (head, loss and their gradients), `other` the rest (rewards, AdamW, checks).
Times are CPU seconds of the process (one thread: OMP_NUM_THREADS=1), so that a run's waiting for a core does not count.
Peak memory is that of the process of a run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

from benchmarks.child import in_child
from benchmarks.equivalence import statistics_of
from benchmarks.gemma_cut import ids_of, padded
from benchmarks.memory import peak_of_process
from benchmarks.results import load, machine, processor
from benchmarks.seeds import Arm, Line, Seeds, each_run
from benchmarks.study import Section, main
from benchmarks.study_page import PARTS
from grpo_fused import fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.rewards import score_answer_reward
from grpo_fused.trainer import GRPOTrainer
from grpo_fused.trainer.metrics import append_jsonl, read_jsonl
from grpo_fused.trainer.reasoning_gym import problems
from grpo_fused.trainer.recipe import Recipe, Reward, load_parts

ARMS = dict.fromkeys(("ours", "trl", "fused_trl"), "benchmarks.pretrained:train")
"""Trainers, in the order in which they run, and what runs them."""
BOUND = 0.05
"""The smallest difference in accuracy that counts."""

Model = Annotated[Path, "a folder, as benchmarks.gemma writes it"]
Work = Annotated[Path, "folder of the start, and of runs.jsonl in it or in a folder of it"]
Since = Annotated[Path | None, "a file of results; its runs count as done"]

TASK, TASK_OPTIONS = "chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
STARTING_EXAMPLES, STARTING_SEED, STARTING_RATE, BATCH = 128, 2047, 2e-5, 16
PROMPTS, GENERATIONS, LENGTH, RATE, STEPS = 8, 8, 48, 2e-6, 20
HELD_OUT = 1024
SEEDS, DRAWS = 20, 8 * HELD_OUT
"""Seeds whose problems are not held out: no more can be run. Draws from the 4,000 sums that give the held-out ones."""


def recipe(model: str, folder: Path, seed: int) -> Recipe:
    """The run as a recipe of our trainer."""
    return Recipe(
        model=model, task="reasoning_gym", dataset=TASK, dataset_options=TASK_OPTIONS, chat=False,
        system_prompt="", rewards=(Reward(name="score_answer"),), eval_limit=HELD_OUT, steps=STEPS, seed=seed,
        prompts_per_step=PROMPTS, num_generations=GENERATIONS, max_completion_length=LENGTH, learning_rate=RATE,
        mixed_precision="bf16", save_steps=10, save_total_limit=1, logging_steps=1, output_dir=str(folder),
    )  # fmt: skip


class Clock:
    """CPU seconds of the parts of a step, by hooks on a model and its trainer's accelerator."""

    def __init__(self, model: Any, accelerator: Any, file: Path) -> None:
        self.file, self.seconds, self.generates, self.at = file, Counter[str](), False, 0.0
        self.started = time.process_time()
        generate, backward = model.generate, accelerator.backward

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            self.generates, started = True, time.process_time()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generates = False
                self.seconds["generation"] += time.process_time() - started

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            self._passed("body")  # since the gradient of the hidden states

        model.generate, accelerator.backward = timed_generate, timed_backward
        body = model.get_decoder()
        body.register_forward_pre_hook(self._before_body)
        body.register_forward_hook(self._after_body)

    def done(self, step: int, **metrics: float) -> None:
        """Writes the line of a step and starts the next one."""
        total = time.process_time() - self.started
        other = total - sum(self.seconds.values())
        append_jsonl(self.file, {"step": step, "seconds": total, **self.seconds, "other": other, **metrics})
        self.seconds, self.started = Counter(), time.process_time()

    def _passed(self, part: str) -> None:
        now = time.process_time()
        self.seconds[part] += now - self.at
        self.at = now

    def _before_body(self, *_: Any) -> None:
        self.at = time.process_time()

    def _after_body(self, module: Any, inputs: Any, output: Any) -> None:
        if self.generates:
            return
        self._passed("body")
        hidden = output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._passed("head"))


def start(model: Path, folder: Path, examples: int) -> None:
    """The supervised start: one epoch over worked sums, saved as a model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=STARTING_RATE, weight_decay=0.0)
    problem = problems(TASK, TASK_OPTIONS, seed=STARTING_SEED)
    for first in range(0, examples, BATCH):
        rows = [problem(index) for index in range(first, min(first + BATCH, examples))]
        ids, trained = padded([ids_of(tokenizer, prompt_of(row), worked(row)) for row in rows])
        with torch.autocast("cpu", torch.bfloat16):
            hidden = head_hidden_states(policy, ids)  # causal: no token sees the padding on its right
            scores = fused_linear_logprobs(
                hidden[:, :-1], token_ids=ids[:, 1:], mask=trained[:, :-1], **lm_head_inputs(policy)
            )
        loss = -scores.logps.sum() / trained.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"start: {first + len(rows)} of {examples} examples, loss {loss.item():.3f}", flush=True)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompt_of(row: Any) -> str:
    """As the recipe makes it: `chat: false` without a system prompt."""
    return f"User: {row['question']}\nAssistant:"


def worked(row: Any) -> str:
    """What the supervised start teaches: ` 1 + 3 = 4, 4 - 5 = -1 <answer>-1</answer>`."""
    first, *rest = row["metadata"]["expression"].split()
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total} {sign} {term} = {after}")
        total = after
    return f" {', '.join(steps)} <answer>{total}</answer>"


def all_texts() -> list[tuple[str, str]]:
    """The prompts of all 4,000 sums, and their worked answers."""
    one = problems(TASK, TASK_OPTIONS)(0)
    question, shown = one["question"], one["metadata"]["expression"]
    texts = []
    for a, b, c, s, t in product(*[range(10)] * 3, *["+-"] * 2):
        expression = f"{a} {s} {b} {t} {c}"
        row = {"question": question.replace(shown, expression), "metadata": {"expression": expression}}
        texts.append((prompt_of(row), worked(row)))
    return texts


class TimedTrainer(GRPOTrainer):
    """Our trainer with a clock."""

    clock: Clock

    def step(self) -> dict[str, float]:
        """A step, and its line of times."""
        metrics = super().step()
        self.clock.done(self.steps_done + 1, **{name: metrics[name] for name in ("reward", "completion_length")})
        return metrics


def train_ours(options: Recipe, parts: dict[str, Any]) -> Any:
    """The policy after a run of our trainer, with the times of its steps in the recipe's folder."""
    trainer = TimedTrainer(**parts | {"eval_dataset": None}, config=options)
    trainer.clock = Clock(trainer.model, trainer.accelerator, Path(options.output_dir) / "steps.jsonl")
    trainer.train()
    return trainer.model


def train_trl(arm: str, model: str, folder: Path, seed: int) -> Any:
    """The policy after a run of TRL's trainer, stock or fused."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig
    from trl import GRPOTrainer as Stock

    from grpo_fused.integrations.trl import FusedGRPOTrainer

    problem = problems(TASK, TASK_OPTIONS, seed=seed)
    seen: dict[str, float] = {}

    def reward(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        rewards = score_answer_reward(completions, [problem(i)["score_answer"] for i in index])
        seen["reward"] = torch.tensor(rewards).mean().item()
        seen["completion_length"] = sum(map(len, completion_ids)) / len(completion_ids)
        return [float(value or 0.0) for value in rewards]

    class EachStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.done(state.global_step, **seen)

    rows = [{"prompt": prompt_of(problem(index)), "index": index} for index in range(STEPS * PROMPTS)]
    options = GRPOConfig(
        str(folder), max_steps=STEPS, per_device_train_batch_size=PROMPTS * GENERATIONS, num_generations=GENERATIONS,
        max_completion_length=LENGTH, learning_rate=RATE, lr_scheduler_type="constant", seed=seed, beta=0.0,
        top_k=0, shuffle_dataset=False, use_cpu=True, bf16=True, report_to="none", logging_steps=1,
        disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = (FusedGRPOTrainer if arm == "fused_trl" else Stock)(
        model, reward, options, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[EachStep()],
    )  # fmt: skip
    clock = Clock(trainer.model, trainer.accelerator, folder / "steps.jsonl")
    trainer.train()
    return trainer.model


@lru_cache
def held_out_rows() -> list[Any]:
    """Problems that no run and no supervised start has seen: there are only 4,000 sums."""
    seen = {
        prompt_of(problem(index))
        for problem, count in [
            *((problems(TASK, TASK_OPTIONS, seed=seed), STEPS * PROMPTS) for seed in range(SEEDS)),
            (problems(TASK, TASK_OPTIONS, seed=STARTING_SEED), STARTING_EXAMPLES),
        ]
        for index in range(count)
    }
    drawn = replace(recipe(".", Path(), 0), eval_limit=DRAWS).eval_rows() or []
    rows = list({row["prompt"]: row for row in drawn if row["prompt"] not in seen}.values())[:HELD_OUT]  # each once
    if len(rows) < HELD_OUT:
        raise RuntimeError(f"expected {HELD_OUT} sums that no run sees; got {len(rows)}")
    return rows


def accuracy(folder: str, weights: dict[str, Any] | None = None) -> float:
    """The share of held-out problems with a right greedy answer (its reward is 1).

    Args:
        folder: Of the model where the runs begin.
        weights: In place of its own.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    if weights is not None:
        model.load_state_dict(weights)
    return accuracy_of(model, AutoTokenizer.from_pretrained(folder))


@torch.no_grad()
def accuracy_of(model: Any, tokenizer: Any) -> float:
    """As `accuracy`, of a model that is loaded."""
    model.eval()
    rows, size, texts = held_out_rows(), 64, list[str]()
    for first in range(0, len(rows), size):
        prompts = [row["prompt"] for row in rows[first : first + size]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.autocast("cpu", torch.bfloat16):
            ids = model.generate(**batch, max_new_tokens=LENGTH, do_sample=False)
        texts += tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    rewards = score_answer_reward(texts, [row["score_answer"] for row in rows])
    return sum(reward == 1.0 for reward in rewards) / len(rewards)


def train(arm: str, model: str, seed: int) -> dict[str, Any]:
    """A run, in this process: accuracy after it, curves, seconds of a step, and memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arm == "ours":
            options = recipe(model, folder, seed)
            trained = train_ours(options, load_parts(options)._asdict())
        else:
            trained = train_trl(arm, model, folder, seed)
        found = figures_of(folder)
    return {"after": accuracy(model, trained.state_dict()), **found}


def figures_of(folder: Path) -> dict[str, Any]:
    """Curves, seconds of a step, and memory of a run in this process, from its folder."""
    peak = peak_of_process()
    rows = read_jsonl(folder / "steps.jsonl")
    tokens = [PROMPTS * GENERATIONS * (row["completion_length"] or 0.0) / (row["seconds"] or 1.0) for row in rows]
    return {
        "rewards": [round(row["reward"] or 0.0, 4) for row in rows],
        "lengths": [round(row["completion_length"] or 0.0, 2) for row in rows],
        "median": {name: round(median([row.get(name) or 0.0 for row in rows]), 3) for name in ("seconds", *PARTS)},
        "tokens_per_second": round(median(tokens), 1), "peak_bytes": peak,
    }  # fmt: skip


def measure(
    model: Path, work: Path, seeds: int, since: Path | None, recipe: dict[str, Any], about: dict[str, Any],
    arms: dict[str, str] = ARMS, baseline: str = "trl",
) -> Iterator[Section]:  # fmt: skip
    """A section after each run.

    Args:
        model: Folder where all runs begin.
        work: Folder of `runs.jsonl`.
        seeds: 0, 1, ..., of each trainer; at most `SEEDS`.
        since: A file of results whose runs count as done, if `work` has none yet.
        recipe: What the section says of the runs; its task is the name of the section.
        about: More of the section.
        arms: What is run, and by which function of (arm, model, seed).
        baseline: The arm that others are compared with.
    """
    if seeds > SEEDS:
        sys.exit(f"expected at most {SEEDS} seeds, whose problems are not held out; got {seeds}")
    file = work / "runs.jsonl"
    if since is not None and not file.exists():
        before_now = load(since)
        runs = before_now.sections[recipe["task"]]["runs"]
        file.write_text("".join(json.dumps({"machine": processor(before_now.machine), **row}) + "\n" for row in runs))
    recipe |= {"steps": STEPS, "prompts_per_step": PROMPTS, "num_generations": GENERATIONS, "num_iterations": 1}
    recipe |= {"max_completion_length": LENGTH, "learning_rate": RATE, "starting_examples": STARTING_EXAMPLES}
    about = {"recipe": recipe, "held_out": HELD_OUT, "replay": [], **about}
    folder = str(model.resolve())  # a child runs in the repository
    before = cache(lambda: in_child("benchmarks.pretrained:accuracy", folder))

    def trained(arm: Arm, seed: int, begin: str) -> Line:
        return {"machine": processor(machine()), **in_child(arms[arm["arm"]], arm["arm"], begin, seed)}

    def section_of(runs: list[Line]) -> Section:
        return {**about, **statistics_of(runs, BOUND, baseline)}

    yield from each_run(
        work, lambda _: (folder, before()), [({"arm": arm}, seeds) for arm in arms], trained, section_of
    )


def started(model: Path, work: Path) -> Path:
    """The folder of the model after its supervised start, which is made if it does not exist."""
    if not (model / "config.json").exists():
        sys.exit(f"expected a model folder (python -m benchmarks.gemma); got {model}")
    folder = work / "start"
    if not (folder / "config.json").exists():
        start(model, folder, STARTING_EXAMPLES)
    return folder


def run(model: Model, work: Work = Path("runs/pretrained"), seeds: Seeds = 3, since: Since = None) -> Iterator[Section]:
    """The section `pretrained`."""
    yield from measure(started(model, work), work, seeds, since, {"task": "pretrained"}, {})


if __name__ == "__main__":
    main("pretrained")
