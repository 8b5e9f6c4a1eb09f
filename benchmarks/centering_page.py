"""The tables and the picture of `benchmarks.centering`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.centering_tail import share
from benchmarks.equivalence import values_of
from benchmarks.learning_page import SMOOTH, band, differences, names, points, runs_of, smooth
from benchmarks.results import Run
from benchmarks.study import Section
from benchmarks.style import COLORS, decorate, legend, new_figure
from benchmarks.tables import grid, paragraphs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLERS = {"lag_4": "4 steps old", "lag_16": "16 steps old", "fp8": "fp8"}
OBJECTIVES = {"tis": "TIS", "centered": "TIS, centered"}
ARM_COLORS = {"tis": COLORS["eager"], "centered": COLORS["native"]}
NO_CAP = 1e5


def table(section: Section, run: Run) -> str:
    """What centering did to each sampler's runs, and the exact biases."""
    rows = []
    for sampler, label in SAMPLERS.items():
        for name, arm in section["arms"].get(sampler, {}).items():
            after, reward = arm["after"], arm["reward"]
            against = section["against_tis"].get(sampler) if name == "centered" else None
            less_tis = {m: "{} ({})".format(*points(row)) for m, row in (against or {}).items()}
            rows.append([
                label, OBJECTIVES[name], str(after["n"]), f"{arm['sampler_kl']['mean']:.1e}",
                f"{after['mean']:.1%} ± {100 * after['sd']:.1f}", less_tis.get("after", ""),
                f"{reward['mean']:.1%} ± {100 * reward['sd']:.1f}", less_tis.get("reward", ""),
            ])  # fmt: skip
    recipe, before = section["recipe"], section["before"]
    return paragraphs(
        grid(
            "| sampler | objective | seeds | KL to the policy, nats | accuracy | less TIS | reward in training | "
            "less TIS |",
            rows,
        ),
        f"± is the standard deviation over seeds; differences are by seed, in points, with 95 % t-intervals. From "
        f"{before['mean']:.1%} (sd {100 * before['sd']:.1f}) of {section['held_out']:,} held-out problems after the "
        f"warm-up, greedy; {recipe['steps']} rollouts of {recipe['prompts_per_step']} prompts with "
        f"{recipe['num_generations']} completions, one optimizer step each, learning rate "
        f"{recipe['learning_rate']:g}, cap {section['cap']:g}. The KL is the mean of log q - log p over the sampled "
        f"tokens. {runs_of(section, run)}",
        _biases(section["bias"]),
    )


def _biases(bias: Section) -> str:
    rows = [
        [
            f"{row['mismatch']:g}", "none" if row["cap"] > NO_CAP else f"{row['cap']:g}",
            *(share(row[name]["mean"]) for name in ("tis", "tis_baseline", "centered")),
        ]
        for row in bias["rows"]
    ]  # fmt: skip
    return paragraphs(
        grid("| mismatch | cap | TIS | TIS with a baseline | TIS, centered |", rows),
        f"Mean relative error of the expected update, over {bias['draws']:,} random policies of {bias['vocab']} tokens "
        f"(logits of standard deviation {bias['spread']:g}) with rewards of 0 and 1. The mismatch is the "
        "standard deviation of what the sampler's logits have in addition; the baseline is the mean reward under the "
        "sampler. In expectation centering is that baseline.",
    )


def plot(section: Section) -> Figure:
    """The rewards with each sampler, and the difference of each seed."""
    samplers = [sampler for sampler in SAMPLERS if section["arms"].get(sampler)]
    runs = [run | {"arm": f"{run['sampler']} {run['objective']}"} for run in section["runs"]]
    seeds = {run["seed"] for run in runs}
    figure = new_figure(
        13.2, 4.4, f"Score centering where the sampler is not the policy, {len(seeds)} seeds",
        f"REINFORCE with truncated importance sampling. Rewards are means of {SMOOTH} rollouts, a line the mean over "
        "seeds, a band their standard deviation.\nA point is a seed; whiskers are the 95 % interval of the mean "
        f"difference, the grey band is {100 * section['bound']:g} points.",
    )  # fmt: skip
    *curves, last = figure.subplots(1, len(samplers) + 1)
    for axes, sampler in zip(curves, samplers, strict=True):
        for name, label in OBJECTIVES.items():
            found = [smooth(run["rewards"], SMOOTH) for run in runs if run["arm"] == f"{sampler} {name}"]
            if found:
                band(axes, found, ARM_COLORS[name], label)
        legend(axes, "lower right")
        axes.set_ylim(0.0, 1.0)
        axes.locator_params(axis="x", integer=True)
        decorate(axes, f"Reward, sampler {SAMPLERS[sampler]}", "rollout", "")
    baselines = {f"{sampler} centered": f"{sampler} tis" for sampler in section["against_tis"]}
    rows = {f"{sampler} centered": row["after"] for sampler, row in section["against_tis"].items()}
    colors = dict.fromkeys(rows, COLORS["native"])
    differences(last, values_of(runs, "arm"), baselines, rows, section["bound"], colors)
    names(last, [SAMPLERS[sampler] for sampler in section["against_tis"]])
    decorate(last, "Accuracy, less TIS", "", "points")
    return figure
