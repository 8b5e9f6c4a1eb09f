"""The order of the gradient's tasks, and what each waits for: csrc/cpu/rounds.h, whose threads are not run here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from native.building import shared_library


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """(number of tasks, superblock, block or -1, tile or -1, waits that are not met without `left_out`) of a task."""
    source = Path(__file__).parent / "rounds_harness.cpp"
    library = ctypes.CDLL(str(shared_library(tmp_path_factory.mktemp("rounds") / "rounds.so", source)))

    def call(*arguments, left_out=-1):
        out = (ctypes.c_int64 * 4)()
        count = library.rounds_of(*map(ctypes.c_int64, (*arguments, left_out)), out)
        return count, *out

    return call


@pytest.mark.parametrize("tiles", [0, 1, 3])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(("blocks", "superblock"), [(1, 1), (1, 3), (5, 1), (7, 3), (6, 2), (3, 3)])
def test_each_task_waits_for_what_it_needs(task, blocks, superblock, slots, tiles):
    """That is before it in the queue, so that one thread never waits; two superblocks are worked on at a time."""
    shape, superblocks = (blocks, superblock, slots, tiles), -(-blocks // superblock)
    count = task(*shape, 0)[0]
    tasks = [task(*shape, i)[1:] for i in range(count)]
    assert {(at, block) for at, block, tile, _ in tasks if tile < 0} == {(b // superblock, b) for b in range(blocks)}
    assert {(at, tile) for at, _, tile, _ in tasks if tile >= 0} == {
        (s, t) for s in range(superblocks) for t in range(tiles)
    }
    assert count == blocks + superblocks * tiles == len(set(tasks))
    assert not any(unmet for *_, unmet in tasks)
    for i, (at, _, tile, _) in enumerate(tasks):
        for j, (other, _, other_tile, _) in enumerate(tasks[:i]):
            if tile < 0:
                needs = other_tile >= 0 and other == at - slots
            else:
                needs = (other_tile < 0 and other == at) or (other_tile == tile and other < at)
            assert (task(*shape, i, left_out=j)[4] > 0) == needs, (i, j)
    first_tile = next((i for i, (_, _, tile, _) in enumerate(tasks) if tile >= 0), count)
    assert first_tile == min(blocks, superblock * min(slots, 2)) or tiles == 0
