"""The built-in tasks, GSM8K and countdown: raw rows of their data sets in, prompts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_fused.trainer.data import Row

# DeepSeek-R1 (arXiv 2501.12948, table 1), whose tags `grpo_fused.rewards` reads.
THINK_THEN_ANSWER = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think><answer> answer here </answer>."
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Converts the raw rows of one data set into rows to train on.

    Args:
        name: The key in `TASKS`.
        source: Name of the data set, for `load_rows`.
        subset: Its configuration, for `load_rows`.
        default_system_prompt: Used if the user gives none.
        read: Returns a raw row's question, as text, and the columns for the reward functions. Raises KeyError,
            AttributeError, TypeError or ValueError for a row of another shape.
        examples: A few raw rows of the data set's shape, for runs without it.
    """

    name: str
    source: str
    subset: str | None = None
    default_system_prompt: str
    read: Callable[[Row], tuple[str, dict[str, object]]]
    examples: tuple[Row, ...]


def format_rows(task: Task, rows: Sequence[Row], system_prompt: str | None = None, *, chat: bool = True) -> list[Row]:
    """`{"prompt": ..., **columns}` of every raw row.

    Args:
        task: The task.
        rows: Raw rows, as `load_rows(task.source, subset=task.subset)` returns them.
        system_prompt: Default None for the task's own; "" for none at all.
        chat: Chat messages. False for one text, `{system prompt}\\nUser: {question}\\nAssistant:`, for a base model
            whose tokenizer has no chat template.

    Raises:
        ValueError: A row does not have the task's form; the message names it.
    """
    system = task.default_system_prompt if system_prompt is None else system_prompt
    formatted: list[Row] = []
    for position, raw in enumerate(rows):
        try:
            question, columns = task.read(raw)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"row {position} is not a row of the task {task.name!r}: {reason}; got {raw!r:.80}"
            ) from error
        messages = [{"role": "system", "content": system}] if system else []
        text = f"{system.rstrip()}\n" if system else ""
        prompt = [*messages, {"role": "user", "content": question}] if chat else f"{text}User: {question}\nAssistant:"
        formatted.append({"prompt": prompt, **columns})
    return formatted


def final_answer(worked_answer: str) -> str:
    """The text after the last `####` of a GSM8K answer, without commas: "1200" for "... #### 1,200".

    Source: the format of GSM8K (arXiv 2110.14168).
    """
    _, marker, answer = worked_answer.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker or not answer:
        raise ValueError(f'expected an answer that ends in "#### " and the final answer; got {worked_answer!r}')
    return answer


def _gsm8k(raw: Any) -> tuple[str, dict[str, object]]:
    if not raw["question"].strip():
        raise ValueError("expected a question that is not blank")
    return raw["question"], {"answer": final_answer(raw["answer"])}


def _countdown(raw: Any) -> tuple[str, dict[str, object]]:
    """The text of TinyZero (github.com/Jiayi-Pan/TinyZero), without the tags, which the system prompt explains."""
    nums, target = list(raw["nums"]), raw["target"]
    if not nums or any(type(number) is not int for number in (*nums, target)):
        raise TypeError("expected nums, a list of ints, and target, an int")
    question = (
        f"Using the numbers {nums}, create an equation that equals {target}. You can use basic "
        "arithmetic operations (+, -, *, /) and each number can only be used once. The answer is the left side of the "
        "equation alone, for example <answer> (1 + 2) / 3 </answer>."
    )
    return question, {"target": target, "nums": nums}


GSM8K = Task(
    name="gsm8k",
    source="openai/gsm8k",
    subset="main",
    # the exact-answer reward compares texts, and "18 eggs" is not "18"
    default_system_prompt=f"{THINK_THEN_ANSWER} The answer is a number and nothing else.",
    read=_gsm8k,
    examples=(
        {
            "question": "A box holds 6 eggs. How many eggs do 4 boxes hold?",
            "answer": "4 boxes hold 4 * 6 = <<4*6=24>>24 eggs.\n#### 24",
        },
        {
            "question": "Ada reads 12 pages on Monday and half as many on Tuesday. How many pages does she read?",
            "answer": "On Tuesday she reads 12 / 2 = <<12/2=6>>6 pages.\nShe reads 12 + 6 = <<12+6=18>>18 pages."
            "\n#### 18",
        },
    ),
)

COUNTDOWN = Task(
    name="countdown",
    source="Jiayi-Pan/Countdown-Tasks-3to4",
    default_system_prompt=THINK_THEN_ANSWER,
    read=_countdown,
    examples=(
        {"nums": [44, 19, 35], "target": 98},  # 44 + 19 + 35
        {"nums": [2, 3, 7], "target": 35},  # (2 + 3) * 7
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in (GSM8K, COUNTDOWN)}
