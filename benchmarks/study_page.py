"""The tables and the picture of docs/study.md, from `benchmarks.pretrained` and `benchmarks.real_rollouts`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import newest, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINERS = {"ours": "our trainer", "fused_trl": "`FusedGRPOTrainer`", "trl": "TRL's `GRPOTrainer`"}
PARTS = ("generation", "body", "head", "other")
SMOOTH = 5
"""steps in a mean of a reward curve"""


def runs(folder: Path) -> str:
    """A row for each run: accuracy before and after, time of a step and its parts, tokens per second, memory."""
    run = newest("cpu", "pretrained", folder)
    if run is None:
        return "Not measured yet (`python -m benchmarks.pretrained`)."
    columns = ("accuracy before", "after", "steps", "s in a step", *PARTS, "tokens/s", "peak GiB")
    lines = [f"| run | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, found in run.sections["pretrained"]["runs"].items():
        accuracy, median = found["accuracy"], found["median"]
        cells = [
            f"{accuracy['before']:.1%}",
            f"{accuracy['after']:.1%}" if "after" in accuracy else "not finished",
            str(found["steps"]),
            *(f"{median[part]:.1f}" for part in ("seconds", *PARTS)),
            f"{found['tokens_per_second']:.0f}",
            f"{found['peak_bytes'] / 2**30:.1f}",
        ]
        lines.append(f"| {title(name)} | {' | '.join(cells)} |")
    section = run.sections["pretrained"]
    lines += [
        "",
        f"{section['model']}; {section['prompts']} prompts with {section['generations']} completions of at most "
        f"{section['max_completion_length']} tokens in a step, learning rate {section['learning_rate']:g}; accuracy on "
        f"{section['held_out']} held-out problems, greedy. Seconds are medians over the steps. {where(run)}.",
    ]
    return "\n".join(lines)


def summary(folder: Path) -> str:
    """A sentence on the first run of each trainer: accuracy, and the time of a step."""
    run = newest("cpu", "pretrained", folder)
    found = {} if run is None else run.sections["pretrained"]["runs"]
    if run is None or "after" not in found.get("ours-0", {}).get("accuracy", {}):
        return "A pretrained model: not measured yet (`python -m benchmarks.pretrained`)."
    first = {name: found[f"{kind}-0"] for kind, name in TRAINERS.items() if f"{kind}-0" in found}
    ends = ", ".join(
        f"{row['accuracy']['after']:.0%} with {name} ({row['median']['seconds']:.0f} s a step)"
        for name, row in first.items()
        if "after" in row["accuracy"]
    )
    ours = found["ours-0"]
    return (
        "After a short supervised start, Gemma 3 270M (V = 262,144) learns sums of reasoning-gym in "
        f"{ours['steps']} steps on two CPU cores: from {ours['accuracy']['before']:.0%} of "
        f"{run.sections['pretrained']['held_out']} held-out problems to {ends}; one run of each "
        "([the study](docs/study.md))."
    )


def distribution(folder: Path) -> str:
    """What the recorded tokens say: errors of heads, sizes of candidate sets, and times of the loss."""
    run = newest("cpu", "real_rollouts", folder)
    if run is None:
        return "Not measured yet (`python -m benchmarks.real_rollouts`)."
    return "\n".join(_distribution(run.sections["real_rollouts"], where(run)))


def _distribution(section: dict[str, Any], where: str) -> Iterator[str]:
    entropy = section["entropy"]
    yield (
        f"{section['tokens']} tokens of {section['steps']} rollouts; largest |logit| {section['max_logit']:.0f}; "
        f"entropy {entropy['mean']:.2f} nats (median {entropy['median']:.3f}, p99 {entropy['p99']:.2f}); "
        f"{section['zero_advantage_groups']:.0%} of the groups have equal rewards. {where}."
    )
    yield from (
        "",
        "| log-probs | error, mean | p99 | max | flipped clips | ratios outside [0.9, 1.1] |",
        "|---" * 6 + "|",
    )
    for name, label in (("head", "bf16 logits"), ("ours", "grpo_fused")):
        head = section["heads"][name]
        error, share = head["logp_error"], head["ratio_outside"]["exact"]
        yield (
            f"| {label} | {error['mean']:.1e} | {error['p99']:.1e} | {error['max']:.1e} | {head['flipped']:.2%} "
            f"| {share:.2%} |"
        )
    columns = ("", "tokens in a set: median", "p90", "p99", "max", "forward + backward, ms", "× bare")
    yield from ("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
    names = {"bare-1": "one bare product", "bare-3": "three bare products", "fill dW": "fill a fresh dW"}
    for name, row in section["times"].items():
        size = section["set_sizes"].get(name)
        cells = [f"{size[q]:.0f}" for q in ("median", "p90", "p99", "max")] if size else [""] * 4
        cells += [f"{row['ms']['median']:.0f}", f"{row['times_bare']['median']:.3f}"]
        yield f"| {names.get(name, name)} | {' | '.join(cells)} |"
    masses = ", ".join(
        f"the first {name.removeprefix('top_k ')} tokens have {mass['mean']:.2%} (p10 {mass['p10']:.2%})"
        for name, mass in section["mass"].items()
    )
    yield from ("", f"Probability: {masses}.")


def title(name: str) -> str:
    """`ours-0` → `our trainer, seed 0`."""
    kind, _, seed = name.rpartition("-")
    return f"{TRAINERS[kind]}, seed {seed}"


def pretrained_plot(section: dict[str, Any]) -> Figure:
    """Reward curves, held-out accuracy before and after, and where the time of a step goes."""
    from matplotlib.ticker import PercentFormatter

    from benchmarks.style import COLORS, INK, PEER, decorate, label_bars, new_figure

    figure = new_figure(
        12.6, 4.4, "GRPO on a pretrained model: learning, and the time of a step",
        f"{section['model']}, reasoning_gym {section['task']}, V = 262,144, bf16 autocast on two CPU cores. "
        f"Rewards are means of {SMOOTH} steps.",
    )  # fmt: skip
    rewards, accuracy, times = figure.subplots(1, 3, width_ratios=(1.2, 0.8, 1.4))
    color = {"ours": COLORS["native"], "fused_trl": COLORS["TRL"], "trl": COLORS["eager"]}
    known = set[str]()
    for name, run in section["runs"].items():
        kind = name.rpartition("-")[0]
        reward = [value or 0.0 for value in run["curves"]["reward"]]
        means = [sum(reward[i : i + SMOOTH]) / SMOOTH for i in range(len(reward) - SMOOTH + 1)]
        label = "" if kind in known else TRAINERS[kind].replace("`", "")
        known.add(kind)
        rewards.plot(range(SMOOTH, len(reward) + 1), means, color=color[kind], linewidth=1.6, label=label)
        found = run["accuracy"]
        if "after" in found:
            line = [found["before"], found["after"]]
            accuracy.plot([0, 1], line, "o-", color=color[kind], linewidth=1.4, markersize=5)
    rewards.legend(frameon=False, fontsize=8.5, loc="upper left")
    decorate(rewards, "Reward in training", "step", "mean reward")
    accuracy.set_xticks([0, 1], ["before", "after"])
    accuracy.set_xlim(-0.3, 1.3)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    decorate(accuracy, "Held-out accuracy", "", "")
    shown = [name for name in section["runs"] if name.endswith("-0")]
    shades = {"generation": PEER, "body": COLORS["chunked"], "head": COLORS["eager"], "other": INK}
    left = [0.0] * len(shown)
    for part in PARTS:
        seconds = [section["runs"][name]["median"][part] for name in shown]
        times.barh(range(len(shown)), seconds, left=left, color=shades[part], height=0.6, label=part)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    label_bars(times, [TRAINERS[name.rpartition("-")[0]].replace("`", "") for name in shown])
    times.legend(frameon=False, fontsize=8.5, loc="lower center", ncols=4, bbox_to_anchor=(0.45, 1.06))
    decorate(times, "", "seconds of a step (median)", "", grid="none")
    return figure
