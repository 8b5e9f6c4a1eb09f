"""A pretrained model learns a task of reasoning-gym by GRPO: our trainer, TRL's stock one, and `FusedGRPOTrainer`.

    python -m benchmarks.gemma ~/gemma-3-270m                                     # the model, once
    python -m benchmarks.pretrained ~/gemma-3-270m --work runs/pretrained --minutes 55 --out results.json

Repeat the second line until it says that all runs are complete: each part stops after its minutes, with checkpoints,
and the next continues. The parts of a run are:

1. A short supervised start (`start`): the base model sees `STARTING_EXAMPLES` worked sums once, so that it writes the
   steps and the tags. All runs begin with its weights.
2. GRPO on new problems in each step. The trainers get the same problems in the same order, the same options, and
   sample with their own generators.
3. Held-out accuracy (greedy) of the start and of each complete run, from its saved weights.

Each step's time is split by hooks: `generation` is that of `model.generate`, `body` the forward and backward passes of
the layers, `head` what is between them (head, loss and their gradients), `other` the rest (rewards, AdamW, checks).
Peak memory is that of the run's process. What is written into the file is read from `WORK/<run>/steps.jsonl`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

from benchmarks import child
from benchmarks.study import Section, main
from grpo_fused import fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.rewards import score_answer_reward
from grpo_fused.trainer import GRPOTrainer
from grpo_fused.trainer.metrics import append_jsonl, cut_jsonl, read_jsonl
from grpo_fused.trainer.reasoning_gym import problems
from grpo_fused.trainer.recipe import Recipe, Reward, load_parts

RUNS = ("ours-0", "trl-0", "fused_trl-0", "ours-1", "ours-2")
"""Trainer and seed, in the order in which they run."""

TASK, TASK_OPTIONS = "chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
STARTING_EXAMPLES, STARTING_SEED, STARTING_RATE, BATCH = 128, 2047, 2e-5, 16
PROMPTS, GENERATIONS, LENGTH, RATE = 8, 8, 48, 2e-6
HELD_OUT = 384


def recipe(model: Path, folder: Path, steps: int, seed: int) -> Recipe:
    """The run as a recipe of our trainer."""
    return Recipe(
        model=str(model), task="reasoning_gym", dataset=TASK, dataset_options=TASK_OPTIONS, chat=False,
        system_prompt="", rewards=(Reward(name="score_answer"),), eval_limit=HELD_OUT, steps=steps, seed=seed,
        prompts_per_step=PROMPTS, num_generations=GENERATIONS, max_completion_length=LENGTH, learning_rate=RATE,
        mixed_precision="bf16", save_steps=10, save_total_limit=1, logging_steps=1, output_dir=str(folder),
    )  # fmt: skip


class Clock:
    """Seconds of the parts of a step, by hooks on a model and its trainer's accelerator."""

    def __init__(self, model: Any, accelerator: Any, file: Path) -> None:
        self.file, self.seconds, self.generates, self.at = file, Counter[str](), False, 0.0
        self.started = time.perf_counter()
        generate, backward = model.generate, accelerator.backward

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            self.generates, started = True, time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generates = False
                self.seconds["generation"] += time.perf_counter() - started

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            self._passed("body")  # since the gradient of the hidden states

        model.generate, accelerator.backward = timed_generate, timed_backward
        body = model.get_decoder()
        body.register_forward_pre_hook(self._before_body)
        body.register_forward_hook(self._after_body)

    def done(self, step: int, **metrics: float) -> None:
        """Writes the line of a step and starts the next one."""
        total = time.perf_counter() - self.started
        other = total - sum(self.seconds.values())
        append_jsonl(self.file, {"step": step, "seconds": total, **self.seconds, "other": other, **metrics})
        self.restart()

    def restart(self) -> None:
        """Starts a step now."""
        self.seconds, self.started = Counter(), time.perf_counter()

    def _passed(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self.at
        self.at = now

    def _before_body(self, *_: Any) -> None:
        self.at = time.perf_counter()

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
        asked = [tokenizer(prompt_of(row)).input_ids for row in rows]
        answered = [tokenizer(worked(row), add_special_tokens=False).input_ids for row in rows]
        width = max(len(a) + len(b) for a, b in zip(asked, answered, strict=True)) + 1
        ids = torch.full((len(rows), width), tokenizer.eos_token_id)
        trained = torch.zeros(len(rows), width - 1, dtype=torch.bool)
        for row, (a, b) in enumerate(zip(asked, answered, strict=True)):
            ids[row, : len(a) + len(b)] = torch.tensor(a + b)
            trained[row, len(a) - 1 : len(a) + len(b)] = True  # and the EOS
        with torch.autocast("cpu", torch.bfloat16):
            hidden = head_hidden_states(policy, ids)  # causal: no token sees the padding on its right
            scores = fused_linear_logprobs(hidden[:, :-1], token_ids=ids[:, 1:], mask=trained, **lm_head_inputs(policy))
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


def train_ours(model: Path, folder: Path, steps: int, seed: int, until: float) -> bool:
    """A part of a run of our trainer; whether the run is complete."""
    options = recipe(model, folder, steps, seed)
    parts = load_parts(options)
    trainer = TimedTrainer(
        **(parts._asdict() | {"eval_dataset": None}), config=options, output_dir=options.output_dir, resume=True
    )
    trainer.until, trainer.clock = until, Clock(trainer.model, trainer.accelerator, folder / "steps.jsonl")
    cut_jsonl(trainer.clock.file, trainer.steps_done)
    trainer.clock.restart()
    trainer.train()
    return trainer.steps_done == steps


class TimedTrainer(GRPOTrainer):
    """Our trainer with a clock and an end of its part."""

    clock: Clock
    until: float

    def step(self) -> dict[str, float]:
        """A step, and its line of times."""
        metrics = super().step()
        kept = {name: metrics[name] for name in ("reward", "completion_length", "zero_std_groups", "entropy")}
        self.clock.done(self.steps_done + 1, **kept)
        if time.time() > self.until:
            os.kill(os.getpid(), signal.SIGINT)  # ends the run after this step, with a checkpoint
        return metrics


def train_trl(kind: str, model: Path, folder: Path, steps: int, seed: int, until: float) -> bool:
    """A part of a run of TRL's trainer, stock or fused; whether the run is complete."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig
    from trl import GRPOTrainer as Stock

    from grpo_fused.integrations.trl import FusedGRPOTrainer

    problem = problems(TASK, TASK_OPTIONS, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    seen: dict[str, float] = {}

    def reward(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        rewards = score_answer_reward(completions, [problem(i)["score_answer"] for i in index])
        table = torch.tensor(rewards).view(-1, GENERATIONS)
        seen["reward"] = table.mean().item()
        seen["completion_length"] = sum(map(len, completion_ids)) / len(completion_ids)
        seen["zero_std_groups"] = (table.std(1) == 0).float().mean().item()
        return [float(value or 0.0) for value in rewards]

    class Part(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.done(state.global_step, **seen)
            if time.time() > until:
                control.should_save = control.should_training_stop = True

        def on_save(self, *_: Any, **__: Any) -> None:
            clock.restart()

    rows = [{"prompt": prompt_of(problem(index)), "index": index} for index in range(steps * PROMPTS)]
    options = GRPOConfig(
        str(folder), max_steps=steps, per_device_train_batch_size=PROMPTS * GENERATIONS, num_generations=GENERATIONS,
        max_completion_length=LENGTH, learning_rate=RATE, lr_scheduler_type="constant", seed=seed, beta=0.0,
        top_k=0, shuffle_dataset=False, use_cpu=True, bf16=True, report_to="none", logging_steps=1,
        disable_tqdm=True, save_strategy="steps", save_steps=10, save_total_limit=1, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = (FusedGRPOTrainer if kind == "fused_trl" else Stock)(
        str(model), reward, options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Part()],
    )  # fmt: skip
    done = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")]
    clock = Clock(trainer.model, trainer.accelerator, folder / "steps.jsonl")
    if done:
        cut_jsonl(clock.file, max(done))
    else:
        clock.file.write_text("")
    clock.restart()
    trainer.train(resume_from_checkpoint=bool(done))
    return trainer.state.global_step == steps


def held_out_rows(options: Recipe) -> list[Any]:
    """Held-out problems that no run of the study and no supervised start has seen: there are only 4,000 sums."""
    seeds = {int(name.rpartition("-")[2]) for name in RUNS}
    seen = {
        problem(index)["question"]
        for problem, count in [
            *((problems(TASK, TASK_OPTIONS, seed=seed), options.steps * PROMPTS) for seed in seeds),
            (problems(TASK, TASK_OPTIONS, seed=STARTING_SEED), STARTING_EXAMPLES),
        ]
        for index in range(count)
    }
    drawn = replace(options, eval_limit=4 * HELD_OUT).eval_rows() or []
    rows = list({row["prompt"]: row for row in drawn}.values())  # each once
    return [row for row in rows if not any(question in row["prompt"] for question in seen)][:HELD_OUT]


@torch.no_grad()
def score(folder: Path, rows: Any, start: Path) -> None:
    """Greedy accuracy of a run or of the start (a right answer has a reward of 1), into its folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = start
    if folder != start:
        saved = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved).eval(), AutoTokenizer.from_pretrained(start)
    size, texts = 64, list[str]()
    for first in range(0, len(rows), size):
        prompts = [row["prompt"] for row in rows[first : first + size]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.autocast("cpu", torch.bfloat16):
            ids = model.generate(**batch, max_new_tokens=LENGTH, do_sample=False)
        texts += tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    rewards = score_answer_reward(texts, [row["score_answer"] for row in rows])
    right = sum(reward == 1.0 for reward in rewards) / len(rewards)
    (folder / "accuracy.json").write_text(json.dumps({"right": right, "of": len(rows), "examples": texts[:3]}))


def part(name: str, work: str, steps: int, until: float) -> None:
    """A part of one run, in this process."""
    folder, model, (kind, _, seed) = Path(work, name), Path(work, "start"), name.rpartition("-")
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    args = (model, folder, steps, int(seed), until)
    complete = train_ours(*args) if kind == "ours" else train_trl(kind, *args)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = len(read_jsonl(folder / "steps.jsonl"))
    append_jsonl(folder / "parts.jsonl", {"step": done, "seconds": time.perf_counter() - begun, "peak_bytes": peak})
    if complete:
        (folder / "complete").touch()


def summary_of(folder: Path) -> dict[str, Any]:
    """A run's section of the results."""
    steps, parts = read_jsonl(folder / "steps.jsonl"), read_jsonl(folder / "parts.jsonl")
    names = ("seconds", "generation", "body", "head", "other")
    columns = ("reward", "completion_length", "zero_std_groups", *names)
    files = {"before": folder.parent / "start" / "accuracy.json", "after": folder / "accuracy.json"}
    return {
        "steps": len(steps),
        "median": {name: median([row.get(name) or 0.0 for row in steps]) for name in names},
        "tokens_per_second": median(
            [PROMPTS * GENERATIONS * (row["completion_length"] or 0.0) / (row["seconds"] or 1.0) for row in steps]
        ),
        "peak_bytes": max(row["peak_bytes"] or 0.0 for row in parts),
        "accuracy": {when: json.loads(file.read_text())["right"] for when, file in files.items() if file.exists()},
        "curves": {name: [row.get(name) for row in steps] for name in columns},
    }


def run(
    model: Annotated[Path, "a folder, as benchmarks.gemma writes it"],
    work: Annotated[Path, "checkpoints; 4 GB for each run"] = Path("runs/pretrained"),
    steps: int = 60,
    minutes: float = 55.0,
    runs: Annotated[tuple[str, ...], f"default {' '.join(RUNS)}"] = RUNS,
    examples: Annotated[int, "of the supervised start"] = STARTING_EXAMPLES,
) -> Iterator[Section]:
    """Goes on with the runs for some minutes; then the section `pretrained`."""
    begin, until = work / "start", time.time() + 60 * minutes
    if not (model / "config.json").exists():
        sys.exit(f"benchmarks.pretrained: error: expected a model folder (python -m benchmarks.gemma); got {model}")
    if not (begin / "config.json").exists():
        start(model, begin, examples)
    waiting = [name for name in runs if not (work / name / "complete").exists()]
    for name in list(waiting):
        if time.time() > until:
            break
        one = child.command("benchmarks.pretrained:part", name, str(work), steps, until)
        if subprocess.run(one, check=False).returncode:
            sys.exit(f"benchmarks.pretrained: error: {name} failed")
        if (work / name / "complete").exists():
            waiting.remove(name)
    held_out = held_out_rows(recipe(begin, begin, steps, 0))
    for folder in [begin, *(work / name for name in runs if name not in waiting)]:
        file = folder / "accuracy.json"
        if not file.exists() or json.loads(file.read_text()).get("of") != len(held_out):
            score(folder, held_out, begin)
    yield {
        "model": "Gemma 3 270M, Q4_K_M weights in fp32", "task": TASK, "task_options": TASK_OPTIONS,
        "starting_examples": examples, "prompts": PROMPTS, "generations": GENERATIONS,
        "max_completion_length": LENGTH, "learning_rate": RATE, "held_out": len(held_out),
        "runs": {name: summary_of(work / name) for name in runs if (work / name / "parts.jsonl").exists()},
    }  # fmt: skip
    print("all runs are complete" if not waiting else f"to be continued: {', '.join(waiting)}")


if __name__ == "__main__":
    main("pretrained")
