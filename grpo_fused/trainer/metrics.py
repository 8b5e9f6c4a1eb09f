"""Where the numbers of a run go: a JSON line for each step, a printed row every few steps, trackers when asked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.markup import escape
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
    """The lines of `append_jsonl`; a last line that does not end (a full disk, a kill) is left out.

    Raises:
        ValueError: Another line is no JSON object with a step.
    """
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, float | None]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
            int(rows[-1]["step"] or 0)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"line {number} of {path} must be a JSON object with a step; got {line:.80}") from error
    return rows


def cut_jsonl(path: Path, last_step: int) -> None:
    """Removes the lines after a step, those of a run that went on after the checkpoint that is resumed from."""
    if not path.exists():
        return
    kept = [row for row in read_jsonl(path) if cast(int, row["step"]) <= last_step]
    beside = path.with_suffix(".unfinished")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(beside, path)


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
        table.add_row(*(escape(_printable(text)) for text in (prompt, completion, *given)))
    Console().print(table)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)
