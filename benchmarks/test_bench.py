"""pytest-benchmark: every provider on one small problem of this machine (the first part of `make bench`).

    python -m pytest benchmarks/test_bench.py [--benchmark-json FILE] [-k "trl and scoring"]

Forward (no gradient), forward + backward, and scoring; by dtype and by which tokens have a gradient. A result is
checked against float64 before it is timed: a wrong one of a peer is an expected failure, with its error; one of ours
fails. Rounds are not interleaved here and the problem is small, so these figures show changes of one provider; for
comparisons and ratios to the bare products use `benchmarks.cpu`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch

from benchmarks.measure import BASES, Verdict, call_of, verdicts
from benchmarks.problem import PATTERNS, Case
from benchmarks.providers import PROVIDERS
from benchmarks.timing import cache_flush
from grpo_fused.testing import Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (5, 48, 256, 32000)  # 40 % of 5 sequences are 2; some 0.1 s a call on two cores
ROUNDS = 5


class Prepared(NamedTuple):
    """A problem, and what is said of each provider's results."""

    case: Case
    problem: Problem
    verdict: Verdict


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=PATTERNS)
def prepared(request, dtype) -> Prepared:
    case = Case(*SHAPE, dtype, request.param)
    problem = case.problem(DEVICE)
    return Prepared(case, problem, cache(verdicts(problem)))


@pytest.mark.parametrize("what", BASES)
@pytest.mark.parametrize("name", PROVIDERS)
def test_speed(benchmark, prepared, name, what):
    provider = PROVIDERS[name]
    if (reason := provider.unavailable(DEVICE)) is not None:
        pytest.skip(reason)
    if prepared.case.pattern not in provider.patterns:
        pytest.skip("the same as others here")
    if what == "scoring" and provider.logps is None:
        pytest.skip("it returns no log-probs")
    if what == "forward" and provider.always_gradients:
        pytest.skip("it computes the gradients in its forward")
    verdict = prepared.verdict(provider)
    if (reason := verdict.get("not_timed")) is not None:
        if provider.ours:
            pytest.fail(reason)
        pytest.xfail(f"not timed: {reason}")
    call, flush = call_of(provider, what, prepared.problem), cache_flush(DEVICE)

    def finished() -> None:
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def clean() -> None:
        if flush is not None:
            flush()
            torch.cuda.synchronize()

    benchmark.extra_info.update(verdict["errors"] | prepared.case.describe())
    benchmark.pedantic(finished, setup=clean, rounds=ROUNDS, warmup_rounds=1)
