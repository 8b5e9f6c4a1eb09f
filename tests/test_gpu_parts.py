"""The runner of `make gpu-first` and others: a step that fails, hangs or finds no time does not stop the next."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu, graphs, measure, sweep
from benchmarks.command import parser_of
from benchmarks.gpu import PARTS, Step
from benchmarks.studies import STUDIES
from benchmarks.study import Study

ROOT = Path(__file__).parents[1]
FINE = Step("fine", ("-c", "print('fine ran')"), 30)
PROGRAMS = [(part, step) for part, steps in PARTS.items() for step in steps if step.arguments[0] == "-m"]


def test_each_part_fits_its_limit():
    """A machine's commands end after ten minutes, and it takes some of them to start."""
    assert gpu.LIMIT <= 480
    for part, steps in PARTS.items():
        assert sum(step.seconds for step in steps) <= gpu.LIMIT, part


@pytest.mark.parametrize(("part", "step"), PROGRAMS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_each_program_understands_its_options(part, step):
    """In a rehearsal, too: it has a smaller form of each."""
    assert step.rehearsed is not None
    for module, *options in (step.arguments[1:], step.rehearsed):
        if module.startswith("benchmarks."):
            parser = parser_of(STUDIES[module.removeprefix("benchmarks.")].run)
            parser.parse_args(options)
    assert step.rehearsed[0] == step.arguments[1]


def options_of(part, name):
    step = next(step for step in PARTS[part] if step.name == name)
    return vars(parser_of(sweep.run).parse_args(step.arguments[2:]))


def test_the_first_part_compares_all_shapes():
    given = options_of("first", "speed")
    plans = measure.chosen(sweep.PLANS, given["cases"], given["patterns"], peers=given["peers"], memory=given["memory"])
    assert [(p.case.N, p.case.H, p.case.V) for p in plans] == [
        (8192, 4096, 151936), (8192, 896, 151936), (8192, 4096, 131072), (8192, 2048, 151936), (8192, 768, 50257),
        (8192, 8192, 152064),
    ]  # fmt: skip
    for plan in plans:
        assert plan.case.pattern == "dense"
        assert set(plan.peers) == {"liger-scaled", "torch.compile"}
        assert not plan.memory
    assert given["seconds"] < 170


def test_the_third_part_is_the_whole_sweep():
    given = options_of("third", "speed")
    plans = measure.chosen(sweep.PLANS, given["cases"], given["patterns"], peers=given["peers"], memory=given["memory"])
    assert plans == sweep.PLANS
    assert len(plans) == 6 + 2 * 3
    assert all(plan.memory == (plan.case.pattern == "dense") for plan in plans)
    assert {plan.case.pattern for plan in plans} == {"dense", "half-inactive", "zero-advantage-40"}


def test_the_second_part_has_small_batches():
    assert [(case.N, case.H, case.V) for case in graphs.CASES] == [(256, 896, 151936), (1024, 896, 151936)]
    assert {step.name for step in PARTS["second"]} == {"extension", "graphs", "tests", "training"}


def test_steps_after_a_failure_and_a_hang_run(monkeypatch, tmp_path, capfd):
    steps = Step("bad", ("-c", "raise SystemExit(3)"), 30), Step("slow", ("-c", "import time; time.sleep(60)"), 1), FINE
    monkeypatch.setitem(PARTS, "first", steps)
    start = time.monotonic()
    with pytest.raises(SystemExit, match="not done: bad, slow"):
        gpu.run("first", out=str(tmp_path))
    assert time.monotonic() - start < 30
    printed = capfd.readouterr().out
    assert "-- bad: failed with status 3" in printed
    assert "-- slow: stopped at its limit of 1 s" in printed
    assert "fine ran" in printed
    assert "no results; first took " in printed


def test_an_interrupt_ends_the_step(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            started.append(self)
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu._outcome([sys.executable, "-c", "import time; time.sleep(60)"], 30, rehearse=True)
    assert started[0].returncode == -signal.SIGKILL


def test_a_step_does_not_start_without_time_for_it(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(PARTS, "first", (FINE,))
    with pytest.raises(SystemExit, match="not done: fine"):
        gpu.run("first", out=str(tmp_path), limit=5.0)
    assert "fine: not started, 5 s are left" in capfd.readouterr().out


def test_a_rehearsal_has_the_time_of_the_part(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(PARTS, "first", (Step("slow", ("-c", "import time; time.sleep(2)"), 1),))
    gpu.run("first", out=str(tmp_path), rehearse=True)
    assert "-- slow: done after 2 s" in capfd.readouterr().out


def test_the_file_of_results_reaches_the_programs(tmp_path):
    step = Step("speed", ("-m", "benchmarks.sweep", "--rounds", "5"), 30, ("benchmarks.sweep", "--small"))
    out = tmp_path / "run.json"
    assert gpu._command(step, out, False)[1:] == ["-m", "benchmarks.sweep", "--rounds", "5", "--out", str(out)]
    assert gpu._command(step, out, True)[1:] == ["tests/rehearsal.py", "benchmarks.sweep", "--small", "--out", str(out)]
    assert gpu._command(FINE, out, True)[1:] == list(FINE.arguments)
    doctor = PARTS["first"][1]
    assert gpu._command(doctor, out, False)[1:] == ["-m", "grpo_fused", "doctor"]
    assert gpu._command(doctor, out, True)[1:] == ["tests/rehearsal.py", "grpo_fused", "doctor", "--no-measure"]


@pytest.mark.parametrize(("out", "file"), [("new/folder", "new/folder/first.json"), ("a.json", "a.json")])
def test_where_results_go(out, file, monkeypatch, tmp_path):
    """A path of the caller's folder, though the programs run in the checkout."""
    seen = []
    monkeypatch.setitem(PARTS, "first", (FINE,))
    monkeypatch.setattr(gpu, "_command", lambda step, path, _: seen.append(path) or [sys.executable, "-c", ""])
    monkeypatch.chdir(tmp_path)
    gpu.run("first", out=out)
    assert seen == [tmp_path / file]


@pytest.mark.parametrize(
    ("tool", "rehearse", "wanted"), [("/bin/nvcc", False, "cuda"), ("/bin/nvcc", True, "None"), (None, False, "None")]
)
def test_with_nvcc_a_cuda_extension_must_compile(tool, rehearse, wanted, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(shutil, "which", lambda name: tool)
    monkeypatch.delenv("GRPO_FUSED_BUILD", raising=False)
    step = Step("build", ("-c", "import os; print('build:', os.environ.get('GRPO_FUSED_BUILD'))"), 30)
    monkeypatch.setitem(PARTS, "first", (step,))
    gpu.run("first", out=str(tmp_path), rehearse=rehearse)
    assert f"build: {wanted}" in capfd.readouterr().out
    assert all(steps[0] == gpu.EXTENSION for part, steps in PARTS.items() if part != "first")  # the real ones


def test_wheels_of_a_folder_are_installed_first(monkeypatch, tmp_path, capfd):
    with pytest.raises(SystemExit, match="--wheels must be a folder with wheels; got"):
        gpu.run("first", out=str(tmp_path), wheels=str(tmp_path))
    for name in ("b-1-py3-none-any.whl", "a-1-py3-none-any.whl", "c.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    (step,) = gpu._installation(".")
    found = [str(tmp_path / f"{name}-1-py3-none-any.whl") for name in "ab"]
    assert step.arguments == ("-m", "pip", "install", "-q", "--no-index", "--no-deps", *found)
    assert gpu._installation(None) == []
    monkeypatch.setitem(PARTS, "first", (FINE,))
    monkeypatch.setattr(gpu, "_installation", lambda folder: [Step("wheels", ("-c", "print('installed')"), 30)])
    gpu.run("first", out=str(tmp_path), wheels=".")
    printed = capfd.readouterr().out
    assert printed.index("installed") < printed.index("fine ran")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("part", PARTS)
def test_make_passes_its_variables(part):
    """From the environment as from the command line."""
    given = {"OUT": "results", "WHEELS": "wheels", "REHEARSE": "1", "GPU_PYTHON": "python"}
    command = f"python -m benchmarks.gpu {part}"

    def printed(*words, **environment):
        done = subprocess.run(
            ["make", "-n", f"gpu-{part}", *words], cwd=ROOT, check=True, capture_output=True, text=True,
            env={"PATH": os.environ["PATH"], **environment},
        )  # fmt: skip
        return done.stdout.split()

    words = [*command.split(), "--out", "results", "--wheels", "wheels", "--rehearse"]
    assert printed(**given) == words
    assert printed(*(f"{name}={value}" for name, value in given.items())) == words
    assert printed(GPU_PYTHON="python") == command.split()


def test_every_program_is_a_study():
    assert all(
        isinstance(STUDIES[step.arguments[1].removeprefix("benchmarks.")], Study)
        for _, step in PROGRAMS
        if step.arguments[1].startswith("benchmarks.")
    )
