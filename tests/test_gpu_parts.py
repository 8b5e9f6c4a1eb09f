"""The runner of `make gpu-first` and others: a step that fails, hangs or finds no time does not stop the next."""

from __future__ import annotations

import pytest

from benchmarks import gpu
from benchmarks.gpu import PARTS, Step

FINE = Step("fine", ("-c", "print('fine ran')"), 30)


def test_each_part_fits_its_limit_and_a_command() -> None:
    """A machine's commands end after ten minutes, and compiling the extension takes some of them."""
    for steps in PARTS.values():
        assert sum(step.seconds for step in steps) <= 520
    assert gpu.LIMIT <= 480


def test_steps_after_a_failure_and_a_hang_run(monkeypatch, tmp_path, capfd) -> None:
    steps = Step("bad", ("-c", "raise SystemExit(3)"), 30), Step("slow", ("-c", "import time; time.sleep(60)"), 1), FINE
    monkeypatch.setitem(PARTS, "first", steps)
    with pytest.raises(SystemExit, match="not done: bad, slow"):
        gpu.run("first", out=str(tmp_path))
    printed = capfd.readouterr().out
    assert "-- bad: failed with status 3" in printed
    assert "-- slow: stopped at its limit of 1 s" in printed
    assert "fine ran" in printed
    assert "no results" in printed


def test_a_step_does_not_start_without_time_for_it(monkeypatch, tmp_path, capfd) -> None:
    monkeypatch.setitem(PARTS, "first", (FINE,))
    with pytest.raises(SystemExit, match="not done: fine"):
        gpu.run("first", out=str(tmp_path), limit=5.0)
    assert "fine: not started, 5 s are left" in capfd.readouterr().out


def test_the_file_of_results_reaches_the_programs(tmp_path) -> None:
    step = Step("speed", ("-m", "benchmarks.sweep", "--rounds", "5"), 30, ("--small",))
    out = tmp_path / "run.json"
    assert gpu._command(step, out, False)[1:] == ["-m", "benchmarks.sweep", "--rounds", "5", "--out", str(out)]
    assert gpu._command(step, out, True)[1:] == ["tests/rehearsal.py", "benchmarks.sweep", "--small", "--out", str(out)]
    assert gpu._command(FINE, out, True) is None
    doctor = gpu._command(PARTS["first"][0], out, False)
    assert doctor is not None
    assert doctor[1:] == ["-m", "grpo_fused", "doctor"]
