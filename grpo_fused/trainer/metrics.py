"""The output of a run's metrics: a JSON line for each step, a printed row every few steps, trackers if requested."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from accelerate import Accelerator, tracking
from accelerate.utils import LoggerType
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from grpo_fused.trainer.config import GRPOTrainerConfig

Metrics = dict[str, float]

NOT_SHOWN = {
    "reward_std", "unjudged", "clip_ratio/low_mean", "clip_ratio/high_mean", "learning_rate", "seconds", "epoch",
}  # fmt: skip
COLUMNS = {
    "step": ("step", 5, "d"), "reward": ("reward", 8, ".3f"), "zero_std_groups": ("zero std", 8, ".0%"),
    "completion_length": ("length", 7, ".1f"), "kl": ("kl", 7, ".4f"), "entropy": ("entropy", 7, ".3f"),
    "clip_ratio/region_mean": ("clipped", 7, ".1%"), "cispo_clip_ratio": ("clipped", 7, ".1%"),
    "loss": ("loss", 8, ".4f"), "grad_norm": ("grad norm", 9, ".3f"), "tokens_per_second": ("tokens/s", 8, ",.0f"),
}  # fmt: skip
"""Metric: its title in the printed table, its width and its format."""
WIDTH = 100
RUN_NAMES = {
    "wandb": "name", "trackio": "name", "swanlab": "experiment_name", "mlflow": "run_name", "clearml": "task_name",
}  # fmt: skip
"""Tracker: its option for the name of a run."""


def append_jsonl(path: Path, metrics: Mapping[str, float]) -> None:
    """Appends one line; a value that is not finite (such as a clip ratio of no sequence) is written as null."""
    line = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, float | None]]:
    """The lines of `append_jsonl`; a last line that does not end (a full disk, a kill) is left out.

    Raises:
        ValueError: Another line is not a JSON object with a step.
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
    """Removes the lines after a step: those that a run wrote after the checkpoint from which it is resumed."""
    if not path.exists():
        return
    kept = [row for row in read_jsonl(path) if cast(int, row["step"]) <= last_step]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(unfinished, path)


def format_facts(facts: Mapping[str, object]) -> str:
    """One aligned line for each name and value."""
    return "\n".join(f"{name:{max(map(len, facts))}}  {value}" for name, value in facts.items())


def format_row(metrics: Mapping[str, float], *, titles: bool = False) -> str:
    """A row of the table of a run, and below it the metrics without a column; `titles` adds column titles above.

    ::

         step    reward  zero std   length  entropy  clipped      loss  grad norm  tokens/s
           10     0.412        6%    118.3    0.184     0.0%   -0.0829      0.316     2,918
               format 0.656, relative_length 1.000, eval/format 0.500
    """
    columns = [(*COLUMNS[name], value) for name, value in metrics.items() if name in COLUMNS]
    lines = ["  ".join(f"{title:>{width}}" for title, width, _, _ in columns)] if titles and "reward" in metrics else []
    if "reward" in metrics:
        lines += ["  ".join(f"{_cell(value, width, form):>{width}}" for _, width, form, value in columns)]
    own = {name for name in metrics if name.startswith("rewards/")}
    hidden = NOT_SHOWN | set(COLUMNS) | (own if len(own) == 1 else set())  # one reward is the sum
    rest = (f"{_short_name(name)} {_cell(value, 9, '.3f')}" for name, value in metrics.items() if name not in hidden)
    text = ", ".join(item.replace(" ", "\0") for item in rest)  # no line break there
    first = " " * 9 if lines else f"{metrics['step']:5d}    "
    lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * 9, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _cell(value: float, width: int, form: str) -> str:
    """A number, shortened with k, M, ... if it does not fit."""
    text = "-" if math.isnan(value) else format(value, form)
    if len(text) <= width or form == "d":
        return text
    thousands = min(int(math.log10(abs(value)) // 3), 5)
    return f"{value / 1000**thousands:.1f}{' kMGTP'[thousands].strip()}"


def check_trackers(names: Iterable[str]) -> None:
    """Raises unless accelerate supports the trackers and their packages are installed: it would ignore a missing one.

    Raises:
        ValueError: A name is not a tracker.
        ImportError: The package of a tracker is not installed.
    """
    known = [*tracking.LOGGER_TYPE_TO_CLASS, "all"]
    for name in names:
        if name not in known:
            raise ValueError(f"report_to must name trackers of accelerate, {', '.join(known)}; got {name!r}")
        installed = name in map(str, tracking.get_available_trackers())
        if name in LoggerType.list() and name != "all" and not installed:
            raise ImportError(
                f"report_to must name trackers whose packages are installed; got {name!r}: pip install {name}"
            )


class RunLog:
    """Where the metrics of a run go: `metrics.jsonl` in its folder, trackers, and the terminal; by the main process.

    Raises:
        ValueError: The accelerator does not log with a tracker of the options.
    """

    def __init__(self, config: GRPOTrainerConfig, accelerator: Accelerator, output_dir: Path | None) -> None:
        trackers = {getattr(tracker, "value", tracker.name) for tracker in accelerator.log_with}  # an enum or a tracker
        if not set(config.report_to) <= trackers | {"all"}:
            raise ValueError(f"accelerator must log with report_to, {list(config.report_to)}; got {sorted(trackers)}")
        self.config, self.accelerator, self.output_dir = config, accelerator, output_dir
        self._rows_printed = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """With the trackers of the run."""
        if self.config.report_to:
            options = {k: v for k, v in vars(self.config).items() if isinstance(v, (bool, int, float, str))}
            name = self.config.run_name
            names = {tracker: {option: name} for tracker, option in RUN_NAMES.items() if name is not None}
            self.accelerator.init_trackers(self.config.project, options | vars(self.config.loss), names)
        try:
            yield
        finally:
            for tracker in self.accelerator.trackers:  # `end_training` would end the process group, too
                tracker.finish()

    def record(self, metrics: Metrics) -> None:
        """Writes the metrics of a step."""
        if not self.accelerator.is_main_process:
            return
        if self.output_dir is not None:
            append_jsonl(self.output_dir / "metrics.jsonl", metrics)
        if self.config.report_to:
            self.accelerator.log(metrics, step=int(metrics["step"]))
        if metrics["step"] % self.config.logging_steps == 0:
            tqdm.write(format_row(metrics, titles=self._rows_printed % 20 == 0))
            self._rows_printed += "reward" in metrics

    def say(self, text: str) -> None:
        """Prints a text."""
        if self.accelerator.is_main_process:
            tqdm.write(text)


def _short_name(name: str) -> str:
    return name.removeprefix("rewards/").removesuffix("_reward")


def print_samples(
    step: int, prompts: Sequence[str], completions: Sequence[str], rewards: Mapping[str, Sequence[float]]
) -> None:
    """A table of completions with the rewards of each function."""
    table = Table(title=f"completions of step {step}", show_lines=True)
    for name in ("prompt", "completion", *map(_short_name, rewards)):
        table.add_column(name, overflow="fold")
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        given = ("-" if math.isnan(values[row]) else f"{values[row]:.3g}" for values in rewards.values())
        # text of a model is not markup: a "[/b]" in it would be an error
        table.add_row(*(escape(_printable(text)) for text in (prompt, completion, *given)))
    Console().print(table)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)
