"""The tables of studies, in Markdown: each a function of a run that has the section. No number is typed.

`benchmarks.pages` says on which page each stands.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.results import Run, where
from benchmarks.timing import MIB


def grid(header: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table under a header line."""
    columns = header.replace("\\|", "").count("|") - 1
    return [header, "|---" * columns + "|", *(f"| {' | '.join(cells)} |" for cells in rows)]


def ms(value: float) -> str:
    """A time in milliseconds as text."""
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def title(shape: dict[str, Any]) -> str:
    """A problem as text."""
    return f"{shape['dtype']}, N = {shape['N']}, H = {shape['H']}, V = {shape['V']}"


def calls_grid(calls: dict[str, Any], header: str, digits: int, names: dict[str, str] | None = None) -> list[str]:
    """A row for each call: its time, and its ratio to another call's."""
    return grid(
        header,
        (
            ((names or {}).get(name, name), ms(row["ms"]["median"]), f"{row['times_bare']['median']:.{digits}f}")
            for name, row in calls.items()
        ),
    )


BARE = {"bare-1": "one bare product", "bare-3": "bare products", "fill dW": "fill a fresh dW"}


def page(section: dict[str, Any], first: str, digits: int) -> list[str]:
    """Lines: the first, a table of the section's calls, and their memory."""
    known = ((name, x) for name, x in section["scratch_bytes"].items() if x is not None)
    memory = ", ".join(f"{name} {x / MIB:.0f} MiB" for name, x in known)
    chunk = section.get("chunk")
    on_logits = "" if chunk is None else f" Calls on logits take {chunk} tokens at a time."
    return [
        first,
        "",
        *calls_grid(section["calls"], "| | time | × bare (forward + backward) |", digits, BARE),
        "",
        f"Memory beyond inputs and gradients: {memory}.{on_logits}",
    ]


def training_step(steps: Run, shares: Run) -> str:
    """The time of steps of TRL's trainer with our loss and without, and the head's share in larger models."""
    section, of_head = steps.sections["trl_steps"], shares.sections["end_to_end"]["head_flop_share"]
    time = {name: f"{row['seconds']['median']:.1f} s" for name, row in section["trainers"].items()}
    memory = {name: row["peak_bytes"]["median"] / MIB for name, row in section["trainers"].items()}
    others = ", ".join(f"{share:.0%} of {name}" for name, share in of_head.items() if name != "this model")
    return (
        f"{section['steps']} steps of TRL's trainer, generation included, on a small Qwen2 (H = {section['hidden']}, "
        f"{section['layers']} layers, V = {section['vocab']}, {section['threads']} thread):\n"
        f"{time['fused']} with `FusedGRPOTrainer` and {time['patched']} with `patch_trl()` instead of "
        f"{time['stock']}; peak memory of the process {memory['fused']:.0f} MiB instead of "
        f"{memory['stock']:.0f} MiB\n({where(steps)}). In this model most of the work is the head. "
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


def integration_steps(runs: dict[str, Run]) -> str:
    """A training step with each project's own loss head and with ours, each from a run that timed it."""
    cells, models, places = [], {}, {}
    for project, words in STEP_ROWS.items():
        if project not in runs:
            cells.append([words, *["-"] * 5])
            continue
        row = runs[project].sections[f"integration_steps.{project}"]
        own, ours = (row["sides"][name] for name in ("own", "ours"))
        release = row["versions"].get(project, row["versions"].get(f"{project}-kernel", ""))
        cells.append([
            f"{words} {release}".strip(),
            *(f"{side['seconds']['median']:.2f} s" for side in (own, ours)),
            f"{row['ratio']:.2f}",
            f"{own['peak_bytes'] / MIB:.0f} and {ours['peak_bytes'] / MIB:.0f} MiB",
            f"{row['loss_difference']:.0e}, {row['gradient_error']:.0e}",
        ])  # fmt: skip
        models[project] = (
            f"{row['layers']} layers of Qwen2, H = {row['hidden']}, V = {row['vocab']}, {row['dtype']}, "
            f"{row['sequences']} sequences of {row['length']} tokens, {row['threads']} threads"
        )
        places[project] = where(runs[project])
    lines = grid("| | its own | ours | own / ours | peak memory | losses, gradients differ by |", cells)
    for texts in (models, places):
        for text in dict.fromkeys(texts.values()):
            projects = [project for project in texts if texts[project] == text]
            lines += ["", text + (f" ({', '.join(projects)})." if len(projects) < len(texts) else ".")]
    return "\n".join(lines)


ACCURACY_NAMES = {"linear_cross_entropy": "linear_cross_entropy of torch, chunked"}
"""Of providers, where the name in the results says too little."""


def accuracy(run: Run) -> str:
    """Errors in bf16 for the rows whose largest logit is nearest to 32; and the picture."""
    rows = [row for row in run.sections["accuracy"]["rows"] if row["dtype"] == "bfloat16"]
    size = min((row["max_logit"] for row in rows), key=lambda z: abs(z - 32))
    shape = run.sections["accuracy"]["shape"]
    cells = (
        (ACCURACY_NAMES.get(row["provider"], row["provider"]), f"{row['logp_error']['max']:.1e}",
         f"{row['logp_error']['mean']:.1e}", f"{row['flipped']['exact_old']:.2%}")
        for row in rows if row["max_logit"] == size
    )  # fmt: skip
    return "\n".join([
        f"bf16, {shape['B'] * shape['T']} tokens, H = {shape['H']}, V = {shape['V']}, largest logit {size:.0f}; "
        f"{where(run)}.",
        "",
        *grid("| | max \\|Δlogp\\| | mean | wrong clip decisions |", cells),
        "",
        "![errors by size of the logits](plots/accuracy.svg)",
    ])  # fmt: skip


def end_to_end(run: Run) -> str:
    """Time and memory of a training step, and the head's share of it; and the picture."""
    section = run.sections["end_to_end"]
    model, shares = section["model"], section["head_flop_share"]
    cells = (
        (dtype, name, f"{row['tokens_per_second']:.0f}", f"{row['head_share']:.0%}",
         f"{row['peak_bytes'] / MIB:.0f} MiB" if row.get("peak_bytes") else "")
        for dtype, results in section["results"].items()
        for name, row in results.items() if "step_seconds" in row
    )  # fmt: skip
    return "\n".join([
        f"{model['layers']} layers, H = {model['hidden']}, V = {model['vocab']}, {section['tokens']} completion "
        f"tokens a step, no generation; {where(run)}. The head's share of the FLOP of a model: "
        + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()) + ".",
        "",
        *grid("| | loss | tokens/s | share of head and loss | memory beyond weights and AdamW |", cells),
        "",
        "![a training step](plots/end-to-end.svg)",
    ])  # fmt: skip


def growth(run: Run) -> str:
    """The error of the predicted memory; and the picture."""
    errors: dict[str, list[float]] = {}
    for point in run.sections["growth"]["points"]:
        if "predicted_bytes" in point and point["bytes"] is not None:
            off = abs(point["predicted_bytes"] - point["bytes"]) / MIB
            errors.setdefault(f"{point['engine']} in {point['dtype']}", []).append(off)
    words = (f"{name}, {statistics.median(off):.1f} MiB ({max(off):.1f})" for name, off in errors.items())
    return (
        f"Memory is predicted before a call; the prediction is off by, median (and worst): {'; '.join(words)}. "
        f"{where(run)}.\n\n![time and memory by problem size](plots/growth.svg)"
    )


def candidates(run: Run) -> str:
    """Time of the loss on candidate sets and of dense ones, in the published sizes and in recorded ones."""
    section = run.sections["candidates"]
    lines = []
    if (published := section.get("published")) is not None:
        first = f"bf16, {_sizes(published)}. {where(run)}."
        lines = [*page(published, first, 4), "", "![sets by size](plots/candidates.svg)"]
    if (window := section.get("window")) is not None:
        count = window["micro_batches"]
        more = window["more"][f"{count} more"]
        each = f"{more['ms']['median'] / count:.1f} ms, {more['times_bare']['median'] / count:.4f} x bare"
        lines += [
            "",
            f"An optimizer step of {count} such micro-batches, with a clipped norm, AdamW and zeroing, same run. "
            f"A micro-batch whose rows are added to a gradient that is there takes {each}.",
            "",
            *calls_grid(window["calls"], "| | time | × bare (forward + backward) |", 3, BARE),
        ]
    if (recorded := section.get("recorded")) is not None:
        lines += [
            "",
            f"Recorded in a rollout of `examples.small`'s policy with top_p = {recorded['top_p']}, same run: "
            f"{_sizes(recorded)}. Its vocabulary is tiny: the head is little work there.",
            "",
            *calls_grid(recorded["calls"], "| | time | × dense loss |", 3),
        ]
    return "\n".join(lines).strip()


def _sizes(section: dict[str, Any]) -> str:
    sizes = section["set_sizes"]
    return (
        f"N = {section['N']}, H = {section['H']}, V = {section['V']}; set sizes: {sizes['alone']:.0%} one token, "
        f"median {sizes['median']:.0f}, mean {sizes['mean']:.1f}, p99 {sizes['p99']:.0f}"
    )


def divergence(run: Run) -> str:
    """Time, memory and errors of divergences between two heads, ours and those of TRL and Liger."""
    section = run.sections["divergence"]

    def cells() -> Iterator[list[str]]:
        for name, error in section["errors"].items():
            provider, kind = name.split()
            row, memory = section["calls"][name], section["scratch_bytes"][name]
            time, ratio = ms(row["ms"]["median"]), f"{row['times_bare']['median']:.2f}"
            yield [f"{kind}, {provider}", time, ratio, f"{memory / MIB:.0f} MiB",
                   f"{error['loss']:.0e}", f"{error['dhidden']:.0e}"]  # fmt: skip

    lines = grid("| | time | × bare | memory | loss off by | dH off by |", cells())
    return "\n".join([*lines, "", f"{title(section | {'dtype': 'bf16'})}, forward and backward; {where(run)}."])


def shared_prompts(run: Run) -> str:
    """Completion tokens per second of an update in which completions share their prompt, and of one without."""
    section = run.sections["shared_prompts"]

    def cells() -> Iterator[list[str]]:
        for case in section["cases"]:
            apart, shared = (case["updates"][name]["ms"]["median"] / 1e3 for name in ("separate", "shared"))
            tokens = section.get("prompts", 2) * case["generations"] * case["completion"]
            yield [f"{case['prompt']}, {case['completion']}", str(case["generations"]), f"{tokens / apart:.0f}",
                   f"{tokens / shared:.0f}", f"{apart / shared:.2f} x"]  # fmt: skip

    lines = grid("| prompt, completion | completions | apart | shared | |", cells())
    return "\n".join([*lines, "", f"{where(run)}."])


def generation(run: Run) -> str:
    """Seconds of a rollout by transformers and by our engine, with shared prompts and without."""
    section = run.sections["generation"]
    names = list(section["cases"][0]["rollouts"])
    rows = (
        (str(case["prompt"]), *(f"{case['rollouts'][name]['ms']['median'] / 1e3:.2f} s" for name in names))
        for case in section["cases"]
    )
    lines = grid(f"| longest prompt | {' | '.join(names)} |", rows)
    model = f"Qwen2, {section['layers']} layers, H = {section['hidden']}, V = {section['vocab']}, fp32"
    batch = f"{section['prompts']} x {section['generations']} completions of {section['completion']} tokens"
    return "\n".join([*lines, "", f"{model}; {batch}; {where(run)}."])


def threads(run: Run) -> str:
    """Seconds of the engines and of the bare products with one thread, one for each core, and two."""
    section = run.sections["threads"]
    counts = list(section["cases"][0]["threads"])

    def cells() -> Iterator[list[str]]:
        for case in section["cases"]:
            for name in case["threads"][counts[0]]:
                rows = [case["threads"][count][name] for count in counts]
                form = "{:.2f} s" if name == "bare" else "{:.2f} s, {:.2f} × bare"
                times = (form.format(row["ms"]["median"] / 1e3, row["times_bare"]["median"]) for row in rows)
                yield [title(case["shape"]), name, *times]

    lines = grid(f"| | threads: | {' | '.join(counts)} |", cells())
    return "\n".join([*lines, "", f"{section['cores']} cores; {where(run)}."])


def compiled(run: Run) -> str:
    """The Triton kernels that ship, compiled for every kind of GPU by several versions of triton: what went wrong."""
    faults = {
        "spill": lambda row: row["stack"] > 0,
        "products wait for each other": lambda row: row.get("serialized", False),
        "more shared memory than the chip has": lambda row: not row["fits"],
    }
    modes = ("score", "exponentials", "dlogits")
    by_version = dict(sorted(run.sections["compiled"].items()))

    def cells() -> Iterator[list[str]]:
        for version, rows in by_version.items():
            bad = (sorted(name for name, row in rows.items() if fault(row)) for fault in faults.values())
            counts = (f"{rows[f'sm_90-bf16-{mode}-plain-even']['instructions']:.1f}" for mode in modes)
            yield [version, str(len(rows)), *(", ".join(names) or "0" for names in bad), ", ".join(counts)]

    lines = grid(f"| triton | kernels | {' | '.join(faults)} | instructions for a logit: {', '.join(modes)} |", cells())
    kinds = ", ".join(sorted({row["arch"] for rows in by_version.values() for row in rows.values()}))
    return "\n".join([*lines, "", f"For {kinds}; commit {run.machine['commit']}, {run.machine['date'][:10]}."])


def mismatch(run: Run) -> str:
    """Differences between log-probs of vLLM and of the policy, by their cause."""
    cases = dict(sorted(run.sections["mismatch"]["cases"].items()))
    names = list(next(iter(next(iter(cases.values()))["policies"].values())))
    rows = (
        (case, policy,
         *(f"{row['mean']:.2g}, {row['p99']:.2g}, {row['max']:.2g}; {row['outside']:.1%}"
           for row in (rows[name] for name in names)))
        for case, measured in cases.items() for policy, rows in measured["policies"].items()
    )  # fmt: skip
    tokens = ", ".join(str(count) for count in sorted({measured["tokens"] for measured in cases.values()}))
    lines = grid(f"| model | policy | {' | '.join(names)} |", rows)
    lines += ["", f"{tokens} sampled tokens of a model; {where(run)}."]
    timed = {case: measured["calls"]["exact_logprobs"] for case, measured in cases.items() if "calls" in measured}
    if timed:
        ratios = ", ".join(f"{row['times_bare']['median']:.2f} ({case})" for case, row in timed.items())
        lines += ["", f"Time of a rollout with `exact_logprobs` relative to one without: {ratios}."]
    return "\n".join(lines)


def rows(run: Run) -> str:
    """Times of the row kernels, and why one has none."""
    lines = []
    for vocabulary in run.sections["rows"]["vocabularies"]:
        times = (
            (mode, name, ms(row["median"]), f"{row['tb_per_s']:.2f} TB/s", f"{row.get('times_triton', 1.0):.2f}")
            for mode, by_name in vocabulary["modes"].items()
            for name, row in by_name.items()
        )
        lines += [f"V = {vocabulary['V']}, {vocabulary['R']} rows", ""]
        lines += [*grid("| mode | kernel | time | traffic | × triton |", times), ""]
        timed = vocabulary["modes"]["loss"]
        lines += [f"{name}: not timed: {e}" for name, e in vocabulary["error"].items() if name not in timed]
    return "\n".join(lines)


def tune(run: Run) -> str:
    """Times of the head kernel's configurations relative to the library's product, and why one has none."""
    lines = []
    for shape in run.sections["tune"]["shapes"]:
        lines.append(f"N = {shape['N']}, H = {shape['H']}, V = {shape['V']}")
        lines += [f"  {entry}" for entry in shape["configurations"]]
    return "\n".join(lines)
