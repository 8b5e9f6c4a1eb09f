"""Two processes that share a run: the same losses and weights as one process on the same global batch."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from distributed import faults
from processes import torchrun
from trainer import runs

from grpo_fused.trainer.checkpoint import checkpoints

TOLERANCE = 1e-5
"""Absolute, on weights of size 0.2 after four optimizer steps at 1e-2: gradients are summed in another order, and Adam
divides them by their own size."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run(folder: Path, processes: int, kind: str, loss_type: str) -> Any:
    folder.mkdir()
    if processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
        runs.shared(str(folder), kind, loss_type)
    else:
        assert [each.said for each in faults.run_pair(folder, faults.shared, kind, loss_type)] == ["done", "done"]
    return outcome(folder, processes)


def launch(*arguments: str) -> Any:
    """A program of `trainer.runs`, under torchrun: `accelerate launch --cpu` always starts one process."""
    return torchrun("-m", "trainer.runs", *arguments, timeout=180, ACCELERATE_USE_CPU="true")


def outcome(folder: Path, processes: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and metrics of `runs.shared` with this number of processes."""
    states = [json.loads(path.read_text()) for path in (folder / "run").glob("checkpoint-*/state.json")]
    assert {state["processes"] for state in states} == {processes}
    return torch.load(folder / "weights.pt", weights_only=True), json.loads((folder / "history.json").read_text())


@pytest.mark.parametrize(
    ("kind", "loss_type"),
    [
        pytest.param("plain", "grpo", id="ddp-grpo", marks=pytest.mark.full),
        pytest.param("fsdp", "dapo", id="fsdp2-dapo"),
        pytest.param("plain", "dapo", id="ddp-dapo", marks=pytest.mark.full),
        pytest.param("lora", "bnpo", id="ddp-lora-bnpo", marks=pytest.mark.full),
        pytest.param("fsdp", "centered", id="fsdp2-objective", marks=pytest.mark.full),
        pytest.param("plain", "centered", id="ddp-objective", marks=pytest.mark.full),
    ],
)
def test_two_processes_equal_one(tmp_path: Path, kind: str, loss_type: str) -> None:
    one_kind = "plain" if kind == "fsdp" else kind
    weights, history = run(tmp_path / "one", 1, one_kind, loss_type)
    other_weights, other_history = run(tmp_path / "two", 2, kind, loss_type)
    assert weights.keys() == other_weights.keys()
    moved = 0.0
    for name, value in weights.items():
        torch.testing.assert_close(
            other_weights[name], value, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
        moved = max(moved, float(value.abs().max()))
    assert moved > 0.1
    for row, other in zip(history, other_history, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


def test_processes_sample_in_step(tmp_path: Path) -> None:
    """FSDP gathers weights in each pass, so one that only some processes make would hang."""
    said = [each.said for each in faults.run_pair(tmp_path, faults.sampling_in_step)]
    assert said == ["4 passes", "4 passes"]


@pytest.mark.full
def test_a_failure_on_one_process_loses_no_training(tmp_path: Path) -> None:
    """The other one does not wait for it, and both save the training so far."""
    done = launch("fails_on_one", str(tmp_path), "raises")
    assert done.returncode != 0
    reason = "RewardError: reward function 'count_ones' raised ConnectionError: the judge is offline"
    assert f"PeerError: rank 1 of the process group failed: {reason}" in done.stderr
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000002"]


@pytest.mark.full
def test_a_kill_of_one_process_ends_both(tmp_path: Path) -> None:
    done = launch("fails_on_one", str(tmp_path), "killed")
    assert done.returncode != 0
    assert "PeerError: another process of the group ended without an error" in done.stderr


@pytest.mark.full
def test_a_policy_that_diverges_on_one_process_is_not_saved(tmp_path: Path) -> None:
    """The others must not wait for it in a collective of the save."""
    done = launch("fails_on_one", str(tmp_path), "diverged")
    assert done.returncode != 0
    assert "DivergedError: diverged at step 3: NaN; there is no checkpoint" in done.stderr
    assert "PeerError: rank 1 of the process group failed: DivergedError: NaN" in done.stderr
    assert not checkpoints(tmp_path)
