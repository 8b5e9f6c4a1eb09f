"""The curves of a run, as small multiples: `grpo-fused plot RUN`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_fused.trainer.metrics import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"

Lines = list[dict[str, float | None]]


class Panel(NamedTuple):
    """One of the small multiples."""

    title: str
    unit: str
    curves: dict[str, str]  # metric in metrics.jsonl -> label


def panels_of(lines: Lines) -> list[Panel]:
    """The panels that these metrics fill: rewards first, then what the run has."""
    names = list(dict.fromkeys(name for line in lines for name, value in line.items() if value is not None))
    rewards = {name: name.removeprefix("rewards/") for name in names if name.startswith("rewards/")}
    held_out = {name: name.removeprefix("eval/") for name in names if name.startswith(("eval/", "held_out"))}
    panels = [
        Panel("Reward", "mean of a rollout", {"reward": "weighted sum"} | (rewards if len(rewards) > 1 else {})),
        Panel("Held-out prompts", "mean", held_out),
        Panel("KL to the reference", "nats per token", {"kl": ""}),
        Panel("Entropy", "nats per token", {"entropy": ""}),
        Panel("Clip ratio", "share of tokens", {"clip_ratio/region_mean": ""}),
        Panel("Completion length", "tokens, EOS included", {"completion_length": ""}),
        Panel("Groups without spread", "share of groups", {"zero_std_groups": ""}),
        Panel("Gradient norm", "before clipping", {"grad_norm": ""}),
    ]
    return [panel for panel in panels if any(name in names for name in panel.curves)]


def plot_run(run: Path, image: Path | None = None, title: str | None = None) -> Path:
    """Draws the curves of a run's `metrics.jsonl` into a PNG; returns its path.

    Args:
        run: The folder of a run, or its metrics file.
        image: Default `curves.png` beside the metrics.
        title: Default the name of the folder.

    Raises:
        FileNotFoundError: There are no metrics.
        ValueError: They hold no step, or are not JSON lines.
    """
    from matplotlib.figure import Figure

    metrics = run / "metrics.jsonl" if run.is_dir() else run
    lines = read_jsonl(metrics)
    panels = panels_of(lines)
    if not panels:
        raise ValueError(f"{metrics} must hold the metrics of at least one step; it has {len(lines)} lines")
    image = image or metrics.with_name("curves.png")
    columns = min(4 if len(panels) > 6 else 3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 3.3 * rows), dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(
        title or metrics.resolve().parent.name, color=INK, fontsize=14, fontweight="bold", x=0.012, ha="left"
    )
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, panel, lines)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(image)
    return image


def main(argv: Sequence[str]) -> None:
    """`grpo-fused plot`."""
    parser = argparse.ArgumentParser(prog="grpo-fused plot", description="Draws the curves of a run into a PNG.")
    parser.add_argument("run", type=Path, help="the output_dir of a run, or its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="default: curves.png in the run's folder")
    parser.add_argument("--title", help="default: the name of the folder")
    arguments = parser.parse_args(argv)
    try:
        print(f"wrote {plot_run(arguments.run, arguments.out, arguments.title)}")
    except (OSError, ValueError) as error:
        raise SystemExit(f"grpo-fused plot: error: {error}") from error


def draw_panel(axes: Axes, panel: Panel, lines: Lines) -> None:
    """One metric (or a few of one unit) over the steps; a noisy curve is pale with its moving average on top."""
    for number, (name, label) in enumerate(panel.curves.items()):
        points = [(line["step"] or 0, value) for line in lines if (value := line.get(name)) is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        is_noisy = len(values) > 30
        smooth = moving_average(values, 9) if is_noisy else values
        axes.plot(steps, values, color=f"C{number}", alpha=0.25 if is_noisy else 1.0)
        axes.plot(steps, smooth, color=f"C{number}", linewidth=2, marker="" if is_noisy else "o", label=label)
    axes.set_title(panel.title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel("GRPO step", fontsize=9, color=MUTED)
    axes.set_ylabel(panel.unit, fontsize=9, color=MUTED)
    axes.set_xlim(left=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    if len(panel.curves) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")


def moving_average(values: list[float], width: int) -> list[float]:
    """Centred; the window shrinks at both ends."""
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
