"""Where the numbers of a run go: a JSON line for each step, a printed row every few steps, trackers when asked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

Metrics = dict[str, float]

NOT_SHOWN = {
    "reward_std", "unjudged", "clip_ratio/low_mean", "clip_ratio/high_mean", "learning_rate", "seconds", "epoch",
}  # fmt: skip


def append_jsonl(path: Path, metrics: Mapping[str, float]) -> None:
    """Appends one line; a value that is not finite (a clip ratio of no sequence, say) is written as null."""
    line = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, float | None]]:
    """The lines of `append_jsonl`; a last line that was cut off (a full disk, a kill) is left out.

    Raises:
        ValueError: Another line is no JSON object with a step.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines):
        try:
            rows += [json.loads(line)] if line else []
        except (json.JSONDecodeError, RecursionError) as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"line {number + 1} of {path} is not JSON: {error}") from error
        if line and not (isinstance(rows[-1], dict) and isinstance(rows[-1].get("step"), int)):
            raise ValueError(f"line {number + 1} of {path} must be an object with a step; got {line:.80}")
    return rows


def cut_jsonl(path: Path, last_step: int) -> None:
    """Removes the lines after a step, those of a run that went on after the checkpoint that is resumed from."""
    if not path.exists():
        return
    kept = [row for row in read_jsonl(path) if cast(int, row["step"]) <= last_step]
    beside = path.with_suffix(".unfinished")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(beside, path)


def mean_of(updates: Sequence[Metrics]) -> Metrics:
    """Of the optimizer steps of a rollout; a rollout without any had no gradient."""
    if not updates:
        return {"loss": 0.0, "grad_norm": 0.0}
    return {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}


def format_row(metrics: Mapping[str, float]) -> str:
    """`step  10  reward 0.412  format 0.95 …`: in their order, without those that only the file needs."""
    return "  ".join(f"{_short_name(name)} {_short(value)}" for name, value in metrics.items() if name not in NOT_SHOWN)


def _short_name(name: str) -> str:
    if name == "clip_ratio/region_mean":
        return "clip_ratio"
    return name.removeprefix("rewards/").removesuffix("_reward")


def _short(value: float) -> str:
    return f"{value:4d}" if isinstance(value, int) else f"{value:.3g}"


def print_samples(
    step: int, prompts: Sequence[str], completions: Sequence[str], rewards: Mapping[str, Sequence[float]]
) -> None:
    """A table of completions with what each reward function gave them."""
    table = Table(title=f"completions of step {step}", show_lines=True)
    for name in ("prompt", "completion", *map(_short_name, rewards)):
        table.add_column(name, overflow="fold")
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        given = ("-" if math.isnan(values[row]) else f"{values[row]:.3g}" for values in rewards.values())
        # text of a model is no markup: a "[/b]" in it would be an error
        table.add_row(*(_plain(text) for text in (prompt, completion, *given)))
    Console().print(table)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape("".join(character if character.isprintable() or character == "\n" else "�" for character in text))
