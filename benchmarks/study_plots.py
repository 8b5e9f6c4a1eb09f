"""Plots of the studies: each takes its section of a result file, as a dict, and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from benchmarks.style import (
    COLORS,
    INK,
    LABEL_BOX,
    MUTED,
    OURS,
    bar_text,
    color_of,
    decorate,
    label_bars,
    legend,
    log2_ticks,
    log_height,
    new_figure,
    percent,
)  # fmt: skip
from benchmarks.timing import MIB
from grpo_fused import engines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {"linear_cross_entropy": "linear_cross_entropy of torch: bf16 results", "bare": "bare products"}


def accuracy_plot(section: dict[str, Any]) -> Figure:
    """Errors of log-probs, flipped clip decisions and on-policy ratios in bf16, of `benchmarks.accuracy`."""
    shape = section["shape"]
    figure = new_figure(
        13.2, 4.6, "Effect of bf16 logits on GRPO: errors of log-probs, clip decisions and ratios",
        f"bf16 inputs, {shape['B'] * shape['T']} tokens sampled from the policy, H = {shape['H']}, V = {shape['V']}, "
        f"{section['device']}; compared with float64 on the same inputs, with exact old log-probs.\n"
        "Where bf16 logits gave the old log-probs too, the on-policy ratio is 1 until the first optimizer step.",
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
        "error bound", (sizes[0], promised[0]), xytext=(0, -12), textcoords="offset points", fontsize=8.5, color=INK
    )
    axes.set_yscale("log")
    decorate(axes, "Error of log-probs (lower is better)", "largest |logit|", "max |Δ log p|, nats")
    _logit_axis(axes, sizes)
    _draw_curves(axes, curves, (0.01, 0.41))  # above the bound


def _flips_panel(axes: Axes, section: dict[str, Any]) -> None:
    curves = _curves(section, lambda row: row["flipped"]["exact_old"], together=0.001)
    top = 1.06 * max(0.01, *(max(y) for _, y in curves.values()))
    axes.set_ylim(-0.02 * top, top)
    percent(axes.yaxis)
    low, high = section["clip"]
    unit = f"share of tokens, policies {section['old_noise']:g} nats apart"
    decorate(axes, f"Wrong clip decisions, [{low:g}, {high:g}] (lower is better)", "largest |logit|", unit)
    _logit_axis(axes, sorted({row["max_logit"] for row in section["rows"]}))
    _draw_curves(axes, curves)


def _ratio_panel(axes: Axes, section: dict[str, Any]) -> None:
    histograms = section["histograms"]
    edges, counts = histograms["edges"], histograms["counts"]["bfloat16"]
    mine = next(name for name in OURS if name in counts)
    places = (("eager", "bf16 logits", (0.04, 0.93), "left"), (mine, "ours", (0.96, 0.20), "right"))
    for name, label, place, side in places:
        values = counts[name]["exact"]
        shares = [below / sum(values) for below in accumulate(values)]
        axes.plot(edges, [0.0, *shares], color=COLORS[name], linewidth=2.4 if name == mine else 1.6, zorder=3)
        axes.text(
            *place, f"{label}:\n{_ratio_words(section, name)}", transform=axes.transAxes, color=COLORS[name],
            fontsize=8.5, fontweight="bold", va="top", ha=side, bbox=LABEL_BOX,
        )  # fmt: skip
    percent(axes.yaxis)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xticks([edges[0], 1.0, edges[-1]])
    unit = f"new / exact old probability, largest |logit| {histograms['max_logit']:g}"
    decorate(axes, "On-policy ratios (a step at 1 is exact)", unit, "share of tokens with a smaller ratio")


def _ratio_words(section: dict[str, Any], provider: str) -> str:
    size = section["histograms"]["max_logit"]
    row = min(_by_provider(section)[provider], key=lambda row: abs(row["max_logit"] - size))
    return f"within {row['on_policy']['exact']['max_deviation']:.0e} of 1".replace("e-0", "e-")


def _by_provider(section: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows in bf16, by size of the logits."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(section["rows"], key=lambda row: row["max_logit"]):
        if row["dtype"] == "bfloat16":
            found.setdefault(row["provider"], []).append(row)
    return found


def _curves(
    section: dict[str, Any], value: Callable[[dict[str, Any]], float], together: float = 0.0
) -> dict[tuple[str, ...], tuple[list[float], list[float]]]:
    """(max |z|, value) by providers; curves that are equal within 2 % (or `together`) become one."""
    groups: dict[tuple[str, ...], tuple[list[float], list[float]]] = {}
    for name, rows in _by_provider(section).items():
        x, y = [row["max_logit"] for row in rows], [value(row) for row in rows]
        for names, (other_x, other_y) in groups.items():
            near = all(abs(a - b) <= max(0.02 * abs(b), together) for a, b in zip(y, other_y, strict=True))
            if x == other_x and near and (name in OURS) == (names[0] in OURS):
                groups[(*names, name)] = groups.pop(names)
                break
        else:
            groups[(name,)] = (x, y)
    return groups


def _draw_curves(
    axes: Axes,
    groups: dict[tuple[str, ...], tuple[list[float], list[float]]],
    place: str | tuple[float, float] = "upper left",
) -> None:
    for names, (x, y) in groups.items():
        mine = names[0] in OURS
        text = ", ".join(LABELS.get(name, name) for name in names)
        if set(names) == {"eager", "TRL", "Liger"}:
            text = "eager, TRL, Liger: bf16 logits"
        elif len(names) > 1 and mine:
            text = f"ours ({text})"
        axes.plot(
            x, y, color=color_of(names[0]), linewidth=2.4 if mine else 1.6, marker="o", markersize=4,
            zorder=3 if mine else 2, label=text,
        )  # fmt: skip
    legend(axes, place)


def _logit_axis(axes: Axes, sizes: Sequence[float]) -> None:
    ticks = sorted({round(z) for z in sizes})
    log2_ticks(axes, ticks, [str(z) for z in ticks])


def growth_plot(section: dict[str, Any]) -> Figure:
    """Time and memory by each varied dimension, of `benchmarks.growth`."""
    base = section["base"]
    words = f"N = {base['N']}, H = {base['H']}, V = {base['V']}"
    figure = new_figure(
        13.2, 6.6, "Time and memory of the loss by problem size (lower is better)",
        f"One size varies, the others are {words}; bf16, {section['device']}. Dots: measured, medians. "
        "Lines of memory: predicted by the plan of the engine.\n"
        "The machine is shared with others: the bare products, whose work is known exactly, wander too.",
    )  # fmt: skip
    panels = figure.subplots(2, len(section["varied"]), sharey="row", squeeze=False)
    titles = {"N": "tokens N", "V": "vocabulary V", "H": "hidden size H", "active": "share of active tokens"}
    for (above, below), dimension in zip(panels.T, section["varied"], strict=True):
        points = [p for p in section["points"] if all(p[k] == v for k, v in base.items() if k != dimension)]
        points.sort(key=lambda p: p[dimension])
        for engine in dict.fromkeys(p["engine"] for p in section["points"]):
            mine = [p for p in points if p["engine"] == engine]
            seconds = [(p[dimension], p["seconds"]["median"]) for p in mine]
            _dots_and_line(above, engine, seconds, seconds)
            measured = [(p[dimension], p["bytes"] / MIB) for p in mine if p["bytes"] is not None and p["bytes"] > 0]
            predicted = [(p[dimension], p["predicted_bytes"] / MIB) for p in mine if "predicted_bytes" in p]
            _dots_and_line(below, engine, measured, predicted or measured)
        logits = sorted({(p[dimension], 4 * p["N"] * p["active"] * p["V"] / MIB) for p in points})
        below.plot(
            *zip(*logits, strict=True), color=MUTED, linewidth=1, linestyle=":", label="fp32 logits of all tokens"
        )
        ticks = sorted({p[dimension] for p in points})
        for axes in (above, below):
            log2_ticks(axes, ticks, [f"{t:.0%}" if dimension == "active" else _thousands(t) for t in ticks])
            log_height(axes)
        decorate(above, f"Time by {titles[dimension]}", "", "")
        decorate(below, f"Memory by {titles[dimension]}", titles[dimension], "")
    for axes, label in zip(
        panels[:, 0], ("seconds, forward + backward", "MiB beyond inputs and gradients"), strict=True
    ):
        axes.set_ylabel(label)
        legend(axes, "upper left")
    return figure


def _dots_and_line(axes: Axes, engine: str, dots: list[tuple[float, float]], line: list[tuple[float, float]]) -> None:
    """What was measured, if anything was, and a line with the engine's name."""
    if dots:
        color = color_of(engine)
        axes.plot(*zip(*dots, strict=True), "o", color=color, markersize=5)
        axes.plot(*zip(*line, strict=True), color=color, linewidth=1.4, label=LABELS.get(engine, engine))


def _thousands(number: float) -> str:
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"


def end_to_end_plot(section: dict[str, Any]) -> Figure:
    """Time and memory of a training step, and the head's share of larger models."""
    model = section["model"]
    figure = new_figure(
        13.2, 4.5, "A whole training step, without generation",
        f"Qwen2 with H = {model['hidden']}, {model['layers']} layers, V = {model['vocab']}; {section['tokens']} "
        f"completion tokens, {model['device']}. Right: by parameters, without attention scores.",
    )  # fmt: skip
    time, memory, share = figure.subplots(1, 3)
    bars = [(dtype, name, r) for dtype, by in section["results"].items() for name, r in by.items() if "head_share" in r]
    for y, (_, name, r) in enumerate(bars):
        seconds, head = r["step_seconds"]["median"], r["head_seconds"]["median"]
        color = color_of(name)
        time.barh(y, 1e3 * head, color=color, height=0.66)
        time.barh(y, 1e3 * max(seconds - head, 0), left=1e3 * head, color=color, alpha=0.35, height=0.66)
        bar_text(time, 1e3 * max(seconds, head), y, f"{1e3 * seconds:,.0f} ms, head {r['head_share']:.0%}")
        if r.get("peak_bytes") is not None:
            memory.barh(y, r["peak_bytes"] / MIB, color=color, height=0.66)
            bar_text(memory, r["peak_bytes"] / MIB, y, f"{r['peak_bytes'] / MIB:,.0f}")
    for axes in (time, memory):
        label_bars(axes, [f"{name}, {_short(dtype)}" for dtype, name, _ in bars])
        axes.set_xlim(0, 1.55 * axes.get_xlim()[1])
    decorate(time, "Time: head and loss (dark), rest (pale)", "ms for each step (lower is better)", "", grid=False)
    unit = "MiB beyond weights and optimizer state (lower is better)"
    decorate(memory, "Peak memory of a step", unit, "", grid=False)
    shares = section["head_flop_share"]
    for y, (name, value) in enumerate(shares.items()):
        share.barh(y, value, color=MUTED if name != "this model" else INK, height=0.6)
        bar_text(share, value, y, f"{value:.0%}")
    label_bars(share, list(shares))
    share.set_xlim(0, 1)
    percent(share.xaxis)
    decorate(share, "Head's share of a model's matrix products", "share of the FLOP of a token", "", grid=False)
    return figure


def candidates_plot(section: dict[str, Any]) -> Figure:
    """Time by the size of the sets, compared with the dense loss."""
    shape, points = section["published"], section["growth"]
    figure = new_figure(
        7.4, 5.2, "Candidate sets: time of the loss by set size (lower is better)",
        f"bf16, H = {shape['H']}, V = {shape['V']}, frozen head, sets of one size. Dots: medians; bars: p20 to p80.\n"
        "The whole vocabulary is timed again beside each size, and takes the same work each time: that\n"
        "it wanders is the machine, shared with others. Sets of more than V / 96 tokens are worked as the\n"
        "whole vocabulary with a mask, so that the largest size takes less time than the one before it.",
    )  # fmt: skip
    axes = figure.subplots()
    sizes = [point["size"] for point in points]
    for name, color, label in (("sets", COLORS["native"], "candidate sets"), ("dense", MUTED, "whole vocabulary")):
        times = [point[name]["ms"]["median"] for point in points]
        spread = [
            [abs(point[name]["ms"][q] - t) for point, t in zip(points, times, strict=True)] for q in ("p20", "p80")
        ]
        axes.errorbar(sizes, times, spread, fmt="o-", color=color, markersize=5, linewidth=1.4, label=label)
    limit = engines.largest_sparse_set("native", shape["V"])
    axes.axvline(limit, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate("V / 96", (limit, 0.04), xycoords=("data", "axes fraction"), xytext=(5, 0),
                  textcoords="offset points", fontsize=8.5, color=INK, bbox=LABEL_BOX)  # fmt: skip
    log2_ticks(axes, sizes, [f"{size}" for size in sizes])
    log_height(axes)
    legend(axes, "center left")
    decorate(axes, "", "tokens in a set", "ms, forward + backward")
    return figure


def distillation_plot(section: dict[str, Any]) -> Figure:
    """Held-out accuracy by step, of distillation and of GRPO from the same start, a line for each seed."""
    figure = new_figure(
        7.4, 4.2, "On-policy distillation and GRPO from the same start",
        "Two-digit arithmetic, a model of half a million parameters; a line for each seed. Dashed: the teachers.",
    )  # fmt: skip
    axes = figure.subplots()
    for run in section["runs"]:
        rows = [row for row in run["metrics"] if "held_out_accuracy" in row]
        x, y = [row["step"] for row in rows], [row["held_out_accuracy"] for row in rows]
        color, label = (COLORS["native"], "distillation") if run["distil"] else (MUTED, "GRPO")
        axes.plot(x, y, "o-", color=color, markersize=4, linewidth=1.4, label="" if run["seed"] else label)
        axes.axhline(run["teacher_accuracy"], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    percent(axes.yaxis)
    axes.set_ylim(0, 1.02)
    legend(axes, "lower right")
    decorate(axes, "", "step", "held-out accuracy")
    return figure


def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype)
