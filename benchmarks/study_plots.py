"""Pictures of the studies: each takes its section of a result file, as a dict, and returns a matplotlib figure.

python -m benchmarks.study_plots results.json folder/    # a PNG for each section that the file has
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
COLORS = {
    "native": "#0072b2",
    "ours": "#0072b2",
    "triton": "#0072b2",
    "chunked": "#56b4e9",
    "eager": "#d55e00",
    "TRL": "#e69f00",
    "Liger": "#a0522d",
    "linear_cross_entropy": "#cc79a7",
    "bare": "#7b8794",
}
"""Okabe and Ito's palette, told apart by every kind of colour vision; lines are labelled all the same."""

LABELS = {"linear_cross_entropy": "linear_cross_\nentropy of torch:\nbf16 results", "bare": "bare products"}
OURS = ("native", "triton", "chunked")
MIB = 2**20


def accuracy_plot(section: dict[str, Any]) -> Figure:
    """Errors of log-probs, flipped clip decisions and on-policy ratios in bf16, of `benchmarks.accuracy`."""
    shape = section["shape"]
    figure = _figure(
        13.2, 4.6, "What rounding the logits to bf16 costs GRPO",
        f"bf16 inputs, {shape['B'] * shape['T']} tokens sampled from the policy, H = {shape['H']}, V = {shape['V']}, "
        f"{section['device']}; against float64 on the same inputs, with exact old log-probs.\n"
        "A head of bf16 logits that has scored the rollout too has ratios of 1 as well, until the policy moves.",
    )  # fmt: skip
    error, flips, ratios = figure.subplots(1, 3, width_ratios=(1.1, 1.1, 0.9))
    _error_panel(error, section)
    _flips_panel(flips, section)
    _ratio_panel(ratios, section)
    return figure


def _error_panel(axes: Axes, section: dict[str, Any]) -> None:
    curves = _curves(section, lambda row: row["logp_error"]["max"])
    promise, sizes = section["promise"], sorted({row["max_logit"] for row in section["rows"]})
    promised = [promise["logp_error"] * max(1.0, z / promise["up_to"]) for z in sizes]
    axes.plot(sizes, promised, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "promised", (sizes[0], promised[0]), xytext=(0, 4), textcoords="offset points", fontsize=8.5, color=INK
    )
    axes.set_yscale("log")
    _draw_curves(axes, curves)
    _logit_axis(axes, sizes)
    _title(axes, "Error of log-probs", "max |Δ log p|, nats")


def _flips_panel(axes: Axes, section: dict[str, Any]) -> None:
    curves = _curves(section, lambda row: row["flipped"]["exact_old"], together=0.001)
    axes.set_ylim(-0.001, 1.06 * max(0.01, *(max(y) for _, y in curves.values())))
    _draw_curves(axes, curves)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _logit_axis(axes, sorted({row["max_logit"] for row in section["rows"]}))
    low, high = section["clip"]
    unit = f"share of tokens, policies {section['old_noise']:g} nats apart"
    _title(axes, f"Clip decisions flipped, [{low:g}, {high:g}]", unit)


def _ratio_panel(axes: Axes, section: dict[str, Any]) -> None:
    histograms = section["histograms"]
    edges, counts = histograms["edges"], histograms["counts"]["bfloat16"]
    mine = next((name for name in OURS if name in counts), None)
    for name, label, place in (("eager", "bf16 logits", (0.03, 0.62)), (mine, "ours", (0.55, 0.93))):
        if name is None or name not in counts:
            continue
        values = counts[name]["exact"]
        axes.stairs([v / sum(values) for v in values], edges, color=COLORS[name], fill=True, zorder=3)
        axes.text(
            *place, f"{label}:\n{_ratio_words(section, name)}", transform=axes.transAxes, color=COLORS[name],
            fontsize=8.5, fontweight="bold", va="top",
        )  # fmt: skip
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.6)
    axes.set_yticks([0, 0.01, 0.1, 1.0], ["0", "1%", "10%", "100%"])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.3)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xticks([edges[0], 1.0, edges[-1]])
    axes.set_xlabel(f"new / exact old probability, at max |z| = {histograms['max_logit']:g}", fontsize=9, color=MUTED)
    _title(axes, "On-policy ratios: all should be 1", "share of tokens")


def _ratio_words(section: dict[str, Any], provider: str) -> str:
    size = section["histograms"]["max_logit"]
    row = min(_by_provider(section, "bfloat16")[provider], key=lambda row: abs(row["max_logit"] - size))
    return f"within {row['on_policy']['exact']['max_deviation']:.0e} of 1".replace("e-0", "e-")


def _by_provider(section: dict[str, Any], dtype: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of a dtype, by growing logits."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(section["rows"], key=lambda row: row["max_logit"]):
        if row["dtype"] == dtype:
            found.setdefault(row["provider"], []).append(row)
    return found


def _curves(
    section: dict[str, Any], value: Callable[[dict[str, Any]], float], together: float = 0.0
) -> dict[tuple[str, ...], tuple[list[float], list[float]]]:
    """(max |z|, value) by providers; those that lie on one another (within 2 %, or `together`) are one curve."""
    groups: dict[tuple[str, ...], tuple[list[float], list[float]]] = {}
    for name, rows in _by_provider(section, "bfloat16").items():
        x, y = [row["max_logit"] for row in rows], [value(row) for row in rows]
        for names, (other_x, other_y) in groups.items():
            near = all(abs(a - b) <= max(0.02 * abs(b), together) for a, b in zip(y, other_y, strict=True))
            if x == other_x and near and (name in OURS) == (names[0] in OURS):
                groups[(*names, name)] = groups.pop(names)
                break
        else:
            groups[(name,)] = (x, y)
    return groups


def _draw_curves(axes: Axes, groups: dict[tuple[str, ...], tuple[list[float], list[float]]]) -> None:
    """Lines with their names at the right end; the axis' scale and limits must have been set."""
    for names, (x, y) in groups.items():
        mine = names[0] in OURS
        color = COLORS.get(names[0], MUTED)
        axes.plot(x, y, color=color, linewidth=2.4 if mine else 1.6, marker="o", markersize=4, zorder=3 if mine else 2)
    ends = []
    for names, (x, y) in groups.items():
        text = ", ".join(LABELS.get(name, name) for name in names)
        if set(names) == {"eager", "TRL", "Liger"}:
            text = "eager, TRL, Liger:\nbf16 logits"
        elif len(names) > 1 and names[0] in OURS:
            text = f"ours\n({text})"
        ends.append((x[-1], y[-1], text, COLORS.get(names[0], MUTED)))
    _name_ends(axes, ends)


def _name_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Writes (x, y, text, colour) to the right of its point, above the text below where they would meet."""
    figure_low, figure_high = (axes.transData.transform((1, y))[1] for y in axes.get_ylim())
    points = axes.get_position().height * axes.figure.get_figheight() * 72
    below = -1.0
    for x, y, text, color in sorted(ends, key=lambda end: end[1]):
        room = 5.5 * (1 + text.count("\n")) / points  # half its height
        height = (axes.transData.transform((1, y))[1] - figure_low) / (figure_high - figure_low)
        below = max(height, below + room)
        axes.text(
            1.12 * x, below, text, transform=axes.get_xaxis_transform(), va="center", fontsize=8.5,
            fontweight="bold", color=color,
        )  # fmt: skip
        below += room


def _logit_axis(axes: Axes, sizes: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({round(z) for z in sizes})
    axes.set_xticks(ticks, [str(z) for z in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(sizes) * 0.9, max(sizes) * 6)  # room for the names
    axes.set_xlabel("max |z|", fontsize=9, color=MUTED)


def growth_plot(section: dict[str, Any]) -> Figure:
    """Time and memory by each varied dimension, measured (dots) and predicted (lines), of `benchmarks.growth`."""
    dtype = section["points"][0]["dtype"]
    base = section["base"]
    words = f"N = {base['N']}, H = {base['H']}, V = {base['V']}"
    figure = _figure(
        13.2, 6.6, "How the loss grows",
        f"around {words}, {_short(dtype)}, {section['device']}; dots measured, lines predicted: time by a fit that has "
        "not seen the point, memory by the engines' rules",
    )  # fmt: skip
    panels = figure.subplots(2, len(section["varied"]), sharey="row", squeeze=False)
    titles = {"N": "tokens N", "V": "vocabulary V", "H": "width H", "active": "active share of tokens"}
    for column, dimension in enumerate(section["varied"]):
        points = [
            p for p in section["points"]
            if p["dtype"] == dtype and all(p[k] == v for k, v in base.items() if k != dimension)
        ]  # fmt: skip
        _growth_panel(panels[0][column], points, dimension, _seconds, "predicted_seconds", 1.0)
        _growth_panel(panels[1][column], points, dimension, _bytes, "predicted_bytes", MIB)
        _title(panels[0][column], f"Time by {titles[dimension]}", "seconds, forward + backward" if column == 0 else "")
        below = "MiB beyond inputs and gradients" if column == 0 else ""
        _title(panels[1][column], f"Memory by {titles[dimension]}", below)
    for axes in panels[:, -1]:  # once all panels of the row have set its limits
        axes.set_xlim(right=2.2 * axes.get_xlim()[1])
        curves = [curve for curve in axes.get_lines() if curve.get_linestyle() != "None"]
        _name_ends(axes, [(c.get_xdata()[-1], c.get_ydata()[-1], c.get_label(), c.get_color()) for c in curves])
    return figure


def _seconds(point: dict[str, Any]) -> float | None:
    return point["seconds"]["median"]


def _bytes(point: dict[str, Any]) -> float | None:
    return point["bytes"]


def _growth_panel(
    axes: Axes,
    points: list[dict[str, Any]],
    dimension: str,
    measured: Callable[[dict[str, Any]], float | None],
    predicted: str,
    unit: float,
) -> None:
    ticks = sorted({p[dimension] for p in points})
    for engine in dict.fromkeys(p["engine"] for p in points):
        mine = sorted((p for p in points if p["engine"] == engine), key=lambda p: p[dimension])
        dots = [(p[dimension], value / unit) for p in mine if (value := measured(p)) is not None and value > 0]
        line = [(p[dimension], p[predicted] / unit) for p in mine if p.get(predicted)]
        if not dots:
            continue
        color, name = COLORS.get(engine, MUTED), LABELS.get(engine, engine)
        axes.plot(*zip(*dots, strict=True), "o", color=color, markersize=5)
        axes.plot(*zip(*(line or dots), strict=True), color=color, linewidth=1.4, label=name)
    if measured is _bytes:
        logits = sorted({(p[dimension], 4 * p["N"] * p["active"] * p["V"] / unit) for p in points})
        axes.plot(
            *zip(*logits, strict=True), color=MUTED, linewidth=1, linestyle=":", label="fp32 logits\nof all tokens"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{t:.0%}" if dimension == "active" else _thousands(t) for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _thousands(number: float) -> str:
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"


def end_to_end_plot(section: dict[str, Any]) -> Figure:
    """A training step by what it is made of, its memory, and what the head is of larger models."""
    model = section["model"]
    figure = _figure(
        13.2, 4.5, "A whole training step: the loss is only a part of it",
        f"Qwen2 with H = {model['hidden']}, {model['layers']} layers, V = {model['vocab']}; {section['tokens']} "
        f"completion tokens, no generation, {model['device']}. On the right: by parameters, without attention scores",
    )  # fmt: skip
    time, memory, share = figure.subplots(1, 3)
    bars = [(dtype, name, r) for dtype, by in section["results"].items() for name, r in by.items() if "head_share" in r]
    bars.reverse()  # the first one on top
    names = [f"{name}, {_short(dtype)}" for dtype, name, _ in bars]
    for y, (_, name, r) in enumerate(bars):
        seconds, head = r["step_seconds"]["median"], r["head_seconds"]["median"]
        axes_color = COLORS.get(name, MUTED)
        time.barh(y, 1e3 * head, color=axes_color, height=0.66)
        time.barh(y, 1e3 * max(seconds - head, 0), left=1e3 * head, color=axes_color, alpha=0.3, height=0.66)
        _beside(
            time, 1e3 * max(seconds, head), y, f"{r['tokens_per_second']:,.0f} tokens/s, head {r['head_share']:.0%}"
        )
        if "peak_bytes" in r:
            memory.barh(y, r["peak_bytes"] / MIB, color=axes_color, height=0.66)
            _beside(memory, r["peak_bytes"] / MIB, y, f"{r['peak_bytes'] / MIB:,.0f}")
    for axes in (time, memory):
        axes.set_yticks(range(len(names)), names, fontsize=9, color=INK)
        axes.set_xlim(0, 1.75 * axes.get_xlim()[1])
    _title(time, "Time: head (full), the rest (pale)", "", grid="x")
    time.set_xlabel("ms a step: forward, loss, backward, AdamW", fontsize=9, color=MUTED)
    _title(memory, "Peak memory of a step", "", grid="x")
    memory.set_xlabel("MiB beyond weights and optimizer state", fontsize=9, color=MUTED)
    shares = list(section["head_flop_share"].items())[::-1]
    for y, (name, value) in enumerate(shares):
        share.barh(y, value, color=MUTED if name != "this model" else INK, height=0.6)
        _beside(share, value, y, f"{value:.0%}")
    share.set_yticks(range(len(shares)), [name for name, _ in shares], fontsize=9, color=INK)
    share.set_xlim(0, 1)
    share.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _title(share, "The head's share of a model's products", "", grid="x")
    share.set_xlabel("of parameters that a token is multiplied by", fontsize=9, color=MUTED)
    return figure


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


def _figure(width: float, height: float, title: str, note: str) -> Figure:
    """Inches; drawn without a display, whatever backend the user has configured."""
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=13, fontweight="bold", x=0.012, ha="left")
    figure.supxlabel(note, color=MUTED, fontsize=8.5, x=0.012, ha="left")
    return figure


def _title(axes: Axes, title: str, unit: str, grid: Literal["both", "x"] = "both") -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9, color=MUTED)
    axes.grid(visible=True, axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, which="both")
    axes.spines[:].set_visible(False)


PLOTS = {"accuracy": accuracy_plot, "growth": growth_plot, "end_to_end": end_to_end_plot}


def main(argv: list[str] | None = None) -> None:
    """Draw what the file has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(argv)
    given.folder.mkdir(parents=True, exist_ok=True)
    sections = json.loads(given.results.read_text())["sections"]
    for name in PLOTS.keys() & sections.keys():
        PLOTS[name](sections[name]).savefig(given.folder / f"{name}.png")
        print(f"written to {given.folder / name}.png")


if __name__ == "__main__":
    main()
