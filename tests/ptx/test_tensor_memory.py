"""tcgen05 against its definitions in the PTX manual, and when it is noticed to be too early."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import numbers
from tests.ptx.block import Options
from tests.ptx.matrices import swizzled
from tests.ptx.running import run_ptx
from tests.ptx.text import PtxError

U16, U32, F32 = np.uint16, np.uint32, np.float32
LATE, EARLY = Options(races=True), Options(late=False, races=True)
WAYS = [LATE, EARLY, Options(together=False, backwards=True, races=True)]
LANE = np.arange(128)
A, B, BARRIER, SLOT = 0, 16384, 20480, 20488
"""Where matrices, an mbarrier and the address of tensor memory are in shared memory."""

ALLOCATE = f"""
    setp.lt.u32 %p1, %r0, 32;
    setp.eq.u32 %p2, %r0, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{SLOT}], {{count}};
    bar.sync 0;
    ld.shared.b32 %r400, [smem+{SLOT}];  // first column
    bar.sync 0;
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    and.b32 %r401, %r0, 96;
    shl.b32 %r401, %r401, 16;
    add.s32 %r401, %r401, %r400;  // first of the warp's lanes
"""
FREE = """
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r400, {count};
"""


def run(body, *arrays, options=LATE, count=32, free=FREE):
    return run_ptx(
        ALLOCATE.format(count=count) + body + free.format(count=count), *arrays, threads=128, shared=32768,
        options=options,
    )  # fmt: skip


@pytest.mark.parametrize("options", WAYS, ids=("late", "early", "backwards"))
@pytest.mark.parametrize(("shape", "split"), [("32x32b", ""), ("16x32bx2", ", 8")])
def test_stores_and_loads(shape, split, options):
    """Register i of thread t is column i of lane t; with 16x32bx2 threads 16 to 31 have lanes of 0 to 15, further on."""
    out = np.zeros((128, 4), U32)
    registers = "{%r10, %r11, %r12, %r13}"
    block = run(f"""
        mul.lo.u32 %r10, %r0, 10; add.u32 %r11, %r10, 1; add.u32 %r12, %r10, 2; add.u32 %r13, %r10, 3;
        tcgen05.st.sync.aligned.{shape}.x4.b32 [%r401+3]{split}, {registers};
        mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.{shape}.x4.b32 {registers}, [%r401+3]{split};
        tcgen05.wait::ld.sync.aligned;
        mad.wide.u32 %rd41, %r0, 16, %rd0;
        st.global.v4.b32 [%rd41], {registers};
    """, out, options=options)  # fmt: skip
    want = 10 * LANE[:, None] + np.arange(4)
    assert (out == want).all()
    half = LANE % 32 // 16 if split else 0 * LANE
    columns = 512 - 32 + 3 + 8 * half[:, None] + np.arange(4)
    assert (block.tensor.cells[(LANE - 16 * half)[:, None], columns] == want).all()
    assert (block.tensor.cells == 0x7FFF7FFF).sum() == 128 * 512 - 512, "nothing else"


PRODUCT = """
    mad.wide.u32 %rd40, %r0, 160, %rd0;
    mul.lo.u32 %r402, %r0, 160;
    {fill}
    {proxy}
    @%p2 mbarrier.init.shared::cta.b64 [smem+{barrier}], 1;
    {start}
    bar.sync 0;
    @%p2 tcgen05.mma.cta_group::1.kind::f16 [%r400], {a}, {b}, {shape}, {keep};
    @%p2 tcgen05.mma.cta_group::1.kind::f16 [%r400], {a}, {b}, {shape}, 1;
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+{barrier}];
    {wait}
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r401];
    {loaded}
    mad.wide.u32 %rd41, %r0, 64, %rd1;
    {store}
"""
WAIT = f"""
    $again:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem+{BARRIER}], 0;
    @!%p3 bra $again;
"""
REGISTERS = [f"%r{100 + i}" for i in range(16)]
ONES = f"""
    tcgen05.st.sync.aligned.32x32b.x16.b32 [%r401], {{{", ".join(16 * ["0f3F800000"])}}};
"""


def product(rows=128, pattern=128, kind="bf16", *, keep=1, proxy="fence.proxy.async.shared::cta;", wait=WAIT,
            stored="tcgen05.wait::st.sync.aligned;", loaded="tcgen05.wait::ld.sync.aligned;", options=LATE, shape=0):  # fmt: skip
    """(A [rows, 16] B [16, 16]^T twice and, with `keep`, 1; what is in the 128 lanes)."""
    encode, decode = numbers.ENCODE[kind], numbers.DECODE[kind]
    random = np.random.default_rng(0)
    a, b = (encode(random.standard_normal((size, 16)).astype(F32)) for size in (rows, 16))
    image = np.full(10240, 0x7FFF, U16)
    for matrix, start in ((a, A), (b, B)):
        row, k = np.indices(matrix.shape)
        image[swizzled(start + row * pattern + 2 * k, pattern) // 2] = matrix
    mode = {128: 2, 64: 4, 32: 6}[pattern]
    a_place, b_place = (mode << 61 | 1 << 46 | (8 * pattern >> 4) << 32 | start >> 4 for start in (A, B))
    types = {"bf16": 1, "f16": 0}[kind]
    out = np.zeros((128, 16), F32)
    body = PRODUCT.format(
        fill="\n".join(
            f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd40+{16 * part}];\n"
            f"st.shared.v4.b32 [%r402+{16 * part}], {{%r1, %r2, %r3, %r4}};" for part in range(10)
        ),
        proxy=proxy, start=ONES + stored if keep else "", barrier=BARRIER, a=a_place, b=b_place, keep=keep,
        shape=shape or rows >> 4 << 24 | 16 >> 3 << 17 | types << 10 | types << 7 | 1 << 4, wait=wait, loaded=loaded,
        registers=", ".join(REGISTERS), store="\n".join(f"st.global.b32 [%rd41+{4 * i}], {r};" for i, r in enumerate(REGISTERS)),
    )  # fmt: skip
    run(body, image, out, options=options)
    once = decode(a).astype(float) @ decode(b).astype(float).T
    return ((once + keep).astype(F32) + once).astype(F32), out


@pytest.mark.parametrize("options", WAYS, ids=("late", "early", "backwards"))
@pytest.mark.parametrize(("pattern", "kind", "keep"), [(128, "bf16", 1), (64, "f16", 1), (32, "bf16", 0)])
def test_products_of_128_rows(pattern, kind, keep, options):
    want, out = product(128, pattern, kind, keep=keep, options=options)
    assert (out == want).all()


@pytest.mark.parametrize("options", WAYS, ids=("late", "early", "backwards"))
def test_products_of_64_rows(options):
    """In the first 16 of each 32 lanes."""
    want, out = product(64, options=options)
    assert (out.reshape(4, 32, 16)[:, :16].reshape(64, 16) == want).all()
    assert (out.reshape(4, 32, 16)[:, 16:] == 1).all(), "lanes without a row"


def test_a_register_is_there_for_those_who_read_it():
    """As the manual says, without `tcgen05.wait::ld` too."""
    want, out = product(loaded="")
    assert (out == want).all()


def test_too_early():
    with pytest.raises(PtxError, match="the product of warp 0 reads .* what warp 0 writes"):
        product(proxy="")
    assert np.isnan(product(stored="", options=Options())[1]).all(), "a sum with what nobody wrote"
    for options in WAYS:
        with pytest.raises(
            PtxError, match="the product of warp 0 writes .* what the store to tensor memory of warp 0 writes"
        ):
            product(stored="", options=options)
    with pytest.raises(PtxError, match="race .*reads .* what the product of warp 0 writes"):
        product(wait="", options=EARLY)
    with pytest.raises(PtxError, match="the block ends while copies or products are on their way"):
        product(wait="", options=Options())


def test_memory_is_free_too_early():
    """While other warps may still read it."""
    body = """
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r401], {%r0};
        tcgen05.wait::st.sync.aligned;
        bar.sync 0;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r401];
        tcgen05.wait::ld.sync.aligned;
    """
    run(body)
    with pytest.raises(PtxError, match="race .* warp 0 writes at .*dealloc.* what warp . reads"):
        run(body, free=FREE.replace("bar.sync 0;", ""))


def test_what_is_not_allowed():
    with pytest.raises(PtxError, match="48 columns of tensor memory: expected a power of 2"):
        run("", count=48)
    with pytest.raises(PtxError, match="part of a warp"):
        run("setp.lt.u32 %p5, %r0, 5;\n@%p5 tcgen05.wait::ld.sync.aligned;")
    with pytest.raises(PtxError, match="not freed"):
        run("bar.sync 0;\nmov.pred %p1, 0;")
    with pytest.raises(PtxError, match="after relinquish"):
        run(f"@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{SLOT}], 32;")
    with pytest.raises(PtxError, match="columns 512 to 515 of tensor memory are not allocated"):
        run("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r10, %r11, %r12, %r13}, [%r401+32];")
    with pytest.raises(PtxError, match="rank .* access tensor memory from lane"):
        run("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r400];")
    with pytest.raises(PtxError, match="expected 4 registers; got 3"):
        run("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r10, %r11, %r12}, [%r401];")
    with pytest.raises(PtxError, match=r"instruction descriptor .*: expected fp16 or bf16"):
        product(shape=1 << 4 | 1 << 15)
