"""Our Triton kernels as PTX of NVIDIA GPUs, interpreted on the CPU, against float64 (make emulate-nvidia).

The gate runs a sample of it (tests/kernels/test_ptx_sample.py). Every access of shared memory is checked for races, and
every global address for the tensor that it belongs to.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers import config_id

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs TRITON_INTERPRET=0: see make emulate-nvidia", allow_module_level=True)
pytest.importorskip("triton")

import kernel_cases as cases
from grpo_fused.kernels import head_configs, head_launch
from grpo_fused.kernels.launch import TritonRows
from grpo_fused.kernels.row_types import Rows, Transform

from tests.ptx import numbers
from tests.ptx.block import Options
from tests.ptx.driver import driver_of

ARCHITECTURES = ("sm_80", "sm_90", pytest.param("sm_100", marks=pytest.mark.full))
IN_STEP = Options(races=True)
ORDERS = {
    "forwards-late": Options(together=False, races=True),
    "backwards-late": Options(together=False, backwards=True, races=True),
    "forwards-early": Options(together=False, late=False),
    "backwards-early": Options(together=False, backwards=True, late=False),
}
"""Warps one after another between barriers, and asynchronous operations at their waits or at once."""


@pytest.fixture(params=ARCHITECTURES)
def driver(request):
    """CPU tensors take the kernels, and their launch configurations, of an NVIDIA GPU."""
    driver = driver_of(request.param)
    with cases.launched_as(lambda: request.param), driver.active(IN_STEP):
        yield driver


HEAD_SAMPLE = (("sm_90", cases.BF16, "bias+scale"),)


@pytest.mark.gate(keep=lambda driver, dtype, name: (driver, dtype, name) in HEAD_SAMPLE)
@pytest.mark.parametrize(("dtype", "name"), cases.HEADS, ids=str)
def test_head(driver, dtype, name):
    cases.head(dtype, name)


FROZEN_SAMPLE = (("sm_80", "fp8"), ("sm_90", "int8-adapter"))


@pytest.mark.gate(keep=lambda driver, dtype, form: (driver, form) in FROZEN_SAMPLE)
@pytest.mark.parametrize(("dtype", "form"), cases.FROZEN, ids=str)
def test_frozen_heads(driver, dtype, form):
    cases.frozen_head(dtype, form)


ERRORS = {"up": numbers.up, "down": numbers.down, "either": numbers.either}
LAUNCHES = {
    "head-bf16": lambda: cases.head(cases.BF16, "all"),
    "head-fp32": lambda: cases.head(cases.FP32, "all"),
    "rows": lambda: cases.rows(1031, cases.FP32, cases.FP32, "all"),
    "loss-rows": lambda: [cases.loss_in_the_row_kernel(config) for config in cases.CONFIGS],
    "loss-head": lambda: cases.loss_in_the_head_kernel(cases.CONFIGS[1], sets=True),
}


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_errors_of_approximate_functions(driver, launch, error):
    """Each result of ex2, lg2, div and others at its bound: all above, all below, or some above and some below."""
    with driver.active(IN_STEP._replace(error=ERRORS[error])):
        LAUNCHES[launch]()


@pytest.mark.gate(keep=lambda driver: driver == "sm_90")
def test_larger_errors_are_noticed(driver):
    """Forty times the bounds of the manual."""
    too_far = IN_STEP._replace(error=lambda *arguments: 40 * numbers.up(*arguments))
    with driver.active(too_far), pytest.raises(AssertionError, match="not close"):
        LAUNCHES["rows"]()


@pytest.mark.gate(keep=lambda driver: driver == "sm_90")
def test_loss_of_a_token_outside_of_the_vocabulary(driver):
    cases.loss_of_a_token_outside_of_the_vocabulary()


def test_blackwell():
    """What a step of training takes of sm_100; the gate has no more of it."""
    with cases.launched_as(lambda: "sm_100"), driver_of("sm_100").active(IN_STEP):
        cases.training(cases.BF16)


SIZES = [(1, 8, 1), (3, 16, 33), (129, 72, 257), (5, 81, 131), (64, 256, 640)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_of_heads(driver, size, dtype):
    """One token and one word; more than a panel and a tile by one; an odd width; even sizes."""
    cases.head(dtype, "temperatures", *size)


@pytest.mark.full
def test_panels_and_splits(driver):
    cases.panels_and_splits(V=600)


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP32], ids=str)
def test_order_of_warps(driver, dtype, order):
    """Whatever order the warps run in, and whenever asynchronous operations happen: the same bits."""
    in_step = cases.results_of_all(dtype)
    with driver.active(ORDERS[order]):
        cases.assert_all_equal(in_step, cases.results_of_all(dtype))


ROW_SAMPLE = ((1031, "plain", cases.FP32, cases.BF16), (4500, "all", cases.BF16, cases.BF16))


@pytest.mark.gate(
    keep=lambda driver, vocab_size, dtype, out_dtype, name: (vocab_size, name, dtype, out_dtype) in ROW_SAMPLE
)
@pytest.mark.parametrize("name", ["plain", "temperature", "all"])
@pytest.mark.parametrize(("dtype", "out_dtype"), cases.ROWS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 37, 1031, 4500])
def test_rows(driver, vocab_size, dtype, out_dtype, name):
    cases.rows(vocab_size, dtype, out_dtype, name)


def test_a_kernel_that_is_not_in_tritons_cache(tmp_path, monkeypatch):
    """The other tests may take theirs from the cache, and pass though nothing compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with cases.launched_as(lambda: "sm_90"), driver_of("sm_90").active(IN_STEP):
        cases.rows(37, cases.FP16, cases.FP16, "temperature")
    assert any(tmp_path.rglob("*.ptx"))


@pytest.mark.gate(keep=lambda driver, config: config is cases.CONFIGS[1])
@pytest.mark.parametrize("config", cases.CONFIGS, ids=config_id)
def test_loss_in_the_row_kernel(driver, config):
    cases.loss_in_the_row_kernel(config)


@pytest.mark.full
def test_loss_of_a_large_vocabulary(driver):
    cases.loss_of_a_large_vocabulary()


@pytest.mark.full
@pytest.mark.parametrize("sets", [False, True], ids=["whole", "candidates"])
@pytest.mark.parametrize("config", [cases.CONFIGS[1], cases.CONFIGS[-1]], ids=config_id)
def test_loss_in_the_head_kernel(driver, config, sets):
    cases.loss_in_the_head_kernel(config, sets)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["chunked", "triton"])
@pytest.mark.parametrize("config", cases.CONFIGS[:2], ids=config_id)
def test_masked_rows(driver, config, engine):
    cases.masked_rows(config, engine)


@pytest.mark.gate(keep=lambda driver, count: (driver, count) == ("sm_90", 128))
@pytest.mark.parametrize("count", [0, 128, 150])
def test_first_rows(driver, count):
    cases.first_rows(count)


@pytest.mark.gate(keep=lambda driver, dtype, factor: (driver, dtype, factor) == ("sm_90", cases.BF16, 0.3))
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32], ids=str)
def test_scaling(driver, dtype, factor):
    cases.scaling(dtype, torch.tensor(factor), 9001)


@pytest.mark.gate(keep=lambda driver, dtype, width: dtype == cases.BF16 and width == 200)
@pytest.mark.parametrize("width", [200, 77])
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32], ids=str)
def test_candidate_kernels(driver, dtype, width):
    cases.candidate_kernels(dtype, width)


@pytest.mark.full
def test_no_tf32(driver):
    """Products of fp32 are not made on tensor cores."""
    cases.head(cases.FP32, "plain", 3, 16, 33)
    opcodes = {i.opcode for _, kernel in driver.launched for i in kernel.instructions}
    assert any(opcode.startswith("fma.rn") for opcode in opcodes)
    assert not [opcode for opcode in opcodes if "mma" in opcode]


@pytest.mark.gate(keep=lambda driver: driver == "sm_90")
def test_rows_beyond_two_to_the_31(driver):
    """The last row of logits whose number of elements no 32-bit integer holds; the others are never touched."""
    V = 2**20
    logits = torch.empty(2**11 + 3, V, dtype=torch.bfloat16)  # address space; pages appear where they are written
    g = torch.Generator().manual_seed(0)
    logits[-1] = torch.randn(V, generator=g)
    targets = torch.zeros(len(logits), dtype=torch.int64)
    rows = Rows(logits[-1:], targets[-1:], Transform())
    exact = cases.Exact(rows.raw, rows.targets, rows.transform)
    with driver.active(Options(), only=lambda number, of: number == of - 1):
        found = TritonRows().statistics(Rows(logits, targets, Transform()), with_entropy=True)
    exact.assert_close([None if x is None else x[-1:] for x in found])


@pytest.mark.full
def test_exponentials_beyond_two_to_the_31(driver):
    """The last panel of tokens and split of a head whose N V is above 2^31 writes its exponentials where they belong."""
    H, V, N = 16, 2**18, 2**13 + 5
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g).bfloat16(), torch.zeros(V, H, dtype=torch.bfloat16)
    weight[-1024:] = torch.randn(1024, H, generator=g)
    config = head_configs.head_config(weight, Transform())
    room = head_launch.Exponentials.empty(N, weight, torch.bfloat16, config)
    _, tiles = config.splits(V, H)
    last = tiles * config.block_v
    weight[-last:] = torch.randn(last, H, generator=g)
    room.values[-5:, -last:] = torch.nan
    with driver.active(Options(), only=lambda number, of: number == of - 1):
        head_launch.head_scores(hidden, weight, torch.zeros(N, dtype=torch.int64), Transform(), with_entropy=False, exponentials=room)  # fmt: skip
    z = (hidden[-5:].float() @ weight[-last:].float().T).unflatten(1, (tiles, config.block_v))
    offsets = room.offsets[-5:, -tiles:]
    assert offsets.eq(offsets[:, :1]).all()
    want = (z - offsets.unsqueeze(2)).exp().flatten(1)
    torch.testing.assert_close(room.values[-5:, -last:].float(), want, rtol=2**-7, atol=1e-6)
