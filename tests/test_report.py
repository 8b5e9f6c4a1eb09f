"""Tables and plots are made from the newest results; the report names what was not measured, and refuses unreadable
files."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks import plots, report, results
from benchmarks.command import call
from benchmarks.pages import TABLES
from benchmarks.problem import Case
from benchmarks.results import SCHEMA
from benchmarks.speed_tables import SUMMARY_PEERS, summary
from benchmarks.studies import STUDIES
from benchmarks.style import COLORS, new_figure
from benchmarks.sweep import HEADS, PLANS


def names_of(page: str) -> list[str]:
    return re.findall(r"<!-- begin:([\w-]+) -->", (results.ROOT / page).read_text(encoding="utf-8"))


PAGES = {
    page: names
    for page in ("README.md", *(f"docs/{path.name}" for path in sorted((results.ROOT / "docs").glob("*.md"))))
    if (names := names_of(page))
}
SHOWN_NAMES = {name for names in PAGES.values() for name in names}


def empty(page: str) -> str:
    """A page with markers around old text."""
    markers = [f"<!-- begin:{name} -->\nold\n<!-- end:{name} -->\nkept {name}\n" for name in PAGES[page]]
    return "# Title\n" + "".join(markers)


def taken(ms: float, bare: float) -> dict:
    return {
        "ms": {"median": ms, "p20": ms - 1, "p80": ms + 1},
        "times_bare": {"median": ms / bare, "p20": ms / bare - 0.01, "p80": ms / bare + 0.01},
    }


def measured(case: Case, peers: bool = True) -> dict:
    """A row of `benchmarks.measure` with invented figures."""
    errors = {"loss": 1e-6, "dhidden": 2e-3, "dweight": 3e-3, "logp": 4e-6}
    rows: dict = {
        "native": {"errors": errors, "forward_backward": taken(900.0, 1000.0), "scoring": taken(250.0, 333.0),
                   "memory_mib": {"resident": 61.4, "allocator": 60.0}},
    }  # fmt: skip
    if peers:
        rows["trl"] = {"errors": errors | {"logp": 0.08}, "forward_backward": taken(4000.0, 1000.0),
                       "scoring": taken(700.0, 333.0), "memory_mib": {"failed": "no result within 300 s"}}  # fmt: skip
        rows["torch-lce"] = {"errors": errors | {"dweight": None}, "not_timed": "dweight is off by nan"}
        rows["liger"] = {"not_timed": "ImportError: a | b"}
    bare = {name: {"median": ms, "p20": ms, "p80": ms} for name, ms in (("bare-3", 1000.0), ("bare-1", 333.0))}
    shares = {"active": 0.5, "gradient": 0.5} if case.pattern != "dense" else {"active": 1.0, "gradient": 1.0}
    return {"shape": case.describe(), "shares": shares, "bare": bare, "providers": rows}


def result(device: str, *cases: tuple[Case, bool], schema: int = SCHEMA, date: str = "2026-05-06T07:08:09") -> str:
    names = {"native": True, "trl": False, "torch-lce": False, "liger": False, "cce": False}
    section = {
        "command": "python -m benchmarks.cpu --quick", "rounds": 3, "copy_tb_per_s": 0.02, "left_out": [],
        "providers": {n: {"composition": f"{n}'s kernel", "ours": ours,
                          "unavailable": "runs on cuda only" if n == "cce" else None} for n, ours in names.items()},
        "cases": {case.name: measured(case, peers) for case, peers in cases},
    }  # fmt: skip
    about = {"device": device, "kind": "a-machine", "name": "A machine", "cores": 2, "threads": 2, "native": "AVX512",
             "date": date, "commit": "abc1234", "dirty": False, "load": 0.1, "python": "3.11",
             "versions": {"torch": "2.13.0"}}  # fmt: skip
    return json.dumps({"schema": schema, "machine": about, "sections": {"loss": section}})


@pytest.fixture
def place(tmp_path):
    """A folder with the pages, and one of results."""
    (tmp_path / "results" / "a-machine").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        (tmp_path / page).write_text(empty(page))
    return tmp_path, tmp_path / "results"


def put(place, name: str, text: str) -> None:
    (place[1] / "a-machine" / name).write_text(text)


def benchmarks_page(place) -> str:
    return (place[0] / "docs" / "benchmarks.md").read_text()


def plots_of(place) -> list:
    return sorted((place[0] / "docs" / "plots").glob("*"))


DENSE, HALF = Case(4, 256, 896, 151936), Case(4, 256, 896, 151936, pattern="half-inactive")
FEW = Case(1, 128, 896, 151936)


def test_the_committed_files_are_up_to_date():
    report.main(check=True)


def test_every_table_is_on_a_page():
    assert TABLES.keys() - SHOWN_NAMES == {"loss", "rows", "tune", "integration-steps.{project}"}


SHOWN = [study for study in STUDIES.values() if study.section.replace("_", "-") in TABLES.keys() & SHOWN_NAMES]


@pytest.mark.parametrize("study", SHOWN, ids=lambda study: study.program)
def test_a_table_names_the_commit_of_its_run(study):
    runs = results.all_runs()
    newest = results.latest(study.section, runs)
    assert newest.machine["commit"] in TABLES[study.section.replace("_", "-")](runs)


def test_what_is_timed_is_in_the_words_of_the_newest_run_that_could_time_it(place):
    cpu, gpu = (json.loads(result(device, (DENSE, True), date=date)) for device, date in (
        ("cpu", "2026-05-06T07:08:09"), ("cuda", "2026-05-07T07:08:09")))  # fmt: skip
    first, second = (run["sections"]["loss"]["providers"] for run in (cpu, gpu))
    second["native"]["unavailable"] = "runs on cpu only"
    second["native"]["composition"] = second["cce"]["composition"] = "words of the GPU's run"
    second["cce"]["unavailable"] = None
    second["cce-exact"] = second["cce"] | {"composition": "the same, exact"}
    first["cpu-only"] = first["native"]
    for name, run in (("a.json", cpu), ("b.json", gpu)):
        put(place, name, json.dumps(run))
    rows = re.findall(r"^\| (\S+) \| (.*?) \|", TABLES["providers"](results.all_runs(place[1])), re.MULTILINE)
    assert rows[rows.index(("cce", "words of the GPU's run")) + 1] == ("cce-exact", "the same, exact")
    assert ("native", "native's kernel") in rows


def test_nothing_measured(place):
    report.write(*place)
    text = benchmarks_page(place)
    assert (place[0] / "README.md").read_text().count("not measured yet") == len(PAGES["README.md"])
    assert text.count("not measured yet") >= 2 + 4 * 3
    for plan in PLANS:
        assert f"N = {plan.case.N}, H = {plan.case.H}, V = {plan.case.V}" in text
    assert "kept gpu-speed" in text
    assert "old" not in text
    assert not plots_of(place)
    assert report.outdated(*place) == ""


def test_cases_that_no_time_was_left_for_are_named(place):
    text = result("cpu", (DENSE, True)).replace('"left_out": []', '"left_out": ["bf16-128-896-151936"]')
    put(place, "a.json", text)
    report.write(*place)
    assert "Not measured in the time of this run: bf16-128-896-151936." in benchmarks_page(place)


def test_tables_come_from_the_file(place):
    put(place, "a.json", result("cpu", (DENSE, True), (HALF, False), (FEW, False)))
    report.write(*place)
    text = benchmarks_page(place)
    cpu, gpu = text.split("begin:gpu-speed")
    assert "| **native** | 900 ms | 0.90 (0.89 to 0.91) | 250 ms | 0.75 | 61 MiB | 3.0e-03 | 4.0e-06 |" in cpu
    assert "| trl | 4000 ms | 4.00 (3.99 to 4.01) | 700 ms | 2.10 | no result within 300 s | 3.0e-03 | 8.0e-02 |" in cpu
    assert "| torch-lce | not timed: dweight is off by nan |  |  |  |  |  | 4.0e-06 |" in cpu
    assert "ImportError: a \\| b" in cpu
    flops = 2 * 1024 * 896 * 151936
    assert f"1000 ms, {3 * flops / 1e9:.0f} GFLOP/s" in cpu
    assert "half-inactive | 50% | native | 900 ms | 0.90 | 1.00 |" in cpu
    assert "| bf16, N = 128, H = 896, V = 151936 | native | 900 ms | 0.90 | 250 ms | 0.75 | 61 MiB |" in cpu
    assert cpu.count("| Other sizes |") == 1
    assert "A machine, 2 cores, 2 threads (AVX512); torch 2.13.0" in cpu
    assert (
        "Commit abc1234, 2026-05-06, 3 rounds, load average 0.1 at the start. Repeat it with "
        "`python -m benchmarks.cpu --quick`" in cpu
    )
    assert "not measured yet" in gpu
    assert "| cce | cce's kernel | cpu: runs on cuda only |" in gpu
    for row in (line for line in cpu.splitlines() if line.startswith("|")):
        assert row.replace("\\|", "").count("|") in (7, 8, 9), row


def test_a_wrong_result_of_ours_is_named_without_peers(place):
    run = json.loads(result("cpu", (FEW, False)))
    run["sections"]["loss"]["cases"][FEW.name]["providers"]["native"] = {"not_timed": "dweight is off by 2"}
    put(place, "a.json", json.dumps(run))
    report.write(*place)
    row = "| bf16, N = 128, H = 896, V = 151936 | native | not timed: dweight is off by 2 |  |  |  |  |"
    assert row in benchmarks_page(place)


def test_a_gpu_run_lists_what_it_has_not_measured(place):
    put(place, "a.json", result("cuda", (PLANS[0].case, True)))
    report.write(*place)
    gpu = benchmarks_page(place).split("begin:gpu-speed")[1]
    assert f"**bf16, N = 8192, H = {PLANS[0].case.H}, V = 151936**" in gpu
    assert sum(line.count("not measured yet") == 4 for line in gpu.splitlines()) == len(HEADS) - 1
    assert "(plots/gpu-speed.svg)" in gpu


def test_each_kind_of_gpu_has_the_tables_of_its_newest_run(place):
    """The newest kind first, with the plots; the last kind lists nothing that it has not measured."""
    for date, name in (("2026-05-06", "Old GPU"), ("2026-05-07", "New GPU"), ("2026-05-08", "Old GPU")):
        text = result("cuda", (PLANS[0].case, True), date=f"{date}T07:08:09").replace('"A machine"', f'"{name}"')
        put(place, f"{date}.json", text.replace("abc1234", date[-2:] * 3))
    report.write(*place)
    gpu = benchmarks_page(place).split("begin:gpu-speed")[1].split("end:gpu-speed")[0]
    assert [line for line in gpu.splitlines() if line.startswith("Commit")] == [
        f"Commit {day * 3}, 2026-05-{day}, 3 rounds, load average 0.1 at the start. "
        "Repeat it with `python -m benchmarks.cpu --quick`." for day in ("08", "07")]  # fmt: skip
    newest, older = gpu.split("New GPU")
    assert ("not measured yet" in newest, "not measured yet" in older) == (True, False)
    assert gpu.count("(plots/gpu-speed.svg)") == newest.count("(plots/gpu-speed.svg)") == 1


def test_places_of_a_layout_that_differ_in_their_last_bits_give_the_same_plot(tmp_path):
    pytest.importorskip("matplotlib")

    def draw(shift):
        figure = new_figure(4.0, 3.0, "title", "note")
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.2, 0.2, 0.7 + shift, 0.6))
        axes.plot([0.0, 1.0])
        return figure

    for shift in (0.0, 1e-12):
        plots.save(tmp_path / str(shift), plots.Picture(None, lambda _, by=shift: draw(by), "source"))
    first, second = (path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert first == second
    assert b"clip-path" in first


def test_plots_are_reproducible_and_contain_a_hash_of_their_data(place):
    pytest.importorskip("matplotlib")
    put(place, "a.json", result("cpu", (DENSE, True)))
    report.write(*place)
    assert "Other sizes" not in benchmarks_page(place)
    assert [path.name for path in plots_of(place)] == ["cpu-memory.svg", "cpu-speed.svg"]
    first = {path: path.read_bytes() for path in (*plots_of(place), *(place[0] / page for page in PAGES))}
    assert report.outdated(*place) == ""
    report.write(*place)
    assert {path: path.read_bytes() for path in first} == first
    assert not re.search(rb"<dc:date>|20\d\d-\d\d-\d\dT", b"".join(first[p] for p in first if p.suffix == ".svg"))
    changed = result("cpu", (DENSE, True)).replace("4.0,", "5.0,")
    put(place, "b.json", changed.replace("T07:08:09", "T08:08:09"))
    found = report.outdated(*place)
    assert "cpu-speed.svg does not show the newest results" in found
    assert "cpu-memory.svg" not in found
    assert "+" in found
    assert (
        plots.plots(results.all_runs(place[1]))["cpu-speed.svg"].data.panels[
            f"bf16, N = {DENSE.N}, H = 896, V = 151936"
        ]["trl"]
        == 5.0
    )


def test_check_fails_with_a_diff(place):
    options = [f"--{name}={value}" for name, value in zip(("root", "results"), place, strict=True)]
    with pytest.raises(SystemExit, match="(?s)[+]On a CPU.*not up to date: run python -m benchmarks.report"):
        call(report.main, ["--check", *options])
    assert {page: (place[0] / page).read_text() for page in PAGES} == {page: empty(page) for page in PAGES}
    call(report.main, options)
    call(report.main, ["--check", *options])


def test_a_newer_schema_is_refused(place):
    put(place, "a.json", result("cpu", (DENSE, True), schema=SCHEMA + 1))
    with pytest.raises(ValueError, match="newer than this code"):
        report.write(*place)
    assert benchmarks_page(place) == empty("docs/benchmarks.md")


def test_the_summary_is_of_the_newest_run_that_timed_every_peer(place):
    def all_timed(ms: float) -> dict:
        return {name: {"forward_backward": taken(ms, 1000.0)} for name in ("torch.compile", "liger", "trl")}

    run = json.loads(result("cpu", (DENSE, True)))
    run["sections"]["loss"]["cases"][DENSE.name]["providers"] |= all_timed(5000.0)
    put(place, "a.json", json.dumps(run))
    put(place, "b.json", result("cpu", (DENSE, True), date="2026-05-08T07:08:09"))  # newer, without torch.compile
    report.write(*place)
    text = (place[0] / "README.md").read_text()
    assert "| 900 ms, 61 MiB | 5000 ms | 5000 ms | 5000 ms |" in text
    picture = (place[0] / "docs" / "plots" / "summary.svg").read_text()
    for word in (
        "900",
        "61",
        "5,000",
        "torch.compile",
        "ours: native",
        "A machine with AVX512, commit abc1234, 2026-05-06",
    ):
        assert f">{word}<" in picture, word
    assert all(f"fill: {COLORS[name]}" in picture for name in ("native", "torch.compile", "Liger", "TRL"))
    assert "A machine with AVX512, commit abc1234, 2026-05-06, 2 threads." in text


def test_the_training_step_compares_ours_with_trl(place):
    run = json.loads(result("cpu", (FEW, False)))
    seconds = {"ours": 0.4, "eager": 0.8, "TRL": 1.6}
    run["sections"]["end_to_end"] = {
        "model": {"hidden": 256, "layers": 4, "vocab": 32000, "device": "cpu"}, "tokens": 1024,
        "results": {"bfloat16": {name: {"step_seconds": {"median": s}, "head_seconds": {"median": s / 2},
                                        "tokens_per_second": 1024 / s, "head_share": 0.5} for name, s in seconds.items()}},
        "head_flop_share": {"this model": 0.68, "Large": 0.1},
    }  # fmt: skip
    row = {"seconds": {"median": 20.0}, "processor_seconds": {"median": 19.5}, "peak_bytes": {"median": 2**30}}
    run["sections"]["trl_steps"] = {
        "vocab": 50000, "hidden": 256, "layers": 2, "steps": 10, "threads": 1,
        "trainers": {"stock": {**row, "seconds": {"median": 30.0}}, "patched": row, "fused": row},
    }  # fmt: skip
    put(place, "a.json", json.dumps(run))
    report.write(*place)
    text = (place[0] / "README.md").read_text()
    assert "10 steps of TRL's trainer, generation included, on a small Qwen2 (H = 256, 2 layers, V = 50000" in text
    assert "20.0 s with `FusedGRPOTrainer` and 20.0 s with `patch_trl()` instead of 30.0 s; peak memory" in text
    assert "The head is 10% of Large: expect a smaller gain there." in text
    assert "| bfloat16 | TRL | 640 | 50% |" in benchmarks_page(place)


def without_memory(data: Any) -> Any:
    """What a machine measures whose kernel does not allow a reset of the peak."""
    if isinstance(data, list):
        return [without_memory(item) for item in data]
    if not isinstance(data, dict):
        return data
    known = {name: without_memory(item) for name, item in data.items()}
    absent = {name: None for name in ("bytes", "peak_bytes") if name in data}
    if "scratch_bytes" in data:
        absent["scratch_bytes"] = dict.fromkeys(data["scratch_bytes"])
    return known | absent


@pytest.mark.parametrize("name", ["alternatives", "candidates", "divergence", "end_to_end", "growth", "heads"])
def test_memory_that_cannot_be_read_is_left_out(name):
    run = results.latest(name, results.all_runs())
    section = without_memory(run.sections[name])
    assert "None" not in STUDIES[name].table(section, run)
    pytest.importorskip("matplotlib")
    for study in STUDIES.values():
        if study.section == name and study.plot is not None:
            study.plot(section)


def test_the_summary_without_the_memory_of_candidate_sets():
    run = results.newest("cpu", "candidates", results.all_runs())
    section = without_memory(run.sections["candidates"])
    case = measured(Case(4, 256, 896, 151936))
    case["providers"] |= dict.fromkeys(SUMMARY_PEERS, case["providers"]["native"])
    loss = run._replace(sections={"candidates": section, "loss": {"cases": {"a": case}}})
    assert " in that run) |" in summary([loss])


def test_steps_of_integrations(place):
    """Each project from the newest run that has it; "-" where none has."""
    side = {"seconds": {"median": 4.0}, "peak_bytes": 2**30}
    step = {
        "vocab": 151936, "hidden": 896, "layers": 2, "sequences": 8, "length": 128, "dtype": "bfloat16", "threads": 2,
        "rounds": 5, "versions": {"liger-kernel": "0.8.5"}, "loss_difference": 1e-4, "gradient_error": 4e-3,
        "sides": {"own": side, "ours": {**side, "seconds": {"median": 2.0}}}, "ratio": 2.0,
    }  # fmt: skip
    for name, project, day in (("a", "liger", 6), ("b", "prime-rl", 7)):
        run = json.loads(result("cpu", date=f"2026-05-0{day}T00:00:00"))
        run["sections"] = {f"integration_steps.{project}": step}
        put(place, f"{name}.json", json.dumps(run))
    report.write(*place)
    text = (place[0] / "docs" / "integrations.md").read_text()
    row = "| 4.00 s | 2.00 s | 2.00 | 1024 and 1024 MiB | 1e-04, 4e-03 |"
    assert f"| `LigerFusedLinearGRPOLoss` 0.8.5 {row}" in text
    assert f"| prime-rl's `FusedOutputLinear` {row}" in text
    assert "| TRL under DeepSpeed ZeRO-2, two processes | - | - | - | - | - |" in text
    assert text.count("2 layers of Qwen2, H = 896, V = 151936, bfloat16, 8 sequences of 128 tokens, 2 threads.") == 1
    assert "abc1234, 2026-05-06 (liger)." in text
    assert "abc1234, 2026-05-07 (prime-rl)." in text


ONE, *MORE = (
    f"<!-- begin:{name} -->\n<!-- end:{name} -->\n" for name in ("summary", "training-step", "learning-sentence")
)
TWO = "".join(MORE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE.replace("<!-- end:summary -->", "") + TWO, "expected one .*end:summary.*got 1 and 0"),
        (ONE + ONE + TWO, "got 2 and 2"),
        (ONE + TWO + ONE.replace("summary", "other"), "no table is named other; there are loss, "),
    ],
    ids=["end missing", "twice", "unknown"],
)
def test_markers_must_be_right(place, text, message):
    with pytest.raises(ValueError, match=message):
        report.rewritten(text, [])


@pytest.mark.parametrize(
    ("key", "other"), [("commit", "c1"), ("dirty", True), ("threads", 1), ("native", "AVX2"), ("kind", "b")]
)
def test_a_file_has_sections_of_one_state_of_code_and_machine(key, other, monkeypatch, tmp_path):
    about = {"device": "cpu", "kind": "a", "commit": "c0", "dirty": False, "threads": 2, "native": "AMX", "load": 0.1}
    monkeypatch.setattr(results, "machine", lambda _: about)
    results.record("limit", {"cases": {}}, out=tmp_path / "a.json")
    results.record("heads", {"x": float("nan")}, out=tmp_path / "a.json")
    assert results.load(tmp_path / "a.json").sections == {"limit": {"cases": {}}, "heads": {"x": None}}
    about = about | {key: other}
    with pytest.raises(ValueError, match=f"is of {key} .*, this run of {other!r}: take a new file"):
        results.record("growth", {}, out=tmp_path / "a.json")
