"""The tables of speed and memory, from the section `loss` of a run: see `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.results import Run, newest, newest_first, where
from benchmarks.study import Section
from benchmarks.sweep import PLANS as GPU_PLANS
from benchmarks.tables import COMMANDS, NOT_YET, grid, mib, ms, paragraphs, taken, title

SPEED_HEADER = (
    "|  | forward + backward | × bare (p20 to p80) | scoring | × bare | memory | gradients off by | max \\|Δlogp\\| |"
)
SUMMARY_PEERS = {"torch.compile": "torch.compile", "liger": "Liger", "trl": "TRL"}


def summary(runs: list[Run]) -> str:
    """One row: time and memory of our loss and of its peers, from the newest CPU run that timed all of them."""
    found = summary_case(runs)
    if found is None:
        return f"Time and memory: {NOT_YET} (`{COMMANDS['cpu']}`)."
    run, case = found
    names = {"native": "**grpo_fused**", **SUMMARY_PEERS}
    cells = ["time of forward + backward, memory beyond inputs and gradients"]
    for name in names:
        row = case["providers"][name]
        memory = peak_mib(row)
        cells.append(ms(row["forward_backward"]["ms"]["median"]) + ("" if memory is None else f", {memory:.0f} MiB"))
    shape = case["shape"]
    rows, source = _candidate_rows(run, shape, len(names), runs)
    words = f"{shape['dtype']}, {shape['N']} tokens, hidden size {shape['H']}, vocabulary {shape['V']}"
    return paragraphs(
        grid(f"| {words} | {' | '.join(names.values())} |", [cells, *rows]),
        f"{where(run)}, {run.machine['threads']} threads{source}.",
    )


def _candidate_rows(dense: Run, shape: dict[str, Any], columns: int, runs: list[Run]) -> tuple[list[list[str]], str]:
    """The same with candidate sets of published sizes, and its source; empty if it was measured on another machine."""
    run = newest("cpu", "candidates", runs)
    if run is None or run.machine["name"] != dense.machine["name"]:
        return [], ""
    published = run.sections["candidates"]["published"]
    if any(published[name] != shape[name] for name in "NHV"):
        return [], ""
    row, memory = published["calls"]["native loss"], mib(published["scratch_bytes"]["native"])
    text = "the same with [candidate sets](docs/candidates.md) of the sizes that top-p 0.97 leaves"
    beside = ms(published["calls"]["native dense loss"]["ms"]["median"])
    time = f"{ms(row['ms']['median'])} (dense {beside} in that run)" + (f", {memory}" if memory else "")
    source = f"; candidate sets: commit {run.machine['commit']}, {run.machine['date'][:10]}"
    return [[text, time, *[""] * (columns - 1)]], source


def summary_case(runs: list[Run]) -> tuple[Run, dict[str, Any]] | None:
    """The newest CPU run that timed ours and all of `SUMMARY_PEERS`, and the first dense case in which it did."""
    for run in newest_first("cpu", "loss", runs):
        for case in _dense(run.sections["loss"]).values():
            rows = case["providers"]
            if all(name in rows and "not_timed" not in rows[name] for name in ("native", *SUMMARY_PEERS)):
                return run, case
    return None


def speed_of(device: str, runs: list[Run]) -> str:
    """The tables of the newest run, of a GPU those of each kind; and which of the GPU's problems were not measured."""
    found = newest_first(device, "loss", runs)
    if found:
        kinds = {run.machine["name"]: run for run in reversed(found)}  # the newest of each
        older = [run for run in found[1:] if device == "cuda" and kinds[run.machine["name"]] is run]
        return paragraphs(*(speed(run.sections["loss"], run, last=run is found[0]) for run in (found[0], *older)))
    note = f"On a {device.replace('cuda', 'gpu').upper()}: {NOT_YET}. `{COMMANDS[device]}` fills this in."
    return paragraphs(note, _missing_on_a_gpu({}, device))


def speed(section: Section, run: Run, last: bool = True) -> str:
    """The machine, then a table for each problem that includes peers: ours and theirs, fastest first.

    Of the newest run on the device also what it left out, and its plots.
    """
    cases, device = with_peers(section), run.machine["device"]
    ours = {p for p, entry in section["providers"].items() if entry["ours"]}
    blocks = [_about(section, run), *(_speed_table(case, ours) for case in cases.values())]
    alone = [row for name, case in _dense(section).items() if name not in cases for row in _alone_rows(case)]
    if alone:
        blocks.append(grid("| Other sizes | | forward + backward | × bare | scoring | × bare | memory |", alone))
    if not last:
        return paragraphs(*blocks)
    if left_out := section["left_out"]:
        blocks.append(f"Not measured in the time of this run: {', '.join(left_out)}.")
    blocks.append(_missing_on_a_gpu(section["cases"], device))
    name, rows = device.replace("cuda", "gpu"), [row for case in cases.values() for row in case["providers"].values()]
    if any("not_timed" not in row for row in rows):
        blocks.append(f"![time of forward and backward, relative to the bare products](plots/{name}-speed.svg)")
    if any(peak_mib(row) is not None for row in rows):
        blocks.append(f"![peak memory](plots/{name}-memory.svg)")
    return paragraphs(*blocks)


def sparsity(device: str, runs: list[Run]) -> str:
    """Savings by inactive tokens: × bare of each pattern relative to × bare of the dense case."""
    run = newest(device, "loss", runs)
    rows = [] if run is None else list(_sparse_rows(run.sections["loss"]["cases"]))
    if not rows:
        return f"Padding and zero advantages: {NOT_YET} (`{COMMANDS[device]}`)."
    return grid("| problem | tokens with a gradient | | time | × bare | × bare, relative to dense |", rows)


def providers(runs: list[Run]) -> str:
    """What is timed under each name, in the words of the newest run that could time it, and why another could not."""
    found = [run for device in ("cpu", "cuda") if (run := newest(device, "loss", runs)) is not None]
    found.sort(key=lambda run: run.machine["date"], reverse=True)
    known = {run.machine["device"]: run.sections["loss"]["providers"] for run in found}
    if not known:
        return "`benchmarks/providers.py` says what is timed under each name."
    rows = []
    for name in dict.fromkeys(name for entries in known.values() for name in entries):
        entries = {device: by_name[name] for device, by_name in known.items() if name in by_name}
        absent = [f"{device}: {entry['unavailable']}" for device, entry in entries.items() if entry["unavailable"]]
        timed = [entry for entry in entries.values() if not entry["unavailable"]]
        rows.append((name, _cell((timed or [*entries.values()])[0]["composition"]), _cell("; ".join(absent))))
    table = grid("| name | what is timed | not run |", rows)
    return paragraphs("<details><summary>What is timed under each name</summary>", table, "</details>")


def with_peers(section: Section) -> dict[str, Any]:
    """The dense cases in which a peer was timed or tried."""
    return {
        name: case
        for name, case in _dense(section).items()
        if not all(section["providers"][provider]["ours"] for provider in case["providers"])
    }


def _dense(section: Section) -> dict[str, Any]:
    return {name: case for name, case in section["cases"].items() if case["shape"]["pattern"] == "dense"}


def peak_mib(row: dict[str, Any]) -> float | None:
    """MiB beyond inputs and gradients: the resident set on a CPU, the allocator's on a GPU; None if not measured."""
    measured = row.get("memory_mib", {})
    return measured.get("resident", measured.get("allocator"))


def _missing_on_a_gpu(cases: dict[str, Any], device: str) -> str:
    """A table of the GPU's dense problems that are not among the cases; nothing for a CPU."""
    missing = [plan.case for plan in GPU_PLANS if plan.case.pattern == "dense" and plan.case.name not in cases]
    if device == "cpu" or not missing:
        return ""
    rows = ([title(case.describe()), *[NOT_YET] * 4] for case in missing)
    return grid("| problem | bare products | ours | TRL | Liger |", rows)


def _about(section: Section, run: Run) -> str:
    machine, name = run.machine, run.machine["name"]
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


def _speed_table(case: dict[str, Any], ours: set[str]) -> str:
    shape, bare, rows = case["shape"], case["bare"], case["providers"]
    product = 2 * shape["N"] * shape["H"] * shape["V"]
    timed = {name: row for name, row in rows.items() if "not_timed" not in row}
    three, one = bare["bare-3"]["median"], bare["bare-1"]["median"]
    first = f"{ms(three)}, {_rate(3 * product / three)}", "1", f"{ms(one)}, {_rate(product / one)}", "1"
    cells = [["bare products", *first, *[""] * 3]]
    for name, row in sorted(timed.items(), key=lambda item: item[1]["forward_backward"]["ms"]["median"]):
        spread = row["forward_backward"]["times_bare"]
        both, ratio, *others = _taken(row)
        ratio += f" ({spread['p20']:.2f} to {spread['p80']:.2f})"
        cells.append([f"**{name}**" if name in ours else name, both, ratio, *others, *_errors(row["errors"])])
    cells += [
        [name, f"not timed: {_cell(row['not_timed'])}", *[""] * 4, *_errors(row.get("errors", {}))]
        for name, row in rows.items()
        if name not in timed
    ]
    return paragraphs(f"**{title(shape)}**", grid(SPEED_HEADER, cells))


def _taken(row: dict[str, Any]) -> list[str]:
    """Forward + backward and its ratio to the bare products, scoring and its ratio, memory."""
    score = taken(row["scoring"]) if "scoring" in row else ("", "")
    return [*taken(row["forward_backward"]), *score, _memory(row)]


def _alone_rows(case: dict[str, Any]) -> Iterator[list[str]]:
    for name, row in case["providers"].items():
        cells = [f"not timed: {_cell(row['not_timed'])}", *[""] * 4] if "not_timed" in row else _taken(row)
        yield [title(case["shape"]), name, *cells]


def _sparse_rows(cases: dict[str, Any]) -> Iterator[list[str]]:
    for case in cases.values():
        shape = case["shape"]
        if shape["pattern"] == "dense":
            continue
        dense = cases.get(_dense_name(shape, cases), {"providers": {}})
        for name, row in case["providers"].items():
            whole = dense["providers"].get(name, {})
            if "not_timed" in row or "not_timed" in whole:
                continue
            both, of_dense = row["forward_backward"], ""
            if whole:  # both relative to the bare products of their rounds: the cases ran minutes apart
                ratio = both["times_bare"]["median"] / whole["forward_backward"]["times_bare"]["median"]
                of_dense = f"{ratio:.2f}"
            yield [
                f"{title(shape)}, {shape['pattern']}", f"{case['shares']['gradient']:.0%}", name,
                *taken(both), of_dense,
            ]  # fmt: skip


def _dense_name(shape: dict[str, Any], cases: dict[str, Any]) -> str:
    """The dense case of the same head whose number of tokens is nearest."""
    same = {
        name: abs(case["shape"]["N"] - shape["N"])
        for name, case in cases.items()
        if case["shape"]["pattern"] == "dense" and all(case["shape"][k] == shape[k] for k in ("dtype", "H", "V"))
    }
    return min(same, key=lambda name: same[name], default="")


def _errors(errors: dict[str, float | None]) -> list[str]:
    """The larger error of the two gradients, and the error of the log-probs."""
    gradients = [errors.get("dhidden"), errors.get("dweight")]
    known = [error for error in gradients if error is not None]
    return [_small(max(known)) if len(known) == 2 else "", _small(errors.get("logp"))]


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _rate(flop_per_ms: float) -> str:
    """The rate of matrix products as text."""
    gflops = flop_per_ms / 1e6
    return f"{gflops / 1000:.0f} TFLOP/s" if gflops >= 1e4 else f"{gflops:.0f} GFLOP/s"


def _memory(row: dict[str, Any]) -> str:
    if (memory := peak_mib(row)) is not None:
        return f"{memory:.0f} MiB"
    return _cell(row.get("memory_mib", {}).get("failed", ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
