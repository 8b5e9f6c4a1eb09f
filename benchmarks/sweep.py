"""The GPU engines, the bare products and the peers: error, time and memory, into the file of a run.

    python -m benchmarks.sweep                        # N = 8192: six dense heads, and two patterns more for three
    python -m benchmarks.sweep --seconds 450          # starts nothing new after this
    python -m benchmarks.sweep --small --out r.json   # the same program on a small problem, on a CPU as well

Liger's fast head, Apple's CCE, QuACK and verl are included if they are installed (docs/benchmarks.md).
The same measurement as `benchmarks.cpu`; peak memory is the allocator's, of the dense cases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.measure import Cases, Memory, Patterns, Peers, Plan, Seconds, Small, chosen, sections
from benchmarks.problem import PATTERNS, Case
from benchmarks.providers import PEERS
from benchmarks.results import Device
from benchmarks.study import Section, main

HEADS = [(4096, 151936), (896, 151936), (4096, 131072), (2048, 151936), (768, 50257), (8192, 152064)]
"""H and V: Qwen's heads, the one that Liger publishes times of, and a V that is no multiple of 8; the most important
first, since time may run out."""
PLANS = [Plan(Case(16, 512, H, V)) for H, V in HEADS] + [
    Plan(Case(16, 512, H, V, pattern=pattern), memory=False)
    for pattern in PATTERNS
    for H, V in HEADS
    if pattern != "dense" and V == 151936
]
SMALL = [Plan(Case(5, 16, 64, 2048, "bf16", pattern)) for pattern in PATTERNS]
DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    cases: Cases = ("",), patterns: Patterns = tuple(PATTERNS), rounds: int = 7, small: Small = False,
    peers: Peers = PEERS, memory: Memory = True, seconds: Seconds = None, device: Device = DEVICE,
) -> Iterator[Section]:  # fmt: skip
    """The section `loss`, after each case."""
    if device == "cpu" and not small:
        sys.exit("there is no GPU here: python -m benchmarks.cpu has the shapes of a CPU")
    plans = chosen(SMALL if small else PLANS, cases, patterns, peers=peers, memory=memory)
    return sections(plans, device, rounds=rounds, seconds=seconds)


if __name__ == "__main__":
    main("sweep")
