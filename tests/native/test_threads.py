"""The threads of the CPU library: several callers, processes that fork, and numbers of threads that change."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from grpo_fused import fused_linear_logprobs
from grpo_fused.engines import cpu_library

pytestmark = pytest.mark.usefixtures("cpu_extension")


@pytest.fixture
def score():
    """Log-probs by native, on 3 threads; and the number of threads restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    hidden, weight, ids = torch.randn(70, 40), torch.randn(9000, 40), torch.randint(0, 9000, (70,))
    yield lambda: fused_linear_logprobs(hidden, weight, ids, impl="native").logps
    torch.set_num_threads(before)


def test_callers_on_several_threads(score):
    """Each gets the same bits, whether it has the pool or works alone."""
    want = score()

    def caller(_):
        torch.set_num_threads(3)
        return [score() for _ in range(20)]

    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(caller, range(4)):
            assert all(torch.equal(x, want) for x in found)


def test_a_call_waits_for_its_helpers(score):
    """Many short calls: a helper that is late must not write into the next one's memory."""
    rows, targets = torch.randn(12, 3000), torch.zeros(12, dtype=torch.int64)
    want, found = torch.empty(4, 12), torch.empty(4, 12)
    cpu_library.call("logit_statistics", rows, targets, True, want)
    for _ in range(2000):
        cpu_library.call("logit_statistics", rows, targets, True, found.fill_(torch.nan))
        assert torch.equal(found, want)


def test_helpers_do_a_part_of_the_work(score):
    """Calls of some 50 ms, until they have worked for 20; those that only wake up would need hundreds of calls."""
    rows, weight, out = torch.randn(256, 256), torch.randn(20000, 256), torch.empty(256, 20000)
    for _ in range(2):  # a job finds its helpers new, and asleep
        before, calls = _helpers_ticks(), 0
        while _helpers_ticks() < before + 2:
            cpu_library.head_products(cpu_library.HeadProducts(rows, weight), out)
            calls += 1
            assert calls < 40


def test_helpers_compute_as_their_caller_does(score):
    """Products of numbers near 1e-20 are 0 for both if denormal numbers are, though helpers began before."""
    rows, weight, out = torch.full((512, 8), 1e-20), torch.full((20000, 8), 1e-20), torch.empty(512, 20000)

    def bits():
        cpu_library.head_products(cpu_library.HeadProducts(rows, weight), out)
        return out.view(torch.int32).clone()

    want = bits()
    assert torch.set_flush_denormal(True)
    try:
        assert not any(bits().any() for _ in range(20))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(), want)  # 8e-40; tiles of AMX always give 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_forks(score):
    """A child has none of its parent's threads; it makes its own, as many as torch has."""
    want = score()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a call that waits for a thread that is not there
        right, counts = torch.equal(score(), want), [_helpers()]
        for number in (6, 2):
            torch.set_num_threads(number)
            right &= torch.equal(score(), want)
            counts.append(_helpers())
        os._exit(0 if right and counts == [2, 5, 5] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(score(), want)


def _helpers() -> int:
    return len(_stats())


def _helpers_ticks() -> int:
    """Processor time of all helpers, in hundredths of a second."""
    return sum(int(field) for stat in _stats() for field in stat.rpartition(")")[2].split()[11:13])


def _stats() -> list[str]:
    stats = (path.read_text() for path in Path("/proc/self/task").glob("*/stat"))
    return [stat for stat in stats if "(grpo_fused)" in stat]
