"""The share of the processor's own rate that ours, the library's bare products and the peers reach.

    python -m benchmarks.limit --out results.json                         # ours and the bare products, some minutes
    python -m benchmarks.limit --tokens 1024 --peers eager torch.compile liger trl --out results.json

The rate is that of operands in registers: a C++ program (`registers.cpp`) measures it in the same run, on as many
threads, compiled by the compiler that builds the library. Training counts three products and scoring one, whatever an
implementation multiplies.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch

from benchmarks.measure import BASES, Peers, measure, print_case
from benchmarks.problem import Case
from benchmarks.providers import available
from benchmarks.results import Run, where
from benchmarks.study import Section, main
from benchmarks.tables import grid, ms, paragraphs, title
from grpo_fused.engines import cpu_library
from grpo_fused.tools.doctor import cpp_compiler

LIMITS = {
    "AMX": (("AMX", 1), ("AMX", 6)),
    "AVX512-BF16": (("AVX512-BF16", 1), ("AVX-512 FMA", 1)),
    "AVX-512, bf16 widened": (("AVX-512 FMA", 1), ("AVX-512 FMA", 1)),
    "AVX2, bf16 widened": (("AVX2 FMA", 1), ("AVX2 FMA", 1)),
}
"""Of each instruction set of `native`: what multiplies bf16, and fp32, and how many of its products are one of them."""
PRODUCTS = {"forward_backward": 3, "scoring": 1}


def rate(instruction: str, threads: int) -> float:
    """GFLOP/s of an instruction on operands in registers, on so many threads."""
    with TemporaryDirectory() as folder:
        program, source = str(Path(folder) / "registers"), str(Path(__file__).with_name("registers.cpp"))
        subprocess.run([cpp_compiler(), "-std=c++20", "-O2", "-pthread", source, "-o", program], check=True)
        done = subprocess.run([program, instruction, str(threads)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def run(
    tokens: Annotated[tuple[int, ...], "numbers of tokens, 256 in a sequence"] = (128, 1024, 4096),
    hidden: int = 896, vocab: int = 151936, dtype: Literal["bf16", "fp32"] = "bf16", rounds: int = 5,
    peers: Peers = (),
) -> Iterator[Section]:  # fmt: skip
    """The section `limit`, after each number of tokens."""
    measured: dict[str, Any] = {}
    instruction, products = LIMITS[cpu_library.instruction_set()][dtype == "fp32"]
    for count in tokens:
        if count > 256 and count % 256:
            raise ValueError(f"tokens must be at most 256, or a multiple of 256; got {count}")
        case = Case(max(count // 256, 1), min(count, 256), hidden, vocab, dtype)
        gflops = rate(instruction, torch.get_num_threads()) / products
        row = measure(case, "cpu", available("cpu", case.pattern, peers), rounds=rounds)
        print_case(case.name, row)
        name = instruction if products == 1 else f"{instruction}, {products} products for one"
        measured[case.name] = row | {"limit": {"instruction": name, "gflops": gflops}}
        yield {"rounds": rounds, "cases": measured}


def table(section: Section, run: Run) -> str:
    """Time, and share of the rate in registers, of each implementation."""
    cases = sorted(section["cases"].values(), key=lambda case: (case["shape"]["dtype"], case["shape"]["N"]))

    def cells() -> Iterator[list[str]]:
        for case in cases:
            bare = {"bare products": {what: {"ms": case["bare"][BASES[what]]} for what in PRODUCTS}}
            for name, row in (bare | case["providers"]).items():
                if "not_timed" not in row:
                    yield [title(case["shape"]), name, *(cell for what in PRODUCTS for cell in taken(case, row, what))]

    limits = (
        f"{title(case['shape'])}: {case['limit']['instruction']}, {case['limit']['gflops']:.0f} GFLOP/s"
        for case in cases
    )
    return paragraphs(
        grid("| | | forward + backward | share | scoring | share |", cells()),
        f"In registers, {run.machine['threads']} threads: {'; '.join(limits)}. {where(run)}.",
    )


def taken(case: dict[str, Any], row: dict[str, Any], what: str) -> tuple[str, str]:
    """The time of a call, and its share of the limit; empty where it was not measured."""
    if what not in row:
        return "", ""
    shape, time = case["shape"], row[what]["ms"]["median"]
    product = 2e-6 * shape["N"] * shape["H"] * shape["V"]  # GFLOP/s if it takes a millisecond
    return ms(time), f"{PRODUCTS[what] * product / time / case['limit']['gflops']:.2f}"


if __name__ == "__main__":
    main("limit")
