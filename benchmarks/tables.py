"""The tables of studies, in Markdown: each a function of a section and of the run that has it. No number is typed.

`benchmarks.pages` says on which page each stands.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.results import Run, latest, where
from benchmarks.study import Section
from benchmarks.timing import MIB

NOT_YET = "not measured yet"
COMMANDS = {"cpu": "make bench", "cuda": "make gpu"}
"""What measures what a table of a device has."""


def grid(header: str, rows: Iterable[Sequence[str]]) -> str:
    """A table under a header line."""
    columns = header.replace("\\|", "").count("|") - 1
    return "\n".join([header, "|---" * columns + "|", *(f"| {' | '.join(cells)} |" for cells in rows)])


def paragraphs(*texts: str) -> str:
    """Texts and tables, a blank line between two; empty ones are left out."""
    return "\n\n".join(filter(None, texts))


def ms(value: float) -> str:
    """A time in milliseconds as text."""
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def mib(size: float | None) -> str:
    """Bytes in MiB as text; empty if they could not be measured."""
    return "" if size is None else f"{size / MIB:.0f} MiB"


def taken(row: dict[str, Any], digits: int = 2) -> tuple[str, str]:
    """The time of a call, and its ratio to another one's."""
    return ms(row["ms"]["median"]), f"{row['times_bare']['median']:.{digits}f}"


def title(shape: dict[str, Any]) -> str:
    """A problem as text."""
    return f"{shape['dtype']}, N = {shape['N']}, H = {shape['H']}, V = {shape['V']}"


BARE = {"bare-1": "one bare product", "bare-3": "bare products", "fill dW": "fill a fresh dW"}


def calls_grid(calls: dict[str, Any], digits: int, ratio: str = "× bare (forward + backward)") -> str:
    """A row for each call: its time, and its ratio to another call's."""
    rows = ((BARE.get(name, name), *taken(row, digits)) for name, row in calls.items())
    return grid(f"| | time | {ratio} |", rows)


def page(section: Section, first: str, digits: int) -> str:
    """A paragraph, a table of the section's calls, and their memory."""
    memory = ", ".join(f"{name} {mib(x)}" for name, x in section["scratch_bytes"].items() if x is not None)
    chunk = section.get("chunk")
    on_logits = "" if chunk is None else f" Calls on logits take {chunk} tokens at a time."
    return paragraphs(
        first, calls_grid(section["calls"], digits), f"Memory beyond inputs and gradients: {memory}.{on_logits}"
    )


def training_step(runs: list[Run]) -> str:
    """The time of steps of TRL's trainer with our loss and without, and the head's share in larger models.

    From the newest run of the trainers, and the newest that knows the heads' shares.
    """
    steps, shares = latest("trl_steps", runs), latest("end_to_end", runs)
    if steps is None or shares is None:
        return f"Time of a training step: {NOT_YET} (`{COMMANDS['cpu']}`)."
    section, of_head = steps.sections["trl_steps"], shares.sections["end_to_end"]["head_flop_share"]
    time = {name: f"{row['seconds']['median']:.1f} s" for name, row in section["trainers"].items()}
    memory = {name: mib(row["peak_bytes"]["median"]) for name, row in section["trainers"].items()}
    others = ", ".join(f"{share:.0%} of {name}" for name, share in of_head.items() if name != "this model")
    return (
        f"{section['steps']} steps of TRL's trainer, generation included, on a small Qwen2 (H = {section['hidden']}, "
        f"{section['layers']} layers, V = {section['vocab']}, {section['threads']} thread):\n"
        f"{time['fused']} with `FusedGRPOTrainer` and {time['patched']} with `patch_trl()` instead of "
        f"{time['stock']}; peak memory of the process {memory['fused']} instead of "
        f"{memory['stock']}\n({where(steps)}). In this model most of the work is the head. "
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


def integration_steps(runs: list[Run]) -> str:
    """A training step with each project's own loss head and with ours, each from the newest run that timed it."""
    cells, models, places = [], {}, {}
    for project, words in STEP_ROWS.items():
        name = f"integration_steps.{project}"
        if (run := latest(name, runs)) is None:
            cells.append([words, *["-"] * 5])
            continue
        row = run.sections[name]
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
        places[project] = where(run)
    lines = [grid("| | its own | ours | own / ours | peak memory | losses, gradients differ by |", cells)]
    for texts in (models, places):
        for text in dict.fromkeys(texts.values()):
            projects = [project for project in texts if texts[project] == text]
            lines.append(text + (f" ({', '.join(projects)})." if len(projects) < len(texts) else "."))
    return paragraphs(*lines)


ACCURACY_NAMES = {"linear_cross_entropy": "linear_cross_entropy of torch, chunked"}
"""Of providers, where the name in the results says too little."""


def accuracy(section: Section, run: Run) -> str:
    """Errors in bf16 for the rows whose largest logit is nearest to 32; and the picture."""
    rows = [row for row in section["rows"] if row["dtype"] == "bfloat16"]
    size = min((row["max_logit"] for row in rows), key=lambda z: abs(z - 32))
    shape = section["shape"]
    cells = (
        (ACCURACY_NAMES.get(row["provider"], row["provider"]), f"{row['logp_error']['max']:.1e}",
         f"{row['logp_error']['mean']:.1e}", f"{row['flipped']['exact_old']:.2%}")
        for row in rows if row["max_logit"] == size
    )  # fmt: skip
    return paragraphs(
        f"bf16, {shape['B'] * shape['T']} tokens, H = {shape['H']}, V = {shape['V']}, largest logit {size:.0f}; "
        f"{where(run)}.",
        grid("| | max \\|Δlogp\\| | mean | wrong clip decisions |", cells),
        "![errors by size of the logits](plots/accuracy.svg)",
    )


def end_to_end(section: Section, run: Run) -> str:
    """Time and memory of a training step, and the head's share of it; and the picture."""
    model, shares = section["model"], section["head_flop_share"]
    cells = (
        (dtype, name, f"{row['tokens_per_second']:.0f}", f"{row['head_share']:.0%}", mib(row.get("peak_bytes")))
        for dtype, results in section["results"].items()
        for name, row in results.items() if "step_seconds" in row
    )  # fmt: skip
    of_models = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return paragraphs(
        f"{model['layers']} layers, H = {model['hidden']}, V = {model['vocab']}, {section['tokens']} completion "
        f"tokens a step, no generation; {where(run)}. The head's share of the FLOP of a model: {of_models}.",
        grid("| | loss | tokens/s | share of head and loss | memory beyond weights and AdamW |", cells),
        "![a training step](plots/end-to-end.svg)",
    )


def growth(section: Section, run: Run) -> str:
    """The error of the predicted memory; and the picture."""
    errors: dict[str, list[float]] = {}
    for point in section["points"]:
        if "predicted_bytes" in point and point["bytes"] is not None:
            off = abs(point["predicted_bytes"] - point["bytes"]) / MIB
            errors.setdefault(f"{point['engine']} in {point['dtype']}", []).append(off)
    words = (f"{name}, {statistics.median(off):.1f} MiB ({max(off):.1f})" for name, off in errors.items())
    return (
        f"Memory is predicted before a call; the prediction is off by, median (and worst): {'; '.join(words)}. "
        f"{where(run)}.\n\n![time and memory by problem size](plots/growth.svg)"
    )


def candidates(section: Section, run: Run) -> str:
    """Time of the loss on candidate sets and of dense ones, in the published sizes and in recorded ones."""
    texts = []
    if (published := section.get("published")) is not None:
        texts += [
            page(published, f"bf16, {_sizes(published)}. {where(run)}.", 4), "![sets by size](plots/candidates.svg)"
        ]  # fmt: skip
    if (window := section.get("window")) is not None:
        count = window["micro_batches"]
        more = window["more"][f"{count} more"]
        each = f"{more['ms']['median'] / count:.1f} ms, {more['times_bare']['median'] / count:.4f} x bare"
        texts += [
            f"An optimizer step of {count} such micro-batches, with a clipped norm, AdamW and zeroing, same run. "
            f"A micro-batch whose rows are added to a gradient that is there takes {each}.",
            calls_grid(window["calls"], 3),
        ]
    if (recorded := section.get("recorded")) is not None:
        texts += [
            f"Recorded in a rollout of `examples.small`'s policy with top_p = {recorded['top_p']}, same run: "
            f"{_sizes(recorded)}. Its vocabulary is tiny: the head is little work there.",
            calls_grid(recorded["calls"], 3, "× dense loss"),
        ]
    return paragraphs(*texts)


def _sizes(section: dict[str, Any]) -> str:
    sizes = section["set_sizes"]
    return (
        f"N = {section['N']}, H = {section['H']}, V = {section['V']}; set sizes: {sizes['alone']:.0%} one token, "
        f"median {sizes['median']:.0f}, mean {sizes['mean']:.1f}, p99 {sizes['p99']:.0f}"
    )


def divergence(section: Section, run: Run) -> str:
    """Time, memory and errors of divergences between two heads, ours and those of TRL and Liger."""

    def cells() -> Iterator[list[str]]:
        for name, error in section["errors"].items():
            provider, kind = name.split()
            yield [f"{kind}, {provider}", *taken(section["calls"][name]), mib(section["scratch_bytes"][name]),
                   f"{error['loss']:.0e}", f"{error['dhidden']:.0e}"]  # fmt: skip

    table = grid("| | time | × bare | memory | loss off by | dH off by |", cells())
    return paragraphs(table, f"{title(section | {'dtype': 'bf16'})}, forward and backward; {where(run)}.")


def shared_prompts(section: Section, run: Run) -> str:
    """Completion tokens per second of an update in which completions share their prompt, and of one without."""

    def cells() -> Iterator[list[str]]:
        for case in section["cases"]:
            apart, shared = (case["updates"][name]["ms"]["median"] / 1e3 for name in ("separate", "shared"))
            tokens = section.get("prompts", 2) * case["generations"] * case["completion"]
            yield [f"{case['prompt']}, {case['completion']}", str(case["generations"]), f"{tokens / apart:.0f}",
                   f"{tokens / shared:.0f}", f"{apart / shared:.2f} x"]  # fmt: skip

    table = grid("| prompt, completion | completions | apart | shared | |", cells())
    return paragraphs(table, f"{_qwen2(section)}; {where(run)}.")


def generation(section: Section, run: Run) -> str:
    """Seconds of a rollout by transformers and by our engine, with shared prompts and without."""
    names = list(section["cases"][0]["rollouts"])
    rows = (
        (str(case["prompt"]), *(f"{case['rollouts'][name]['ms']['median'] / 1e3:.2f} s" for name in names))
        for case in section["cases"]
    )
    table = grid(f"| longest prompt | {' | '.join(names)} |", rows)
    batch = f"{section['prompts']} x {section['generations']} completions of {section['completion']} tokens"
    return paragraphs(table, f"{_qwen2(section)}; {batch}; {where(run)}.")


def _qwen2(section: Section) -> str:
    return f"Qwen2, {section['layers']} layers, H = {section['hidden']}, V = {section['vocab']}, fp32"


def threads(section: Section, run: Run) -> str:
    """Seconds of the engines and of the bare products with one thread, one for each core, and two."""
    counts = list(section["cases"][0]["threads"])

    def cells() -> Iterator[list[str]]:
        for case in section["cases"]:
            for name in case["threads"][counts[0]]:
                rows = [case["threads"][count][name] for count in counts]
                form = "{:.2f} s" if name == "bare" else "{:.2f} s, {:.2f} × bare"
                times = (form.format(row["ms"]["median"] / 1e3, row["times_bare"]["median"]) for row in rows)
                yield [title(case["shape"]), name, *times]

    table = grid(f"| | threads: | {' | '.join(counts)} |", cells())
    return paragraphs(table, f"{section['cores']} cores; {where(run)}.")


def compiled(section: Section, run: Run) -> str:
    """The Triton kernels that ship, compiled for every kind of GPU by several versions of triton: what went wrong."""
    faults = {
        "spill": lambda row: row["stack"] > 0,
        "products wait for each other": lambda row: row.get("serialized", False),
        "more shared memory than the chip has": lambda row: not row["fits"],
    }
    modes = ("score", "exponentials", "dlogits")
    by_version = dict(sorted(section.items()))

    def cells() -> Iterator[list[str]]:
        for version, rows in by_version.items():
            bad = (sorted(name for name, row in rows.items() if fault(row)) for fault in faults.values())
            counts = (f"{rows[f'sm_90-bf16-{mode}-plain-even']['instructions']:.1f}" for mode in modes)
            yield [version, str(len(rows)), *(", ".join(names) or "0" for names in bad), ", ".join(counts)]

    table = grid(f"| triton | kernels | {' | '.join(faults)} | instructions for a logit: {', '.join(modes)} |", cells())
    kinds = ", ".join(sorted({row["arch"] for rows in by_version.values() for row in rows.values()}))
    return paragraphs(table, f"For {kinds}; commit {run.machine['commit']}, {run.machine['date'][:10]}.")


def mismatch(section: Section, run: Run) -> str:
    """Differences between log-probs of vLLM and of the policy, by their cause."""
    cases = dict(sorted(section["cases"].items()))
    names = list(next(iter(next(iter(cases.values()))["policies"].values())))
    rows = (
        (case, policy,
         *(f"{row['mean']:.2g}, {row['p99']:.2g}, {row['max']:.2g}; {row['outside']:.1%}"
           for row in (rows[name] for name in names)))
        for case, measured in cases.items() for policy, rows in measured["policies"].items()
    )  # fmt: skip
    tokens = ", ".join(str(count) for count in sorted({measured["tokens"] for measured in cases.values()}))
    table = grid(f"| model | policy | {' | '.join(names)} |", rows)
    timed = {case: measured["calls"]["exact_logprobs"] for case, measured in cases.items() if "calls" in measured}
    ratios = ", ".join(f"{row['times_bare']['median']:.2f} ({case})" for case, row in timed.items())
    return paragraphs(
        table,
        f"{tokens} sampled tokens of a model; {where(run)}.",
        f"Time of a rollout with `exact_logprobs` relative to one without: {ratios}." if timed else "",
    )


def rows(section: Section, run: Run) -> str:
    """Times of the row kernels, and why one has none."""
    texts = []
    for vocabulary in section["vocabularies"]:
        times = (
            (mode, name, ms(row["ms"]["median"]), f"{row['tb_per_s']:.2f} TB/s", f"{row['times_bare']['median']:.2f}")
            for mode, by_name in vocabulary["modes"].items()
            for name, row in by_name.items()
        )
        timed = vocabulary["modes"]["loss"]
        texts += [
            f"V = {vocabulary['V']}, {vocabulary['R']} rows",
            grid("| mode | kernel | time | traffic | × the first |", times),
            "\n".join(f"{name}: not timed: {e}" for name, e in vocabulary["error"].items() if name not in timed),
        ]
    return paragraphs(*texts)


def tune(section: Section, run: Run) -> str:
    """Times of the head kernel's configurations relative to the library's product, and why one has none."""
    lines = []
    for shape in section["shapes"]:
        lines.append(f"N = {shape['N']}, H = {shape['H']}, V = {shape['V']}")
        lines += [f"  {entry}" for entry in shape["configurations"]]
    return "\n".join(lines)
