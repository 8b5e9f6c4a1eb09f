"""The curves of a run, as small multiples."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo_fused.trainer.metrics import read_jsonl

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"


class Panel(NamedTuple):
    """One of the small multiples."""

    title: str
    unit: str
    curves: dict[str, str]  # metric in metrics.jsonl -> label
    colors: tuple[str, ...]
    top: float | None = None  # upper limit of the axis, for shares


PANELS = (
    Panel(
        "Reward",
        "mean of a rollout",
        {"reward": "weighted sum", "rewards/exact_answer_reward": "exact answer", "rewards/format_reward": "format"},
        ("#1f2933", "#2f6fde", "#e07b39"),
    ),
    Panel("Held-out accuracy", "share right, greedy", {"held_out_accuracy": ""}, ("#1a936f",), top=1.0),
    Panel("KL to the warmed-up model", "nats per token", {"kl": ""}, ("#7a4fbf",)),
    Panel("Entropy", "nats per token", {"entropy": ""}, ("#c2456b",)),
    Panel("Clip ratio", "share of tokens", {"clip_ratio/region_mean": ""}, ("#b7791f",)),
    Panel("Completion length", "tokens, EOS included", {"completion_length": ""}, ("#2b8a9e",)),
)


def plot_curves(metrics_path: Path, image_path: Path, title: str) -> None:
    """Draws the panels from a `metrics.jsonl` into a PNG."""
    lines = read_jsonl(metrics_path)
    figure = Figure(figsize=(12, 6.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user has configured
    figure.suptitle(title, color=INK, fontsize=14, fontweight="bold", x=0.012, ha="left")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        draw_panel(axes, panel, lines)
    figure.savefig(image_path)


def draw_panel(axes: Axes, panel: Panel, lines: list[dict[str, float | None]]) -> None:
    """One metric (or a few of one unit) over the steps; a noisy curve is pale with its moving average on top."""
    for (name, label), color in zip(panel.curves.items(), panel.colors, strict=True):
        steps, values = points_of(lines, name)
        if len(steps) > 40:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, moving_average(values, 9), color=color, linewidth=2, label=label)
        else:
            axes.plot(steps, values, color=color, linewidth=2, marker="o", markersize=4, label=label)
    if panel.top is not None and lines:
        annotate_ends(axes, steps, values, color=panel.colors[0])
    axes.set_title(panel.title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel("GRPO step", fontsize=9, color=MUTED)
    axes.set_ylabel(panel.unit, fontsize=9, color=MUTED)
    axes.set_ylim(0, panel.top and 1.08 * panel.top)
    axes.set_xlim(left=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    if len(panel.curves) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower right")


def points_of(lines: list[dict[str, float | None]], name: str) -> tuple[list[float], list[float]]:
    """The steps that have this metric, and its values."""
    points = [(line["step"] or 0.0, value) for line in lines if (value := line.get(name)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def annotate_ends(axes: Axes, steps: list[float], values: list[float], *, color: str) -> None:
    """Writes the first and the last value beside their points."""
    first, last = (steps[0], values[0]), (steps[-1], values[-1])
    for (step, value), offset, align in ((first, (6, -14), "left"), (last, (0, 8), "right")):
        axes.annotate(
            f"{value:.0%}",
            (step, value),
            textcoords="offset points",
            xytext=offset,
            ha=align,
            color=color,
            fontsize=11,
            fontweight="bold",
        )


def moving_average(values: list[float], width: int) -> list[float]:
    """Centred; the window shrinks at both ends."""
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
