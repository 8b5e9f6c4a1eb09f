"""The GPU engines, the bare products and the peers: error, time and memory, into the file of a run.

    python -m benchmarks.sweep                        # N = 8192, V = 151936, three widths and three patterns
    python -m benchmarks.sweep --seconds 450          # starts nothing new after this
    python -m benchmarks.sweep --small --out r.json   # the same program on a small problem, on a CPU as well

Apple's CCE, QuACK and verl are included if they are installed (`pip install cut-cross-entropy quack-kernels verl`).
The same measurement as `benchmarks.cpu`. Times come first, then peak memory of the dense cases, each in a fresh
process.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.measure import Plan, add_options, chosen, command, run
from benchmarks.problem import PATTERNS, Case

PLANS = [
    Plan(Case(16, 512, H, 151936, "bf16", pattern), memory=pattern == "dense")
    for pattern in PATTERNS
    for H in (4096, 2048, 896)
]
SMALL = [Plan(Case(5, 16, 64, 2048, "bf16", pattern)) for pattern in PATTERNS]


def main(argv: list[str] | None = None) -> None:
    """Run the sweep and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.small:
        sys.exit("there is no GPU here: python -m benchmarks.cpu has the shapes of a CPU")
    again = command("benchmarks.sweep", sys.argv[1:] if argv is None else argv)
    run(again, chosen(SMALL if given.small else PLANS, given), device, given)


if __name__ == "__main__":
    main()
