"""The curves of a run, as small multiples: `grpo-fused plot RUN`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_fused.trainer.data import from_here
from grpo_fused.trainer.metrics import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
CLIP_RATIO = "clip_ratio/region_mean"
HELD_OUT = ("eval/", "held_out")

Lines = list[dict[str, float | None]]


class Panel(NamedTuple):
    """One of the small multiples."""

    title: str
    unit: str
    curves: dict[str, str]  # metric in metrics.jsonl -> label


def panels_of(lines: Lines) -> list[Panel]:
    """The panels for these metrics: rewards first, then those that the run has."""
    names = list(dict.fromkeys(name for line in lines for name, value in line.items() if value is not None))
    rewards = {name: name.removeprefix("rewards/") for name in names if name.startswith("rewards/")}
    held_out = {name: name.removeprefix("eval/") for name in names if name.startswith(HELD_OUT)}
    panels = [
        Panel("Reward", "mean of a rollout", {"reward": "weighted sum"} | (rewards if len(rewards) > 1 else {})),
        Panel("Held-out prompts", "mean", held_out),
        Panel("KL to the reference", "nats per token", {"kl": ""}),
        Panel("Entropy", "nats per token", {"entropy": ""}),
        Panel("Clip ratio", "% of tokens", {CLIP_RATIO: ""}),
        Panel("Completion length", "tokens, EOS included", {"completion_length": ""}),
        Panel("Groups with equal rewards", "% of groups", {"zero_std_groups": ""}),
        Panel("Gradient norm", "before clipping", {"grad_norm": ""}),
    ]
    if not any(line.get(CLIP_RATIO) for line in lines):  # on-policy, so nothing is clipped
        names = [name for name in names if name != CLIP_RATIO]
    return [panel for panel in panels if any(name in names for name in panel.curves)]


def plot_run(run: Path, image: Path | None = None, title: str | None = None) -> Path:
    """Draws the curves of a run's `metrics.jsonl` into a PNG; returns its path.

    Args:
        run: The folder of a run, or its metrics file.
        image: Default `curves.png` next to the metrics.
        title: Default the name of the folder.

    Raises:
        FileNotFoundError: There are no metrics.
        ValueError: They have no step, or are not JSON lines.
    """
    from matplotlib.figure import Figure

    metrics = run / "metrics.jsonl" if run.is_dir() else run
    lines = read_jsonl(metrics)
    if not (panels := panels_of(lines)):
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
    image.parent.mkdir(parents=True, exist_ok=True)
    image = image if image.suffix else image.with_suffix(".png")  # as savefig does
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
    except FileNotFoundError as error:
        missing = Path(error.filename)
        if missing not in (arguments.run, arguments.run / "metrics.jsonl"):
            raise SystemExit(f"grpo-fused plot: error: {error}") from None
        place = f"{missing}{from_here(missing)}"
        raise SystemExit(f"grpo-fused plot: error: run must be the output_dir of a run; no file {place}") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"grpo-fused plot: error: {error}") from error


def draw_panel(axes: Axes, panel: Panel, lines: Lines) -> None:
    """One metric (or a few of one unit) over the steps; a noisy curve is pale with its moving average on top."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    colors = {name: f"C{i}" for i, name in enumerate(name for name in panel.curves if name != "reward")}
    every: list[list[tuple[float, float]]] = []  # the points of each curve
    for name, label in panel.curves.items():
        every.append([(line["step"] or 0, value) for line in lines if (value := line.get(name)) is not None])
        steps, values = [step for step, _ in every[-1]], [value for _, value in every[-1]]
        is_noisy = len(values) > 30
        smooth = moving_average(values, 9) if is_noisy else values
        style: dict[str, Any] = {"color": colors.get(name, INK), "clip_on": False}  # a line at the edge keeps its width
        axes.plot(steps, values, alpha=0.25 if is_noisy else 1.0, **style)
        axes.plot(steps, smooth, linewidth=2, marker="" if is_noisy else "o", label=label, **style)
    axes.set_title(panel.title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel("GRPO step", fontsize=9, color=MUTED)
    axes.set_ylabel(panel.unit, fontsize=9, color=MUTED)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    shown = [point for points in every for point in points]
    if max(map(len, every)) == 1:
        _write_values(axes, shown)
    if panel.unit.startswith("%") or all(name.startswith(HELD_OUT) for name in panel.curves):
        axes.set_ylim(bottom=min(0, *(value for _, value in shown), 0))
    if panel.unit.startswith("%"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    if len(panel.curves) > 1:
        below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.2), "ncols": 2}
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0, **below)


def _write_values(axes: Axes, points: list[tuple[float, float]]) -> None:
    """The numbers of a run of one step beside its points, on an axis from 0: there is no curve to see."""
    for step, value in points:
        axes.annotate(f"{value:.3g}", (step, value), xytext=(8, 0), textcoords="offset points", va="center", color=INK)
    values = [value for _, value in points]
    axes.set_ylim(1.25 * min(0, *values, 0), 1.25 * max(0, *values, 0) or 1)
    axes.set_xlim(right=max(2 * max(step for step, _ in points), 1))


def moving_average(values: list[float], width: int) -> list[float]:
    """Centred; the window shrinks at both ends."""
    half = width // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
