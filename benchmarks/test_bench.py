"""pytest-benchmark: the loss and its peers on one problem of this machine (make bench).

Sizes are for a CPU and a minute or two; `python -m benchmarks.sweep` has the shapes of a GPU and interleaves providers.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.providers import PROVIDERS, SCORERS, installed, make_problem
from benchmarks.sweep import LOSS_TOLERANCE, exact_gradient, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"B4-T64-H256-V32000": (4, 64, 256, 32000)}


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def problem(request, shape):
    return make_problem(*shape, getattr(torch, request.param), DEVICE)


@pytest.mark.parametrize("name", PROVIDERS)
def test_forward_backward(benchmark, problem, name):
    provider, package = PROVIDERS[name]
    if not installed(package):
        pytest.skip(f"{package} is not installed")

    def call():
        problem.clear()
        provider(problem).backward()

    call()
    error = relative_error(problem.hidden.grad, exact_gradient(problem), problem.mask)
    assert error <= LOSS_TOLERANCE, f"{name} is wrong by {error:.2g}: its speed means nothing"
    benchmark.extra_info["gradient_error"] = error
    benchmark.pedantic(call, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("name", SCORERS)
def test_scoring(benchmark, problem, name):
    scorer, package = SCORERS[name]
    if not installed(package):
        pytest.skip(f"{package} is not installed")
    benchmark.pedantic(lambda: scorer(problem), rounds=5, warmup_rounds=1)
