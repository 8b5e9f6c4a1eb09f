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
from benchmarks.speed_tables import peak_mib, with_peers
from benchmarks.studies import STUDIES
from benchmarks.style import INK, NAMES, bar_color, bar_text, decorate, label_bars, new_figure
from benchmarks.tables import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """Data, and how they are drawn."""

    data: Any
    draw: Callable[[Any], Figure]

    @property
    def hash(self) -> str:
        """Hash of all data in the picture."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()


class Bars(NamedTuple):
    """Horizontal bars, a panel for each problem."""

    title: str
    note: str
    """about the machine and the run"""
    label: str
    """of the axis"""
    limit: float | None
    """where a line is drawn"""
    panels: dict[str, dict[str, float]]
    """title of a panel to the length of each name's bar"""


def plots(folder: Path) -> dict[str, Picture]:
    """File name to picture, for all sections that were measured."""
    pictures: dict[str, Picture] = {}
    for study in STUDIES.values():
        if study.plot is not None and (run := latest(study.section, folder)) is not None:
            pictures[f"{study.section.replace('_', '-')}.svg"] = Picture(run.sections[study.section], study.plot)
    for device, name in (("cpu", "cpu"), ("cuda", "gpu")):
        run = newest(device, "loss", folder)
        bars = {} if run is None else _bars(run)
        pictures |= {f"{name}-{what}.svg": Picture(data, draw_bars) for what, data in bars.items() if data.panels}
    return pictures


def _bars(run: Run) -> dict[str, Bars]:
    times: dict[str, dict[str, float]] = {}
    peaks: dict[str, dict[str, float]] = {}
    for case in with_peers(run).values():
        for provider, row in case["providers"].items():
            if "not_timed" not in row:
                ratio = row["forward_backward"]["times_bare"]["median"]
                times.setdefault(title(case["shape"]), {})[provider] = ratio
                if (mib := peak_mib(row)) is not None:
                    peaks.setdefault(title(case["shape"]), {})[provider] = mib
    ratios = "time / time of the three bare products (the dashed line); lower is better"
    mib_label = "MiB beyond inputs and gradients (lower is better)"
    return {
        "speed": Bars("Time of the loss, forward + backward", where(run), ratios, 1.0, times),
        "memory": Bars("Peak memory of the loss", where(run), mib_label, None, peaks),
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
        picture.draw(picture.data).savefig(path, format="svg", metadata=about)


def draw_bars(bars: Bars) -> Figure:
    """A panel for each problem, one below the other."""
    rows = [len(panel) for panel in bars.panels.values()]
    figure = new_figure(7.6, 1.0 + sum(0.62 + 0.27 * n for n in rows), bars.title, bars.note)
    axes = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=[n + 0.8 for n in rows])
    for axis, (name, panel) in zip(axes[:, 0], bars.panels.items(), strict=True):
        _panel(axis, name, panel, bars.limit)
    axes[-1, 0].set_xlabel(bars.label)
    return figure


def _panel(axis: Axes, name: str, bars: dict[str, float], limit: float | None) -> None:
    ordered = sorted(bars, key=lambda key: bars[key])
    if limit is not None:
        axis.axvline(limit, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    for y, key in enumerate(ordered):
        axis.barh(y, bars[key], color=bar_color(key), height=0.66)
        end = bars[key] if limit is None or bars[key] > limit else limit  # no line through the number
        bar_text(axis, end, y, f"{bars[key]:.2f}" if bars[key] < 10 else f"{bars[key]:,.0f}")
    label_bars(axis, [NAMES.get(key, key) for key in ordered])
    axis.set_xlim(0, max(1.14 * max(bars.values()), axis.get_xlim()[1]))
    decorate(axis, name, "", "", grid="none")
