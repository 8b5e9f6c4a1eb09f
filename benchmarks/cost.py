"""Predicted memory of a call, by the engines' own rules (`Engine.cost`), and predicted time of one on an H200.

    python -m benchmarks.cost

The rates of the H200 are a few measured ones, and the efficiency of a product by its depth is a published one
(`EXTRA_DEPTH`). The rate of our head kernel comes from a roofline: a kernel takes as long as the slowest of its
concurrent parts (products, L2 and memory traffic, exponentials), and an epilogue overlaps with products only if a
second program shares the multiprocessor. These are predictions, not measurements: `modelled` is the table of
docs/benchmarks.md, apart from the measured ones.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.tables import grid, paragraphs
from grpo_fused import engines
from grpo_fused.engines import products
from grpo_fused.engines.base import Cost, even_chunks
from grpo_fused.engines.scratch import DEFAULT_SCRATCH_BYTES
from grpo_fused.tools import predictions

VOCABULARY, TOKENS = 151936, 8192


class Shape(NamedTuple):
    """A call."""

    N: int
    """tokens, active or not"""
    H: int
    V: int
    active: float = 1.0
    """share of the tokens that are not masked"""

    @property
    def tokens(self) -> int:
        """Active tokens; nothing is computed for the others."""
        return round(self.N * self.active)


def cost_of(engine: str, shape: Shape, dtype: torch.dtype) -> Cost:
    """By the engine's own rules."""
    head = predictions.Shape(shape.tokens, shape.H, shape.V, dtype).head(torch.device("cpu"))
    return engines.engine(engine).cost(head, shape.tokens, None)


def scratch_bytes(engine: str, shape: Shape, dtype: torch.dtype) -> int:
    """Peak of a loss with both gradients, beyond inputs and gradients."""
    at_work = cost_of(engine, shape, dtype).scratch_bytes + shape.tokens * shape.H * dtype.itemsize  # gathered states
    # all tokens decide whether dW needs its own sum; the gradient that it becomes does not exist yet
    sums = cost_of(engine, shape._replace(active=1.0), dtype).accumulator_bytes
    return max(at_work + sums - shape.V * shape.H * dtype.itemsize, sums) if sums else at_work


class Machine(NamedTuple):
    """The rates of a GPU."""

    name: str
    products: float
    """bf16 FLOP/s of the library's GEMM at its best, measured"""
    memory: float
    """bytes/s, measured"""
    l2: float
    """bytes/s; the 8.2 TB/s and more that 128 x 256 tiles of public Triton GEMMs take at 0.85 to 0.96 of the library's
    rate on an H100"""
    multiprocessors: int
    clock: float
    exponentials: int
    """a clock and multiprocessor"""


H200 = Machine("H200", 790e12, 4.3e12, 8.5e12, 132, 1.75e9, 16)

EPILOGUE_INSTRUCTIONS = {"score": 9.2, "exponentials": 11.3, "dlogits": 15.7}
"""Per logit, with entropy, of plain heads: counted in the machine code of sm_90 (`python -m benchmarks.aot head`). A
score takes scale, maximum, shift, exponential, sum, product and sum of the moment, and a new 0; the rest is of rows."""

EXTRA_DEPTH = 162, 219
"""K0 of rate(K) = rate(inf) / (1 + K0 / K), best and worst: each tile of a product takes as long as K0 more of its
depth K, for its first loads and its store. 162 is cuBLAS's fastest algorithm: 505, 620, 722, 760, 789 TFLOP/s at
K = 256, 512, 1024, 2048, 4096, measured on sm_90 for four bf16 products of 4096 x 4096 x K (the table by which XLA
predicts products: openxla/xla, `xla/service/gpu/model/matmul_interpolator_data.h`); each is within 2 %. 219 is what
`torch.mm` chooses: 553 of the 790 of `H200`, at 8192 x 8192 x 512 (fp16, a published run of Triton's tutorial 09)."""

TILE = 128, 256
"""Of the library's products on sm_90 (the kernel `nvjet_*_128x256_64x4`), either way round."""

KERNEL_SHARE = 0.90
"""Rate of a Triton product relative to the library's if nothing else limits it; public figures: 0.85 to 0.96."""


def kernel_seconds(config: Any, mode: str, programs_per_sm: int, width: int, machine: Machine) -> float:
    """Time of the head kernel at N = 8192, V = 151936 and H = `width`."""
    logits = TOKENS * VOCABULARY
    panels, tiles = -(-TOKENS // config.block_n), -(-VOCABULARY // config.block_v)
    splits, _ = config.splits(VOCABULARY, width)
    group = max(16 * 2**20 // (config.block_n * width * 2), 1)
    products = 2 * logits * width / (KERNEL_SHARE * machine.products)
    l2 = panels * tiles * (config.block_n + config.block_v) * width * 2 / machine.l2
    written = 0 if mode == "score" else 2 * logits
    memory = (-(-panels // group) * VOCABULARY * width * 2 + TOKENS * width * 2 + written) / machine.memory
    lanes = machine.multiprocessors * machine.clock
    epilogue = max(logits / (lanes * machine.exponentials), logits * EPILOGUE_INSTRUCTIONS[mode] / (lanes * 128))
    main = max(products, l2, memory)
    busy = max(main, epilogue) if programs_per_sm > 1 else main + epilogue
    items = panels * splits
    waves = items / (machine.multiprocessors * programs_per_sm)
    return busy * (1.0 if config.persistent else math.ceil(waves) / waves)


ROW_BYTES = {"bare": 0, "chunked": 14, "triton": 0}
"""Memory traffic of a logit besides the products: a row kernel on fp32 logits and bf16 dlogits, or none, since the
products take the exponentials that the head kernel has stored."""


def filled(rows: int, cols: int, machine: Machine) -> float:
    """Share of the multiprocessors' time that has a tile to work on: the last wave is not full, nor an edge's tiles."""
    useful = rows * cols / (TILE[0] * TILE[1])
    tiles = (-(-rows // a) * -(-cols // b) for a, b in (TILE, TILE[::-1]))
    return max(useful / (math.ceil(t / machine.multiprocessors) * machine.multiprocessors) for t in tiles)


def product_seconds(rows: int, cols: int, depth: int, machine: Machine, *, worst: bool = False) -> float:
    """Time of a product of the library; at `worst` it leaves a last wave that is not full as it is."""
    share = min(filled(rows, cols, machine) / filled(4 * 4096, 4096, machine), 1.0) if worst else 1.0
    return 2 * rows * cols * (depth + EXTRA_DEPTH[worst]) / (machine.products * share)


def library_rate(width: int, machine: Machine, *, worst: bool = False) -> float:
    """FLOP/s of the library's head product."""
    return 2 * TOKENS * VOCABULARY * width / product_seconds(TOKENS, VOCABULARY, width, machine, worst=worst)


def chunks_of(engine: str, shape: Shape) -> list[int]:
    """Tokens of each chunk on a GPU."""
    if engine == "bare":
        return [shape.tokens]
    head = predictions.Shape(shape.tokens, shape.H, shape.V, torch.bfloat16).head(torch.device("cpu"))
    with (  # the head is one of a CPU, perhaps of one without bf16
        mock.patch.dict(DEFAULT_SCRATCH_BYTES, cpu=DEFAULT_SCRATCH_BYTES["cuda"]),
        mock.patch.object(products, "has_products_in", return_value=True),
    ):
        rows = engines.engine(engine).chunk_rows(head, shape.tokens, None)
    return [chunk.stop - chunk.start for chunk in even_chunks(shape.tokens, rows)]


def training_seconds(engine: str, width: int, machine: Machine, *, worst: bool = False) -> float:
    """Forward and backward, dense: products, row work at the rate of memory, and the traffic of the fp32 sum of dW over
    chunks, which is written, read and written by each further chunk, and rounded. The head kernel of `triton` takes the
    place of a product; at `worst` its epilogue does not overlap with its products."""
    shape = Shape(TOKENS, width, VOCABULARY)
    chunks, V = chunks_of(engine, shape), VOCABULARY
    seconds = 0.0
    for n in chunks:
        one, *others = (
            product_seconds(rows, cols, depth, machine, worst=worst)
            for rows, cols, depth in ((n, V, width), (n, width, V), (V, width, n))
        )
        seconds += sum(others) + (one if engine != "triton" else 0.0)
    if engine == "triton":
        seconds += kernel_seconds(shipped(), "exponentials", 1 if worst else 2, width, machine)
    numbers = 0 if len(chunks) == 1 else 4 + 8 * (len(chunks) - 1) + 4 + 2
    return seconds + (ROW_BYTES[engine] * TOKENS * V + numbers * V * width) / machine.memory


def shipped() -> Any:
    """The configuration of the head kernel on Hopper."""
    from grpo_fused.kernels.head_configs import HEAD_CONFIGS

    return HEAD_CONFIGS["sm_90"].plain


def modelled(machine: Machine = H200) -> str:
    """The table of docs/benchmarks.md. No run is in it."""
    rows = []
    for width in (4096, 2048, 896):
        cells = [
            " to ".join(f"{1e3 * training_seconds(name, width, machine, worst=worst):.1f}" for worst in (False, True))
            for name in ROW_BYTES
        ]
        rates = " to ".join(f"{library_rate(width, machine, worst=worst) / 1e12:.0f}" for worst in (False, True))
        rows.append([f"modelled, H = {width}", *cells, f"{rates} TFLOP/s"])
    return paragraphs(
        f"**Modelled, not measured**, for an {machine.name}: bf16, N = {TOKENS}, V = {VOCABULARY}, forward + backward, "
        "milliseconds from best to worst case.",
        grid(f"| model | {' | '.join(ROW_BYTES)} | rate of the head product |", rows),
    )


def main() -> None:
    """Print the predictions."""
    print(modelled())
    for width in (4096, 2048, 896):
        product = 2 * TOKENS * VOCABULARY * width
        share = product / kernel_seconds(shipped(), "score", 1, width, H200) / library_rate(width, H200)
        print(f"scoring by triton at H = {width}: {share:.0%} of the library's rate")


if __name__ == "__main__":
    main()
