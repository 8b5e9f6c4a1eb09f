"""Ahead-of-time evidence: every shipped Triton configuration compiled for every architecture, without a GPU.

    python -m benchmarks.aot            # the tables
    python -m benchmarks.aot --json F   # the same as JSON

Registers and stack come from ptxas (`cuobjdump`) or the AMD assembler, shared memory from Triton; a stack above 0 is a
spill. What the head kernel is expected to reach on an H200 comes from the model in `benchmarks.cost`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import aot_cuda, aot_head, aot_rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the evidence to this file")
    arguments = parser.parse_args()
    evidence: dict[str, Any] = {"rows": aot_rows.table(), "head": aot_head.table()}
    reason = aot_cuda.missing_tools()
    if reason is None:
        evidence["cuda"] = aot_cuda.table()
    else:
        print(f"CUDA row kernels: {reason}")
    if arguments.json:
        arguments.json.write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    main()
