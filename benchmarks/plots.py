"""Bars of time and of memory, and the pictures of the studies, from the newest runs, as SVG files.

The same data give the same bytes. Each file contains the hash of its data, so that a check needs no matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.results import Run, latest, newest, where
from benchmarks.speed_tables import SUMMARY_PEERS, peak_mib, summary_case, with_peers
from benchmarks.studies import STUDIES
from benchmarks.style import INK, NAMES, add_source, bar_text, color_of, decorate, label_bars, new_figure
from benchmarks.tables import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """Data, and how they are drawn."""

    data: Any
    draw: Callable[[Any], Figure]
    source: str
    """the machine, the commit and the date of the run"""

    @property
    def hash(self) -> str:
        """Hash of all data in the picture."""
        return hashlib.sha256(json.dumps([self.data, self.source], sort_keys=True).encode()).hexdigest()


class Bars(NamedTuple):
    """Horizontal bars, a panel for each problem."""

    title: str
    note: str
    """about the problem"""
    label: str
    """of the axis"""
    limit: float | None
    """where a line is drawn"""
    panels: dict[str, dict[str, float]]
    """title of a panel to the length of each name's bar"""
    labels: tuple[str, ...] = ()
    """of the axis of each panel, if they differ"""


def plots(runs: list[Run]) -> dict[str, Picture]:
    """File name to picture, for all sections that were measured."""
    pictures: dict[str, Picture] = {}
    for study in STUDIES.values():
        if study.plot is not None and (run := latest(study.section, runs)) is not None:
            name = f"{study.section.replace('_', '-')}.svg"
            pictures[name] = Picture(run.sections[study.section], study.plot, where(run))
    for device, name in (("cpu", "cpu"), ("cuda", "gpu")):
        if (run := newest(device, "loss", runs)) is not None:
            pictures |= {
                f"{name}-{what}.svg": Picture(bars, draw_bars, where(run))
                for what, bars in _bars(run).items()
                if bars.panels
            }
    if (found := summary_case(runs)) is not None:
        pictures["summary.svg"] = Picture(_summary(found[1]), draw_bars, where(found[0]))
    return pictures


def _summary(case: dict[str, Any]) -> Bars:
    """Time and memory of ours and its peers, for the first screen of the README."""
    rows = {name: case["providers"][name] for name in ("native", *SUMMARY_PEERS)}
    times = {name: row["forward_backward"]["ms"]["median"] for name, row in rows.items()}
    peaks = {name: mib for name, row in rows.items() if (mib := peak_mib(row)) is not None}
    return Bars(
        "The GRPO loss on a CPU, forward + backward (lower is better)", title(case["shape"]), "", None,
        {"Time": times, "Memory": peaks}, ("ms", "MiB beyond inputs and gradients"),
    )  # fmt: skip


def _bars(run: Run) -> dict[str, Bars]:
    times: dict[str, dict[str, float]] = {}
    peaks: dict[str, dict[str, float]] = {}
    for case in with_peers(run.sections["loss"]).values():
        for provider, row in case["providers"].items():
            if "not_timed" not in row:
                ratio = row["forward_backward"]["times_bare"]["median"]
                times.setdefault(title(case["shape"]), {})[provider] = ratio
                if (mib := peak_mib(row)) is not None:
                    peaks.setdefault(title(case["shape"]), {})[provider] = mib
    ratios = "time / time of the three bare products (dashed)"
    mib_label = "MiB beyond inputs and gradients"
    note = "N tokens, hidden size H, vocabulary V. A colour is a program."
    return {
        "speed": Bars("Time of the loss, forward + backward (lower is better)", note, ratios, 1.0, times),
        "memory": Bars("Peak memory of the loss (lower is better)", note, mib_label, None, peaks),
    }


def is_current(path: Path, picture: Picture) -> bool:
    """Whether the file exists and shows these data."""
    return path.exists() and picture.hash in path.read_text(encoding="utf-8")


def save(path: Path, picture: Picture) -> None:
    """Draw, and write the file."""
    import matplotlib

    # text stays text, ids are salted with a constant: the same data give the same bytes
    with matplotlib.rc_context({"svg.hashsalt": "grpo_fused", "svg.fonttype": "none", "font.size": 9}):
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"Date": None, "Creator": None, "Description": f"data {picture.hash}"}
        figure = picture.draw(picture.data)
        add_source(figure, picture.source)
        _fix_positions(figure)
        figure.savefig(path, format="svg", metadata=about)


def _fix_positions(figure: Figure) -> None:
    """Of all axes, rounded: those that the layout finds differ in their last bits from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axis in figure.axes:
        axis.set_position([round(x, 6) for x in axis.get_position().bounds])


def draw_bars(bars: Bars) -> Figure:
    """A panel for each problem, two in a row; panels of one unit have one scale."""
    count = len(bars.panels)
    columns = min(count, 2)
    most = max(map(len, bars.panels.values()))
    rows = -(-count // columns)
    height = 1.1 + rows * (0.75 + 0.27 * most)
    figure = new_figure(1.0 + 5.2 * columns, height, bars.title, bars.note)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=not bars.labels).flatten()
    labels = bars.labels or (bars.label,) * count
    for axis, (name, panel), label in zip(axes, bars.panels.items(), labels, strict=False):
        _panel(axis, name, panel, bars.limit)
        axis.set_xlabel(label)
        axis.xaxis.set_tick_params(labelbottom=True)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure


def _panel(axis: Axes, name: str, bars: dict[str, float], limit: float | None) -> None:
    ordered = sorted(bars, key=lambda key: bars[key])
    if limit is not None:
        axis.axvline(limit, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    for y, key in enumerate(ordered):
        axis.barh(y, bars[key], color=color_of(key), height=0.66)
        end = bars[key] if limit is None or bars[key] > limit else limit  # no line through the number
        bar_text(axis, end, y, f"{bars[key]:.2f}" if bars[key] < 10 else f"{bars[key]:,.0f}")
    label_bars(axis, [NAMES.get(key, key) for key in ordered])
    axis.set_xlim(0, max(1.14 * max(bars.values()), axis.get_xlim()[1]))
    decorate(axis, name, "", "", grid=False)
