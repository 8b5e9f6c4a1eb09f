"""Every shipped kernel, compiled ahead of time for every architecture, without a GPU.

    python -m benchmarks.aot              # a line for each kernel: of Triton, and the CUDA C++ row kernels
    python -m benchmarks.aot cuda         # a part: rows, head, candidates or cuda
    python -m benchmarks.aot --record F   # Triton's, one architecture of each kind, into the file of a run

Registers and stack come from ptxas (`cuobjdump`) or the AMD assembler, shared memory from Triton; a stack above 0 is a
spill. Instructions of a logit are counted in the machine code of sm_90 (`benchmarks.sass`). A file of a run takes one
record of each version of triton: `PYTHONPATH=FOLDER python -m benchmarks.aot --record F` takes the
triton in FOLDER.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated, Any

from benchmarks import aot_candidates, aot_head, aot_rows, results
from benchmarks.command import call
from benchmarks.compiled import SHARED_LIMIT

TABLES = {
    "rows": aot_rows.table,
    "head": aot_head.table,
    "candidates": aot_candidates.table,
    "cuda": aot_rows.cuda_table,
}
KINDS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Architectures that differ in kind; the others take the configurations of one of these."""


def record_all(out: Path) -> None:
    """Compile what ships with the triton that is installed, and put it into the file of a run."""
    import triton

    # of each configuration the variant that takes more registers: odd widths for pointers, all options of row kernels
    chosen = [("head", v) for v in aot_head.variants() if v.arch in KINDS and v.ships and v.hardest]
    chosen += [("rows", v) for v in aot_rows.variants() if v.arch in KINDS and v.options == "full"]
    before = results.opened(out).sections.get("compiled", {})  # and the commit that is compiled
    with Pool(os.cpu_count()) as pool:
        found = dict(pool.imap(_inspect, chosen))
    for row in aot_candidates.table():
        found[f"{row['kernel']}-{row['arch']}-{row['dtype']}"] = _kept(row["arch"], row)
    results.record("compiled", before | {triton.__version__: found}, out=out)


def _inspect(chosen: tuple[str, Any]) -> tuple[str, dict[str, Any]]:
    module, variant = aot_head if chosen[0] == "head" else aot_rows, chosen[1]
    return str(variant), _kept(variant.arch, module.inspect(variant))


def _kept(arch: str, found: dict[str, Any]) -> dict[str, Any]:
    names = ("registers", "stack", "shared_kib", "serialized", "instructions")
    kept = {name: found[name] for name in names if found.get(name) is not None}
    return {"arch": arch, **kept, "fits": found["shared_kib"] <= SHARED_LIMIT[arch]}


def main(
    tables: Annotated[tuple[str, ...], f"of {', '.join(TABLES)}; default all"],
    record: Annotated[Path | None, "compile what ships into the file of a run, and print nothing"] = None,
) -> None:
    """Print the lines."""
    if unknown := set(tables) - TABLES.keys():
        sys.exit(f"tables must be of {', '.join(TABLES)}; got {', '.join(sorted(unknown))}")
    if tables and record is not None:
        sys.exit("--record takes all kernels of Triton, and no tables")
    if record is not None:
        return record_all(record)
    for name in tables or TABLES:
        if name == "cuda" and (reason := aot_rows.missing_tools()) is not None:
            print(f"CUDA row kernels: {reason}")
        else:
            for row in TABLES[name]():
                print(" ".join(f"{key}={value}" for key, value in row.items()))
    return None


if __name__ == "__main__":
    call(main)
