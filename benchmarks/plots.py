"""Bars of time and of memory, and the pictures of the studies, from the newest runs, as SVG files.

The same data give the same bytes. Each file contains the hash of its data, so that a check needs no matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.results import newest, where
from benchmarks.speed_tables import peak_mib, title, with_peers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plot(NamedTuple):
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

    @property
    def hash(self) -> str:
        """Hash of all data in the plot."""
        return _hash(self)

    def figure(self) -> Figure:
        """Drawn."""
        from benchmarks.style import new_figure

        rows = [len(bars) for bars in self.panels.values()]
        figure = new_figure(7.6, 1.0 + sum(0.62 + 0.27 * n for n in rows), self.title, self.note)
        axes = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=[n + 0.8 for n in rows])
        for axis, (name, bars) in zip(axes[:, 0], self.panels.items(), strict=True):
            _panel(axis, name, bars, self.limit)
        axes[-1, 0].set_xlabel(self.label)
        return figure


class Study(NamedTuple):
    """A section of a run, drawn by `benchmarks.study_plots`."""

    name: str
    section: dict[str, Any]

    @property
    def hash(self) -> str:
        """Hash of all data in the plot."""
        return _hash(self.section)

    def figure(self) -> Figure:
        """Drawn."""
        from benchmarks.study_plots import PLOTS

        return PLOTS[self.name](self.section)


STUDIES = ("accuracy", "growth", "end_to_end", "candidates", "distillation", "pretrained")


def plots(folder: Path) -> dict[str, Plot | Study]:
    """File name to plot, for all sections that were measured."""
    found: dict[str, Plot | Study] = {}
    for study in STUDIES:
        if (run := newest("cuda", study, folder) or newest("cpu", study, folder)) is not None:
            found[f"{study.replace('_', '-')}.svg"] = Study(study, run.sections[study])
    for device, name in (("cpu", "cpu"), ("cuda", "gpu")):
        run = newest(device, "loss", folder)
        if run is None:
            continue
        cases = with_peers(run)
        times: dict[str, dict[str, float]] = {}
        peaks: dict[str, dict[str, float]] = {}
        for case in cases.values():
            for provider, row in case["providers"].items():
                if "not_timed" not in row:
                    ratio = row["forward_backward"]["times_bare"]["median"]
                    times.setdefault(title(case["shape"]), {})[provider] = ratio
                    if (mib := peak_mib(row)) is not None:
                        peaks.setdefault(title(case["shape"]), {})[provider] = mib
        note = where(run)
        if times:
            label = "time / time of the three bare products (the dashed line); lower is better"
            found[f"{name}-speed.svg"] = Plot("Time of the loss, forward + backward", note, label, 1.0, times)
        if peaks:
            label = "MiB beyond inputs and gradients (lower is better)"
            found[f"{name}-memory.svg"] = Plot("Peak memory of the loss", note, label, None, peaks)
    return found


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def is_current(path: Path, plot: Plot | Study) -> bool:
    """Whether the file exists and shows these data."""
    return path.exists() and plot.hash in path.read_text(encoding="utf-8")


def draw(path: Path, plot: Plot | Study) -> None:
    """Write the file."""
    import matplotlib

    # text stays text, ids are salted with a constant: the same data give the same bytes
    with matplotlib.rc_context({"svg.hashsalt": "grpo_fused", "svg.fonttype": "none", "font.size": 9}):
        path.parent.mkdir(parents=True, exist_ok=True)
        plot.figure().savefig(
            path, format="svg", metadata={"Date": None, "Creator": None, "Description": f"data {plot.hash}"}
        )


def _panel(axis: Any, name: str, bars: dict[str, float], limit: float | None) -> None:
    from benchmarks.style import INK, NAMES, bar_color, bar_text, decorate, label_bars

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
