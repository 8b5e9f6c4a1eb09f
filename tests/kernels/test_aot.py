"""Every shipped row configuration compiles for every architecture, without a GPU, with the expected resources.

Compiling needs triton as a compiler, not as an interpreter, so this runs in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def compiled(code: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


KINDS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Architectures that differ in kind; the others take the configurations of one of these."""


def row_in_gate(variant) -> bool:
    """The kernels of a training step, and every kernel with all options, which needs the most registers."""
    return variant.arch in KINDS and (
        str(variant) in KEY_RESOURCES or ((variant.out == "bf16" or "statistics" in variant.kernel)
        and variant.options == "full")
    )  # fmt: skip


def head_in_gate(variant) -> bool:
    """Those of a training step; for each architecture one of fp32 and one of a frozen head; for Hopper the others.

    Candidates are for the tuner.
    """
    if variant.arch not in KINDS or variant.table.startswith("candidate"):
        return False
    return (
        str(variant) in KEY_RESOURCES
        or (variant.table == "fp32" and variant.mode == "score" and variant.options == "plain")
        or (variant.options == "int8-adapter" and variant.mode == "exponentials" and variant.hardest)
        or (
            variant.arch == "sm_90"
            and variant.table == "bf16"
            and variant.options == "full"
            and (variant.mode in ("finish", "pass") or (variant.mode == "dlogits" and variant.hardest))
        )
    )


COMPILE = """
import contextlib, io, json
from dataclasses import asdict
from benchmarks import aot_candidates, aot_head, aot_rows

rows = [v for v in aot_rows.variants() if str(v) in ROWS]
heads = [v for v in aot_head.variants() if str(v) in HEADS]
unsafe = aot_rows.Variant("row_gradient_bwd_kernel", "sm_90", "fp32", "plain")
if FEW:
    aot_candidates.ARCHITECTURES, aot_candidates.DTYPES = ("sm_90", "gfx942"), ("bf16",)
with contextlib.redirect_stdout(io.StringIO()):
    candidates = aot_candidates.table()
print(json.dumps({
    "rows": [{**asdict(v), **aot_rows.inspect(v)} for v in rows],
    "heads": [{**asdict(v), **aot_head.inspect(v), "wants_tma": v.config.tma} for v in heads],
    "candidates": candidates,
    "without a barrier": aot_rows.barriers_hold(aot_rows.compile_variant(unsafe, IN_PLACE=False).asm["ptx"]),
}))
"""


@pytest.fixture(scope="module")
def compilations(request) -> dict[str, Any]:
    """Everything that these tests look at, compiled by one process; all variants with --full."""
    from benchmarks import aot_head, aot_rows

    full = request.config.getoption("--full")
    rows = [str(v) for v in aot_rows.variants() if full or row_in_gate(v)]
    heads = [str(v) for v in aot_head.variants() if full or head_in_gate(v)]
    return json.loads(compiled(f"ROWS, HEADS, FEW = {rows}, {heads}, {not full}\n{COMPILE}"))


@pytest.fixture(scope="module")
def evidence(compilations) -> list[dict]:
    return compilations["rows"]


@pytest.fixture(scope="module")
def head_evidence(compilations) -> list[dict]:
    return compilations["heads"]


def test_no_spill_and_wide_loads(evidence):
    assert {row["arch"] for row in evidence} >= {*KINDS}
    assert len({row["kernel"] for row in evidence}) == 3
    for row in evidence:
        assert row["stack"] == 0, row
        assert row["widest_load_bits"] == 128, row
        assert row["registers"] <= 128, f"8 warps of more leave less than 2 programs an SM: {row}"


def test_shared_memory_within_limits(evidence):
    from benchmarks.compiled import SHARED_LIMIT

    for row in evidence:
        assert row["shared_kib"] <= SHARED_LIMIT[row["arch"]], row


def test_in_place_gradient_has_its_barrier(evidence, compilations):
    """A load, a barrier, a store, in this order, in every iteration; without the barrier the check finds the race."""
    in_place = [row for row in evidence if row["kernel"] != "row_statistics_fwd_kernel" and row["arch"] != "gfx942"]
    assert in_place
    assert all(row["barrier_before_store"] for row in in_place)
    assert not compilations["without a barrier"]


COUNT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

class Driver:
    "A test double of a GPU: warmup compiles for it and launches nothing."
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Driver())
from grpo_fused.kernels import rows
class Odd(MockTensor):
    "A slice that starts anywhere."
    @staticmethod
    def data_ptr(): return 4
f, ids = MockTensor(torch.float32), MockTensor(torch.int64)
flags = dict(HAS_BIAS=False, HAS_SOFTCAP=False, HAS_TEMPERATURES=False, BLOCK=1024, num_warps=8)

for tokens, temperature, epsilon, beta in ((1, 1.0, 0.2, 0.04), (4096, 0.7, 0.1, 0.1), (70000, 0.31, 1.0, 1.0), (17, 2.0, 0.28, 0.0)):
    row = Odd(torch.float32) if tokens % 2 else f
    stats = (row, row, row, row)
    head = (151936, 151936, temperature, 1.0, 1.0)
    rows.row_statistics_fwd_kernel.warmup(f, None, ids, None, *stats, 151936, *head, **flags, WITH_ENTROPY=True, grid=(tokens,))
    rows.row_gradient_bwd_kernel.warmup(f, f, None, ids, None, *stats, row, None, 151936, 303872, *head, **flags,
        HAS_DENTROPY=False, IN_PLACE=True, grid=(tokens,))
    rows.row_loss_fwd_bwd_kernel.warmup(f, f, None, ids, None, row, row, row, row, None, None, *stats, row, row, 151936, 303872, *head,
        epsilon, epsilon, float("inf"), float("inf"), 1.0, 1.05, beta, POLICY=0, KL=3, HAS_OLD=True, HAS_KL=True,
        BIAS_CORRECTION=True, HAS_IS_RATIO=False, **flags, WITH_ENTROPY=True, HAS_DENTROPY=False, IN_PLACE=True, grid=(tokens,))

for kernel in (rows.row_statistics_fwd_kernel, rows.row_gradient_bwd_kernel, rows.row_loss_fwd_bwd_kernel):
    print(len(kernel.device_caches[0][0]))
"""


@pytest.mark.full
def test_one_compilation_for_all_lengths_temperatures_and_options():
    """Calls with other N, temperature, epsilon, beta and alignment of slices: each kernel is compiled once."""
    assert compiled(COUNT).split() == ["1", "1", "1"]
    compiled_in = COUNT.replace("    head = ", "    flags['BLOCK'] = 512 * (1 + tokens % 2)\n    head = ")
    assert compiled(compiled_in).split() == ["2", "2", "2"], "the count must include compiled-in arguments"


def test_head_kernel_fits(head_evidence):
    from benchmarks.compiled import SHARED_LIMIT

    assert {(row["arch"], row["table"]) for row in head_evidence} >= {
        (arch, table) for arch in KINDS for table in ("bf16", "fp32", "extras")
    }
    for row in head_evidence:
        assert row["stack"] == 0, row
        assert row["shared_kib"] <= SHARED_LIMIT[row["arch"]], row


def test_stores_are_wide_at_any_vocabulary_size(head_evidence):
    """Nothing is known of V here: 50257 is odd. A store of its own for each element touches 7.6 x the sectors."""
    stored = [row for row in head_evidence if row["mode"] in ("exponentials", "dlogits", "pass")]
    assert {row["arch"] for row in stored if row["mode"] == "exponentials"} >= {*KINDS}
    assert not [row for row in stored if row["narrow_stores"]]


def test_head_kernel_multiplies_on_tensor_cores(head_evidence):
    """wgmma on Hopper, its products not waiting for each other; tensor memory on Blackwell; descriptors on both."""
    cores = {"sm_80": "mma", "sm_86": "mma", "sm_89": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
    for row in head_evidence:
        assert not row["serialized"], row
        if row["mode"] == "pass":
            continue
        fp32 = row["table"].startswith("fp32") and row["arch"] != "gfx942"
        known = {"fma"} if fp32 else {cores[row["arch"]]}
        assert row["tensor_cores"] in known, row
        if row["mode"] == "finish":  # gathers rows of the weight
            continue
        assert row["tma"] == row["wants_tma"], row


def test_instructions_of_a_logit(head_evidence):
    """The epilogue of the plain kernel on Hopper, with entropy; masks are for the last tile only."""
    known = {"score": 9.2, "exponentials": 11.3, "dlogits": 15.7}
    found = {row["mode"]: row["instructions"] for row in head_evidence
             if (row["arch"], row["table"], row["options"], row["even"]) == ("sm_90", "bf16", "plain", True)}  # fmt: skip
    assert found.keys() >= {"score", "exponentials"}
    for mode, instructions in found.items():
        if mode in known:
            assert instructions == pytest.approx(known[mode], abs=0.3)


LOOP = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR28], R24 WAITS;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR28], R24, gsb0 ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/              @!P1 BRA `(.L_x_3) ;
        /*0050*/                   FSEL R1, R1, R2, P1 ;
.L_x_3:
EXPONENTIALS
.L_x_2:
        /*0090*/               @P2 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
"""


def test_a_record_is_of_all_tables(monkeypatch, tmp_path):
    from benchmarks import aot

    monkeypatch.setattr(aot, "record_all", lambda out: pytest.fail("compiled"))
    with pytest.raises(SystemExit, match="--record takes all kernels of Triton, and no tables"):
        aot.main(("cuda",), record=tmp_path / "r.json")


def test_reading_machine_code():
    """A tile's row work without the rare mask; products that wait for each other."""
    from benchmarks.sass import is_serialized, tile_instructions

    exponentials = "\n".join(f"        /*{i:04x}*/                   MUFU.EX2 R{i}, R{i} ;" for i in range(20))
    listing = LOOP.replace("EXPONENTIALS", exponentials)
    found = tile_instructions(listing.replace("WAITS", ""))
    assert +found == {"MUFU.EX2": 20, "BRA": 1}
    assert not is_serialized(listing.replace(" WAITS", " "))
    assert is_serialized(listing.replace(" WAITS", ", gsb0 "))
    assert tile_instructions(LOOP.replace("EXPONENTIALS", "")) is None


COUNT_HEAD = (
    COUNT[: COUNT.index("from grpo_fused.kernels import rows")]
    + """
from grpo_fused.kernels import head
class Odd(MockTensor):
    @staticmethod
    def data_ptr(): return 4
f, ids, b = MockTensor(torch.float32), MockTensor(torch.int64), MockTensor(torch.bfloat16)
flags = dict(HAS_BIAS=False, HAS_SOFTCAP=False, HAS_TEMPERATURES=False, num_warps=8, UPCAST=False)

for tokens, temperature in ((1, 1.0), (4096, 0.7), (70000, 0.31), (17, 2.0)):
    row = Odd(torch.float32) if tokens % 2 else f
    if tokens == 17 and CONTROL: flags["num_warps"] = 4
    panels, numbers = -(-tokens // 128), (temperature, 1.0, 1.0)
    for mode in (0, 1, 2):
        head.head_fwd_kernel.warmup(b, b, b if mode else None, None, None, None, None, ids, None, row, row, row, row, row, None,
            f if mode == 1 else None, f, f, f, None if mode == 2 else ids, 896, 896, 0, 151936, tokens, 151936, 896, 0, panels, 73, 119, 10, 1187, *numbers,
            MODE=mode, FP8=False, MORE_STEPS=0, HAS_ROW_SCALE=False, WITH_ENTROPY=True, E_SCALE=1.0,
            HAS_DENTROPY=False, HAS_ROW_OFFSETS=mode == 1, TMA=False, EVEN_K=True, BLOCK_N=128, BLOCK_V=64,
            BLOCK_K=64, num_stages=3, grid=(panels * 119,), **flags)
    head.finish_scores_fwd_kernel.warmup(b, b, None, None, None, ids, None, f, f, f, row, row, row, row, 896, 896, 0, tokens,
        151936, 896, 0, 119, *numbers, FP8=False, MORE_STEPS=0, HAS_ROW_SCALE=False, WITH_ENTROPY=True, EVEN_K=True,
        BLOCK_N=64, BLOCK_K=64, grid=(panels,), **flags)
    flags_pass = {k: v for k, v in flags.items() if k not in ("HAS_BIAS", "HAS_SOFTCAP", "UPCAST")}
    head.exponentials_bwd_kernel.warmup(b, f, ids, None, row, row, row, row, row, None, 151936, 151936, 1187, temperature, 1.0,
        HAS_DENTROPY=False, E_SCALE=1.0, TILES=32, BLOCK_V=128, grid=(tokens,), **flags_pass)
for kernel in (head.head_fwd_kernel, head.finish_scores_fwd_kernel, head.exponentials_bwd_kernel):
    print(len(kernel.device_caches[0][0]))
"""
)


@pytest.mark.full
def test_head_kernel_compiles_once_for_all_lengths_and_temperatures():
    """Once for each of the three modes."""
    assert compiled("CONTROL = False\n" + COUNT_HEAD).split() == ["3", "1", "1"]
    assert compiled("CONTROL = True\n" + COUNT_HEAD).split() == ["6", "2", "2"], (
        "the count must include compiled-in arguments"
    )


KEY_RESOURCES = {
    "row_loss_fwd_bwd_kernel-sm_80-bf16-full": (80, 1),
    "row_loss_fwd_bwd_kernel-sm_90-bf16-plain": (40, 1),
    "row_loss_fwd_bwd_kernel-sm_90-bf16-full": (80, 1),
    "row_loss_fwd_bwd_kernel-sm_100-bf16-full": (80, 1),
    "row_loss_fwd_bwd_kernel-gfx942-bf16-full": (64, 1),
    "sm_80-bf16-score-plain-odd": (255, 66),
    "sm_80-bf16-exponentials-plain-odd": (255, 96),
    "sm_90-bf16-score-plain-even": (192, 193),
    "sm_90-bf16-exponentials-plain-even": (255, 209),
    "sm_90-bf16-score-full-even": (232, 129),
    "sm_100-bf16-score-plain-even": (160, 130),
    "sm_100-bf16-exponentials-plain-even": (176, 194),
    "gfx942-bf16-score-plain-odd": (192, 34),
    "gfx942-bf16-exponentials-plain-odd": (200, 34),
}
"""Registers of a thread and KiB of shared memory that the kernels of a training step may take: those of triton 3.7.1
(`python -m benchmarks.aot`), registers rounded up to multiples of eight, as they are allocated. More is a regression:
fewer programs fit a multiprocessor; lower the number when it falls. Tiles of sm_80, and those of sm_90 with all options,
are as large as one program a multiprocessor allows."""


def test_key_kernels_take_no_more_than_before(evidence, head_evidence):
    import triton

    from benchmarks import aot_head, aot_rows

    if triton.__version__ != "3.7.1":
        pytest.skip(f"expectations are those of triton 3.7.1; this is {triton.__version__}")
    found = {}
    for module, rows in ((aot_rows, evidence), (aot_head, head_evidence)):
        for row in rows:
            fields = {name: row[name] for name in module.Variant.__dataclass_fields__}
            found[str(module.Variant(**fields))] = row["registers"], row["shared_kib"]
    assert KEY_RESOURCES.keys() <= found.keys()
    grown = {
        name: (found[name], most)
        for name, most in KEY_RESOURCES.items()
        if found[name][0] > most[0] or found[name][1] > most[1]
    }
    assert not grown, "kernel: (registers, KiB) now, and at most"


def test_kernels_of_candidate_sets_do_not_spill(compilations, request):
    """All architectures and dtypes with --full."""
    assert len(compilations["candidates"]) == (24 if request.config.getoption("--full") else 6)
    for row in compilations["candidates"]:
        assert row["stack"] == 0, row
        assert row["registers"] <= 128, row
