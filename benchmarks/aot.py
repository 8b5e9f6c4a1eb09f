"""Every shipped kernel, compiled ahead of time for every architecture, without a GPU.

    python -m benchmarks.aot            # the tables: Triton's row kernels and head kernel, the CUDA C++ row kernels
    python -m benchmarks.aot cuda       # one of them: rows, head, candidates or cuda
    python -m benchmarks.aot --json F   # the same as JSON

Registers and stack come from ptxas (`cuobjdump`) or the AMD assembler, shared memory from Triton; a stack above 0 is a
spill. The predicted rate of the head kernel on an H200 comes from the model in `benchmarks.cost`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import aot_candidates, aot_head, aot_rows

TABLES = {
    "rows": aot_rows.table,
    "head": aot_head.table,
    "candidates": aot_candidates.table,
    "cuda": aot_rows.cuda_table,
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; default all")
    parser.add_argument("--json", type=Path, help="also write the evidence to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - TABLES.keys():
        parser.error(f"tables must be of {', '.join(TABLES)}; got {', '.join(sorted(unknown))}")
    evidence: dict[str, Any] = {}
    for name in arguments.tables or TABLES:
        if name == "cuda" and (reason := aot_rows.missing_tools()) is not None:
            print(f"CUDA row kernels: {reason}")
        else:
            evidence[name] = TABLES[name]()
    if arguments.json:
        arguments.json.write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    main()
