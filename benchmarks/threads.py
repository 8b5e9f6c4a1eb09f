"""Time of the CPU engines and of the bare products by the number of threads, up to twice the number of cores.

    python -m benchmarks.threads --out results.json    # about four minutes on two cores

A result must not change with the number of threads (`native`); the tests check that, this measures time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.problem import DTYPES, Case, train
from benchmarks.providers import PROVIDERS
from benchmarks.study import Section, main
from benchmarks.timing import bare_gemms, times_by_round, with_ratios

ENGINES = ("native", "chunked")
CASES = (Case(4, 256, 896, 151936, "bf16"), Case(1, 256, 896, 151936, "fp32"))


def study(case: Case, counts: list[int], rounds: int) -> dict[str, Any]:
    """A problem's times by thread count, and their ratios to the bare products with as many threads."""
    problem = case.problem("cpu")

    calls = {"bare": bare_gemms(case.N, case.H, case.V, DTYPES[case.dtype], "cpu")["bare-3"]}
    calls |= {engine: partial(train, problem, PROVIDERS[engine].loss) for engine in ENGINES}
    by_count = {}
    for count in counts:
        torch.set_num_threads(count)
        by_count[count] = with_ratios(times_by_round(calls, "cpu", rounds=rounds), "bare")
    return {"shape": case.describe(), "threads": by_count}


def run(rounds: int = 5) -> Iterator[Section]:
    """The section `threads`."""
    cores = torch.get_num_threads()
    counts = [*(2**k for k in range(cores.bit_length()) if 2**k < cores), cores, 2 * cores]
    yield {"cores": cores, "cases": [study(case, counts, rounds) for case in CASES]}


if __name__ == "__main__":
    main("threads")
