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
from grpo_fused.kernels.row_types import Coefficients, ObjectiveNumbers, Rows, Statistics, TokenInputs, Transform

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


def head_problem(dtype, name, N=None):
    """Four panels of tokens of which one program takes two; more k steps than stages; several tiles; confident tokens."""
    panels, H, V = (200, 104, 70) if dtype == cases.FP32 else (385, 200, 600)
    N = N or panels
    hidden, weight, targets, coefficients = cases.head_of(N, H, V, dtype)
    hidden[::2] *= 20
    transform = cases.transform_of(name, N, V)
    return hidden, weight, targets, coefficients, transform


def head_scores(dtype, name, store):
    hidden, weight, _, _, transform = head_problem(dtype, name)
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
    V = len(weight)
    out = torch.zeros(len(hidden), configs.padded(V), dtype=dtype)[:, :V]
    head_launch.head_dlogits(
        hidden, weight, targets, Coefficients(stats, dlogp, dentropy), transform, out, config=config
    )
    return [out]


def finish(dtype):
    hidden, weight, targets, _, transform = head_problem(dtype, "plain", N=5)
    return list(head_launch.head_scores(hidden, weight, targets, transform, with_entropy=True))


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
WAITED = "each warp has waited at the mbarrier itself"
TWICE = "the barrier before the first of the two copies orders the second one too"
DRAINED = "the epilogue of the last tile has waited already"
REDUNDANT: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    **{
        (architecture, case): reasons
        for architecture in ("sm_80", "sm_90")
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
        DRAINED: ("cp.async.bulk.wait_group.read 0", "bar.sync 0", "wgmma.wait_group 0"),
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
        DRAINED: ("cp.async.bulk.wait_group.read 0", "bar.sync 0", "wgmma.wait_group 0"),
    },
}
"""(architecture, case) to the places that no run needs, by reason; as triton 3.7.1 compiles them."""
TABLE = [(architecture, case) for architecture in ("sm_80", "sm_90") for case in CASES]
TABLE += [("sm_100", case) for case in CASES if CASES[case][0] not in ("head_fwd_kernel", "finish_scores_fwd_kernel")]


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
    with cases.launched_as(lambda: architecture, in_place=True):
        removals = Removals(driver_of(architecture), case)
        missed = [str(place).split(" (")[0] for place in removals.places if not removals.noticed(place)]
    assert sorted(missed) == sorted(expected), f"of {len(removals.places)}"


@pytest.mark.full
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the table is of triton 3.7.1")
@pytest.mark.parametrize("case", [case for (_, case), reasons in REDUNDANT.items() if ENOUGH in reasons])
def test_barriers_that_stand_for_each_other(case):
    """Of those of which one is enough, not all may be missing."""
    with cases.launched_as(lambda: "sm_90", in_place=True):
        removals = Removals(driver_of("sm_90"), case)
        together = removals.named(REDUNDANT["sm_90", case][ENOUGH])
        assert len(together) > 1
        assert removals.noticed(*together)


@pytest.mark.full
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the table is of triton 3.7.1")
def test_barriers_that_another_one_covers():
    """Those of which none is needed may all be missing."""
    with cases.launched_as(lambda: "sm_90", in_place=True):
        removals = Removals(driver_of("sm_90"), "scores")
        together = removals.named(REDUNDANT["sm_90", "scores"][COVERED])
        assert len(together) == 7
        assert not removals.noticed(*together)


SAMPLE = (("sm_80", "row-statistics"), ("sm_90", "finish"))


@pytest.mark.parametrize(("architecture", "case"), SAMPLE)
def test_a_removal_is_noticed(architecture, case):
    """One barrier and one wait of two kernels, with any version of triton."""
    with cases.launched_as(lambda: architecture, in_place=True):
        removals = Removals(driver_of(architecture), case)
        first = {place.opcode: place for place in reversed(removals.places) if "fence" not in place.opcode}
        for place in first.values():
            assert removals.noticed(place), place
