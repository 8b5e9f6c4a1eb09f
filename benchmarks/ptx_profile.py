"""What each Triton kernel does on an NVIDIA GPU, counted in its PTX by the interpreter (tests/ptx), on a CPU.

    TRITON_INTERPRET=0 python -m benchmarks.ptx_profile            # prints the counts
    TRITON_INTERPRET=0 python -m benchmarks.ptx_profile --out F    # also into the file of a run

Counts are the same on every machine, for one version of triton. They are of PTX: ptxas merges and splits instructions,
and a count is no time. The gate compares them with the newest file: none may grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from grpo_fused.kernels import configs, head_configs
from grpo_fused.kernels.row_types import Coefficients, Rows, Statistics, Transform

from benchmarks.results import Run
from benchmarks.study import Section, main
from benchmarks.tables import grid, paragraphs
from grpo_fused.heads.patches import Patches

ARCHITECTURES = ("sm_80", "sm_90")
TOKENS, HIDDEN, VOCAB = 128, 256, 1024
"""One panel of the head kernels, four k steps, tiles without a rest."""
ODD_VOCAB = 1001
"""Rows of logits that start at odd addresses if they are not padded."""
ROWS, ROW_VOCAB = 2, 8192

BF16, FP32 = torch.bfloat16, torch.float32


@contextmanager
def launched_as(architecture: str) -> Iterator[None]:
    """CPU tensors take the launch configurations of a GPU."""
    from grpo_fused.kernels import head_launch

    finish, in_place, cuda = head_configs.finish_config, head_configs.pass_config, torch.device("cuda")
    with Patches(
        (configs, "architecture", lambda device: architecture),
        (head_configs, "architecture", lambda device: architecture),
        (head_launch, "finish_config", lambda device, dtype: finish(cuda, dtype)),
        (head_launch, "pass_config", lambda device, block_v: in_place(cuda, block_v)),
        (head_launch, "_interprets", lambda x: False),
    ):
        yield


def head(dtype: torch.dtype, mode: str, vocab: int) -> None:
    """Scores, exponentials or dlogits of a plain head."""
    from grpo_fused.kernels import head_launch

    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g).to(dtype)
    weight = (torch.randn(vocab, HIDDEN, generator=g) / 8).to(dtype)
    targets, transform = torch.zeros(TOKENS, dtype=torch.int64), Transform()
    if mode == "dlogits":
        out = torch.empty(TOKENS, configs.padded(vocab), dtype=dtype)[:, :vocab]
        head_launch.head_dlogits(hidden, weight, targets, _coefficients(TOKENS), transform, out)
    else:
        config, stores = head_configs.head_config(weight, transform), mode == "exponentials"
        room = head_launch.Exponentials.empty(TOKENS, weight, dtype, config) if stores else None
        head_launch.head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room)


def _coefficients(count: int) -> Coefficients:
    statistics = Statistics(*(torch.full((count,), value) for value in (3.0, 5.0, -5.0, 6.0)))
    return Coefficients(statistics, torch.ones(count), torch.ones(count))


def exponentials_to_gradient() -> None:
    """Exponentials of a few rows to their gradient, in place."""
    from grpo_fused.kernels import head_launch

    weight = torch.empty(ROW_VOCAB, HIDDEN, dtype=BF16)
    block_v = head_configs.head_config(weight, Transform()).block_v
    room = head_launch.Exponentials(
        torch.rand(ROWS, ROW_VOCAB).to(BF16), torch.zeros(ROWS, ROW_VOCAB // block_v), block_v
    )
    targets = torch.zeros(ROWS, dtype=torch.int64)
    head_launch.exponentials_to_dlogits(room, targets, _coefficients(ROWS), Transform())


def rows(out_dtype: torch.dtype) -> None:
    """Statistics and gradient of given logits."""
    from grpo_fused.kernels.launch import TritonRows

    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(ROWS, ROW_VOCAB, generator=g), torch.zeros(ROWS, dtype=torch.int64)
    given = Rows(logits, targets, Transform())
    TritonRows().statistics(given, with_entropy=True)
    TritonRows().gradient(given, _coefficients(ROWS), torch.empty(ROWS, ROW_VOCAB, dtype=out_dtype))


def candidates() -> None:
    """256 pairs of rows, in 8 segments."""
    from grpo_fused.kernels.candidates import pair_products, segment_sums

    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, HIDDEN, generator=g).bfloat16(), torch.randn(64, HIDDEN, generator=g).bfloat16()
    i, j = torch.randint(0, 16, (256,), generator=g), torch.randint(0, 64, (256,), generator=g)
    pair_products(a, b, i, j)
    segment_sums(b, j, torch.randn(256, generator=g), torch.arange(0, 257, 32))


Case = tuple[str, Callable[[], None], int]
"""The kernel whose counts are kept, what launches it, logits of the launch (elements for pairs and sums)."""

CASES: dict[str, Case] = {
    "scores bf16": ("head_fwd_kernel", lambda: head(BF16, "scores", VOCAB), TOKENS * VOCAB),
    "exponentials bf16": ("head_fwd_kernel", lambda: head(BF16, "exponentials", VOCAB), TOKENS * VOCAB),
    "exponentials bf16, odd V": ("head_fwd_kernel", lambda: head(BF16, "exponentials", ODD_VOCAB), TOKENS * ODD_VOCAB),
    "dlogits bf16": ("head_fwd_kernel", lambda: head(BF16, "dlogits", VOCAB), TOKENS * VOCAB),
    "scores fp32": ("head_fwd_kernel", lambda: head(FP32, "scores", VOCAB), TOKENS * VOCAB),
    "gradient of exponentials": ("exponentials_bwd_kernel", exponentials_to_gradient, ROWS * ROW_VOCAB),
    "row statistics fp32": ("row_statistics_fwd_kernel", lambda: rows(BF16), ROWS * ROW_VOCAB),
    "row gradient fp32 to bf16": ("row_gradient_bwd_kernel", lambda: rows(BF16), ROWS * ROW_VOCAB),
    "pair products bf16": ("pair_products_kernel", candidates, 256 * HIDDEN),
    "segment sums bf16": ("segment_sums_kernel", candidates, 256 * HIDDEN),
}


def count(architecture: str, case: str) -> dict[str, float]:
    """Of each logit: instructions of a thread by class, bytes of global memory, and how far from the fewest."""
    from tests.ptx.block import Options
    from tests.ptx.driver import driver_of
    from tests.ptx.profile import CLASSES, Profile

    kernel, launch, logits = CASES[case]
    profiles: dict[str, Profile] = {}
    with launched_as(architecture), driver_of(architecture).active(Options(), profiles=profiles):
        launch()
    profile = profiles[kernel]
    counts = profile.counts
    found = {name: 32 * profile.instructions[name] / logits for name in CLASSES}
    for kind in ("loaded", "stored"):
        found[f"bytes {kind}"] = counts[f"{kind}_bytes"] / logits
        found[f"sectors {kind} / least"] = counts[f"{kind}_sectors"] / max(counts[f"{kind}_least"], 1)
    found["shared passes / least"] = counts["shared_passes"] / max(counts["shared_least"], 1)
    return {name: round(value, 4) for name, value in found.items()}


def table(section: Section, run: Run) -> str:
    """Markdown: a row for each kernel and GPU."""
    classes = [name for name in next(iter(section["kernels"].values())) if " " not in name]
    rows = []
    for name, found in section["kernels"].items():
        architecture, case = name.split(" ", 1)
        moved = f"{found['bytes loaded']:.2f}, {found['bytes stored']:.2f}"
        sectors = f"{found['sectors loaded / least']:.2f}, {found['sectors stored / least']:.2f}"
        shared = f"{found['shared passes / least']:.2f}"
        rows.append([case, architecture, *(f"{found[each]:.2f}" for each in classes), moved, sectors, shared])
    shape = section["shape"]
    return paragraphs(
        grid(f"| kernel | | {' | '.join(classes)} | bytes in, out | sectors in, out | shared |", rows),
        f"Counted in PTX of triton {section['triton']}, with no GPU: instructions of a thread for each logit, by "
        f"class (head kernels: N = {shape['tokens']}, H = {shape['hidden']}; row kernels: "
        f"V = {shape['row vocabulary']}; pairs and sums: for each element). Bytes of global memory for each logit; "
        "sectors of loads and stores over the fewest that hold these bytes (0: only tensor copies); passes of shared "
        "memory over the fewest. Counts, no times "
        f"(`python -m benchmarks.ptx_profile`, commit {run.machine['commit']}).",
    )


def run() -> Iterator[Section]:
    """The section `ptx`."""
    import triton

    kernels = {}
    for architecture in ARCHITECTURES:
        for case in CASES:
            kernels[f"{architecture} {case}"] = found = count(architecture, case)
            print(architecture, case, found, flush=True)
    shape = {"tokens": TOKENS, "hidden": HIDDEN, "row vocabulary": ROW_VOCAB}
    yield {"triton": triton.__version__, "shape": shape, "kernels": kernels}


if __name__ == "__main__":
    main("ptx_profile")
