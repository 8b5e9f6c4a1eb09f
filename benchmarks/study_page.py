"""The tables of docs/study.md, from `benchmarks.pretrained` and `benchmarks.real_rollouts`."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

from benchmarks.learning_page import ARMS, comparison, counted, p_value, points
from benchmarks.results import Run, where
from benchmarks.study import Section
from benchmarks.tables import BARE, grid, paragraphs

PARTS = ("generation", "body", "head", "other")


def trained(section: Section, run: Run) -> str:
    """A row for each trainer: accuracy and its difference from stock TRL; time of a step and its parts, memory."""
    recipe, rows = section["recipe"], []
    for arm, mean in step_means(section).items():
        times = (f"{mean[part]:.1f}" for part in ("seconds", *PARTS))
        rows.append([ARMS[arm], *times, f"{mean['tokens_per_second']:.0f}", f"{mean['peak_bytes'] / 2**30:.1f}"])
    texts = [
        comparison(section, run),
        grid(f"| trainer | s in a step | {' | '.join(PARTS)} | tokens/s | peak GiB |", rows),
        f"Completions have at most {recipe['max_completion_length']} tokens; the learning rate is "
        f"{recipe['learning_rate']:g}. Seconds are medians over the steps of a run, and means over the seeds; "
        f"{counted(run.machine['threads'], 'thread')}.{_where_timed(section)}",
    ]
    if cut := section.get("cut"):
        texts.append(
            f"The cut vocabulary has {cut['tokens']} of {cut['of']:,} tokens: {cut['of_the_task']} of the task, "
            f"{cut['likely']} more that the model gives probability to, bytes, and the parts of these tokens. In "
            f"{cut['lost']['positions']:,} positions of sampled answers, the cut tokens have {cut['lost']['mean']:.4%} "
            f"of the probability (at most {cut['lost']['max']:.2%} in a position)."
        )
    return paragraphs(*texts)


def adapted(section: Section, run: Run) -> str:
    """LoRA on a quantised head and training of all weights: accuracy, time of a step, memory."""
    rows = []
    for arm, label in (("ours", "all weights"), ("lora_int8", "LoRA of rank 16, head in int8")):
        own, against = section["arms"][arm], section["against_ours"].get(arm)
        runs = [row for row in timed(section) if row["arm"] == arm]
        seconds = fmean(row["median"]["seconds"] for row in runs)
        peak = fmean(row["peak_bytes"] for row in runs if row["peak_bytes"] is not None)
        cells = ["", "", ""] if against is None else [*points(against), p_value(against["p"])]
        sd = f"{100 * own['sd']:.1f}"
        rows.append([label, str(own["n"]), f"{own['mean']:.1%}", sd, *cells, f"{seconds:.1f}", f"{peak / 2**30:.1f}"])
    recipe, before = section["recipe"], section["before"]
    header = "| trained | seeds | accuracy | sd | difference | 95 % interval | p, equal within {:g} points | "
    return paragraphs(
        grid(header.format(100 * section["bound"]) + "s in a step | peak GiB |", rows),
        f"From {before['mean']:.1%} of {section['held_out']:,} held-out problems; {recipe['steps']} steps. The "
        f"learning rate is {recipe['learning_rate']:g} for all weights and {recipe['lora_rate']:g} for adapters. "
        f"Seconds of a step are CPU time, {counted(run.machine['threads'], 'thread')}. {where(run)}.",
    )


def timed(section: Section) -> list[dict[str, Any]]:
    """The runs on the machine of most of them: times of several machines are no mean."""
    machines = Counter(row.get("machine") for row in section["runs"])
    most = machines.most_common(1)[0][0]
    return [row for row in section["runs"] if row.get("machine") == most]


def _where_timed(section: Section) -> str:
    """A sentence, if not all runs are."""
    rows = timed(section)
    if len(rows) == len(section["runs"]):
        return ""
    others = sorted({row["machine"] for row in section["runs"]} - {rows[0]["machine"]})
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    return f" Times and memory are of the seeds {seeds}, on {rows[0]['machine']}; others ran on {', '.join(others)}."


def step_means(section: Section) -> dict[str, dict[str, float]]:
    """Of each trainer, means over the seeds: seconds of a step and of its parts, tokens per second, peak memory."""
    found = {}
    for arm in (arm for arm in ARMS if arm in section["arms"]):
        rows = [row["median"] | row for row in timed(section) if row["arm"] == arm]
        found[arm] = {n: fmean(row[n] for row in rows) for n in ("seconds", *PARTS, "tokens_per_second", "peak_bytes")}
    return found


def step_sentence(section: Section, run: Run) -> str:
    """How long a step of the pretrained model takes in our trainer and in stock TRL."""
    means, first = step_means(section), timed(section)[0]
    ours, theirs = means["ours"]["seconds"], means["trl"]["seconds"]
    return (
        f"A step of Gemma 3 270M (V = 262,144) takes {ours:.1f} s of processor time in our trainer and "
        f"{theirs:.1f} s in stock TRL, "
        f"{theirs / ours:.1f} times as long ({first['machine']}, commit {first['commit']})."
    )


def distribution(section: Section, run: Run) -> str:
    """What the recorded tokens say: errors of heads, sizes of candidate sets, and times of the loss."""
    entropy, heads, times = section["entropy"], [], []
    for name, label in (("head", "bf16 logits"), ("ours", "grpo_fused")):
        head = section["heads"][name]
        errors = (f"{head['logp_error'][size]:.1e}" for size in ("mean", "p99", "max"))
        heads.append([label, *errors, f"{head['flipped']:.2%}", f"{head['ratio_outside']['exact']:.2%}"])
    for name, row in section["times"].items():
        sizes = section["set_sizes"].get(name)
        words = [f"{sizes[q]:.0f}" for q in ("median", "p90", "p99", "max")] if sizes else [""] * 4
        label = "three bare products" if name == "bare-3" else BARE.get(name, name)
        times.append([label, *words, f"{row['ms']['median']:.0f}", f"{row['times_bare']['median']:.3f}"])
    masses = ", ".join(
        f"the first {name.removeprefix('top_k ')} tokens have {mass['mean']:.2%} (p10 {mass['p10']:.2%})"
        for name, mass in section["mass"].items()
    )
    return paragraphs(
        f"{section['tokens']} tokens of {section['steps']} rollouts; largest |logit| {section['max_logit']:.0f}; "
        f"entropy {entropy['mean']:.2f} nats (median {entropy['median']:.3f}, p99 {entropy['p99']:.2f}); "
        f"{section['zero_advantage_groups']:.0%} of the groups have equal rewards. {where(run)}.",
        grid("| log-probs | error, mean | p99 | max | flipped clips | ratios outside [0.9, 1.1] |", heads),
        grid("|  | tokens in a set: median | p90 | p99 | max | forward + backward, ms | × bare |", times),
        f"Probability: {masses}.",
    )
