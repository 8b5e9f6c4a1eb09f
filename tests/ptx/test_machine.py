"""What a block does: memory and its bounds, poison, branches, exchanges, barriers, errors with their source line."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.block import Options
from tests.ptx.profile import Profile
from tests.ptx.running import run_ptx
from tests.ptx.text import PtxError

U32, F32 = np.uint32, np.float32
PLACE = "add.s64 %rd51, %rd0, %rd50;\n"
"""%rd51: where a lane's number of array 0 is"""
LANES = np.arange(32, dtype=U32)


def outcome(body, threads=32, **settings):
    """%r1 of each lane after the body."""
    out = np.zeros(threads, U32)
    run_ptx(PLACE + body + "\nst.global.b32 [%rd51], %r1;", out, threads=threads, **settings)
    return out


def test_an_unknown_instruction_names_its_line():
    with pytest.raises(PtxError, match=r"unknown instruction: frob\.s32 %r1, %r2 .*kernel\.py:12:3"):
        run_ptx(".loc 1 12 3\nfrob.s32 %r1, %r2;")
    for form in ("add.rp.f32 %r1, %r1, %r1", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r1}, {%r1}, {%r1}",
                 "ld.local.b32 %r1, [%rd1]", "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r1"):  # fmt: skip
        with pytest.raises(PtxError, match="unknown instruction"):
            run_ptx(form + ";")


def test_registers_that_nobody_wrote():
    with pytest.raises(PtxError, match=r"%r7 was never written\n  at add\.s32.*kernel\.py:5:1"):
        run_ptx(".loc 1 5 1\nadd.s32 %r1, %r7, 1;")
    got = outcome("setp.lt.u32 %p1, %r0, 4;\n@%p1 mov.b32 %r1, 3;")
    assert list(got[:4]) == [3] * 4
    assert np.isnan(got[4:].view(F32)).all(), "lanes that did not write it"


def test_memory_that_nobody_wrote_is_nan():
    assert np.isnan(outcome("shl.b32 %r2, %r0, 2;\nld.shared.b32 %r1, [%r2];").view(F32)).all()


def test_bounds():
    out = np.zeros(32, U32)
    for width, offset in (("b32", 128), ("b32", -4), ("v4.b32", 16)):
        registers = "{%r1, %r2, %r3, %r4}" if "v4" in width else "%r1"
        scale = 16 if "v4" in width else 4
        with pytest.raises(
            PtxError, match=r"outside of global memory.*\n  at ld\.global.*rows\.py:9:2 @\[ rows\.py:40:1"
        ):
            run_ptx(f".loc 1 9 2 // rows.py:9:2 @[ rows.py:40:1 ]\nmad.wide.u32 %rd1, %r0, {scale}, %rd0;\n"
                    f"ld.global.{width} {registers}, [%rd1+{offset}];", out)  # fmt: skip
    with pytest.raises(PtxError, match="outside of shared"):
        run_ptx("shl.b32 %r2, %r0, 2;\nst.shared.b32 [%r2+1024], %r0;")
    with pytest.raises(PtxError, match="not a multiple of 8"):
        run_ptx(PLACE + "ld.global.b64 %rd3, [%rd51];", np.zeros(64, U32))
    run_ptx(PLACE + "setp.lt.u32 %p1, %r0, 8;\n@%p1 ld.global.b32 %r1, [%rd51+96];", out)


def test_vectors_and_two_ranges():
    source, out = np.arange(128, dtype=U32), np.zeros(128, U32)
    run_ptx("mad.wide.u32 %rd3, %r0, 16, %rd0;\nmad.wide.u32 %rd4, %r0, 16, %rd1;\nld.global.v4.b32 {%r1, %r2, %r3, %r4}, "
            "[%rd3];\nst.global.v4.b32 [%rd4], {%r4, %r3, %r2, %r1};", source, out)  # fmt: skip
    assert (out.reshape(32, 4) == source.reshape(32, 4)[:, ::-1]).all()
    other, out = np.arange(32, dtype=U32) + 1000, np.zeros(32, U32)
    run_ptx("setp.lt.u32 %p1, %r0, 16;\nselp.b64 %rd3, %rd0, %rd1, %p1;\nadd.s64 %rd3, %rd3, %rd50;\n"
            "ld.global.b32 %r1, [%rd3];\nadd.s64 %rd4, %rd2, %rd50;\nst.global.b32 [%rd4], %r1;", source, other, out)  # fmt: skip
    assert list(out) == [*range(16), *range(1016, 1032)]


def test_packing():
    got = outcome("mov.b32 {%rs1, %rs2}, %r0;\nadd.s16 %rs1, %rs1, 5;\nmov.b32 %r1, {%rs2, %rs1};")
    assert (got == (LANES + 5) << 16).all()
    got = outcome("mov.b64 %rd3, {%r0, 7};\nmov.b64 {%r2, %r3}, %rd3;\nadd.s32 %r1, %r2, %r3;")
    assert (got == LANES + 7).all()
    got = outcome(
        "mul.lo.s32 %r2, %r0, 0x01020408;\nmov.b32 {%rs1, %rs2, %rs3, %rs4}, %r2;\nmov.b32 %r1, {%rs2, %rs4};"
    )
    assert (got == LANES * 4 + (LANES << 16)).all()
    with pytest.raises(PtxError, match="b32 does not have 3 parts"):
        outcome("mov.b32 {%rs1, %rs2, %rs3}, %r0;")


def test_lanes_part_and_meet():
    """A loop that each lane leaves at its own time, with an if inside."""
    got = outcome("""
        mov.b32 %r1, 0;
        mov.b32 %r2, 0;
        $L_loop:
        setp.ge.u32 %p1, %r2, %r0;
        @%p1 bra $L_end;
        and.b32 %r3, %r2, 1;
        setp.eq.b32 %p2, %r3, 0;
        @%p2 bra $L_even;
        add.s32 %r1, %r1, 100;
        bra.uni $L_next;
        $L_even:
        add.s32 %r1, %r1, 1;
        $L_next:
        add.s32 %r2, %r2, 1;
        bra.uni $L_loop;
        $L_end:
        bar.sync 0;
    """)
    assert list(got) == [sum(100 if i & 1 else 1 for i in range(n)) for n in range(32)]


def test_names_belong_to_their_scope():
    got = outcome("""
        mov.b32 %r1, 0;
        { .reg .b32 t; mov.b32 t, 5; bra NEXT; mov.b32 t, 6; NEXT: add.s32 %r1, %r1, t; }
        { .reg .b32 t; mov.b32 t, 7; bra NEXT; mov.b32 t, 8; NEXT: add.s32 %r1, %r1, t; }
    """)
    assert (got == 12).all()


@pytest.mark.parametrize(
    ("mode", "by", "clamp"), [("bfly", 5, 31), ("idx", 3, 31), ("down", 4, 31), ("up", 2, 0), ("down", 1, 0x181F)]
)
def test_shuffles(mode, by, clamp):
    got = outcome(
        f"shfl.sync.{mode}.b32 %r2|%p1, %r0, {by}, {clamp}, -1;\nselp.b32 %r3, 100, 0, %p1;\nadd.s32 %r1, %r2, %r3;"
    )
    segment = clamp >> 8 & 31
    for lane in range(32):
        top = (lane & segment) | (clamp & 31 & ~segment)
        source = {"bfly": lane ^ by, "idx": by, "down": lane + by, "up": lane - by}[mode]
        inside = source >= top if mode == "up" else source <= top
        assert got[lane] == (source + 100 if inside else lane)


def test_members_of_exchanges():
    with pytest.raises(PtxError, match="does not take part"):
        run_ptx("setp.lt.u32 %p1, %r0, 16;\n@%p1 shfl.sync.down.b32 %r1, %r0, 4, 31, -1;")
    with pytest.raises(PtxError, match="member mask"):
        run_ptx("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 65535;")
    assert (outcome("redux.sync.max.s32 %r1, %r0, -1;") == 31).all()
    assert list(outcome("elect.sync %r2|%p1, -1;\nselp.b32 %r1, 1, 0, %p1;")) == [1] + [0] * 31
    out = np.zeros(32, F32)
    run_ptx(PLACE + "cvt.rn.f32.u32 %r1, %r0;\nredux.sync.max.NaN.f32 %r2, %r1, -1;\nst.global.b32 [%rd51], %r2;", out)
    assert (out == 31).all()


def test_extremes_of_a_warp():
    """NaN is left out without `.NaN`, signs with `.abs`; integers have signs by their type."""
    x = np.arange(32, dtype=F32) - 20
    x[7] = np.nan
    want = {"min": -20, "max": 11, "min.abs": 0, "max.abs": 20, "max.NaN": np.nan, "min.abs.NaN": np.nan}
    for name, value in want.items():
        out = np.zeros(32, F32)
        run_ptx(PLACE + f"add.s64 %rd3, %rd1, %rd50;\nld.global.b32 %r1, [%rd3];\nredux.sync.{name}.f32 %r2, %r1, -1;\n"
                "st.global.b32 [%rd51], %r2;", out, x)  # fmt: skip
        assert np.array_equal(out, np.full(32, value, F32), equal_nan=True), name
    for name, value in {"min.s32": -20, "max.s32": 11, "min.u32": 0, "max.u32": -1, "add.s32": -144}.items():
        got = outcome(f"sub.s32 %r2, %r0, 20;\nredux.sync.{name} %r1, %r2, -1;")
        assert (got.view(np.int32) == value).all(), name


EXCHANGE = """
    shl.b32 %r2, %r0, 2;
    st.shared.b32 [%r2], %r0;
    {barrier}
    xor.b32 %r3, %r2, {distance};
    ld.shared.b32 %r1, [%r3];
"""


def test_barriers():
    """Neighbouring warps exchange numbers; without the barrier it is an error, and wrong where warps take turns."""
    turns = Options(together=False)
    good = EXCHANGE.format(barrier="bar.sync 0;", distance=128)
    for options in (Options(races=True), turns, Options(together=False, backwards=True, races=True)):
        assert (outcome(good, threads=128, options=options) == np.arange(128) ^ 32).all()
    bad = EXCHANGE.format(barrier="", distance=128)
    with pytest.raises(PtxError, match=r"race on shared byte 128: warp 0 reads at .* what warp 1 writes"):
        outcome(bad, threads=128, options=Options(races=True))
    assert not (outcome(bad, threads=128, options=turns) == np.arange(128) ^ 32).all()
    within = EXCHANGE.format(barrier="bar.warp.sync -1;", distance=64)
    assert (outcome(within, threads=128, options=Options(races=True)) == np.arange(128) ^ 16).all()
    again = good + "st.shared.b32 [%r2], %r1;"
    with pytest.raises(PtxError, match="race on shared byte 0: warp 0 writes at .* what warp 1 reads"):
        outcome(again, threads=128, options=Options(races=True))
    outcome(good + "bar.sync 0;\nst.shared.b32 [%r2], %r1;", threads=128, options=Options(races=True))


MEET = """
    shl.b32 %r2, %r0, 2;
    setp.lt.u32 %p1, %r0, 16;
    @%p1 bra $first;
    $meet:
    bar.warp.sync {members};
    xor.b32 %r3, %r2, 64;
    ld.shared.b32 %r1, [%r3];
    bra $end;
    $first:
    st.shared.b32 [%r2], %r0;
    st.shared.b32 [%r2+64], %r0;
    {back};
    $end:
    bar.sync 0;
"""


def test_lanes_wait_for_those_of_their_warp():
    """Half of a warp is at its barrier first, and reads what the other half has yet to write."""
    got = outcome(MEET.format(members=-1, back="bra $meet"))
    assert list(got) == 2 * list(range(16))
    with pytest.raises(PtxError, match="all warps wait"):
        outcome(MEET.format(members=-1, back="ret"))
    with pytest.raises(PtxError, match="not in the member mask"):
        outcome(MEET.format(members=0xFFFF, back="bra $meet"))
    alone = outcome(MEET.format(members=0xFFFF0000, back="mov.b32 %r1, 7"))
    assert list(alone[:16]) == 16 * [7]
    assert not (alone[16:] == np.arange(16)).any(), "they wait for nobody"
    run_ptx("setp.ge.u32 %p1, %r0, 32;\n@%p1 ret;\nbar.warp.sync -1;", threads=64)  # only the first warp


def test_writes_of_one_value():
    same = "mov.b32 %r1, 7;\nst.shared.b32 [smem], {};"
    outcome(same.format("%r1"), threads=64, options=Options(races=True))
    with pytest.raises(PtxError, match="race"):
        outcome(same.format("%r0"), threads=64, options=Options(races=True))


def test_waiting_for_ever():
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $L1;\nbar.sync 1, 64;\n$L1:\nbar.sync 2;"
    with pytest.raises(PtxError, match=r"(?s)all warps wait.*bar\.sync"):
        run_ptx(body, threads=64)
    with pytest.raises(PtxError, match="part of a warp"):
        run_ptx("setp.lt.u32 %p1, %r0, 5;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\nmov.b32 %r1, 0;")
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $L1;\nbar.sync 1, 32;\n$L1:\nbar.sync 2;"
    run_ptx(body, threads=64)


def test_profile():
    """32 lanes that read 4 bytes each: side by side 4 sectors, 128 bytes apart 32; banks of shared memory."""
    out = np.zeros(2048, U32)
    for scale, sectors in ((4, 4), (8, 8), (128, 32)):
        profile = Profile()
        run_ptx(f"mad.wide.u32 %rd3, %r0, {scale}, %rd0;\nld.global.b32 %r1, [%rd3];", out, profile=profile)
        assert (profile.counts["loaded_sectors"], profile.counts["loaded_least"]) == (sectors, 4)
        assert profile.counts["loaded_bytes"] == 128
    for scale, passes in ((4, 1), (8, 2), (128, 32), (0, 1)):
        profile = Profile()
        run_ptx(f"mul.lo.u32 %r1, %r0, {scale};\nst.shared.b32 [%r1], 0;", shared=8192, profile=profile)
        assert (profile.counts["shared_passes"], profile.counts["shared_least"]) == (passes, 1)
    profile = Profile()
    run_ptx("shl.b32 %r1, %r0, 4;\nst.shared.v4.b32 [%r1], {0, 0, 0, 0};", profile=profile)
    assert profile.counts["shared_passes"] == 4
    assert profile.instructions["memory"] == 2 - 1
    assert profile.instructions["order"] == 1
    assert profile.instructions["integer"] == 2


def test_warps_that_are_ahead_of_one_that_waits():
    """The first warp asks an mbarrier in a loop until the other, which took another way past the loop, has arrived."""
    body = """
        setp.eq.u32 %p1, %r0, 0;
        @%p1 mbarrier.init.shared::cta.b64 [smem], 32;
        bar.sync 0;
        setp.ge.u32 %p2, %r0, 32;
        @%p2 bra $past;
        $again:
        mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem], 0;
        @!%p3 bra $again;
        bra $end;
        $past:
        mbarrier.arrive.shared::cta.b64 _, [smem];
        $end:
        mov.b32 %r1, 7;
    """
    for together in (True, False):
        assert list(outcome(body, threads=64, options=Options(together=together))) == [7] * 64
