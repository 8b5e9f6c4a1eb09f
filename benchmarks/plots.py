"""Bars of time and of memory, and the studies' pictures, from the newest runs, as SVG files alike byte by byte.

Each file carries the hash of the data that it shows, so that a check needs neither matplotlib nor its version.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.results import newest
from benchmarks.tables import peak_mib, title, with_peers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plot(NamedTuple):
    """What a file shows."""

    label: str
    """of the axis"""
    logarithmic: bool
    limit: float | None
    """where a line is drawn"""
    panels: dict[str, dict[str, float]]
    """title of a panel to the length of each name's bar"""
    ours: list[str]

    @property
    def hash(self) -> str:
        """Of everything that is shown."""
        return _hash(self)

    def figure(self) -> Figure:
        """Drawn."""
        from matplotlib.figure import Figure

        rows = max(len(bars) for bars in self.panels.values())
        figure = Figure(figsize=(7, len(self.panels) * (0.7 + 0.24 * rows)), layout="tight")
        axes = figure.subplots(len(self.panels), 1, squeeze=False, sharex=True)
        for axis, (name, bars) in zip(axes[:, 0], self.panels.items(), strict=True):
            _panel(axis, name, bars, self)
        axes[-1, 0].set_xlabel(self.label)
        return figure


class Study(NamedTuple):
    """A section of a run, drawn by `benchmarks.study_plots`."""

    name: str
    section: dict[str, Any]

    @property
    def hash(self) -> str:
        """Of everything that is shown."""
        return _hash(self.section)

    def figure(self) -> Figure:
        """Drawn."""
        from benchmarks.study_plots import PLOTS

        return PLOTS[self.name](self.section)


STUDIES = ("accuracy", "growth", "end_to_end")


def plots(folder: Path) -> dict[str, Plot | Study]:
    """File name to what it shows, for what has been measured."""
    found: dict[str, Plot | Study] = {}
    for study in STUDIES:
        if (run := newest("cuda", study, folder) or newest("cpu", study, folder)) is not None:
            found[f"{study.replace('_', '-')}.svg"] = Study(study, run.sections[study])
    for device, name in (("cpu", "cpu"), ("cuda", "gpu")):
        run = newest(device, "loss", folder)
        if run is None:
            continue
        cases = with_peers(run)
        ours = [p for p, entry in run.sections["loss"]["providers"].items() if entry["ours"]]
        times: dict[str, dict[str, float]] = {}
        peaks: dict[str, dict[str, float]] = {}
        for case in cases.values():
            for provider, row in case["providers"].items():
                if "not_timed" not in row:
                    ratio = row["forward_backward"]["times_bare"]["median"]
                    times.setdefault(title(case["shape"]), {})[provider] = ratio
                    if (mib := peak_mib(row)) is not None:
                        peaks.setdefault(title(case["shape"]), {})[provider] = max(mib, 1.0)
        if times:
            label = "forward + backward, × the three bare products"
            found[f"{name}-speed.svg"] = Plot(label, False, 1.0, times, ours)
        if peaks:
            label = "peak memory beyond inputs and gradients, MiB"
            found[f"{name}-memory.svg"] = Plot(label, True, None, peaks, ours)
    return found


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def is_current(path: Path, plot: Plot | Study) -> bool:
    """Whether the file is there and shows these data."""
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


def _panel(axis: Any, name: str, bars: dict[str, float], plot: Plot) -> None:
    ordered = sorted(bars, key=lambda key: -bars[key])
    colours = ["#1f6f8b" if key in plot.ours else "#b8b8b8" for key in ordered]
    drawn = axis.barh(ordered, [bars[key] for key in ordered], color=colours)
    figures = [f"{bars[key]:.2f}" if bars[key] < 10 else f"{bars[key]:.0f}" for key in ordered]
    axis.bar_label(drawn, figures, padding=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axis.set_title(name, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.12)
    if plot.logarithmic:
        axis.set_xscale("log")
    if plot.limit is not None:
        axis.axvline(plot.limit, color="black", linewidth=0.8, linestyle=":", zorder=0.5)
