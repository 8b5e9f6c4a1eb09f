"""The GPU engines, the bare products and the peers: error, time and memory, into the file of a run.

    python -m benchmarks.sweep                        # N = 8192, V = 151936, three widths and three patterns
    python -m benchmarks.sweep --seconds 450          # starts nothing new after this
    python -m benchmarks.sweep --small --out r.json   # the same program on a small problem, on a CPU as well

Liger's fast head, Apple's CCE, QuACK and verl are included if they are installed (docs/benchmarks.md).
The same measurement as `benchmarks.cpu`. Times come first, then peak memory of the dense cases, each in a fresh
process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.measure import Cases, Memory, Peers, Plan, Seconds, Small, chosen, sections
from benchmarks.problem import PATTERNS, Case
from benchmarks.results import Device
from benchmarks.study import Section, main

PLANS = [
    Plan(Case(16, 512, H, 151936, "bf16", pattern), memory=pattern == "dense")
    for pattern in PATTERNS
    for H in (4096, 2048, 896)
]
SMALL = [Plan(Case(5, 16, 64, 2048, "bf16", pattern)) for pattern in PATTERNS]
DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    cases: Cases = ("",), rounds: int = 7, small: Small = False, peers: Peers = True, memory: Memory = True,
    seconds: Seconds = None, device: Device = DEVICE,
) -> Iterator[Section]:  # fmt: skip
    """The section `loss`, after each case."""
    if device == "cpu" and not small:
        sys.exit("there is no GPU here: python -m benchmarks.cpu has the shapes of a CPU")
    plans = chosen(SMALL if small else PLANS, cases, peers=peers, memory=memory)
    return sections(plans, device, rounds=rounds, seconds=seconds)


if __name__ == "__main__":
    main("sweep")
