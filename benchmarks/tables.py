"""The tables of README.md and the pages in docs/, each from the newest run that has its section. No number is typed.

A table is a function from the folder of results to Markdown. `PAGES` has the names of the tables of each page; the page
has a pair of markers for each name, and `benchmarks.report` writes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import study_page
from benchmarks.results import Run, newest, newest_first, where
from benchmarks.sweep import PLANS as GPU_PLANS

NOT_YET = "not measured yet"
SPEED_COLUMNS = (
    "", "forward + backward", "× bare (p20 to p80)", "scoring", "× bare", "memory", "gradients off by",
    "max \\|Δlogp\\|",
)  # fmt: skip
SUMMARY_PEERS = {"torch.compile": "torch.compile", "liger": "Liger", "trl": "TRL"}
COMMANDS = {"cpu": "make bench", "cuda": "make gpu"}


def summary(folder: Path) -> str:
    """One row: time and memory of our loss and of its peers, from the newest CPU run that timed all of them."""
    found = newest_first("cpu", "loss", folder)
    run = next((run for run in found if _summary_case(run)), None)
    if run is None:
        return f"Time and memory: {NOT_YET} (`{COMMANDS['cpu']}`)."
    case = _summary_case(run)
    assert case is not None
    names = {"native": "**grpo_fused**", **SUMMARY_PEERS}
    cells = []
    for name in names:
        row = case["providers"][name]
        mib = peak_mib(row)
        cells.append(_ms(row["forward_backward"]["ms"]["median"]) + (f", {mib:.0f} MiB" if mib is not None else ""))
    shape = case["shape"]
    return "\n".join(
        [
            f"| {shape['dtype']}, {shape['N']} tokens, hidden size {shape['H']}, vocabulary {shape['V']} | "
            + " | ".join(names.values())
            + " |",
            "|---" * (len(names) + 1) + "|",
            "| time of forward + backward, memory beyond inputs and gradients | " + " | ".join(cells) + " |",
            "",
            f"{where(run)}, {run.machine['threads']} threads.",
        ]
    )


def _summary_case(run: Run) -> dict[str, Any] | None:
    """The first dense case in which ours and all of `SUMMARY_PEERS` were timed."""
    for case in _dense(run).values():
        rows = case["providers"]
        if all(name in rows and "not_timed" not in rows[name] for name in ("native", *SUMMARY_PEERS)):
            return case
    return None


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


def speed(device: str, folder: Path) -> str:
    """The machine, then a table for each problem that includes peers: ours and theirs, fastest first."""
    run = newest(device, "loss", folder)
    if run is None:
        return _not_yet(device)
    cases = with_peers(run)
    ours = {p for p, entry in run.sections["loss"]["providers"].items() if entry["ours"]}
    blocks = [_about(run), *(_speed_table(found, ours) for found in cases.values())]
    alone = [row for name, found in _dense(run).items() if name not in cases for row in _alone_rows(found)]
    if alone:
        header = "| Other sizes | | forward + backward | × bare | scoring | × bare | memory |"
        blocks.append("\n".join([header, "|---" * 7 + "|", *alone]))
    if missing := _not_yet(device, run):
        blocks.append(missing)
    name = "gpu" if device == "cuda" else device
    if any("not_timed" not in row for found in cases.values() for row in found["providers"].values()):
        blocks.append(f"![time of forward and backward, relative to the bare products](plots/{name}-speed.svg)")
    if any(peak_mib(row) is not None for found in cases.values() for row in found["providers"].values()):
        blocks.append(f"![peak memory](plots/{name}-memory.svg)")
    return "\n\n".join(blocks)


def sparsity(device: str, folder: Path) -> str:
    """Savings by inactive tokens: the time of each pattern relative to the dense case, per token of the batch."""
    run = newest(device, "loss", folder)
    header = "| problem | tokens with a gradient | | time | × bare | time / dense time |"
    rows = [] if run is None else list(_sparse_rows(run.sections["loss"]["cases"]))
    if not rows:
        return f"Padding and zero advantages: {NOT_YET} (`{COMMANDS[device]}`)."
    return "\n".join([header, "|---|---|---|---|---|---|", *rows])


def providers(folder: Path) -> str:
    """What is timed under each name, and why it was not run on a machine."""
    runs = {device: newest(device, "loss", folder) for device in ("cpu", "cuda")}
    known = {device: run.sections["loss"]["providers"] for device, run in runs.items() if run is not None}
    if not known:
        return "`benchmarks/providers.py` says what is timed under each name."
    lines = ["<details><summary>What is timed under each name</summary>", "", "| name | what is timed | not run |"]
    lines.append("|---|---|---|")
    for name in dict.fromkeys(name for found in known.values() for name in found):
        entries = {device: found[name] for device, found in known.items() if name in found}
        absent = [f"{device}: {entry['unavailable']}" for device, entry in entries.items() if entry["unavailable"]]
        lines.append(f"| {name} | {_cell(next(iter(entries.values()))['composition'])} | {_cell('; '.join(absent))} |")
    return "\n".join([*lines, "", "</details>"])


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
        lines.append(f"| {names.get(name, name)} | {_ms(row['ms']['median'])} | {row['times_bare']['median']:.4f} |")
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
        yield f"| {name} | {_ms(row['ms']['median'])} | {row['times_bare']['median']:.3f} |"


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
    return "\n".join([*lines, "", f"{tokens} sampled tokens of a model; {where(run)}."])


TABLES: dict[str, Callable[[Path], str]] = {
    "summary": summary,
    "training-step": training_step,
    "integration-steps": integration_steps,
    "cpu-speed": lambda folder: speed("cpu", folder),
    "cpu-sparsity": lambda folder: sparsity("cpu", folder),
    "gpu-speed": lambda folder: speed("cuda", folder),
    "gpu-sparsity": lambda folder: sparsity("cuda", folder),
    "providers": providers,
    "accuracy": accuracy,
    "growth": growth,
    "end-to-end": end_to_end,
    "candidates": candidates,
    "compiled": compiled,
    "study": study_page.summary,
    "study-runs": study_page.runs,
    "study-distribution": study_page.distribution,
    "mismatch": mismatch,
}
"""Name of a pair of markers to the text between them."""

_PAGES = {
    "README.md": ("summary", "training-step", "study"),
    "docs/integrations.md": ("training-step", "integration-steps"),
    "docs/training.md": ("mismatch",),
    "docs/study.md": ("study-runs", "study-distribution"),
}
_ELSEWHERE = {name for names in _PAGES.values() for name in names}
PAGES = _PAGES | {"docs/benchmarks.md": tuple(name for name in TABLES if name not in _ELSEWHERE)}
"""Page to the names of its tables."""


def with_peers(run: Run) -> dict[str, Any]:
    """The dense cases in which a peer was timed or tried."""
    entries = run.sections["loss"]["providers"]
    return {
        name: found
        for name, found in _dense(run).items()
        if not all(entries[provider]["ours"] for provider in found["providers"])
    }


def _dense(run: Run) -> dict[str, Any]:
    return {
        name: found for name, found in run.sections["loss"]["cases"].items() if found["shape"]["pattern"] == "dense"
    }


def title(shape: dict[str, Any]) -> str:
    """A problem as text."""
    return f"{shape['dtype']}, N = {shape['N']}, H = {shape['H']}, V = {shape['V']}"


def peak_mib(row: dict[str, Any]) -> float | None:
    """MiB beyond inputs and gradients: the resident set on a CPU, the allocator's on a GPU; None if not measured."""
    found = row.get("memory_mib", {})
    return found.get("resident", found.get("allocator"))


def _not_yet(device: str, run: Run | None = None) -> str:
    """A note that nothing was measured, or which of the GPU's problems were not."""
    cases = {} if run is None else run.sections["loss"]["cases"]
    shapes = [plan.case for plan in GPU_PLANS if plan.case.pattern == "dense" and plan.case.name not in cases]
    lines = (
        [] if run else [f"On a {device.replace('cuda', 'gpu').upper()}: {NOT_YET}. `{COMMANDS[device]}` fills this in."]
    )
    if shapes and device == "cuda":
        lines += ["", "| problem | bare products | ours | TRL | Liger |", "|---|---|---|---|---|"]
        lines += [f"| {title(case.describe())} |" + f" {NOT_YET} |" * 4 for case in shapes]
    return "\n".join(lines).strip()


def _about(run: Run) -> str:
    machine, section = run.machine, run.sections["loss"]
    name = machine["name"]
    if machine["device"] == "cpu":
        name += f", {machine['cores']} cores, {machine['threads']} threads ({machine['native']})"
    else:
        name += f", copies at {section['copy_tb_per_s']:.1f} TB/s"
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    commit = machine["commit"] + (" with local changes" if machine["dirty"] else "")
    load = f", load average {machine['load']} at the start" if "load" in machine else ""
    return (
        f"{name}; {versions}; Python {machine['python']}.\n"
        f"Commit {commit}, {machine['date'][:10]}, {section['rounds']} rounds{load}. "
        f"Repeat it with `{section['command']}`."
    )


def _speed_table(found: dict[str, Any], ours: set[str]) -> str:
    shape, bare, rows = found["shape"], found["bare"], found["providers"]
    product = 2 * shape["N"] * shape["H"] * shape["V"]
    timed = sorted(
        (name for name in rows if "not_timed" not in rows[name]),
        key=lambda name: rows[name]["forward_backward"]["ms"]["median"],
    )
    lines = [
        f"**{title(shape)}**",
        "",
        "| " + " | ".join(SPEED_COLUMNS) + " |",
        "|" + "---|" * len(SPEED_COLUMNS),
    ]
    three, one = bare["bare-3"]["median"], bare["bare-1"]["median"]
    lines.append(
        f"| bare products | {_ms(three)}, {_rate(3 * product / three)} | 1 | {_ms(one)}, {_rate(product / one)} "
        "| 1 | | | |"
    )
    for name in timed:
        row = rows[name]
        spread = row["forward_backward"]["times_bare"]
        both, ratio, *others = _taken(row)
        ratio += f" ({spread['p20']:.2f} to {spread['p80']:.2f})"
        cells = [f"**{name}**" if name in ours else name, both, ratio, *others, *_errors(row["errors"])]
        lines.append("| " + " | ".join(cells) + " |")
    for name, row in rows.items():
        if "not_timed" in row:
            errors = _errors(row["errors"]) if "errors" in row else ["", ""]
            lines.append(f"| {name} | not timed: {_cell(row['not_timed'])} | | | | | {' | '.join(errors)} |")
    return "\n".join(lines)


def _taken(row: dict[str, Any]) -> list[str]:
    """Forward + backward and its ratio to the bare products, scoring and its ratio, memory."""
    both, score = row["forward_backward"], row.get("scoring")
    return [
        _ms(both["ms"]["median"]),
        f"{both['times_bare']['median']:.2f}",
        _ms(score["ms"]["median"]) if score else "",
        f"{score['times_bare']['median']:.2f}" if score else "",
        _memory(row),
    ]


def _alone_rows(found: dict[str, Any]) -> Iterator[str]:
    for name, row in found["providers"].items():
        taken = [f"not timed: {_cell(row['not_timed'])}", *[""] * 4] if "not_timed" in row else _taken(row)
        yield f"| {' | '.join([title(found['shape']), name, *taken])} |"


def _sparse_rows(cases: dict[str, Any]) -> Iterator[str]:
    for found in cases.values():
        shape = found["shape"]
        if shape["pattern"] == "dense":
            continue
        dense = cases.get(_dense_name(shape, cases))
        for name, row in found["providers"].items():
            if "not_timed" in row or (dense is not None and "not_timed" in dense["providers"].get(name, {})):
                continue
            both = row["forward_backward"]
            of_dense = ""
            if dense is not None and name in dense["providers"]:
                whole = dense["providers"][name]["forward_backward"]["ms"]["median"] / dense["shape"]["N"]
                of_dense = f"{both['ms']['median'] / shape['N'] / whole:.2f}"
            yield (
                f"| {title(shape)}, {shape['pattern']} | {found['shares']['gradient']:.0%} | {name} "
                f"| {_ms(both['ms']['median'])} | {both['times_bare']['median']:.2f} | {of_dense} |"
            )


def _dense_name(shape: dict[str, Any], cases: dict[str, Any]) -> str:
    """The dense case of the same head whose number of tokens is nearest."""
    same = {
        name: abs(found["shape"]["N"] - shape["N"])
        for name, found in cases.items()
        if found["shape"]["pattern"] == "dense" and all(found["shape"][k] == shape[k] for k in ("dtype", "H", "V"))
    }
    return min(same, key=lambda name: same[name], default="")


def _errors(errors: dict[str, float | None]) -> list[str]:
    """The larger error of the two gradients, and the error of the log-probs."""
    gradients = [errors.get("dhidden"), errors.get("dweight")]
    known = [error for error in gradients if error is not None]
    return [_small(max(known)) if len(known) == 2 else "", _small(errors.get("logp"))]


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _rate(flop_per_ms: float) -> str:
    """The rate of matrix products as text."""
    gflops = flop_per_ms / 1e6
    return f"{gflops / 1000:.0f} TFLOP/s" if gflops >= 1e4 else f"{gflops:.0f} GFLOP/s"


def _memory(row: dict[str, Any]) -> str:
    mib = peak_mib(row)
    if mib is not None:
        return f"{mib:.0f} MiB"
    return _cell(row.get("memory_mib", {}).get("failed", ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
