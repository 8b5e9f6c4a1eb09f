"""Matrix products and asynchronous copies against their definitions, and when they are noticed to be too early."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import numbers
from tests.ptx.block import Options, TensorMap
from tests.ptx.matrices import swizzled
from tests.ptx.running import BASE, run_ptx
from tests.ptx.text import PtxError

U16, U32, F32 = np.uint16, np.uint32, np.float32
LATE, EARLY = Options(races=True), Options(late=False, races=True)
ORDERS = ("late", "early", "backwards")
RANDOM = np.random.default_rng(0)


def bf16(*shape):
    return numbers.bf16_of_f32(RANDOM.standard_normal(shape).astype(F32))


FILL = """
    mad.wide.u32 %rd40, %r0, 16, %rd0;
    ld.global.v4.b32 {%r40, %r41, %r42, %r43}, [%rd40];
    shl.b32 %r44, %r0, 4;
    st.shared.v4.b32 [%r44], {%r40, %r41, %r42, %r43};
    bar.sync 0;
"""
"""The first 512 bytes of array 0 to shared memory: each lane 16, a row of an 8 x 8 matrix."""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count, trans):
    source, out, back = bf16(32, 8), np.zeros((32, 4), U32), np.zeros((32, 8), U16)
    registers = ", ".join(f"%r{i}" for i in range(1, count + 1))
    zero = "\n".join(f"mov.b32 %r{i}, 0;" for i in range(1, 5))
    run_ptx(f"""{FILL}{zero}
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r44];
        mad.wide.u32 %rd41, %r0, 16, %rd1;
        st.global.v4.b32 [%rd41], {{%r1, %r2, %r3, %r4}};
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r44+512], {{{registers}}};
        bar.sync 0;
        setp.lt.u32 %p1, %r0, {8 * count};
        @%p1 ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r44+512];
        mad.wide.u32 %rd41, %r0, 16, %rd2;
        @%p1 st.global.v4.b32 [%rd41], {{%r1, %r2, %r3, %r4}};
    """, source, out, back)  # fmt: skip
    got = out.view(U16).reshape(32, 4, 2)
    for matrix in range(count):
        block = source[8 * matrix : 8 * matrix + 8]
        block = block.T if trans else block
        for lane in range(32):
            for half in range(2):
                assert got[lane, matrix, half] == block[lane // 4, 2 * (lane % 4) + half]
    assert (back[: 8 * count] == source[: 8 * count]).all()


@pytest.mark.parametrize(("kind", "encode"), [("bf16", numbers.bf16_of_f32), ("f16", numbers.f16_of_f32)])
def test_mma(kind, encode):
    """The layouts of the manual, element by element."""
    a, b, c = (RANDOM.standard_normal(shape).astype(F32) for shape in ((16, 16), (16, 8), (16, 8)))
    a16, b16 = encode(a), encode(b)
    fragments = np.zeros((32, 10), U32)
    for lane in range(32):
        group, within = lane // 4, lane % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            column = 2 * within + (i & 1) + (8 if i >= 4 else 0)
            fragments[lane, i // 2] |= U32(a16[row, column]) << U32(16 * (i & 1))
        for i in range(4):
            fragments[lane, 4 + i // 2] |= U32(b16[2 * within + (i & 1) + (8 if i >= 2 else 0), group]) << U32(
                16 * (i & 1)
            )
        for i in range(4):
            fragments[lane, 6 + i] = c[group + (8 if i >= 2 else 0), 2 * within + (i & 1)].view(U32)
    out = np.zeros((32, 4), F32)
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd3+{4 * i}];" for i in range(10))
    run_ptx(f"""mad.wide.u32 %rd3, %r0, 40, %rd0;\n{loads}
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r1, %r2, %r3, %r4}}, {{%r10, %r11, %r12, %r13}},
            {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
        mad.wide.u32 %rd4, %r0, 16, %rd1;
        st.global.v4.b32 [%rd4], {{%r1, %r2, %r3, %r4}};""", fragments, out)  # fmt: skip
    decode = numbers.DECODE[kind]
    want = (decode(a16).astype(float) @ decode(b16).astype(float) + c).astype(F32)
    for lane in range(32):
        for i in range(4):
            assert out[lane, i] == want[lane // 4 + (8 if i >= 2 else 0), 2 * (lane % 4) + (i & 1)]


def test_swizzles():
    """16-byte unit u of row r of an eight-row pattern is where the manual's figure has it: u xor r (128 bytes a row)."""
    for pattern, rows_per_step in ((128, 1), (64, 2), (32, 4)):
        for row in range(8):
            for unit in range(pattern // 16):
                place = row * pattern + unit * 16
                want = row * pattern + 16 * (unit ^ (row // rows_per_step % (pattern // 16)))
                assert swizzled(np.array([place + 6]), pattern)[0] == want + 6
    assert swizzled(np.array([77]), 0)[0] == 77


WGMMA = """
    mov.b32 %r500, 0;
    {accumulators}
    mad.wide.u32 %rd40, %r0, 64, %rd0;
    shl.b32 %r401, %r0, 6;
    {fill}
    {proxy}
    bar.sync 0;
    mov.b64 %rd10, {a};
    mov.b64 %rd11, {b};
    mov.pred %p1, -1;
    {fence}
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{registers}}}, %rd10, %rd11, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    {before}
    {wait}
    mad.wide.u32 %rd41, %r0, 32, %rd1;
    {store}
"""


def wgmma(pattern=128, *, fence="wgmma.fence.sync.aligned;", proxy="fence.proxy.async.shared::cta;", before="",
          wait="wgmma.wait_group.sync.aligned 0;", options=LATE):  # fmt: skip
    """(A [64, 16] B [16, 16]^T + 1, what came out) with operands in shared memory, swizzled."""
    a, b = bf16(64, 16), bf16(16, 16)
    image = np.full(8192, 0x7FFF, U16)
    for matrix, start in ((a, 0), (b, 8192)):
        for row in range(len(matrix)):
            for k in range(16):
                place = start + row // 8 * 8 * pattern + row % 8 * pattern + 2 * k
                image[swizzled(np.array([place]), pattern)[0] // 2] = matrix[row, k]
    registers = [f"%r{100 + i}" for i in range(8)]
    mode = {128: 1, 64: 2, 32: 3}[pattern]

    def descriptor(start):
        return mode << 62 | (8 * pattern >> 4) << 32 | start >> 4

    out = np.zeros((128, 8), F32)
    body = WGMMA.format(
        accumulators="\n".join(f"mov.b32 {r}, 0f3F800000;" for r in registers),
        fill="\n".join(
            f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd40+{half * 8192 + part * 16}];\n"
            f"st.shared.v4.b32 [%r401+{half * 8192 + part * 16}], {{%r1, %r2, %r3, %r4}};"
            for half in range(2) for part in range(4)
        ),
        a=descriptor(0), b=descriptor(8192), registers=", ".join(registers), fence=fence, proxy=proxy, before=before,
        wait=wait, store="\n".join(f"st.global.b32 [%rd41+{4 * i}], {r};" for i, r in enumerate(registers)),
    )  # fmt: skip
    run_ptx(body, image, out, threads=128, shared=16384, options=options)
    want = numbers.f32_of_bf16(a).astype(float) @ numbers.f32_of_bf16(b).astype(float).T + 1
    return want.astype(F32), out


@pytest.mark.parametrize("options", [LATE, EARLY, Options(together=False, backwards=True, races=True)], ids=ORDERS)
@pytest.mark.parametrize("pattern", [128, 64, 32])
def test_wgmma(pattern, options):
    want, out = wgmma(pattern, options=options)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(8):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
            assert out[thread, i] == want[row, column]


def test_wgmma_too_early():
    with pytest.raises(PtxError, match="%r100 is read during wgmma"):
        wgmma(wait="")
    with pytest.raises(PtxError, match="%r103 is written during wgmma|%r103 is read during"):
        wgmma(before="setp.eq.u32 %p2, %r0, 0;\n@%p2 mov.b32 %r103, 0;")
    with pytest.raises(PtxError, match=r"without a wgmma\.fence"):
        wgmma(fence="")
    with pytest.raises(PtxError, match="the product of warp 0 reads .* what warp 0 writes"):
        wgmma(proxy="")
    with pytest.raises(PtxError, match="race .*the product of warp 0 reads|what the product of warp 0 reads"):
        wgmma(before="st.shared.b32 [%r401], 0;")
    for options in (LATE, EARLY):  # then operands may change
        wgmma(wait="wgmma.wait_group.sync.aligned 0;\nbar.sync 0;\nst.shared.b32 [%r401], 0;", options=options)


COPY = """
    shl.b32 %r2, %r0, 4;
    mad.wide.u32 %rd3, %r0, 16, %rd0;
    mov.b32 %r5, 16;
    setp.eq.u32 %p1, %r0, 3;
    selp.b32 %r5, 4, %r5, %p1;
    cp.async.cg.shared.global [%r2], [%rd3], 0x10, %r5;
    cp.async.commit_group;
    {wait}
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2];
    mad.wide.u32 %rd4, %r0, 16, %rd1;
    st.global.v4.b32 [%rd4], {{%r10, %r11, %r12, %r13}};
"""


def test_cp_async():
    source = RANDOM.integers(1, 2**31, (32, 4)).astype(U32)
    for options in (LATE, EARLY):
        out = np.zeros_like(source)
        run_ptx(COPY.format(wait="cp.async.wait_group 0;"), source, out, options=options)
        want = source.copy()
        want[3, 1:] = 0
        assert (out == want).all()
        with pytest.raises(PtxError, match=r"race.*cp\.async of warp 0"):
            run_ptx(COPY.format(wait="cp.async.wait_group 1;"), source, out, options=EARLY)
    with pytest.raises(PtxError, match="the block ends while copies or products are on their way"):
        run_ptx(COPY.format(wait="cp.async.wait_group 1;"), source, out, options=Options())
    assert np.isnan(out.view(F32)).all(), "not there yet"
    with pytest.raises(PtxError, match="the block ends while"):
        run_ptx(COPY.format(wait="").replace("cp.async.commit_group;", ""), source, out, options=Options())
    with pytest.raises(PtxError, match="outside of global"):
        run_ptx(COPY.format(wait=""), source[:-1], out)


TENSOR = """
    mov.b32 %r60, m0;  // its address among the parameters
    cvt.u64.u32 %rd5, %r60;
    cvta.param.u64 %rd6, %rd5;
    mov.b64 %rd7, m1;
    cvta.param.u64 %rd7, %rd7;
    elect.sync %r1|%p1, -1;
    setp.lt.u32 %p2, %r0, 32;
    and.pred %p1, %p1, %p2;
    @%p1 mbarrier.init.shared::cta.b64 [smem+8192], 1;
    {init}
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+8192], {bytes};
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [smem], [%rd6, {{{x}, {y}}}], [smem+8192];
    {{
    .reg .pred complete;
    again:
    {wait}
    @!complete bra.uni again;
    }}
    shl.b32 %r2, %r0, 4;
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2];
    mad.wide.u32 %rd4, %r0, 16, %rd1;
    st.global.v4.b32 [%rd4], {{%r10, %r11, %r12, %r13}};
    st.shared.v4.b32 [%r2+4096], {{%r10, %r11, %r12, %r13}};
    {fence}
    bar.sync 0;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd7, {{{x}, {y}}}], [smem+4096];
    cp.async.bulk.commit_group;
    {drain}
    bar.sync 0;
    st.shared.b32 [%r2+4096], 0;
    {end}
"""


def tensor_copy(options=LATE, bytes=1024, x=64, y=-2, init="bar.sync 0;", fence="fence.proxy.async.shared::cta;",
                drain="cp.async.bulk.wait_group.read 0;", end="cp.async.bulk.wait_group.read 0;",
                wait="mbarrier.try_wait.parity.shared::cta.b64 complete, [smem+8192], 0;"):  # fmt: skip
    """(source [20, 128], the box [8, 64] as it lay in shared memory, what was copied back)."""
    source, box, back = bf16(20, 104), np.zeros((8, 64), U16), np.zeros((20, 104), U16)
    maps = (
        TensorMap(BASE, (20, 104), 208, (8, 64), 2, 128),
        TensorMap(BASE + 2 * 2**24, (20, 104), 208, (8, 64), 2, 128),
    )
    body = TENSOR.format(bytes=bytes, x=x, y=y, init=init, fence=fence, drain=drain, end=end, wait=wait)
    run_ptx(body, source, box, back, threads=64, shared=8200, options=options, maps=maps)
    return source, box, back


@pytest.mark.parametrize("options", [LATE, EARLY, Options(together=False, backwards=True, races=True)], ids=ORDERS)
@pytest.mark.parametrize(("x", "y"), [(0, 4), (64, -2), (64, 17)])
def test_tensor_copies(options, x, y):
    """Zeros outside of the tensor, nothing written there; rows swizzled."""
    source, box, back = tensor_copy(options, x=x, y=y)
    want = np.zeros((8, 64), U16)
    whole = np.zeros_like(back)
    for row in range(8):
        for column in range(64):
            if 0 <= y + row < 20 and x + column < 104:
                want[row, column] = source[y + row, x + column]
                whole[y + row, x + column] = source[y + row, x + column]
    unit = np.arange(64) // 8
    swapped = np.stack([want[r][(unit ^ r) * 8 + np.arange(64) % 8] for r in range(8)])
    assert (box == swapped).all()
    assert (back == whole).all()


def test_tensor_copies_too_early():
    with pytest.raises(PtxError, match="race.*tensor load of warp 0"):
        tensor_copy(EARLY, wait="mov.pred complete, -1;")
    for missing in ({"drain": "", "end": ""}, {"wait": "mov.pred complete, -1;"}):  # a store, and a load
        for late in (True, False):
            with pytest.raises(PtxError, match="the block ends while copies or products are on their way"):
                tensor_copy(Options(late=late), **missing)
    with pytest.raises(PtxError, match="tensor store of warp 0 reads .* what warp"):
        tensor_copy(fence="")
    with pytest.raises(PtxError, match="tensor store of warp 0 reads"):
        tensor_copy(drain="")
    with pytest.raises(PtxError, match="race"):
        tensor_copy(init="")
    with pytest.raises(PtxError, match="all warps wait"):
        tensor_copy(bytes=1040)
    with pytest.raises(PtxError, match="no mbarrier was initialised"):
        tensor_copy(wait="mbarrier.try_wait.parity.shared::cta.b64 complete, [smem+4096], 0;")


def test_ends_of_mbarriers():
    first = "setp.eq.u32 %p1, %r0, 0;\n@%p1 mbarrier.init.shared::cta.b64 [smem], 1;\n"
    end, arrive = "@%p1 mbarrier.inval.shared::cta.b64 [smem];\n", "@%p1 mbarrier.arrive.shared::cta.b64 _, [smem];\n"
    run_ptx(first + arrive + end)
    with pytest.raises(PtxError, match="no mbarrier was initialised at shared byte 0"):
        run_ptx(first + end + arrive)
    with pytest.raises(PtxError, match="invalidated while copies are on their way"):
        run_ptx(first + arrive.replace("arrive", "arrive.expect_tx").replace("]", "], 16") + end)
