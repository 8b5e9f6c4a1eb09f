"""A cost model of the loss on a GPU: FLOP, bytes, waves and occupancy. It predicts; only a chip measures.

    python -m benchmarks.cost    # which engine is expected to win at which shape, and what a gradient filter would gain

A kernel takes as long as the slowest of what it does at once: products, L2 and memory traffic, exponentials. An
epilogue runs beside products only where a second program shares the multiprocessor.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

VOCABULARY, TOKENS = 151936, 8192


class Machine(NamedTuple):
    """What a GPU can do."""

    name: str
    products: float
    """bf16 FLOP/s of the library's GEMM, measured"""
    memory: float
    """bytes/s, measured"""
    l2: float
    """bytes/s; the 8.2 TB/s and more that 128 x 256 tiles of public Triton GEMMs take at 0.85 to 0.96 of the library's
    rate on an H100"""
    multiprocessors: int
    clock: float
    exponentials: int
    """a clock and multiprocessor"""
    registers: int
    shared_kib: int
    threads: int


H200 = Machine("H200", 790e12, 4.3e12, 8.5e12, 132, 1.75e9, 16, 65536, 227, 2048)

EPILOGUE_INSTRUCTIONS = {"score": 9, "exponentials": 11, "dlogits": 9}
"""Per logit, with entropy: scale (2), maximum, shift, exp (2), sum, moment (2); a store of two takes 2 more."""

KERNEL_SHARE = 0.90
"""What a Triton product reaches of the library's rate where nothing else limits it; public figures: 0.85 to 0.96."""

SPARSE_SHARE = 0.75
"""The same for a gradient product over a list of live tiles, whose loops have no common length: a guess."""


def occupancy(registers: int, num_warps: int, shared_kib: float, machine: Machine) -> int:
    """Programs that fit a multiprocessor at a time; registers are handed out in eights."""
    threads = 32 * num_warps
    by_registers = machine.registers // (-(-registers // 8) * 8 * threads)
    return min(by_registers, int(machine.shared_kib // (shared_kib + 1)), machine.threads // threads)


def predicted_rate(config: Any, mode: str, programs_per_sm: int, width: int, machine: Machine) -> float:
    """FLOP/s of the head kernel at N = 8192, V = 151936 and H = `width`."""
    return 2 * TOKENS * VOCABULARY * width / kernel_seconds(config, mode, programs_per_sm, width, machine)


def kernel_seconds(config: Any, mode: str, programs_per_sm: int, width: int, machine: Machine) -> float:
    """Time of the head kernel; 0 programs a multiprocessor is a configuration that cannot run."""
    if programs_per_sm == 0:
        return math.inf
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


def training_seconds(head_kernel: float, width: int, machine: Machine) -> dict[str, float]:
    """Forward and backward, dense: library GEMMs and row kernel (14 B a logit), or exponential store (4 B after it)."""
    product = 2 * TOKENS * VOCABULARY * width / machine.products
    logits = TOKENS * VOCABULARY
    return {
        "bare": 3 * product,
        "chunked": 3 * product + 14 * logits / machine.memory,
        "triton": head_kernel + 4 * logits / machine.memory + 2 * product,
    }


class Filter(NamedTuple):
    """What a gradient filter would find among tokens whose probabilities fall with their rank as rank^-exponent."""

    entropy: float
    """of a token, nats"""
    live: float
    """share of tiles with some probability above the bound"""
    gain: float
    """of the time of the three products, where the two gradient products are made of live tiles only"""


def gradient_filter(exponent: float, *, bound: float = 2.0**-12, tile: tuple[int, int] = (128, 128)) -> Filter:
    """Which vocabulary entry has which rank is drawn by a Zipf popularity over ids in order of frequency."""
    import torch

    g = torch.Generator().manual_seed(0)
    rows, cols = tile
    p = torch.arange(1, 4097, dtype=torch.float64) ** -exponent
    p /= p.sum()
    popularity = 1.0 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    shares = []
    for _ in range(8):
        ids = torch.multinomial(popularity.expand(rows, -1), int((p > bound).sum()), generator=g)
        live = torch.zeros(-(-VOCABULARY // cols), dtype=torch.bool)
        live[(ids // cols).flatten()] = True
        shares.append(live.double().mean().item())
    share = sum(shares) / len(shares)
    return Filter(-(p * p.log()).sum().item(), share, 2 / 3 * (1 - share / SPARSE_SHARE))


def main() -> None:
    """Print what is expected."""
    from grpo_fused.kernels.head_configs import HEAD_CONFIGS

    config = HEAD_CONFIGS["sm_90"].plain
    print(f"expected on an {H200.name}, bf16, N = {TOKENS}, V = {VOCABULARY}, forward + backward, in ms")
    for width in (896, 2048, 4096):
        expected = training_seconds(kernel_seconds(config, "exponentials", 1, width, H200), width, H200)
        times = "  ".join(f"{name} {1e3 * seconds:5.1f}" for name, seconds in expected.items())
        score = predicted_rate(config, "score", 1, width, H200) / H200.products
        print(f"  H = {width:4}: {times}   scoring at {100 * score:.0f} % of the library's rate")
    print("a gradient filter that skips tiles of 128 x 128 without a probability above 2^-12:")
    for exponent in (1.2, 1.6, 2.0, 2.5, 3.0):
        found = gradient_filter(exponent)
        print(f"  tokens of {found.entropy:.1f} nats: {found.live:.0%} of the tiles are live, gain {found.gain:+.0%}")


if __name__ == "__main__":
    main()
