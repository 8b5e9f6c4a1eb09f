"""Our Triton kernels as machine code of an MI300 (gfx942), run in tinygrad's emulator, against float64 (make emulate).

Compiled code, its register layouts and its barriers are what a GPU would run; time and the order of memory accesses
between waves are not.
"""

from __future__ import annotations

import os

import pytest
from helpers import config_id

if os.environ.get("TRITON_INTERPRET") != "0":
    pytest.skip("needs TRITON_INTERPRET=0: see make emulate", allow_module_level=True)
triton = pytest.importorskip("triton")
emu = pytest.importorskip("test.mockgpu.amd.emu", reason="needs a checkout of tinygrad: see make emulate")

import kernel_cases as cases
from with_emulator import instructions
from with_emulator.driver import WAVE, Driver


@pytest.fixture(autouse=True, scope="module")
def _mi300():
    """CPU tensors take the kernels, and their launch configurations, of an MI300."""
    instructions.install()
    triton.runtime.driver.set_active(Driver())
    with cases.launched_as(lambda: "gfx942"):
        yield


@pytest.mark.parametrize(("dtype", "name"), cases.HEADS, ids=str)
def test_head(dtype, name):
    cases.head(dtype, name)


@pytest.mark.parametrize(("dtype", "form"), [case for case in cases.FROZEN if "int8" not in case[1]], ids=str)
def test_frozen_heads(dtype, form):
    """Not int8, which takes 16-bit shifts of bytes within a register (SDWA) that the emulator does not have."""
    cases.frozen_head(dtype, form)


def test_panels_and_splits():
    cases.panels_and_splits()


def test_barriers(monkeypatch):
    """Between barriers the emulator runs wave after wave: in the opposite order every result is the same."""
    forwards = cases.results_of_all()
    start = emu._init_wave
    monkeypatch.setattr(
        emu, "_init_wave", lambda code, first, threads, *rest: start(code, threads - WAVE - first, threads, *rest)
    )
    cases.assert_all_equal(forwards, cases.results_of_all())


@pytest.mark.parametrize("name", ["plain", "temperature", "all"])
@pytest.mark.parametrize(("dtype", "out_dtype"), cases.ROWS, ids=str)
@pytest.mark.parametrize("vocab_size", [37, 1031, 4500])
def test_rows(vocab_size, dtype, out_dtype, name):
    cases.rows(vocab_size, dtype, out_dtype, name)


@pytest.mark.parametrize("config", cases.CONFIGS, ids=config_id)
def test_loss_in_the_row_kernel(config):
    cases.loss_in_the_row_kernel(config)


def test_loss_of_a_large_vocabulary():
    cases.loss_of_a_large_vocabulary()


@pytest.mark.parametrize("sets", [False, True], ids=["whole", "candidates"])
@pytest.mark.parametrize("config", [cases.CONFIGS[1], cases.CONFIGS[-1]], ids=config_id)
def test_loss_in_the_head_kernel(config, sets):
    cases.loss_in_the_head_kernel(config, sets)


def test_odd_width():
    cases.head(cases.BF16, "temperatures", 5, 81, 131)


@pytest.mark.parametrize("engine", ["chunked", "triton"])
@pytest.mark.parametrize("config", cases.CONFIGS[:2], ids=config_id)
def test_masked_rows(config, engine):
    cases.masked_rows(config, engine)


@pytest.mark.parametrize("width", [200, 77])
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP16, cases.FP32], ids=str)
def test_candidate_kernels(dtype, width):
    cases.candidate_kernels(dtype, width)
