"""The cost model's communication equals that of real process groups; the example runs under torchrun."""

from __future__ import annotations

import re

import pytest
import torch
from distributed.jobs import token_loss, vocab_loss
from helpers import make_case, make_config
from processes import torchrun

from benchmarks.scaling import Layout, Machine, communication, step


@pytest.mark.full
def test_vocabulary_ranks(workers):
    case = make_case(1, B=4).to(torch.float32)
    for got in workers.run(vocab_loss, 2, case, make_config("dapo", beta=0.1), "chunked", [15, 14], {}):
        scored, worked = int(case.completion_mask.sum()), int(got["gradient_tokens"])
        want = communication(scored, worked, 12, Layout(vocab=2, tokens=1))
        assert got["numbers"]["statistics"] == want.statistics
        assert got["numbers"]["hidden gradient"] == want.hidden_gradient
        assert want.objective == 0


def test_token_ranks(workers):
    case = make_case(2, B=6)
    case.completion_mask[:] = True
    parts = [slice(0, 3), slice(3, 6)]
    for got in workers.run(token_loss, 2, case, make_config("dapo", beta=0.1), "chunked", parts, "rows", {}):
        assert got["numbers"]["objective"] == communication(21, 21, 12, Layout(vocab=1, tokens=2)).objective


def test_model_scales_with_the_layout():
    """Twice the ranks halve the products; within a node, slices cost links and save the weight's gradient."""
    machine = Machine()
    one, two = (step(2**20, 4096, 151936, Layout(1, n), machine) for n in (64, 128))
    assert one.products == pytest.approx(2 * two.products)
    whole, sliced = step(2**20, 4096, 151936, Layout(1, 64), machine), step(2**20, 4096, 151936, Layout(8, 8), machine)
    assert sliced.token_links < whole.token_links
    assert sliced.vocab_links > whole.vocab_links == 0
    assert sliced.weight_gb == pytest.approx(whole.weight_gb / 8)


@pytest.mark.full
def test_example_under_torchrun():
    done = torchrun("-m", "examples.vocab_parallel", "--small", timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    # lines of the ranks may be mixed
    errors = re.findall(r"relative errors dH ([0-9.e+-]+), dW ([0-9.e+-]+);", done.stdout)
    assert len(errors) == 2
    assert all(float(error) < 1e-2 for pair in errors for error in pair)
