"""Where the numbers of a run go: one JSON line for each step, and a printed row every few steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

Metrics = dict[str, float]

NOT_SHOWN = {"reward_std", "unjudged", "clip_ratio/low_mean", "clip_ratio/high_mean", "learning_rate", "seconds"}


def append_jsonl(path: Path, metrics: Mapping[str, float]) -> None:
    """Appends one line; a value that is not finite (a clip ratio of no sequence, say) is written as null."""
    line = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, float | None]]:
    """The lines of `append_jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def format_row(metrics: Mapping[str, float]) -> str:
    """`step  10  reward 0.412  format 0.95 …`: in their order, without those that only the file needs."""
    return "  ".join(f"{_short_name(name)} {_short(value)}" for name, value in metrics.items() if name not in NOT_SHOWN)


def _short_name(name: str) -> str:
    if name == "clip_ratio/region_mean":
        return "clip_ratio"
    return name.removeprefix("rewards/").removesuffix("_reward")


def _short(value: float) -> str:
    return f"{value:4d}" if isinstance(value, int) else f"{value:.3g}"
