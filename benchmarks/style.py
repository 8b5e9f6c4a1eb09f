"""The style of every picture: colours, fonts, titles, and labels on a white background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
PROGRAMS = {
    "native": ("#0072b2", "ours: native"),
    "ours": ("#0072b2", "ours"),
    "triton": ("#0072b2", "ours: triton"),
    "cuda": ("#0072b2", "ours: cuda"),
    "chunked": ("#56b4e9", "ours: chunked"),
    "eager": ("#d55e00", "eager PyTorch"),
    "torch.compile": ("#009e73", "torch.compile"),
    "TRL": ("#e69f00", "TRL"),
    "trl": ("#e69f00", "TRL"),
    "Liger": ("#a0522d", "Liger"),
    "liger": ("#a0522d", "Liger"),
    "liger-triton": ("#a0522d", "Liger, Triton"),
    "linear_cross_entropy": ("#cc79a7", "linear_cross_entropy"),
    "torch-lce": ("#cc79a7", "linear_cross_entropy"),
    "torch-lce-chunked": ("#cc79a7", "linear_cross_entropy, chunked"),
    "torchtitan": ("#7e57c2", "torchtitan"),
    "unsloth": ("#b8a100", "Unsloth"),
    "cce": ("#117733", "Apple CCE"),
    "cce-exact": ("#117733", "Apple CCE, exact"),
    "quack": ("#882255", "QuACK"),
    "bare": ("#7b8794", "bare"),
}
"""Of each implementation in the result files the colour and the name in every picture: Okabe and Ito's palette, which
people with any kind of colour vision can distinguish, and further ones. Lines and bars have labels as well."""
COLORS, NAMES = ({program: row[i] for program, row in PROGRAMS.items()} for i in range(2))
OURS = ("native", "triton", "cuda", "chunked", "ours")

LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
"""The background of a label: no line goes through its text."""


def new_figure(width: float, height: float, title: str, note: str) -> Figure:
    """Width and height in inches; drawn without a display, with any backend that the user has configured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(note, color=MUTED, fontsize=8.5, x=0.012, ha="left")
    return figure


def decorate(axes: Axes, title: str, x_label: str, y_label: str, grid: bool = True) -> None:
    """Title, labels and grid of a panel."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    axes.set_xlabel(x_label, fontsize=9, color=MUTED)
    axes.set_ylabel(y_label, fontsize=9, color=MUTED)
    if grid:
        axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, which="both")
    axes.spines[:].set_visible(False)


def percent(axis: Axis) -> None:
    """Shares as percentages."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def log2_ticks(axes: Axes, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """A logarithmic horizontal axis with these ticks only."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels)
    axes.xaxis.set_minor_locator(NullLocator())


def log_height(axes: Axes) -> None:
    """A logarithmic vertical axis whose ticks are plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, place: str | tuple[float, float] = "best") -> None:
    """The names of lines, without a frame."""
    axes.legend(frameon=False, fontsize=8.5, loc=place)


def color_of(name: str) -> str:
    """The colour of a program; grey for one that is new."""
    return COLORS.get(name, MUTED)


def add_source(figure: Figure, source: str) -> None:
    """A last line below the picture: the machine, the commit and the date of its run."""
    figure.supxlabel(f"{figure.get_supxlabel()}\n{source}", color=MUTED, fontsize=8.5, x=0.012, ha="left")


def label_bars(axes: Axes, names: Sequence[str]) -> None:
    """The names of horizontal bars, the first one on top, on an axis that begins at 0."""
    axes.set_yticks(range(len(names)), names, fontsize=9, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)


def bar_text(axes: Axes, x: float, y: float, text: str) -> None:
    """Text to the right of the end of a bar."""
    axes.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK, bbox=LABEL_BOX
    )
