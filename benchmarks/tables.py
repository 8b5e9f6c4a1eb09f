"""The tables of README.md and the pages in docs/, each from the newest run that has its section. No number is typed.

A table is a function from the folder of results to Markdown. `PAGES` has the names of the tables of each page; the page
has a pair of markers for each name, and `benchmarks.report` writes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import speed_tables, study_page
from benchmarks.results import Run, newest, where
from benchmarks.speed_tables import COMMANDS, NOT_YET, ms


def training_step(folder: Path) -> str:
    """The time of steps of TRL's trainer with our loss and without, and the head's share in larger models."""
    run, shares = newest("cpu", "trl_steps", folder), newest("cpu", "end_to_end", folder)
    if run is None or shares is None:
        return f"Time of a training step: {NOT_YET} (`{COMMANDS['cpu']}`)."
    section, of_head = run.sections["trl_steps"], shares.sections["end_to_end"]["head_flop_share"]
    rows = {
        name: (row["seconds"]["median"], row["peak_bytes"]["median"] / 2**20)
        for name, row in section["trainers"].items()
    }
    time, memory = ({name: row[i] for name, row in rows.items()} for i in (0, 1))
    others = ", ".join(f"{share:.0%} of {name}" for name, share in of_head.items() if name != "this model")
    return (
        f"{section['steps']} steps of TRL's trainer, generation included, on a small Qwen2 (H = {section['hidden']}, "
        f"{section['layers']} layers, V = {section['vocab']}, {section['threads']} thread):\n"
        f"{time['fused']:.1f} s with `FusedGRPOTrainer` and {time['patched']:.1f} s with `patch_trl()` instead of "
        f"{time['stock']:.1f} s; peak memory of the process {memory['fused']:.0f} MiB instead of "
        f"{memory['stock']:.0f} MiB\n({where(run)}). Most of this model is head. "
        f"The head is {others}: expect a smaller gain there."
    )


STEP_ROWS = {
    "verl": "verl's fused head (torch back end) in its FSDP2 engine",
    "torchtitan": "torchtitan's `ChunkedLossWrapper` around `GRPOLoss`",
    "prime-rl": "prime-rl's `FusedOutputLinear`",
    "liger": "`LigerFusedLinearGRPOLoss`",
    "deepspeed": "TRL under DeepSpeed ZeRO-2, two processes",
}
"""Project to what its own side of `benchmarks.integration_steps` is."""


def integration_steps(folder: Path) -> str:
    """A training step with each project's own loss head and with ours, each from the newest run that timed it."""
    runs = {project: newest("cpu", f"integration_steps.{project}", folder) for project in STEP_ROWS}
    lines = ["| | its own | ours | own / ours | peak memory | losses, gradients differ by |", "|---" * 6 + "|"]
    models, places = {}, {}
    for project, words in STEP_ROWS.items():
        run = runs[project]
        if run is None:
            lines.append(f"| {words} |" + " - |" * 5)
            continue
        row = run.sections[f"integration_steps.{project}"]
        own, ours = (row["sides"][name] for name in ("own", "ours"))
        release = row["versions"].get(project, row["versions"].get(f"{project}-kernel", ""))
        cells = [
            f"{words} {release}".strip(),
            *(f"{side['seconds']['median']:.2f} s" for side in (own, ours)),
            f"{row['ratio']:.2f}",
            f"{own['peak_bytes'] / 2**20:.0f} and {ours['peak_bytes'] / 2**20:.0f} MiB",
            f"{row['loss_difference']:.0e}, {row['gradient_error']:.0e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        models[project] = (
            f"{row['layers']} layers of Qwen2, H = {row['hidden']}, V = {row['vocab']}, {row['dtype']}, "
            f"{row['sequences']} sequences of {row['length']} tokens, {row['threads']} threads"
        )
        places[project] = where(run)
    for found in (models, places):
        for text in dict.fromkeys(found.values()):
            these = [project for project in found if found[project] == text]
            lines += ["", text + (f" ({', '.join(these)})." if len(these) < len(found) else ".")]
    return "\n".join(lines)


def accuracy(folder: Path) -> str:
    """Errors in bf16 for the rows whose largest logit is nearest to 32; and the picture."""
    run = newest("cpu", "accuracy", folder)
    if run is None:
        return f"Accuracy: {NOT_YET} (`make bench`)."
    rows = [row for row in run.sections["accuracy"]["rows"] if row["dtype"] == "bfloat16"]
    size = min((row["max_logit"] for row in rows), key=lambda z: abs(z - 32))
    shape = run.sections["accuracy"]["shape"]
    lines = [
        f"bf16, {shape['B'] * shape['T']} tokens, H = {shape['H']}, V = {shape['V']}, largest logit {size:.0f}; "
        f"{where(run)}.",
        "",
        "| | max \\|Δlogp\\| | mean | wrong clip decisions |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row["max_logit"] == size:
            error = row["logp_error"]
            lines.append(
                f"| {row['provider']} | {error['max']:.1e} | {error['mean']:.1e} | {row['flipped']['exact_old']:.2%} |"
            )
    return "\n".join([*lines, "", "![errors by size of the logits](plots/accuracy.svg)"])


def end_to_end(folder: Path) -> str:
    """Time and memory of a training step, and the head's share of it; and the picture."""
    run = newest("cuda", "end_to_end", folder) or newest("cpu", "end_to_end", folder)
    if run is None:
        return f"A whole training step: {NOT_YET} (`make bench`)."
    section = run.sections["end_to_end"]
    model = section["model"]
    lines = [
        f"{model['layers']} layers, H = {model['hidden']}, V = {model['vocab']}, {section['tokens']} completion "
        f"tokens a step, no generation; {where(run)}. "
        + "The head's share of the FLOP of a model: "
        + ", ".join(f"{name} {share:.0%}" for name, share in section["head_flop_share"].items())
        + ".",
        "",
        "| | loss | tokens/s | share of head and loss | memory beyond weights and AdamW |",
        "|---|---|---|---|---|",
    ]
    for dtype, results in section["results"].items():
        for name, row in results.items():
            if "step_seconds" in row:
                memory = f"{row['peak_bytes'] / 2**20:.0f} MiB" if row.get("peak_bytes") else ""
                share = f"{row['head_share']:.0%}"
                lines.append(f"| {dtype} | {name} | {row['tokens_per_second']:.0f} | {share} | {memory} |")
    return "\n".join([*lines, "", "![a training step](plots/end-to-end.svg)"])


def growth(folder: Path) -> str:
    """The error of the cost model against the measurements; and the picture."""
    run = newest("cuda", "growth", folder) or newest("cpu", "growth", folder)
    if run is None:
        return f"Growth: {NOT_YET} (`make bench`)."
    model = run.sections["growth"]["model"]
    words = [
        f"{engine} in {dtype}, {error['seconds']['median']:.0%} ({error['seconds']['worst']:.0%})"
        for engine, by_dtype in model["leave_one_out_error"].items()
        for dtype, error in by_dtype.items()
    ]
    return (
        f"The time model is `{model['form']}` (N tokens, P products). Its error on measurements that the fit did not "
        f"use, median (and worst): {'; '.join(words)}. {where(run)}.\n\n"
        "![time and memory by problem size](plots/growth.svg)"
    )


def candidates(folder: Path) -> str:
    """Time of the loss on candidate sets and of dense ones; training with and without them; and the picture."""
    run = newest("cuda", "candidates", folder) or newest("cpu", "candidates", folder)
    if run is None:
        return f"Candidate sets: {NOT_YET} (`python -m benchmarks.candidates`)."
    found = run.sections["candidates"]["published"]
    sizes = found["set_sizes"]
    lines = [
        f"bf16, N = {found['N']}, H = {found['H']}, V = {found['V']}; set sizes: {sizes['alone']:.0%} one token, "
        f"median {sizes['median']:.0f}, mean {sizes['mean']:.1f}, p99 {sizes['p99']:.0f}. {where(run)}.",
        "",
        "| | time | × bare (forward + backward) |",
        "|---|---|---|",
    ]
    for name, row in found["calls"].items():
        names = {"bare-1": "one bare product", "bare-3": "bare products", "fill dW": "fill a fresh dW"}
        lines.append(f"| {names.get(name, name)} | {ms(row['ms']['median'])} | {row['times_bare']['median']:.4f} |")
    memory = ", ".join(f"{name} {x / 2**20:.0f} MiB" for name, x in found["scratch_bytes"].items() if x is not None)
    lines += ["", f"Memory beyond inputs and gradients: {memory}.", "", "![sets by size](plots/candidates.svg)"]
    if (own := run.sections["candidates"].get("recorded")) is not None:
        lines += ["", *_recorded(own)]
    if (trained := newest("cpu", "truncation", folder)) is not None:
        lines += ["", *_truncation(trained)]
    return "\n".join(lines)


def _recorded(found: dict[str, Any]) -> Iterator[str]:
    """Sets of a rollout of the small demo, and times on exactly its tensors."""
    sizes = found["set_sizes"]
    yield (
        f"Recorded in a rollout of `examples.small`'s policy with top_p = {found['top_p']}, same run: "
        f"N = {found['N']}, H = {found['H']}, V = {found['V']}; set sizes: {sizes['alone']:.0%} one token, "
        f"median {sizes['median']:.0f}, "
        f"mean {sizes['mean']:.1f}, p99 {sizes['p99']:.0f}. Its vocabulary is tiny: the head is little work there."
    )
    yield ""
    yield "| | time | × dense loss |"
    yield "|---|---|---|"
    for name, row in found["calls"].items():
        yield f"| {name} | {ms(row['ms']['median'])} | {row['times_bare']['median']:.3f} |"


def _truncation(run: Run) -> Iterator[str]:
    """Means over the seeds: the ratios of the first step, and the reward at the end."""
    section, ratio = run.sections["truncation"], "sampling/importance_sampling_ratio"
    steps, seeds = section["steps"], len(section["runs"]) // 2
    yield (
        f"A small policy trained on rollouts with top_p = {section['top_p']} (`python -m benchmarks.truncation`), "
        f"means of {seeds} seeds. The ratio is that between sampler and policy, on the first step. {where(run)}."
    )
    yield ""
    yield f"| | ratio: min, mean, max | clip ratio | reward, first step | reward, last five of {steps} |"
    yield "|---|---|---|---|---|"
    for sets in (True, False):
        runs = [r["metrics"] for r in section["runs"] if r["sets"] == sets]

        def mean(name: str, rows: slice, runs: list[Any] = runs) -> float:
            values = [row[name] for metrics in runs for row in metrics[rows]]
            return sum(values) / len(values)

        first, last = slice(0, 1), slice(-5, None)
        cells = [
            ", ".join(f"{mean(f'{ratio}/{kind}', first):.3f}" for kind in ("min", "mean", "max")),
            f"{mean('clip_ratio/region_mean', first):.4f}",
            f"{mean('reward', first):.3f}",
            f"{mean('reward', last):.3f}",
        ]
        yield f"| {'with' if sets else 'without'} candidate sets | {' | '.join(cells)} |"


def divergence(folder: Path) -> str:
    """Time, memory and errors of divergences between two heads, ours and those of TRL and Liger."""
    run = newest("cpu", "divergence", folder)
    if run is None:
        return f"Divergences: {NOT_YET} (`python -m benchmarks.divergence`)."
    found = run.sections["divergence"]
    lines = ["| | time | × bare | memory | loss off by | dH off by |", "|---" * 6 + "|"]
    for name, error in found["errors"].items():
        provider, kind = name.split()
        row, memory = found["calls"][name], found["scratch_bytes"][name]
        cells = [
            f"{kind}, {provider}",
            ms(row["ms"]["median"]),
            f"{row['times_bare']['median']:.2f}",
            f"{memory / 2**20:.0f} MiB",
            f"{error['loss']:.0e}",
            f"{error['dhidden']:.0e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    shape = f"bf16, N = {found['N']}, H = {found['H']}, V = {found['V']}, forward and backward"
    return "\n".join([*lines, "", f"{shape}; {where(run)}."])


def shared_prompts(folder: Path) -> str:
    """Completion tokens per second of an update in which completions share their prompt, and of one without."""
    run = newest("cpu", "shared_prompts", folder)
    if run is None:
        return f"Shared prompts: {NOT_YET} (`python -m benchmarks.shared_prompts`)."
    section = run.sections["shared_prompts"]
    lines = ["| prompt, completion | completions | apart | shared | |", "|---" * 5 + "|"]
    for case in section["cases"]:
        apart, shared = (case["updates"][name]["ms"]["median"] / 1e3 for name in ("separate", "shared"))
        tokens = section.get("prompts", 2) * case["generations"] * case["completion"]
        lines.append(
            f"| {case['prompt']}, {case['completion']} | {case['generations']} | {tokens / apart:.0f} "
            f"| {tokens / shared:.0f} | {apart / shared:.2f} x |"
        )
    return "\n".join([*lines, "", f"{where(run)}."])


def generation(folder: Path) -> str:
    """Seconds of a rollout by transformers and by our engine, with shared prompts and without."""
    run = newest("cpu", "generation", folder)
    if run is None:
        return f"Generation: {NOT_YET} (`python -m benchmarks.generation`)."
    section = run.sections["generation"]
    names = list(section["cases"][0]["rollouts"])
    lines = [f"| longest prompt | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case in section["cases"]:
        times = (case["rollouts"][name]["ms"]["median"] / 1e3 for name in names)
        lines.append(f"| {case['prompt']} | {' | '.join(f'{seconds:.2f} s' for seconds in times)} |")
    model = f"Qwen2, {section['layers']} layers, H = {section['hidden']}, V = {section['vocab']}, fp32"
    batch = f"{section['prompts']} x {section['generations']} completions of {section['completion']} tokens"
    return "\n".join([*lines, "", f"{model}; {batch}; {where(run)}."])


def threads(folder: Path) -> str:
    """Seconds of the engines and of the bare products with one thread, one for each core, and two."""
    run = newest("cpu", "threads", folder)
    if run is None:
        return f"Threads: {NOT_YET} (`python -m benchmarks.threads`)."
    section = run.sections["threads"]
    counts = list(section["cases"][0]["threads"])
    lines = [
        f"| | threads: | {' | '.join(counts)} |",
        "|---" * (len(counts) + 2) + "|",
    ]
    for case in section["cases"]:
        for name in case["threads"][counts[0]]:
            rows = [case["threads"][count][name] for count in counts]
            ratio = "" if name == "bare" else ", {:.2f} × bare"
            cells = (f"{row['ms']['median'] / 1e3:.2f} s" + ratio.format(row["times_bare"]["median"]) for row in rows)
            lines.append(f"| {speed_tables.title(case['shape'])} | {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{section['cores']} cores; {where(run)}."])


def compiled(folder: Path) -> str:
    """The Triton kernels that ship, compiled for every kind of GPU by several versions of triton: what went wrong."""
    run = newest("cpu", "compiled", folder)
    if run is None:
        return f"Compiled kernels: {NOT_YET} (`python -m benchmarks.aot --record FILE`)."
    faults = {
        "spill": lambda row: row["stack"] > 0,
        "products wait for each other": lambda row: row.get("serialized", False),
        "more shared memory than the chip has": lambda row: not row["fits"],
    }
    modes = ("score", "exponentials", "dlogits")
    lines = [
        f"| triton | kernels | {' | '.join(faults)} | instructions for a logit: {', '.join(modes)} |",
        "|---" * (len(faults) + 3) + "|",
    ]
    for version, rows in sorted(run.sections["compiled"].items()):
        found = (sorted(name for name, row in rows.items() if fault(row)) for fault in faults.values())
        cells = [", ".join(names) or "0" for names in found]
        counts = ", ".join(f"{rows[f'sm_90-bf16-{mode}-plain-even']['instructions']:.1f}" for mode in modes)
        lines.append(f"| {version} | {len(rows)} | {' | '.join(cells)} | {counts} |")
    kinds = ", ".join(sorted({row["arch"] for rows in run.sections["compiled"].values() for row in rows.values()}))
    return "\n".join([*lines, "", f"For {kinds}; commit {run.machine['commit']}, {run.machine['date'][:10]}."])


def mismatch(folder: Path) -> str:
    """Differences between log-probs of vLLM and of the policy, by their cause."""
    run = newest("cpu", "mismatch", folder)
    if run is None:
        return f"Mismatch by cause: {NOT_YET} (`python -m benchmarks.mismatch`)."
    cases = run.sections["mismatch"]["cases"]
    names = list(next(iter(next(iter(cases.values()))["policies"].values())))
    lines = [f"| model | policy | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for case, found in sorted(cases.items()):
        for policy, rows in found["policies"].items():
            cells = [
                f"{row['mean']:.2g}, {row['p99']:.2g}, {row['max']:.2g}; {row['outside']:.1%}"
                for row in (rows[name] for name in names)
            ]
            lines.append(f"| {case} | {policy} | {' | '.join(cells)} |")
    tokens = ", ".join(str(count) for count in sorted({found["tokens"] for found in cases.values()}))
    lines += ["", f"{tokens} sampled tokens of a model; {where(run)}."]
    timed = {case: found["calls"]["exact_logprobs"] for case, found in sorted(cases.items()) if "calls" in found}
    if timed:
        ratios = ", ".join(f"{row['times_bare']['median']:.2f} ({case})" for case, row in timed.items())
        lines += ["", f"Time of a rollout with `exact_logprobs` relative to one without: {ratios}."]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "summary": speed_tables.summary,
    "training-step": training_step,
    "integration-steps": integration_steps,
    "cpu-speed": lambda folder: speed_tables.speed("cpu", folder),
    "cpu-sparsity": lambda folder: speed_tables.sparsity("cpu", folder),
    "gpu-speed": lambda folder: speed_tables.speed("cuda", folder),
    "gpu-sparsity": lambda folder: speed_tables.sparsity("cuda", folder),
    "providers": speed_tables.providers,
    "accuracy": accuracy,
    "growth": growth,
    "threads": threads,
    "end-to-end": end_to_end,
    "candidates": candidates,
    "compiled": compiled,
    "divergence": divergence,
    "generation": generation,
    "shared-prompts": shared_prompts,
    "study": study_page.summary,
    "study-runs": study_page.runs,
    "study-distribution": study_page.distribution,
    "mismatch": mismatch,
}
"""Name of a pair of markers to the text between them."""

_PAGES = {
    "README.md": ("summary", "training-step", "study"),
    "docs/integrations.md": ("training-step", "integration-steps"),
    "docs/training.md": ("generation", "shared-prompts", "mismatch"),
    "docs/divergence.md": ("divergence",),
    "docs/study.md": ("study-runs", "study-distribution"),
}
_ELSEWHERE = {name for names in _PAGES.values() for name in names}
PAGES = _PAGES | {"docs/benchmarks.md": tuple(name for name in TABLES if name not in _ELSEWHERE)}
"""Page to the names of its tables."""
