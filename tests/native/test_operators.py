"""The functions of the CPU library: a wrong call is refused before memory is used."""

from __future__ import annotations

import os

import pytest
import torch

from grpo_fused.call.head_parts import widened
from grpo_fused.engines import cpu_library

pytestmark = pytest.mark.usefixtures("cpu_extension")
N, H, V = 70, 40, 300
NOTHING_KEPT = {"kept": torch.empty(0), "spill": torch.empty(0, dtype=torch.uint8)}
SUMS = cpu_library.HeadSums(torch.zeros(N), torch.zeros(N, H))
WIDE = {"hidden": torch.randn(N, 32)}
CODES = {**WIDE, "weight": torch.zeros(V, 16, dtype=torch.uint8), "codes": torch.ones(16)}
LOW = {"low_hidden": torch.randn(N, 8), "low_weight": torch.randn(V, 8), "kept": torch.empty(V, 8)}


def scores(**changes):
    arguments = {
        "hidden": torch.randn(N, H), "weight": torch.randn(V, H), "targets": torch.randint(0, V, (N,)),
        "temperature": torch.ones(N), **changes,
    }  # fmt: skip
    call = {
        "with_entropy": True, "kept": torch.empty(V, H), "spill": torch.empty(V * 64 * 4, dtype=torch.uint8),
        "sum_offset": None,
    }  # fmt: skip
    call = {name: arguments.pop(name, default) for name, default in call.items()}
    names = arguments.keys() & set(cpu_library.HeadProducts._fields)
    products = cpu_library.HeadProducts(**{name: arguments.pop(name) for name in names})
    return cpu_library.HeadInputs(products, **arguments), *call.values()


def sets_of_first(ids, of_first):
    """The first token has a candidate set, from where to where in `ids`; the others have none."""
    ranges = torch.full((N, 2), -1)
    ranges[0] = torch.tensor(of_first)
    return {"set_ids": torch.tensor(ids), "set_ranges": ranges}


def gradient(**changes):
    inputs, _, kept, spill, *_ = scores()
    statistics, offsets, _ = cpu_library.head_scores(inputs, True, kept, spill)
    arguments = {
        "inputs": inputs, "statistics": statistics, "offsets": offsets, "rows": torch.arange(0, N, 2), "dlogp": torch.randn(N),
        "dentropy": torch.randn(N), "entries": None, "dweight": kept, "spill": spill, "sums": None,
        "need_hidden": True, "need_bias": True, **changes,
    }  # fmt: skip
    return tuple(arguments.values())


def entries(tokens, ids, values=None):
    values = torch.zeros(len(ids)) if values is None else values
    return {"entries": (torch.tensor(tokens, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32), values)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": torch.full((N,), V)}, rf"targets must be in \[0, {V}\), or -1 for another rank's; got {V} at 0"),
        ({"targets": torch.full((N,), -2)}, "got -2 at 0"),
        ({"targets": torch.zeros(N, dtype=torch.int32)}, "targets has the wrong dtype"),
        ({"targets": torch.zeros(N - 1, dtype=torch.int64)}, rf"targets must be \[{N}\]; got \[{N - 1}\]"),
        ({"targets": torch.zeros(2 * N, dtype=torch.int64)[::2]}, "targets must be contiguous"),
        ({"hidden": torch.randn(N, H + 1)}, rf"weight must be \[{V}, {H + 1}\]; got \[{V}, {H}\]"),
        ({"hidden": torch.randn(H, N).T}, "rows of hidden must be contiguous"),
        ({"weight": torch.zeros(V, H, dtype=torch.int8)}, "a quantised weight must have a multiple of 32 columns; got 40"),
        (
            {"hidden": torch.randn(N, 48), "weight": torch.zeros(V, 48, dtype=torch.int8), **NOTHING_KEPT},
            "a multiple of 32 columns; got 48",
        ),
        ({**WIDE, "weight": torch.zeros(V, 32, dtype=torch.int8), "kept": torch.empty(V, 32)}, "weight is frozen"),
        ({**WIDE, "weight": torch.ones(V, 32), "group_scale": torch.ones(V, 1), "kept": torch.empty(V, 32)}, "is frozen"),
        ({**WIDE, "weight": torch.zeros(V, 32, dtype=torch.uint8)}, "bytes of a weight need codes"),
        ({"codes": torch.ones(16)}, "weight must be .300, 20.; got .300, 40."),
        ({**CODES, "weight": torch.zeros(V, 16)}, "bytes of a weight need codes, and codes bytes"),
        ({**CODES, "codes": torch.ones(15)}, "codes must be .16.; got .15."),
        ({**WIDE, "weight": torch.ones(V, 32), "group_scale": torch.ones(V, 2)}, "got 2 groups of 32 columns"),
        ({"group_scale": torch.ones(V, 0)}, "a multiple of 32 columns; got 0 groups of 40 columns"),
        ({**WIDE, "weight": torch.ones(V, 32), "group_scale": torch.ones(V - 1, 1)}, "group_scale must be .300, 1.; got .299"),
        ({"rounded": 3}, "rounded must be that of a float; got 3"),
        ({"row_scale": torch.ones(V - 1)}, rf"row_scale must be \[{V}\]; got \[{V - 1}\]"),
        ({**LOW, "low_weight": None}, "low_hidden and low_weight go together"),
        ({**LOW, "low_weight": torch.randn(V, 0)}, "low_weight must have columns"),
        ({**LOW, "low_weight": torch.randn(V - 1, 8)}, rf"low_weight must be \[{V}, 8\]; got \[{V - 1}, 8\]"),
        ({**LOW, "low_weight": torch.randn(8, V).T}, "rows of low_weight must be contiguous"),
        ({**LOW, "low_weight": torch.zeros(V, 8, dtype=torch.int8)}, "low_weight must be float32, bfloat16 or float16"),
        ({**LOW, "low_hidden": torch.randn(N, 7)}, rf"low_hidden must be \[{N}, 8\]; got \[{N}, 7\]"),
        ({**LOW, "low_hidden": torch.randn(N, 8).bfloat16()}, "low_hidden has the wrong dtype"),
        ({**LOW, "kept": torch.empty(V, 8).bfloat16()}, "dweight of a low-rank weight must be float32"),
        ({**LOW, "kept": torch.empty(V, H)}, rf"dweight must be \[{V}, 8\]; got \[{V}, {H}\]"),
        ({"hidden": torch.randn(N)}, r"hidden must be \[N, H\]; got 1 dimensions"),
        ({"hidden": torch.randn(N, 0), "weight": torch.randn(V, 0)}, "from 1 to 2.31 - 1 rows and columns"),
        ({"hidden": torch.randn(N, H).double()}, "hidden must be float32, bfloat16 or float16"),
        ({"weight": torch.randn(H, V).T}, "rows of weight must be contiguous"),
        ({"weight": torch.randn(0, H)}, "from 1 to 2.31 - 1 rows and columns; got .0, "),
        ({"weight": torch.zeros(V, H, dtype=torch.int32)}, "weight must be float32, bfloat16 or float16"),
        ({"bias": torch.zeros(V - 1)}, rf"bias must be \[{V}\]"),
        ({"temperature": torch.ones(N, 1)}, r"temperature must be \[70\]; got \[70, 1\]"),
        ({"softcap": float("nan")}, "softcap must be finite"),
        ({"kept": torch.empty(V, H - 1)}, r"dweight must be \[300, 40\]; got \[300, 39\]"),
        ({"kept": torch.empty(H, V).T}, "dweight must be contiguous"),
        (sets_of_first([0, V], [0, 2]), rf"set_ids must be in \[0, {V}\); got {V} at 1"),
        (sets_of_first([7, 3], [0, 2]), "set_ids must ascend within a set"),
        (sets_of_first([3, 3], [0, 2]), "set_ids must ascend within a set"),
        (sets_of_first([3, 7], [0, 3]), r"set_ranges must lie in \[0, 2\], or begin at -1; got 0 to 3 at 0"),
        (sets_of_first([3, 7], [2, 1]), "got 2 to 1 at 0"),
        (sets_of_first([3, 7], [-2, 1]), "got -2 to 1 at 0"),
        ({"set_ids": torch.arange(2)}, "set_ids and set_ranges go together"),
        ({"set_ids": torch.arange(2), "set_ranges": torch.zeros(N, 3, dtype=torch.int64)}, r"must be \[70, 2\]"),
        ({"spill": torch.empty(V * 64 * 4 + 1, dtype=torch.uint8)}, "the same number of bytes for each of 300 rows"),
        ({**NOTHING_KEPT, "sum_offset": torch.zeros(N - 1)}, rf"sum_offset must be \[{N}\]; got \[{N - 1}\]"),
        ({**NOTHING_KEPT, "sum_offset": torch.zeros(N), **sets_of_first([1], [0, 1])}, "no candidate sets"),
    ],
)  # fmt: skip
def test_wrong_scores_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        cpu_library.head_scores(*scores(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.tensor([0, 0])}, "rows must ascend; got 0 at 1"),
        ({"rows": torch.tensor([69, 70])}, r"rows must be in \[0, 70\); got 70 at 1"),
        ({"rows": torch.tensor([-1])}, "got -1 at 0"),
        ({"statistics": torch.zeros(3, N)}, r"statistics must be \[4, 70\]; got \[3, 70\]"),
        ({"offsets": torch.zeros(1, 64)}, r"offsets must be \[2, 64\]; got \[1, 64\]"),
        ({"dlogp": torch.zeros(N - 1)}, r"dlogp must be \[70\]"),
        ({"dentropy": torch.zeros(N).double()}, "dentropy has the wrong dtype"),
        (entries([35], [1]), r"entry_tokens must be in \[0, 35\); got 35 at 0"),
        (entries([0], [V]), rf"entry_ids must be in \[0, {V}\); got {V} at 0"),
        (entries([0], [1], torch.zeros(1).double()), "entry_values has the wrong dtype"),
        (entries([1, 0], [1, 1]), r"in the order of blocks of \d+ ids, then of tokens; got another at 1"),
        (entries([0, 1], [V - 1, 0]), "got another at 1"),
        ({"sums": SUMS}, "sums serve no entropy's gradient, no entries and no candidate sets"),
        ({"sums": SUMS, "dentropy": None, **entries([0], [1])}, "sums serve no"),
        (
            {"sums": SUMS, "dentropy": None, "inputs": scores(**sets_of_first([1], [0, 1]))[0]},
            "and no candidate sets",
        ),
        ({"sums": SUMS, "dentropy": None}, "with sums, dweight must be of a low-rank weight"),
        ({"sums": SUMS._replace(values=torch.zeros(N, H - 1))}, rf"sums must be \[{N}, {H}\]; got"),
        ({"sums": SUMS._replace(offset=torch.zeros(N).double())}, "sum_offset has the wrong dtype"),
    ],
)
def test_wrong_gradients_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        cpu_library.head_gradient(*gradient(**changes))


def test_no_tokens():
    inputs = scores(hidden=torch.randn(0, H), targets=torch.zeros(0, dtype=torch.int64), temperature=torch.ones(0))
    statistics, offsets, _ = cpu_library.head_scores(*inputs)
    assert statistics.shape == (4, 0)
    assert offsets.shape[1] == 0
    dweight = torch.full((V, H), torch.nan)
    dhidden, dbias = cpu_library.head_gradient(*gradient(rows=torch.arange(0), dweight=dweight))
    assert dhidden.shape == (0, H)
    assert (dbias == 0).all()
    assert (dweight == 0).all()


@pytest.mark.parametrize(
    ("vocab", "hidden"), [(300, 0), (0, 40), (-1, 40), (1, 2**62), (1, 2**31), (2**31, 1), (2**63 - 1, 2**63 - 1)]
)
def test_a_plan_of_a_head_of_no_such_size_is_refused(vocab, hidden):
    """An integer division by zero, also after an overflow, would kill the process."""
    with pytest.raises(RuntimeError, match=r"from 1 to 2\^31 - 1 rows and columns; got \["):
        cpu_library.head_layout((vocab, hidden, 0), torch.bfloat16)


def test_a_plan_of_a_negative_rank_is_refused():
    with pytest.raises(RuntimeError, match="got .300, 40., and a rank of -1"):
        cpu_library.head_layout((V, H, -1), torch.bfloat16)


SIZES = [2, 0, 3]
"""Candidates of three tokens."""


def offsets(*sizes):
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])


def set_scores(**changes):
    arguments = {
        "hidden": torch.randn(3, H), "weight": torch.randn(V, H), "index": torch.tensor([7, 9, 0, 299, 5]),
        "ids": torch.tensor([7, 9, 0, 299, 5]), "offsets": offsets(*SIZES), "targets": torch.tensor([9, -1, 0]),
        "bias": None, "temperature": torch.ones(3), "scale": 1.0, "softcap": 0.0, "with_entropy": True,
        "z": torch.empty(5), "statistics": torch.empty(4, 3), **changes,
    }  # fmt: skip
    return tuple(arguments.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": torch.tensor([7, 9, 0, V, 5])}, rf"index must be in \[0, {V}\); got {V} at 3"),
        ({"index": torch.tensor([7])}, r"index must be \[5\]; got \[1\]"),
        ({"ids": torch.tensor([7, 9, 0, 10, 5]), "bias": torch.zeros(10)}, r"ids must be in \[0, 10\); got 10 at 3"),
        ({"ids": torch.tensor([-1, 9, 0, 10, 5])}, "got -1 at 0"),
        ({"offsets": offsets(2, 0, 4)}, r"offsets must rise within \[0, 5\]; got 6 at 3"),
        ({"offsets": offsets(2, -1, 4)}, "got 1 at 2"),
        ({"offsets": offsets(2, 0, 2)}, "offsets must run from 0 to 5; got 0 to 4"),
        ({"offsets": torch.tensor([1, 2, 2, 5])}, "offsets must run from 0 to 5; got 1 to 5"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, "offsets must hold at least one number"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"targets must be \[3\]; got \[2\]"),
        ({"hidden": torch.randn(2, H)}, "hidden must have 3 rows; got 2"),
        ({"hidden": torch.randn(3, H - 1)}, "as many columns and the same dtype"),
        ({"hidden": torch.randn(3, H).bfloat16()}, "as many columns and the same dtype"),
        ({"weight": torch.randn(H, V).T}, "rows of weight must be contiguous"),
        ({"temperature": torch.ones(3).double()}, "temperature has the wrong dtype"),
    ],
)
def test_wrong_candidate_sets_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        cpu_library.call("set_scores", *set_scores(**changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_added_to_rows(dtype):
    x, factor, index = torch.randn(9, H).to(dtype), torch.randn(5), torch.tensor([8, 0, 8, 3, 3])
    out = torch.randn(20, H).to(dtype)
    want = out.double()
    for row, part in zip((4, 5, 19), (slice(0, 2), slice(2, 2), slice(2, 5)), strict=True):
        want[row] += (factor[part].double().unsqueeze(1) * x[index[part]].double()).sum(0)
    cpu_library.call("add_segment_sums", out, torch.tensor([4, 5, 19]), x, index, factor, offsets(*SIZES))
    assert torch.equal(out[torch.arange(20) % 4 == 1], want.to(dtype)[torch.arange(20) % 4 == 1])  # others untouched
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sum_that_is_nan_stays_nan(dtype):
    """Of any bits: rounded like a number, the last ones here would become 0."""
    for bits in (0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF):
        x = torch.ones(9, H)
        x[3, ::7] = torch.frombuffer(bytearray(bits.to_bytes(4, "little")), dtype=torch.float32)
        out = torch.ones(20, H).to(dtype)
        rows, index = torch.tensor([4, 5]), torch.tensor([3, 8])
        cpu_library.call("add_segment_sums", out, rows, x, index, torch.ones(2), offsets(1, 1))
        assert torch.equal(out[4].isnan(), x[3].isnan())
        assert (out[5] == 2).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.tensor([4, 4, 19])}, "rows must ascend"),
        ({"rows": torch.tensor([4, 5, 20])}, r"rows must be in \[0, 20\); got 20 at 2"),
        ({"rows": torch.tensor([4, 5])}, r"offsets must be \[3\]; got \[4\]"),
        ({"index": torch.tensor([8, 0, 9, 3, 3])}, r"index must be in \[0, 9\); got 9 at 2"),
        ({"factor": torch.zeros(4)}, r"factor must be \[5\]; got \[4\]"),
        ({"x": torch.randn(9, H + 1)}, "out and x must have as many columns"),
    ],
)
def test_wrong_sums_are_refused(changes, message):
    arguments = {
        "out": torch.zeros(20, H), "rows": torch.tensor([4, 5, 19]), "x": torch.randn(9, H),
        "index": torch.tensor([8, 0, 8, 3, 3]), "factor": torch.randn(5), "offsets": offsets(*SIZES), **changes,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        cpu_library.call("add_segment_sums", *arguments.values())


@pytest.mark.parametrize("isa", ["avx512", "avx512f", "avx2", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_float64(dtype, isa):
    """Odd sizes and gaps between rows; a token's are bitwise the same in any batch."""
    cpu_library.use_isa(isa)
    try:
        if cpu_library.missing():
            pytest.skip(cpu_library.missing())
        for n, h, v in ((1, 1, 1), (5, 7, 33), (130, 33, 517), (64, 64, 256)):
            hidden, weight = torch.randn(n, h).to(dtype), torch.randn(v, h + 3).to(dtype)[:, :h]
            out = torch.full((n, v + 2), 7.0)
            cpu_library.head_products(cpu_library.HeadProducts(hidden, weight), out[:, :v])
            want = hidden.double() @ weight.double().T
            torch.testing.assert_close(out[:, :v].double(), want, rtol=0.0, atol=1e-5 * h**0.5)
            assert (out[:, v:] == 7).all()
            last = torch.empty(1, v)
            cpu_library.head_products(cpu_library.HeadProducts(hidden[-1:].contiguous(), weight), last)
            assert torch.equal(last[0], out[-1, :v])
    finally:
        cpu_library.use_isa(os.environ.get("GRPO_FUSED_ISA", ""))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [0, 5, 70])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_numbers_of_a_weight_are_widened_exactly(kind, groups, rank, rounded):
    """Every byte of each format, in every column, times its group's scale; a low-rank weight beside it stays fp32."""
    count, rows = 96, 256
    g = torch.Generator().manual_seed(0)
    codes = torch.randn(16, generator=g) if kind == torch.uint8 else None
    width = count if codes is None else count // 2
    stored = (torch.arange(rows).unsqueeze(1) + torch.arange(width + 3)).to(torch.uint8)
    if kind == torch.float8_e4m3fn:
        stored = torch.where(stored.view(kind).float().isnan(), 0, stored)
    weight = torch.randn(rows, width, generator=g).to(kind) if kind == torch.bfloat16 else stored.view(kind)[:, :width]
    scale = torch.randn(rows, groups, generator=g) if groups else None
    low_weight = torch.randn(rows, rank, generator=g)
    want = widened(weight, scale, codes, rounded).float()
    for compute in {torch.float32, rounded}:
        each = torch.eye(count + rank)
        hidden, out = each[:, :count].to(compute).contiguous(), torch.empty(count + rank, rows)
        low = (each[:, count:].contiguous(), low_weight) if rank else (None, None)
        cpu_library.head_products(
            cpu_library.HeadProducts(hidden, weight, None, scale, codes, cpu_library.scalar(rounded), *low), out
        )
        assert torch.equal(out[:count].T, want)
        assert torch.equal(out[count:].T, low_weight)


@pytest.mark.parametrize("hidden_size", [1, H])
def test_strides_of_a_single_row_or_column_are_any(hidden_size):
    """As in torch, whose `.contiguous()` leaves them as they are."""
    hidden, out = torch.randn(3, hidden_size + 1)[:1, :hidden_size], torch.empty(1, V)
    weight = torch.randn(1, V).T if hidden_size == 1 else torch.randn(V, H)
    assert hidden.is_contiguous()
    assert hidden.stride(0) == hidden_size + 1
    assert weight.stride() == ((1, V) if hidden_size == 1 else (H, 1))
    cpu_library.head_products(cpu_library.HeadProducts(hidden, weight), out)
    torch.testing.assert_close(out, hidden @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "in_gradient"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1)], ids=str
)
def test_scratch_holds_the_exponentials_of_all_tokens_or_what_fits(dtype, in_gradient):
    """Two panels of 64 tokens, of which dW's rows of 80 numbers hold none, or one."""
    shape, kept = (V, 80, 0), torch.empty(V if in_gradient else 0, 80, dtype=dtype)
    panel = V * 64 * dtype.itemsize
    enough = cpu_library.scratch_plan(shape, dtype, N, kept, 2**40)
    assert enough.spill_bytes == (2 - in_gradient) * panel
    assert enough.kept_tokens == N
    exactly = cpu_library.scratch_plan(shape, dtype, N, kept, enough.fixed_bytes + enough.spill_bytes + panel // 2)
    assert exactly.fixed_bytes + exactly.spill_bytes <= enough.fixed_bytes + enough.spill_bytes + panel // 2
    assert cpu_library.scratch_plan(shape, dtype, N, kept, 0).spill_bytes == 0
    assert cpu_library.scratch_plan(shape, dtype, N, kept, 0).kept_tokens == 64 * in_gradient


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scratch_holds_the_copies_of_a_low_rank_weight(dtype, threads):
    """A block in fp32 and as an operand for each thread; for each token u twice, in panels too, and dH nine times."""
    threads(3)
    rank, nothing = 512, torch.empty(0)
    without, beside = (cpu_library.scratch_plan((V, 80, r), dtype, N, nothing, 0).fixed_bytes for r in (0, rank))
    rows = cpu_library.head_layout((V, 80, rank), dtype).block_rows
    assert beside - without >= rank * (3 * rows * (4 + dtype.itemsize) + 128 * (2 * 4 + 2 * dtype.itemsize + 9 * 4))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(N, V + 1), rf"out must be \[{N}, {V}\]; got \[{N}, {V + 1}\]"),
        (torch.empty(N, V, dtype=torch.bfloat16), "out must be float32"),
        (torch.empty(V, N).T, "rows of out must be contiguous"),
        (torch.empty(V).expand(N, V), "rows of out must not overlap; got a stride of 0"),
    ],
    ids=["shape", "dtype", "columns", "rows"],
)
def test_products_refuse_a_wrong_result(out, message):
    with pytest.raises(RuntimeError, match=message):
        cpu_library.head_products(cpu_library.HeadProducts(torch.randn(N, H), torch.randn(V, H)), out)


def test_tensors_elsewhere_are_refused():
    """Their pointers are none of this process's memory; with no token, the library would not use them."""
    products = cpu_library.HeadProducts(torch.empty(0, H, device="meta"), torch.randn(V, H))
    with pytest.raises(RuntimeError, match="all tensors must be on the CPU; got one on meta"):
        cpu_library.head_products(products, torch.empty(0, V))
