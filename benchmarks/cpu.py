"""The CPU engines, the bare products and the peers: error, time and memory, into the file of a run.

    python -m benchmarks.cpu                      # all cases (about an hour on two idle cores)
    python -m benchmarks.cpu --quick              # what `make bench` runs (about 10 minutes)
    python -m benchmarks.cpu --cases bf16-1024    # some of them, by the beginning of their names
    python -m benchmarks.cpu --small --out r.json # the same program on a small problem

Ratios are medians over rounds of (time of a provider / time of the bare products in the same round). A provider whose
result is wrong is reported with its error and not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from benchmarks.measure import Cases, Memory, Peers, Plan, Seconds, Small, chosen, sections
from benchmarks.problem import PATTERNS, Case
from benchmarks.providers import PEERS
from benchmarks.study import Section, main

PLANS = [
    plan
    for dtype in ("bf16", "fp32")
    for plan in (
        Plan(Case(4, 256, 896, 151936, dtype)),
        Plan(Case(4, 256, 896, 151936, dtype, "half-inactive"), peers=()),
        Plan(Case(10, 102, 896, 151936, dtype, "zero-advantage-40"), peers=()),
        Plan(Case(8, 256, 2048, 32000, dtype)),
        Plan(Case(1, 128, 896, 151936, dtype), peers=()),
        Plan(Case(16, 256, 896, 151936, dtype), peers=()),
    )
]
QUICK = [
    Plan(
        Case(4, 256, 896, 151936, "bf16"),
        peers=("eager", "torch.compile", "torch-lce", "trl", "liger", "torchtitan", "unsloth"),
    ),
    Plan(Case(4, 256, 896, 151936, "bf16", "half-inactive"), peers=(), memory=False),
    Plan(Case(10, 102, 896, 151936, "bf16", "zero-advantage-40"), peers=(), memory=False),
    Plan(Case(1, 256, 896, 151936, "fp32"), peers=("eager", "trl", "liger"), memory=False),
]
"""One form of each peer: `make bench` must end within half an hour."""
SMALL = [Plan(Case(2, 40, 64, 2000, "bf16"))]


def run(
    cases: Cases = ("",), rounds: int = 5, small: Small = False, peers: Peers = PEERS, memory: Memory = True,
    seconds: Seconds = None, quick: Annotated[bool, "fewer cases and at most 3 rounds"] = False,
) -> Iterator[Section]:  # fmt: skip
    """The section `loss`, after each case."""
    plans = chosen(SMALL if small else QUICK if quick else PLANS, cases, PATTERNS, peers=peers, memory=memory)
    return sections(plans, "cpu", rounds=min(rounds, 3) if quick else rounds, seconds=seconds)


if __name__ == "__main__":
    main("cpu")
