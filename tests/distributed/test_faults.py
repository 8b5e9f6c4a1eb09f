"""One of two processes fails: the other one ends soon, with the reason. The table of docs/scaling.md has these cases."""

from __future__ import annotations

import re

import pytest
from distributed.faults import (
    losses,
    other_rows,
    other_start,
    run_pair,
    training,
    twice,
    under_another_error,
    without_launcher,
)
from distributed.test_training import free_port

from grpo_fused import share_failures
from grpo_fused.trainer.checkpoint import checkpoints

full = pytest.mark.full
OFFLINE = "ConnectionError: the judge is offline"
REWARD = f"RewardError: reward function 'count_ones' raised {OFFLINE}"
MEMORY = "MemoryError: no room for the activations"
KILLED = "PeerError: another process of the group ended without an error: it was killed, or has left"
SILENT = "PeerError: another process of the group did not answer in time"


def peer(reason: str) -> str:
    return f"PeerError: rank 1 of the process group failed: {reason}"


@pytest.mark.gate(keep=lambda layout, how, **_: (layout == "tokens") == (how == "leaves"))
@pytest.mark.parametrize("layout", ["vocab", "tokens"])
@pytest.mark.parametrize(
    ("how", "first", "second"),
    [("raises", peer(OFFLINE), OFFLINE), ("leaves", peer("SystemExit: 3"), "SystemExit: 3"), ("kill", KILLED, "")],
    ids=["raises", "leaves", "killed"],
)
def test_between_two_losses(how, first, second, layout, tmp_path):
    assert [outcome.said for outcome in run_pair(tmp_path, losses, layout, how)] == [first, second]


def test_an_error_that_was_handled_is_not_the_reason(tmp_path):
    assert [outcome.said for outcome in run_pair(tmp_path, twice)] == [KILLED, ""]


def test_the_process_that_has_the_store_fails(tmp_path):
    want = "PeerError: the process that holds the store of the process group has ended; its output has the reason"
    assert [outcome.said for outcome in run_pair(tmp_path, without_launcher, free_port())] == [OFFLINE, want]


def test_a_block_without_a_process_group():
    @share_failures()
    def raises():
        raise ValueError("alone")

    with pytest.raises(ValueError, match="alone"):
        raises()


@full
@pytest.mark.parametrize("layout", ["vocab", "tokens"])
def test_a_process_that_hangs_between_two_losses(layout, tmp_path):
    """Both see the timeout: the one that hangs finds the other one gone."""
    waiting, hanging = run_pair(tmp_path, losses, layout, "hangs", 3.0)
    assert waiting.said == SILENT
    assert hanging.said == KILLED
    assert waiting.seconds > 2.9


@pytest.mark.parametrize(
    ("where", "how", "first", "second", "saved"),
    [
        pytest.param("reward", "raises", peer(REWARD), REWARD, ["checkpoint-000002"], id="reward"),
        pytest.param("data", "data", peer("IndexError: there is no such row"), "IndexError: there is no such row",
                     ["checkpoint-000002"], id="data", marks=full),
        pytest.param("rollout", "raises", peer(OFFLINE), OFFLINE, [], id="rollout-fsdp2", marks=full),
        pytest.param("update", "memory", peer(MEMORY), MEMORY, [], id="update"),
        pytest.param("evaluation", "raises", peer(OFFLINE), OFFLINE, [], id="evaluation", marks=full),
        pytest.param("reward", "leaves", peer("SystemExit: 3"), "SystemExit: 3", [], id="leaves", marks=full),
        pytest.param("update", "kill", KILLED, "", [], id="killed"),
        pytest.param("reward", "kill", KILLED, "", [], id="killed-in-reward", marks=full),
        pytest.param("reward", "term", "stopped by 15 after step 3", "stopped by 15 after step 3",
                     ["checkpoint-000003"], id="sigterm"),
    ],
)  # fmt: skip
def test_in_training(where, how, first, second, saved, tmp_path):
    said = [re.sub(r" \(\S+faults.py:\d+\)$", "", outcome.said) for outcome in run_pair(tmp_path, training, where, how)]
    assert said == [first, second]
    assert [path.name for path in checkpoints(tmp_path / "run")] == saved


@full
def test_a_process_that_hangs_in_training(tmp_path):
    waiting, hanging = run_pair(tmp_path, training, "reward", "hangs", 10.0)
    assert waiting.said == SILENT
    assert hanging.said == KILLED


@pytest.mark.parametrize("what", ["weights", "reference", "disk"])
def test_processes_that_begin_in_another_way(what, tmp_path):
    want = (
        "ValueError: all processes must begin with the same weights and vocabulary, of model and reference_model; got "
        "others on the processes [1] (a random model needs the same seed on each)"
    )
    if what == "disk":
        found = [str(tmp_path / "0" / "checkpoint-000001"), "None"]
        want = f"CheckpointError: all processes must see the same newest checkpoint, on a shared disk; got {found}"
    assert [outcome.said for outcome in run_pair(tmp_path, other_start, what)] == [want, want]


def test_only_the_first_process_may_have_weights(tmp_path):
    said = "the identity of the first: True"
    assert [outcome.said for outcome in run_pair(tmp_path, other_start, "first alone")] == [said, said]


def test_a_lost_process_under_another_error(tmp_path):
    reset = "RuntimeError: the judge: Connection reset by peer"
    assert [outcome.said for outcome in run_pair(tmp_path, under_another_error)] == [peer(reset), reset]


def test_other_rows_on_one_process(tmp_path):
    want = (
        "ValueError: all processes must have the same rows for training and evaluation; "
        "got process 0: 6 and 0, process 1: 5 and 0"
    )
    assert [outcome.said for outcome in run_pair(tmp_path, other_rows, slice(5))] == [want, want]
    want = want.partition("process 0")[0] + "6 and 0 on each, with other prompts or another seed"
    assert [outcome.said for outcome in run_pair(tmp_path, other_rows, slice(None, None, -1))] == [want, want]
    reason = "ValueError: train_dataset must have at least 2 rows, as many as a step takes; got 0"
    assert [outcome.said for outcome in run_pair(tmp_path, other_rows, slice(0))] == [peer(reason), reason]
