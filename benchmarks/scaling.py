"""The head over many GPUs: bytes, FLOP and time of a step by layout. A model, not measured.

    python -m benchmarks.scaling                                  # 8 to 1024 H200s
    python -m benchmarks.scaling --hidden 896 --tokens 1048576 --inter-gb-per-s 25

The traffic comes from `communication`, which the tests compare with the counted traffic of real process groups.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from benchmarks.command import call


class Machine(NamedTuple):
    """A GPU and its links; bytes/s that one GPU sends and receives at the same time."""

    products: float = 790e12
    """bf16 FLOP/s of the library's GEMM on an H200, measured with PyTorch"""
    intra: float = 450e9
    """NVLink 4 within a node, one direction, by the vendor's datasheet"""
    inter: float = 50e9
    """400 Gb/s InfiniBand a GPU, by the vendor's datasheet"""
    gpus_per_node: int = 8
    latency: float = 20e-6
    """of a collective, an assumption"""


class Layout(NamedTuple):
    """How the head is split over the ranks."""

    vocab: int
    """ranks that hold slices of the vocabulary (TP)"""
    tokens: int
    """ranks with tokens of their own: other sequences (DP), or parts of the same ones (SP, CP)"""


class Communication(NamedTuple):
    """Numbers that one rank contributes to collectives in a call."""

    statistics: int
    """fp32, all-gathered over `vocab`"""
    hidden_gradient: int
    """fp32, all-reduced over `vocab`"""
    objective: int
    """fp64 before the loss and fp32 after it, all-gathered over `tokens`"""


FIELDS = 5
"""A token's inputs of the objective: mask, sequence, advantage, old and ref log-probs."""


def communication(scored: int, with_gradient: int, width: int, layout: Layout) -> Communication:
    """Of a rank with `scored` tokens, `with_gradient` of them with a gradient, states of `width`, and entropies."""
    return Communication(
        statistics=4 * scored if layout.vocab > 1 else 0,
        hidden_gradient=width * with_gradient if layout.vocab > 1 else 0,
        objective=(FIELDS + 2) * scored if layout.tokens > 1 else 0,
    )


class Step(NamedTuple):
    """Seconds of a step of the head, and its memory."""

    products: float
    vocab_links: float
    """statistics and the hidden states' gradient, within the vocabulary's ranks"""
    token_links: float
    """the objective's numbers, and the weight's gradient over the ranks with other tokens"""
    weight_gb: float
    """bf16 weight and gradient of a rank"""

    @property
    def total(self) -> float:
        """Without overlap: an upper bound of the waiting time of a rank."""
        return self.products + self.vocab_links + self.token_links


def step(tokens: int, width: int, vocab: int, layout: Layout, machine: Machine) -> Step:
    """Forward and backward of `tokens` in all."""
    v, t = layout
    mine, rows = tokens / t, vocab / v
    product = 2 * mine * width * rows / machine.products
    sent = communication(int(mine), int(mine), width, layout)
    inner = machine.intra if v <= machine.gpus_per_node else machine.inter
    outer = machine.intra if v * t <= machine.gpus_per_node else machine.inter
    vocab_bytes = 4 * sent.statistics * (v - 1) + 2 * 4 * sent.hidden_gradient * (v - 1) / v
    # fp64 fields before, two fp32 numbers after; the weight's gradient in bf16, reduce-scattered and gathered
    token_bytes = (8 * FIELDS + 4 * 2) * mine * (t - 1) + (2 * 2 * width * rows * (t - 1) / t if t > 1 else 0)
    return Step(
        products=3 * product,
        vocab_links=vocab_bytes / inner + (2 * machine.latency if v > 1 else 0),
        token_links=token_bytes / outer + (3 * machine.latency if t > 1 else 0),
        weight_gb=2 * 2 * width * rows / 1e9,
    )


def main(
    hidden: int = 4096,
    vocab: int = 151936,
    tokens: Annotated[int, "of a step, over all GPUs"] = 2**20,
    intra_gb_per_s: float = Machine().intra / 1e9,
    inter_gb_per_s: float = Machine().inter / 1e9,
) -> None:
    """Print the table."""
    machine = Machine(intra=intra_gb_per_s * 1e9, inter=inter_gb_per_s * 1e9)
    print(f"H = {hidden}, V = {vocab}, {tokens} tokens a step; milliseconds by the model")
    header = ("GPUs", "vocab", "tokens", "products", "vocab links", "token links", "total")
    print("{:>5} {:>6} {:>7} {:>9} {:>12} {:>12} {:>8}  GB".format(*header))
    for ranks in (8, 32, 128, 512, 1024):
        for slices in (1, 2, 4, 8):
            layout = Layout(slices, ranks // slices)
            s = step(tokens, hidden, vocab, layout, machine)
            print(
                f"{ranks:5} {slices:6} {layout.tokens:7} {1e3 * s.products:9.2f} {1e3 * s.vocab_links:12.2f} "
                f"{1e3 * s.token_links:12.2f} {1e3 * s.total:8.2f}  {s.weight_gb:.2f}"
            )


if __name__ == "__main__":
    call(main)
