"""The tables of docs/study.md, from `benchmarks.pretrained` and `benchmarks.real_rollouts`."""

from __future__ import annotations

from benchmarks.results import Run, where
from benchmarks.tables import BARE, grid

TRAINERS = {"ours": "our trainer", "fused_trl": "`FusedGRPOTrainer`", "trl": "TRL's `GRPOTrainer`"}
PARTS = ("generation", "body", "head", "other")


def runs(run: Run) -> str:
    """A row for each run: accuracy before and after, time of a step and its parts, tokens per second, memory."""
    section, rows = run.sections["pretrained"], []
    for name, trained in section["runs"].items():
        accuracy, median = trained["accuracy"], trained["median"]
        rows.append([
            title(name),
            f"{accuracy['before']:.1%}",
            f"{accuracy['after']:.1%}" if "after" in accuracy else "not finished",
            str(trained["steps"]),
            *(f"{median[part]:.1f}" for part in ("seconds", *PARTS)),
            f"{trained['tokens_per_second']:.0f}",
            f"{trained['peak_bytes'] / 2**30:.1f}",
        ])  # fmt: skip
    parts = " | ".join(PARTS)
    return "\n".join([
        *grid(f"| run | accuracy before | after | steps | s in a step | {parts} | tokens/s | peak GiB |", rows),
        "",
        f"{section['model']}; {section['prompts']} prompts with {section['generations']} completions of at most "
        f"{section['max_completion_length']} tokens in a step, learning rate {section['learning_rate']:g}; accuracy on "
        f"{section['held_out']} held-out problems, greedy. Seconds are medians over the steps. {where(run)}.",
    ])  # fmt: skip


def distribution(run: Run) -> str:
    """What the recorded tokens say: errors of heads, sizes of candidate sets, and times of the loss."""
    section = run.sections["real_rollouts"]
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
    return "\n".join([
        f"{section['tokens']} tokens of {section['steps']} rollouts; largest |logit| {section['max_logit']:.0f}; "
        f"entropy {entropy['mean']:.2f} nats (median {entropy['median']:.3f}, p99 {entropy['p99']:.2f}); "
        f"{section['zero_advantage_groups']:.0%} of the groups have equal rewards. {where(run)}.",
        "",
        *grid("| log-probs | error, mean | p99 | max | flipped clips | ratios outside [0.9, 1.1] |", heads),
        "",
        *grid("|  | tokens in a set: median | p90 | p99 | max | forward + backward, ms | × bare |", times),
        "",
        f"Probability: {masses}.",
    ])  # fmt: skip


def title(name: str) -> str:
    """`ours-0` → `our trainer, seed 0`."""
    kind, _, seed = name.rpartition("-")
    return f"{TRAINERS[kind]}, seed {seed}"
