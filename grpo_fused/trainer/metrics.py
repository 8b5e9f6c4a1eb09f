"""The output of a run's metrics: a JSON line for each step, a printed row every few steps, trackers if requested."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator, tracking
from accelerate.utils import LoggerType
from tqdm import tqdm

from grpo_fused.trainer.config import RUN_NAMES, GRPOTrainerConfig

Metrics = dict[str, float]

NOT_SHOWN = {
    "reward_std", "unjudged", "clip_ratio/low_mean", "clip_ratio/high_mean", "learning_rate", "seconds", "epoch",
}  # fmt: skip
COLUMNS = {
    "step": ("step", 5, "d"), "reward": ("reward", 8, ".3f"), "zero_std_groups": ("zero std", 8, ".0%"),
    "completion_length": ("length", 7, ".1f"), "loss": ("loss", 8, ".4f"), "kl": ("kl", 7, ".4f"),
    "entropy": ("entropy", 7, ".3f"), "clip_ratio/region_mean": ("clipped", 7, ".1%"),
    "cispo_clip_ratio": ("clipped", 7, ".1%"), "grad_norm": ("grad norm", 9, ".3f"),
    "tokens_per_second": ("tokens/s", 8, ",.0f"),
}  # fmt: skip
"""Metric: its title in the printed table, its width and its format."""
WIDTH = 100
TITLES_EVERY = 20
"""Rows of the table between two lines of titles."""
SHOWN_COMPLETIONS, SHOWN_LINES = 3, 4
"""Of a step whose completions are printed, and of each of them."""


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
            if not isinstance(rows[-1]["step"], (int, float)):
                raise TypeError
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

         step    reward  zero std   length      loss  entropy  clipped  grad norm  tokens/s
           10     0.412        6%    118.3   -0.0829    0.184     0.0%      0.316     2,918
               format 0.656, relative_length 1.000, eval/format 0.500
    """
    columns = [(*column, metrics[name]) for name, column in COLUMNS.items() if name in metrics]
    lines = ["  ".join(f"{title:>{width}}" for title, width, _, _ in columns)] if titles and "reward" in metrics else []
    if "reward" in metrics:
        lines += ["  ".join(f"{_cell(value, width, form):>{width}}" for _, width, form, value in columns)]
    own = {name for name in metrics if name.startswith("rewards/")}
    is_sum = [_cell(metrics[name], 9, ".3f") for name in own] == [_cell(metrics.get("reward", math.nan), 9, ".3f")]
    hidden = NOT_SHOWN | set(COLUMNS) | (own if is_sum else set())
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
        self._rows_printed, self._columns = 0, list[str]()
        self._not_printed: Metrics | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """With the trackers of the run; without `report_to`, those that the accelerator has are its owner's."""
        if self.config.report_to:
            options = {k: v for k, v in vars(self.config).items() if isinstance(v, (bool, int, float, str))}
            options |= {} if self.config.objective is None else {"objective": self.config.loss_name}
            name = self.config.run_name
            names = {tracker: {option: name} for tracker, option in RUN_NAMES.items() if name is not None}
            self.accelerator.init_trackers(self.config.project, options | asdict(self.config.loss), names)
        try:
            yield
        finally:
            # `end_training` would end the process group, too
            for tracker in self.accelerator.trackers if self.config.report_to else ():
                tracker.finish()

    def record(self, metrics: Metrics) -> None:
        """Writes the metrics of a step."""
        if not self.accelerator.is_main_process:
            return
        if self.output_dir is not None:
            append_jsonl(self.output_dir / "metrics.jsonl", metrics)
        if self.config.report_to:
            self.accelerator.log(metrics, step=int(metrics["step"]))
        self._not_printed = metrics
        if self.config.logging_steps and metrics["step"] % self.config.logging_steps == 0:
            self._print_row()

    def _print_row(self) -> None:
        if (metrics := self._not_printed) is not None and "reward" in metrics:
            new = [name for name in metrics if name in COLUMNS and name not in self._columns]
            self._columns += new
            # a step without an update has no entropy and no clip ratio
            row = {name: metrics.get(name, math.nan) for name in self._columns} | metrics
            self.say(format_row(row, titles=bool(new) or self._rows_printed % TITLES_EVERY == 0))
            self._rows_printed += 1
        elif metrics is not None:
            self.say(format_row(metrics))
        self._not_printed = None

    def samples(self, *samples: Any) -> None:
        """Prints some completions of a step (`format_samples`); the next row has titles again."""
        self.say(format_samples(*samples))
        self._rows_printed = 0

    def finish(self, history: Sequence[Metrics], seconds: float, checkpoint: Path | None) -> None:
        """Prints the row of the last step, if it was not due, and a summary of the run."""
        self._print_row()
        if history:
            self.say("\n" + format_facts(summary_of(history, seconds, self.output_dir, checkpoint)))

    def say(self, text: str) -> None:
        """Prints a text, unless `logging_steps` is 0."""
        if self.accelerator.is_main_process and self.config.logging_steps:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a completion may hold any character
            tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _short_name(name: str) -> str:
    return name.removeprefix("rewards/").removesuffix("_reward")


def format_samples(
    step: int,
    prompt: str,
    completions: Sequence[str],
    rewards: Mapping[str, Sequence[float]],
    totals: Sequence[float],
) -> str:
    """A prompt and three of its completions: those with the highest, the middle and the lowest reward.

    ::

        completions of step 10, 3 of 8
        prompt      user: What is 2 + 2?
        reward 1.1  The answer is 4.
                    format 0.1, correct 1
    """
    order = sorted(range(len(totals)), key=lambda row: -totals[row])
    ends = len(order) - 1
    shown = sorted({round(ends * part / (SHOWN_COMPLETIONS - 1)) for part in range(SHOWN_COMPLETIONS)})
    names = [f"reward {totals[order[place]]:.3g}" for place in shown]
    width = max(map(len, ("prompt", *names))) + 2
    lines = [f"completions of step {step}, {len(shown)} of {len(order)}", _beside("prompt", width, prompt, last=True)]
    for name, row in zip(names, (order[place] for place in shown), strict=True):
        each = ", ".join(f"{_short_name(reward)} {_given(values[row])}" for reward, values in rewards.items())
        lines += [_beside(name, width, completions[row]), *([" " * width + each] if len(rewards) > 1 else [])]
    return "\n".join(["", *lines, ""])


def _given(reward: float) -> str:
    return "not judged" if math.isnan(reward) else f"{reward:.3g}"


def _beside(name: str, width: int, text: str, *, last: bool = False) -> str:
    """A name and the first (or last) lines of a text, which is that of a model: not all of it is printable."""
    shown = ("".join(x if x.isprintable() or x == "\t" else "�" for x in line) for line in text.splitlines())
    lines = [part for line in shown for part in textwrap.wrap(line, WIDTH - width - 4)] or ["(no text)"]
    if len(lines) > SHOWN_LINES:
        lines = ["... " + lines[-SHOWN_LINES], *lines[1 - SHOWN_LINES :]] if last else lines[:SHOWN_LINES]
        lines[-1] += "" if last else " ..."
    return textwrap.indent("\n".join(lines), " " * width).replace(" " * width, f"{name:{width}}", 1)


def summary_of(
    history: Sequence[Metrics], seconds: float, output_dir: Path | None, checkpoint: Path | None
) -> dict[str, str]:
    """What a run did, where its model is, and what to run next, for its last lines.

    Args:
        history: The metrics of its steps, at least one.
        seconds: The time that they took.
        output_dir: Its folder, if it has one.
        checkpoint: Its newest checkpoint, if it has one.
    """
    steps = [metrics for metrics in history if "reward" in metrics]
    facts = {"done": f"{len(steps)} steps in {_duration(seconds)}"}
    for name in [name for name in history[-1] if name == "reward" or name.startswith("eval/")]:
        given = [f"{row[name]:.3f} at step {row['step']:.0f}" for row in history if name in row]
        facts[name] = " -> ".join(dict.fromkeys((given[0], given[-1])))
    if checkpoint is not None:
        facts["checkpoint"] = str(checkpoint)
        facts["use it"] = f'AutoModelForCausalLM.from_pretrained("{checkpoint}")'
    if output_dir is not None:
        facts["curves"] = f"grpo-fused plot {shlex.quote(str(output_dir))}"
    return facts


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
