"""Each barrier, wait and fence of the kernels is removed in turn: a run must notice, or the table says why it is not needed.

A run notices by a race in shared memory, by a register that is used while a product adds to it, or by another result.
The table is of one version of triton; with others, only what has no entry of its kind is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs TRITON_INTERPRET=0: see make emulate-nvidia", allow_module_level=True)
triton = pytest.importorskip("triton")

import kernel_cases as cases
from grpo_fused.kernels import configs, head_configs, head_launch
from grpo_fused.kernels.launch import TritonRows
from grpo_fused.kernels.row_types import Coefficients, Rows, Statistics

from benchmarks.ptx import mutations
from benchmarks.ptx.block import Options
from benchmarks.ptx.driver import Driver, driver_of
from benchmarks.ptx.text import PtxError

WAYS = (
    Options(races=True),
    Options(together=False, backwards=True),
    Options(together=False, late=False),
)
"""Ways to run a kernel without one of its barriers; those after the first only if no way before has noticed."""


def head_problem(dtype, name, N=385):
    """Four panels of tokens of which one program takes two; more k steps than stages; several tiles; confident tokens."""
    H, V = 200, 600
    hidden, weight, targets, coefficients = cases.head_of(N, H, V, dtype)
    hidden[::2] *= 20
    transform = cases.transform_of(name, N, V)
    return hidden, weight, targets, coefficients, transform


def head_scores(dtype, name, store):
    hidden, weight, targets, _, transform = head_problem(dtype, name)
    config = head_configs.head_config(weight, transform)._replace(persistent=True)
    room = head_launch.Exponentials.empty(len(hidden), weight, dtype, transform, config=config) if store else None
    if room is not None:
        room.values.zero_()
        room.offsets.zero_()
    parts = [torch.zeros(1, len(hidden)) for _ in range(3)]
    head_launch._launch(
        config, hidden, weight, None if room is None else room.values, transform,
        MODE=head_launch.SCORE.value if room is None else head_launch.EXPONENTIALS.value,
        max_ptr=parts[0], rest_ptr=parts[1], moment_ptr=parts[2], offset_ptr=None if room is None else room.offsets,
        WITH_ENTROPY=True,
    )  # fmt: skip
    return [*parts, *([] if room is None else [room.values, room.offsets])]


def head_gradient(dtype, name):
    hidden, weight, targets, (dlogp, dentropy), transform = head_problem(dtype, name)
    config = head_configs.head_config(weight, transform, gradient=True)._replace(persistent=True)
    exact = cases.Exact(hidden.double() @ weight.double().T, targets, transform).statistics
    stats = Statistics(*(x.detach().float() for x in exact))
    out = torch.zeros(len(hidden), configs.padded(600), dtype=dtype)[:, :600]
    head_launch.head_dlogits(
        hidden, weight, targets, Coefficients(stats, dlogp, dentropy), transform, out, config=config
    )
    return [out]


def finish():
    hidden, weight, targets, _, transform = head_problem(cases.BF16, "plain", N=5)
    return list(head_launch.head_scores(hidden, weight, targets, transform, with_entropy=True))


def row_problem():
    V = 4500
    width, g = configs.padded(V), torch.Generator().manual_seed(0)
    logits, targets = 4 * torch.randn(2, width, generator=g), torch.randint(0, V, (2,), generator=g)
    logits[0] *= 10  # a confident token
    return Rows(logits[:, :V], targets, cases.transform_of("bias+scale", 2, V))


def row_statistics():
    return list(TritonRows().statistics(row_problem(), with_entropy=True))


def row_gradient():
    """bf16 over the fp32 logits that it comes from."""
    rows = row_problem()
    stats = Statistics(*(x.detach().float() for x in cases.Exact(rows.raw, rows.targets, rows.transform).statistics))
    out = rows.raw.view(torch.bfloat16).as_strided((2, rows.raw.shape[1]), (2 * rows.raw.stride(0), 1))
    TritonRows().gradient(rows, Coefficients(stats, torch.ones(2), torch.ones(2)), out)
    return [out.clone()]


CASES: dict[str, tuple[str, Callable[[], list[torch.Tensor]]]] = {
    "exponentials": ("head_fwd_kernel", lambda: head_scores(cases.BF16, "plain", store=True)),
    "scores": ("head_fwd_kernel", lambda: head_scores(cases.BF16, "bias+scale", store=False)),
    "dlogits": ("head_fwd_kernel", lambda: head_gradient(cases.BF16, "all")),
    "finish": ("finish_scores_fwd_kernel", finish),
    "row-statistics": ("row_statistics_fwd_kernel", row_statistics),
    "row-gradient": ("row_gradient_bwd_kernel", row_gradient),
}


def missed(driver: Driver, kernel_name: str, launch: Callable[[], list[torch.Tensor]]) -> tuple[int, list[str]]:
    """How many places there are, and those whose removal no run notices."""

    def first_program(number: int, of: int) -> bool:
        return number == 0 or kernel_name != "head_fwd_kernel"

    with driver.active(WAYS[0], only=first_program):
        want = launch()
        (kernel,) = {id(k): k for name, k in driver.launched if name == kernel_name}.values()
    places = mutations.places(kernel)
    return len(places), [str(p) for p in places if not _noticed(driver, kernel_name, p, first_program, launch, want)]


def _noticed(driver, kernel_name, place, only, launch, want) -> bool:
    for options in WAYS:
        try:
            with driver.active(options, only=only, edit=mutations.without(kernel_name, place)):
                got = launch()
        except PtxError:
            return True
        if not all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True)):
            return True
    return False


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_removal_is_noticed(architecture, case):
    driver = driver_of(architecture)
    with cases.launched_as(lambda: architecture, in_place=True):
        count, found = missed(driver, *CASES[case])
    print(architecture, case, count, len(found), *found, sep="\n  ")
