"""Tables and pictures of the studies of learning: `learning`, `learning_countdown`, `learning_options`, `length_bias`.

Accuracies are percentages, their differences percentage points.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.equivalence import describe, values_of
from benchmarks.results import Run, where
from benchmarks.study import Section
from benchmarks.style import COLORS, INK, MUTED, decorate, legend, new_figure, percent
from benchmarks.tables import grid, paragraphs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARMS = {
    "ours": "our trainer", "fused_trl": "`FusedGRPOTrainer`", "patched_trl": "`patch_trl()`", "trl": "stock TRL",
}  # fmt: skip
ARM_COLORS = {
    "ours": COLORS["native"], "fused_trl": COLORS["chunked"], "patched_trl": COLORS["TRL"], "trl": COLORS["eager"],
}  # fmt: skip
TASKS = {
    "sums": "Sums and differences of two-digit numbers, a Qwen2",
    "countdown": "Countdown of reasoning-gym (three numbers), a Llama",
    "pretrained": "Sums of three terms of reasoning-gym, Gemma 3 270M",
    "pretrained_cut": "Sums of three terms of reasoning-gym, Gemma 3 270M with its vocabulary cut to the task",
}
OPTIONS = {
    "dapo": "loss `dapo`", "grpo": "loss `grpo`", "dr_grpo": "loss `dr_grpo`", "cispo": "loss `cispo`",
    "sapo": "loss `sapo`", "gspo": "`grpo`, ratios by sequence (GSPO)", "share_prompts": "`share_prompts`",
    "bf16": "bf16 autocast", "lora": "LoRA of rank 16, head included", "lora_int8": "the same on a head in int8",
    "sets": "top-p 0.9, candidate sets", "no_sets": "top-p 0.9, no candidate sets",
}  # fmt: skip
LOSS_COLORS = {"grpo": COLORS["eager"], "dapo": COLORS["TRL"], "dr_grpo": COLORS["native"]}
SMOOTH = 5
"""Rollouts in a mean of a reward curve."""
ALPHA = 0.05
PLANNED = 40
"""Seeds of our trainer and stock TRL; with fewer, nothing is said to be shown."""


def points(row: dict[str, Any], scale: float = 100.0) -> tuple[str, str]:
    """A difference and its interval."""
    mean, low, high = (scale * row[name] + 0.0 for name in ("mean", "low", "high"))
    return f"{mean:+.1f}", f"{low:+.1f} to {high:+.1f}"


def p_value(p: float) -> str:
    """A p-value as text."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def comparison(section: Section, run: Run) -> str:
    """A row for each arm: accuracy, and the difference from stock TRL."""
    rows = []
    for arm, label in ARMS.items():
        if arm not in section["arms"]:
            continue
        own, row = section["arms"][arm], section["against_trl"].get(arm)
        cells = ["", "", ""] if row is None else [*points(row), p_value(row["p"])]
        if row is not None and {own["n"], section["arms"]["trl"]["n"]} != {row["n"]}:
            cells[0] += f" ({row['n']} pairs)"
        sd = f"{100 * own['sd']:.1f}" if own["n"] > 1 else ""
        rows.append([label, str(own["n"]), f"{own['mean']:.1%}", sd, *cells])
    recipe, bound, before = section["recipe"], f"{100 * section['bound']:g}", section["before"]
    replayed = ""
    if section["replay"]:
        steps = section["replayed_steps"] * recipe["num_iterations"]
        replayed = (
            f"On the completions of stock TRL, {steps} optimizer steps of our trainer lead to the same weights: the "
            f"difference is at most {max(section['replay']):.0e} of the way ({len(section['replay'])} seeds). "
        )
    return paragraphs(
        grid(
            "| trainer | seeds | accuracy | sd | difference from stock TRL | 95 % interval | "
            f"p, equal within {bound} points |",
            rows,
        ),
        f"{TASKS[recipe['task']]}: from {before['mean']:.1%} (sd {100 * before['sd']:.1f}) of {section['held_out']:,} "
        f"held-out problems after the warm-up, greedy; {recipe['steps']} rollouts of {recipe['prompts_per_step']} "
        f"prompts with {recipe['num_generations']} completions, "
        f"{counted(recipe['num_iterations'], 'optimizer step')} each. "
        f"Differences are by seed; sd and differences in points. {replayed}{runs_of(section, run)}",
    )


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def sentence(section: Section, run: Run) -> str:
    """What is true of our trainer and stock TRL."""
    row = section["against_trl"]["ours"]
    (difference, interval), p = points(row), p_value(row["p"])
    equal = f"equality within {100 * section['bound']:g} points is {'' if row['p'] < ALPHA else 'not '}shown"
    if row["n"] < PLANNED:
        equal = f"preliminary, since {PLANNED} seeds are planned: equality is not claimed yet"
    ours, theirs = (f"{row[side]:.1%}" for side in ("mean_of_values", "mean_of_baseline"))
    return (
        f"Over {row['n']} seeds a small policy reaches an accuracy of {ours} in our trainer and of {theirs} in stock "
        f"TRL: a difference of {difference} points, 95 % interval {interval}; {equal} (two one-sided tests, "
        f"p {p if p.startswith('<') else '= ' + p})."
    )


def options(section: Section, run: Run) -> str:
    """A row for each option: accuracy, and the difference from its baseline."""
    rows = []
    for name, own in section["arms"].items():
        baseline, row = section["options"][name]["baseline"], section["against"].get(name)
        cells = ["", "", "", ""] if row is None else [OPTIONS[baseline], *points(row), p_value(row["p"])]
        rows.append([OPTIONS[name], str(own["n"]), f"{own['mean']:.1%}", f"{100 * own['sd']:.1f}", *cells])
    bound = f"{100 * section['bound']:g}"
    return paragraphs(
        grid(
            "| option | seeds | accuracy | sd | against | difference | 95 % interval | "
            f"p, equal within {bound} points |",
            rows,
        ),
        f"Our trainer; the rest of the recipe is that of the first table. {runs_of(section, run)}",
    )


def length_bias(section: Section, run: Run) -> str:
    """The weight of a token by length, and how lengths changed."""
    lengths = section["lengths"]
    weights = [[f"`{name}`", *(f"{value:.3g}" for value in row)] for name, row in section["weights"].items()]
    rows = []
    for name in section["weights"]:
        cells = []
        for kind in ("wrong", "right"):
            against = section[kind]["against_dr_grpo"].get(name)
            cells += [
                "{} ({})".format(*points(section[kind]["change"][name], 1.0)),
                "" if against is None else "{} ({})".format(*points(against, 1.0)),
            ]
        rows.append([f"`{name}`", *cells])
    return paragraphs(
        grid(f"| weight of a token in a completion of | {' | '.join(f'{n} tokens' for n in lengths)} |", weights),
        grid(
            "| loss | wrong completions: change of length | against `dr_grpo` | right ones: change | "
            "against `dr_grpo` |",
            rows,
        ),
        f"Tokens, with 95 % intervals over {len(section['wrong']['seeds'])} seeds: the mean of the last "
        f"{section['last']} of {section['recipe']['steps']} rollouts, less the first rollout. {runs_of(section, run)}",
    )


def runs_of(section: Section, run: Run) -> str:
    """Where the statistics were made, and the commits whose code trained."""
    return f"{where(run)}; trained at {', '.join(sorted({row['commit'] for row in section['runs']}))}."


def learning_plot(section: Section) -> Figure:
    """All seeds: the rewards in training, the accuracy of each arm, and its difference from stock TRL."""
    arms = [arm for arm in ARMS if arm in section["arms"]]
    runs = {arm: [row for row in section["runs"] if row["arm"] == arm] for arm in arms}
    after = values_of(section["runs"], "arm")
    seeds, shared = max(map(len, after.values())), set.intersection(*({*found} for found in after.values()))
    figure = new_figure(
        13.2, 4.4, f"GRPO in our trainers and in stock TRL, {seeds} seeds",
        f"{TASKS[section['recipe']['task']]}. Rewards are means of {SMOOTH} rollouts; a line is the mean over the "
        f"{len(shared)} seeds that all trainers have, a band their standard deviation.\n"
        "A point is a seed, a black line its mean; whiskers are the 95 % "
        f"interval of the mean difference, the grey band is {100 * section['bound']:g} points.",
    )  # fmt: skip
    rewards, accuracy, difference = figure.subplots(1, 3, width_ratios=(1, 1.2, 1))
    for x, arm in enumerate(arms):
        curves = [smooth(row["rewards"], SMOOTH) for row in runs[arm] if row["seed"] in shared]
        band(rewards, curves, ARM_COLORS[arm], ARMS[arm])
        _points(accuracy, x, after[arm], ARM_COLORS[arm])
        accuracy.plot([x - 0.3, x + 0.3], [section["arms"][arm]["mean"]] * 2, color=INK, linewidth=1.6)
    legend(rewards, "lower right")
    rewards.set_ylim(bottom=0.0)
    rewards.locator_params(axis="x", integer=True)
    decorate(rewards, "Reward in training", "rollout", "")
    names(accuracy, [ARMS[arm] for arm in arms])
    accuracy.set_ylim(bottom=0.0)
    percent(accuracy.yaxis)
    decorate(accuracy, "Held-out accuracy", "", "")
    others = [arm for arm in arms if arm in section["against_trl"]]
    differences(difference, after, dict.fromkeys(others, "trl"), section["against_trl"], section["bound"], ARM_COLORS)
    names(difference, [ARMS[arm] for arm in others])
    decorate(difference, "Difference from stock TRL, by seed", "", "points")
    return figure


def options_plot(section: Section) -> Figure:
    """The difference of each option from its baseline, all seeds."""
    after, rows = values_of(section["runs"], "option"), section["against"]
    baselines = {name: section["options"][name]["baseline"] for name in rows}
    figure = new_figure(
        10.4, 4.2, f"What options do to the accuracy, {max(row['n'] for row in rows.values())} seeds",
        "A point is a seed; whiskers are the 95 % interval of the mean difference, the band is "
        f"{100 * section['bound']:g} points.",
    )  # fmt: skip
    axes = figure.subplots()
    differences(axes, after, baselines, rows, section["bound"], dict.fromkeys(rows, COLORS["native"]))
    short = {"no_sets": "no sets", "gspo": "GSPO"}
    names(axes, [f"{short.get(name, name)}\n− {base}" for name, base in baselines.items()])
    decorate(axes, "", "", "points")
    return figure


def length_plot(section: Section) -> Figure:
    """Lengths of wrong and right completions over a run: seeds as thin lines, their mean as a thick one."""
    figure = new_figure(
        10.4, 4.2, "Length of completions whose dots count for nothing",
        f"Thin lines are seeds (means of {section['last']} rollouts), thick ones their mean.",
    )  # fmt: skip
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("wrong", "right"), strict=True):
        for loss in section["weights"]:
            curves = [smooth(row[kind], section["last"]) for row in section["runs"] if row["loss"] == loss]
            for curve in curves:
                axes.plot(range(len(curve)), curve, color=LOSS_COLORS[loss], linewidth=0.5, alpha=0.5)
            mean = [fmean(column) for column in zip(*curves, strict=True)]
            axes.plot(range(len(mean)), mean, color=LOSS_COLORS[loss], linewidth=2.2, label=loss)
        decorate(axes, f"{kind.capitalize()} completions", "rollout", "tokens" if kind == "wrong" else "")
        legend(axes)
    return figure


def band(axes: Axes, curves: list[list[float]], color: str, label: str) -> None:
    """Mean and standard deviation over the seeds."""
    rows = [describe(column) for column in zip(*curves, strict=True)]
    x, mean = range(1, len(rows) + 1), [row["mean"] for row in rows]
    low, high = ([row["mean"] + sign * row["sd"] for row in rows] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, mean, color=color, linewidth=1.8, label=label.replace("`", ""))


def _points(axes: Axes, x: float, values: dict[int, float], color: str, scale: float = 1.0) -> None:
    """A point for each seed, side by side in the order of the seeds."""
    seeds = sorted(values)
    places = [x + 0.44 * (i / max(len(seeds) - 1, 1) - 0.5) for i in range(len(seeds))]
    axes.scatter(places, [scale * values[s] for s in seeds], s=16, color=color, alpha=0.8, linewidths=0)


def differences(
    axes: Axes, values: dict[str, dict[int, float]], baselines: dict[str, str], rows: dict[str, Any], bound: float,
    colors: dict[str, str],
) -> None:  # fmt: skip
    """Each arm less its baseline, of the seeds that both have, and the interval of the mean."""
    axes.axhspan(-100 * bound, 100 * bound, color=MUTED, alpha=0.15, linewidth=0)
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    for x, (name, baseline) in enumerate(baselines.items()):
        less = {seed: v - values[baseline][seed] for seed, v in values[name].items() if seed in values[baseline]}
        _points(axes, x, less, colors[name], 100.0)
        mean, low, high = (100 * rows[name][part] for part in ("mean", "low", "high"))
        axes.errorbar([x + 0.34], [mean], [[mean - low], [high - mean]], fmt="o", color=INK, markersize=4, capsize=3)


def names(axes: Axes, names: list[str]) -> None:
    axes.set_xticks(range(len(names)), [name.replace("`", "") for name in names])
    axes.set_xlim(-0.5, max(len(names), 1) - 0.5)


def smooth(values: list[float | None], width: int) -> list[float]:
    """Means of `width` rollouts; a rollout without such completions has no part in them."""
    windows = [
        [v for v in values[max(i - width + 1, 0) : i + 1] if v is not None] or [float("nan")]
        for i in range(len(values))
    ]
    return [fmean(window) for window in windows]
