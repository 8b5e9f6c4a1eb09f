"""Each barrier, wait and fence of the kernels is removed in turn: a run must notice, or the table says why it is not needed.

A run notices by a race in shared memory, by a register that is used while a product adds to it, or by another result.
The table is of one version of triton; with others, only what has no entry of its kind is looked at.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs TRITON_INTERPRET=0: see make emulate-nvidia", allow_module_level=True)
triton = pytest.importorskip("triton")

import kernel_cases as cases
from grpo_fused.kernels import configs, head_configs, head_launch
from grpo_fused.kernels.candidates import pair_products
from grpo_fused.kernels.launch import TritonRows
from grpo_fused.kernels.row_types import (
    Coefficients,
    Extras,
    ObjectiveNumbers,
    Rows,
    Statistics,
    TokenInputs,
    Transform,
)

from tests.ptx import mutations
from tests.ptx.block import Options
from tests.ptx.driver import Driver, driver_of
from tests.ptx.text import PtxError

WAYS = (
    Options(races=True),
    Options(together=False, backwards=True, races=True),
    Options(together=False, late=False),
)
"""Ways to run a kernel without one of its barriers; those after the first only if no way before has noticed."""


def head_problems(dtype, name, N=None):
    """Four panels of tokens of which one program takes two; several tiles; confident tokens. More k steps than stages,
    and for Blackwell, whose kernels have a way of their own for it, a single one."""
    panels, widths, V = (200, (128, 32), 70) if dtype == cases.FP32 else (385, (200,), 600)
    if dtype != cases.FP32 and configs.architecture(torch.device("cpu")) == "sm_100":
        widths, V = (200, 56), 300
    for H in widths:
        hidden, weight, targets, coefficients = cases.head_of(N or panels, H, V, dtype)
        hidden[::2] *= 20
        yield hidden, weight, targets, coefficients, cases.transform_of(name, N or panels, V)


def head_scores(dtype, name, store):
    results = []
    for hidden, weight, _, _, transform in head_problems(dtype, name):
        config = head_configs.head_config(weight, transform)._replace(persistent=True)
        room = head_launch.Exponentials.empty(len(hidden), weight, dtype, config) if store else None
        if room is not None:
            room.values.zero_()
            room.offsets.zero_()
        parts = [torch.zeros(1, len(hidden)) for _ in range(3)]
        head_launch._launch(
            config, hidden, weight, Extras(), None if room is None else room.values, transform,
            MODE=head_launch.SCORE.value if room is None else head_launch.EXPONENTIALS.value,
            max_ptr=parts[0], rest_ptr=parts[1], moment_ptr=parts[2], offset_ptr=None if room is None else room.offsets,
            WITH_ENTROPY=True,
        )  # fmt: skip
        results += [*parts, *([] if room is None else [room.values, room.offsets])]
    return results


def head_gradient(dtype, name):
    results = []
    for hidden, weight, targets, (dlogp, dentropy), transform in head_problems(dtype, name):
        config = head_configs.head_config(weight, transform, gradient=True)._replace(persistent=True)
        exact = cases.Exact(hidden.double() @ weight.double().T, targets, transform).statistics
        stats = Statistics(*(x.detach().float() for x in exact))
        V = len(weight)
        results.append(torch.zeros(len(hidden), configs.padded(V), dtype=dtype)[:, :V])
        head_launch.head_dlogits(
            hidden, weight, targets, Coefficients(stats, dlogp, dentropy), transform, results[-1], config=config
        )
    return results


def finish(dtype):
    results = []
    for hidden, weight, targets, _, transform in head_problems(dtype, "plain", N=5):
        results += head_launch.head_scores(hidden, weight, targets, transform, with_entropy=True)
    return results


def row_problem():
    V = 4500
    width, g = configs.padded(V), torch.Generator().manual_seed(0)
    logits, targets = 4 * torch.randn(2, width, generator=g), torch.randint(0, V, (2,), generator=g)
    logits[0] *= 10  # a confident token
    return Rows(logits[:, :V], targets, cases.transform_of("bias+scale", 2, V))


def row_statistics():
    return list(TritonRows().statistics(row_problem(), with_entropy=True))


def over(rows):
    """Room for a gradient in bf16 over the fp32 logits that it comes from."""
    return rows.raw.view(torch.bfloat16).as_strided((2, rows.raw.shape[1]), (2 * rows.raw.stride(0), 1))


def row_gradient():
    rows = row_problem()
    stats = Statistics(*(x.detach().float() for x in cases.Exact(rows.raw, rows.targets, rows.transform).statistics))
    out = over(rows)
    TritonRows().gradient(rows, Coefficients(stats, torch.ones(2), torch.ones(2)), out)
    return [out.clone()]


def row_loss():
    """Statistics, objective and gradient; bf16 over the fp32 logits that it comes from."""
    rows, (advantages, old, ref, ratio) = row_problem(), torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    inputs = TokenInputs(advantages, torch.ones(2), old - 3, ref - 3, ratio.exp(), torch.tensor(0.1))
    options = ObjectiveNumbers(0, "k3", False, 0.2, 0.2, 2.0, 3.0, 1.0, 1.0, 0.1)
    out = over(rows)
    stats, loss, dlogp = TritonRows().loss(rows, inputs, options, out, with_entropy=True)
    return [*stats, loss, dlogp, out.clone()]


def row_factors():
    """More tiles than one step looks at, of which one has an offset of its own in two of the rows. Targets are among the
    entries that the last warps bring to the largest offset, where the first one writes targets."""
    V, block_v, g = 17600, 16, torch.Generator().manual_seed(0)
    values, offsets = torch.rand(3, V, generator=g).to(cases.BF16), torch.zeros(3, V // block_v)
    offsets[:2, 1090] = 5 * math.log(2.0)
    stats = Statistics(*(torch.randn(4, 3, generator=g) - 3).unbind())
    targets = torch.tensor([V - 1, V - 900, 17])
    room = head_launch.Exponentials(values, offsets, block_v)
    factor = head_launch.exponentials_factor(room, targets, Coefficients(stats, torch.ones(3), None), Transform())
    return [factor, values]


def candidate_rows():
    """Rows of two matrices, and pairs of them: of several blocks, in segments of which one has no pair."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 200, generator=g).bfloat16(), torch.randn(9, 200, generator=g).bfloat16()
    i, j = torch.randint(0, 7, (37,), generator=g), torch.randint(0, 9, (37,), generator=g)
    return a, b, i, j


def candidate_products():
    return [pair_products(*candidate_rows())]


CASES: dict[str, tuple[str, Callable[[], list[torch.Tensor]]]] = {
    "exponentials": ("head_fwd_kernel", lambda: head_scores(cases.BF16, "plain", store=True)),
    "scores": ("head_fwd_kernel", lambda: head_scores(cases.BF16, "bias+scale", store=False)),
    "dlogits": ("head_fwd_kernel", lambda: head_gradient(cases.BF16, "all")),
    "finish": ("finish_scores_fwd_kernel", lambda: finish(cases.BF16)),
    "exponentials-fp32": ("head_fwd_kernel", lambda: head_scores(cases.FP32, "plain", store=True)),
    "scores-fp32": ("head_fwd_kernel", lambda: head_scores(cases.FP32, "bias+scale", store=False)),
    "dlogits-fp32": ("head_fwd_kernel", lambda: head_gradient(cases.FP32, "all")),
    "finish-fp32": ("finish_scores_fwd_kernel", lambda: finish(cases.FP32)),
    "row-statistics": ("row_statistics_fwd_kernel", row_statistics),
    "row-gradient": ("row_gradient_bwd_kernel", row_gradient),
    "row-loss": ("row_loss_fwd_bwd_kernel", row_loss),
    "row-factors": ("exponentials_factor_kernel", row_factors),
    "candidate-products": ("pair_products_kernel", candidate_products),
}


ENOUGH = "several barriers stand between an mbarrier's initialisation and its first wait: one is enough"
COVERED = "the barrier before the first copy has ordered all; from there to the first wait one thread works alone"
ELSEWHERE = "it stands between copies to two stages, which have memory of their own"
OWN = "each warp writes next only where it alone has copied or read since the last barrier"
WAITED = "each warp waits at the mbarrier itself"
TWICE = "the barrier before the first of the two copies orders the second one too"
DRAINED = "the epilogue of the last tile has waited already"
STARTED = (
    "several barriers stand before the first copy and the first product, for the address of tensor memory, zeros in it "
    "and mbarriers: one is enough"
)
CLEARED = "several barriers stand between zeros in tensor memory and the next product: one is enough"
ENDED = "the end of an item waits, the next store, and the end of the kernel: one is enough"
EMPTY = "nothing is on its way before the first tile of an item"
READ = "each warp reads the registers of a load from tensor memory, and so waits for it, before the next barrier"
FREED = "each warp has read its part of tensor memory before the barriers of the last tile's epilogue"
ONE_IS_ENOUGH = (ENOUGH, STARTED, CLEARED, ENDED)
NONE_IS_NEEDED = (COVERED, EMPTY, READ, FREED)


def barriers(*numbers: int) -> tuple[str, ...]:
    return tuple(f"bar.sync {number}" for number in numbers)


REDUNDANT: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    **{
        (architecture, case): reasons
        for architecture in ("sm_80", "sm_90", "sm_100")
        for case, reasons in {
            "exponentials-fp32": {ELSEWHERE: ("bar.sync 7",)},
            "dlogits-fp32": {OWN: ("bar.sync 0",)},
            "finish-fp32": {ELSEWHERE: ("bar.sync 0",), OWN: ("bar.sync 5",)},
        }.items()
    },
    ("sm_90", "exponentials"): {
        ENOUGH: tuple(f"bar.sync {number}" for number in (6, 7, 8, 9, 10)),
        WAITED: ("bar.sync 14",),
        TWICE: ("bar.sync 16",),
        DRAINED: ("wgmma.wait_group 0", "bar.sync 0"),
    },
    ("sm_90", "scores"): {
        COVERED: tuple(f"bar.sync {number}" for number in (7, 8, 9, 10, 11, 12, 13)),
        WAITED: ("bar.sync 14",),
        TWICE: ("bar.sync 16",),
        DRAINED: ("wgmma.wait_group 0", "bar.sync 0"),
    },
    ("sm_90", "dlogits"): {
        ENOUGH: tuple(f"bar.sync {number}" for number in (1, 2, 3, 4, 5)),
        WAITED: ("bar.sync 6",),
        TWICE: ("bar.sync 8",),
        DRAINED: ("wgmma.wait_group 0", "bar.sync 0"),
    },
    ("sm_100", "exponentials"): {
        STARTED: barriers(1, *range(3, 13)),
        CLEARED: barriers(29, 30, 31, 34, 35, 36, 37),
        WAITED: barriers(38),
        READ: ("tcgen05.wait::ld 0", "tcgen05.wait::ld 1"),
        EMPTY: ("cp.async.bulk.wait_group.read 0", *barriers(27)),
        DRAINED: ("mbarrier.try_wait.parity.shared::cta.b64 5", "cp.async.bulk.wait_group.read 3"),
        FREED: barriers(53, 54, 55),
    },
    ("sm_100", "scores"): {
        STARTED: barriers(1, *range(3, 13)),
        CLEARED: barriers(*range(27, 34)),
        WAITED: barriers(34),
        READ: ("tcgen05.wait::ld 0", "tcgen05.wait::ld 1"),
        DRAINED: ("mbarrier.try_wait.parity.shared::cta.b64 5",),
        FREED: barriers(49),
    },
    ("sm_100", "dlogits"): {
        STARTED: barriers(1, *range(3, 13)),
        CLEARED: barriers(*range(15, 22)),
        WAITED: barriers(22),
        READ: ("tcgen05.wait::ld 0", "tcgen05.wait::ld 1"),
        EMPTY: ("cp.async.bulk.wait_group.read 0", *barriers(13)),
        ENDED: ("cp.async.bulk.wait_group.read 2", "cp.async.bulk.wait_group.read 3"),
        DRAINED: ("mbarrier.try_wait.parity.shared::cta.b64 5",),
        FREED: barriers(25, 26, 27),
    },
    ("sm_100", "finish"): {
        STARTED: barriers(1, 2),
        WAITED: barriers(4),
        READ: ("tcgen05.wait::ld 0",),
        FREED: barriers(13),
    },
}
"""(architecture, case) to the places that no run needs, by reason; as triton 3.7.1 compiles them."""
TABLE = [(architecture, case) for architecture in ("sm_80", "sm_90", "sm_100") for case in CASES]


PROGRAMS = {"head_fwd_kernel": lambda number, of: number == 0}
"""Of a head kernel only the first program runs, which takes two of the four panels."""


class Removals:
    """A kernel's places, and what runs without some of them."""

    def __init__(self, driver: Driver, case: str) -> None:
        self.driver, (self.kernel_name, self.launch) = driver, CASES[case]
        self.only = PROGRAMS.get(self.kernel_name)
        with driver.active(WAYS[0], only=self.only):
            self.want = self.launch()
            kernel = next(kernel for name, kernel in driver.launched if name == self.kernel_name)
        self.places = mutations.places(kernel)

    def noticed(self, *removed: mutations.Place) -> bool:
        """Whether a run notices that these are missing."""
        edit = mutations.without(self.kernel_name, *removed)
        for options in WAYS:
            try:
                with self.driver.active(options, only=self.only, edit=edit):
                    got = self.launch()
            except PtxError:
                return True
            if not all(torch.equal(mine, other) for mine, other in zip(got, self.want, strict=True)):
                return True
        return False

    def named(self, names: tuple[str, ...]) -> list[mutations.Place]:
        """The places of these names."""
        return [place for place in self.places if str(place).split(" (")[0] in names]


@pytest.mark.full
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the table is of triton 3.7.1")
@pytest.mark.parametrize(("architecture", "case"), TABLE)
def test_every_removal_is_noticed(architecture, case):
    """All but those of the table."""
    expected = [name for names in REDUNDANT.get((architecture, case), {}).values() for name in names]
    with cases.launched_as(lambda: architecture):
        removals = Removals(driver_of(architecture), case)
        missed = [str(place).split(" (")[0] for place in removals.places if not removals.noticed(place)]
    assert sorted(missed) == sorted(expected), f"of {len(removals.places)}"


@pytest.mark.full
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the table is of triton 3.7.1")
@pytest.mark.parametrize(("architecture", "case"), REDUNDANT)
def test_barriers_that_stand_for_each_other(architecture, case):
    """Of those of which one is enough, not all may be missing; all of those of which none is needed may be."""
    reasons = REDUNDANT[architecture, case]
    with cases.launched_as(lambda: architecture):
        removals = Removals(driver_of(architecture), case)
        for reason in ONE_IS_ENOUGH:
            assert reason not in reasons or removals.noticed(*removals.named(reasons[reason])), reason
        unneeded = [name for reason in NONE_IS_NEEDED for name in reasons.get(reason, ())]
        assert not unneeded or not removals.noticed(*removals.named(tuple(unneeded)))


SAMPLE = (("sm_80", "row-statistics"), ("sm_90", "finish"))


@pytest.mark.parametrize(("architecture", "case"), SAMPLE)
def test_a_removal_is_noticed(architecture, case):
    """One barrier and one wait of two kernels, with any version of triton."""
    with cases.launched_as(lambda: architecture):
        removals = Removals(driver_of(architecture), case)
        first = {place.opcode: place for place in reversed(removals.places) if "fence" not in place.opcode}
        for place in first.values():
            assert removals.noticed(place), place
