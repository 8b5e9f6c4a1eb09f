"""The task: sums and differences of two two-digit numbers, and the demonstrations for the warm-up."""

from __future__ import annotations

import random
from typing import NamedTuple

SPLIT_SEED = 20250101  # the split is part of the task: it is the same for each --seed
WORKED_SHARE = 0.45  # of the demonstrations; the others have the answer without its calculation


class Split(NamedTuple):
    """Three disjoint lists of rows `{"prompt": "37+58=", "answer": "95"}`."""

    demonstrations: list[dict[str, str]]  # warm-up: these rows also have a right "completion"
    train: list[dict[str, str]]  # GRPO: the model gets the question, the reward functions get the answer
    held_out: list[dict[str, str]]  # accuracy: never trained on


def split_questions(num_demonstrations: int, num_held_out: int) -> Split:
    """Shuffles all 12,195 questions (a+b, and a-b where a >= b) and splits them into three disjoint parts."""
    numbers = range(10, 100)
    sums = [(a, "+", b) for a in numbers for b in numbers]
    differences = [(a, "-", b) for a in numbers for b in numbers if a >= b]
    questions = sums + differences
    if num_demonstrations < 1 or num_held_out < 1 or num_demonstrations + num_held_out >= len(questions):
        raise ValueError(
            f"num_demonstrations and num_held_out must be positive and leave some of the {len(questions)} questions "
            f"for training; got {num_demonstrations} and {num_held_out}"
        )
    rng = random.Random(SPLIT_SEED)
    rng.shuffle(questions)
    demonstrations = [
        question_row(*question) | {"completion": demonstrate(*question, worked=rng.random() < WORKED_SHARE)}
        for question in questions[:num_demonstrations]
    ]
    rest = [question_row(*question) for question in questions[num_demonstrations:]]
    return Split(demonstrations, rest[num_held_out:], rest[:num_held_out])


def question_row(a: int, operator: str, b: int) -> dict[str, str]:
    """`{"prompt": "37+58=", "answer": "95"}`."""
    return {"prompt": f"{a}{operator}{b}=", "answer": str(a + b if operator == "+" else a - b)}


def demonstrate(a: int, operator: str, b: int, *, worked: bool) -> str:
    """`<think>7+8=15,3+5+1=9</think><answer>95</answer>` if worked, else the bare `<answer>95</answer>`."""
    answer = f"<answer>{question_row(a, operator, b)['answer']}</answer>"
    return f"<think>{scratch(a, operator, b)}</think>{answer}" if worked else answer


def scratch(a: int, operator: str, b: int) -> str:
    """The ones, then the tens with the carry or the borrow: `37+58` is `7+8=15,3+5+1=9`."""
    tens_a, ones_a, tens_b, ones_b = a // 10, a % 10, b // 10, b % 10
    if operator == "+":
        ones = ones_a + ones_b
        carry = int(ones > 9)
        return f"{ones_a}+{ones_b}={ones},{tens_a}+{tens_b}{'+1' * carry}={tens_a + tens_b + carry}"
    borrow = int(ones_a < ones_b)
    ones_a += 10 * borrow
    return f"{ones_a}-{ones_b}={ones_a - ones_b},{tens_a}-{tens_b}{'-1' * borrow}={tens_a - tens_b - borrow}"
