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
BASE = {"weight": torch.randn(V, H - 32), "base": torch.zeros(V, 32)}


def scores(**changes):
    arguments = {
        "hidden": torch.randn(N, H), "weight": torch.randn(V, H), "terms": 1, "base": None, "group_scale": None,
        "codes": None, "rounded": 0, "row_scale": None, "bias": None, "targets": torch.randint(0, V, (N,)),
        "temperature": torch.ones(N), "scale": 1.0, "softcap": 0.0, "set_ids": None, "set_ranges": None,
        "with_entropy": True, "kept": torch.empty(V, H), "spill": torch.empty(V * 64 * 4, dtype=torch.uint8),
        "sum_offset": None, **changes,
    }  # fmt: skip
    inputs = cpu_library.HeadInputs(*[arguments[name] for name in cpu_library.HeadInputs._fields])
    return inputs, *list(arguments.values())[-4:]


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
        ({"hidden": torch.randn(N, H + 1)}, rf"hidden must have {H} columns; got {H + 1}"),
        ({"terms": 3}, "terms must be 1, or 3 with a base; got 3"),
        ({**BASE, "terms": 2}, "terms must be 1, or 3 with a base; got 2"),
        ({**BASE, "terms": 3}, "base must be .300, 16.; got .300, 32."),
        ({**BASE, "hidden": torch.randn(N, 8), "base": torch.zeros(V, 0)}, "a multiple of 32 columns; got 0"),
        ({**BASE, "kept": torch.empty(V, 8).bfloat16()}, "with a base dweight must be float32"),
        ({"hidden": torch.randn(H, N).T}, "hidden must be contiguous"),
        ({"weight": torch.randn(V, H - 32), "base": torch.randn(V, 33)}, "base must be .*; got "),
        ({"weight": torch.randn(V, H - 32), "base": torch.randn(V - 1, 32)}, "base must be .*; got "),
        ({"weight": torch.randn(V, H - 16), "base": torch.randn(V, 16)}, "base must have a multiple of 32 columns; got 16"),
        ({"weight": torch.randn(V, H - 32), "base": torch.zeros(V, 32, dtype=torch.uint8)}, "bytes of a base need codes"),
        ({**BASE, "codes": torch.ones(16)}, "base must be .300, 16.; got .300, 32."),
        ({**BASE, "codes": torch.ones(16), "base": torch.zeros(V, 16)}, "bytes of a base need codes, and codes bytes"),
        ({**BASE, "codes": torch.ones(15), "base": torch.zeros(V, 16, dtype=torch.uint8)}, "codes must be .16.; got .15."),
        ({**BASE, "group_scale": torch.ones(V, 2)}, "a multiple of 32 columns; got 2 groups of 32 columns"),
        ({**BASE, "group_scale": torch.ones(V, 0)}, "got 0 groups of 32 columns"),
        ({**BASE, "group_scale": torch.ones(V - 1, 1)}, "group_scale must be .300, 1.; got .299, 1."),
        ({**BASE, "rounded": 3}, "rounded must be that of a float; got 3"),
        ({"row_scale": torch.ones(V)}, "row_scale needs a base"),
        ({**BASE, "row_scale": torch.ones(V - 1)}, rf"row_scale must be \[{V}\]; got \[{V - 1}\]"),
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
        cpu_library.head_layout(torch.Size([vocab, hidden]), torch.bfloat16)


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
            cpu_library.head_products(hidden, weight, out[:, :v])
            want = hidden.double() @ weight.double().T
            torch.testing.assert_close(out[:, :v].double(), want, rtol=0.0, atol=1e-5 * h**0.5)
            assert (out[:, v:] == 7).all()
            last = torch.empty(1, v)
            cpu_library.head_products(hidden[-1:].contiguous(), weight, last)
            assert torch.equal(last[0], out[-1, :v])
    finally:
        cpu_library.use_isa(os.environ.get("GRPO_FUSED_ISA", ""))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [0, 5])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_numbers_of_a_base_are_widened_exactly(kind, groups, own, rounded):
    """Every byte of each format, in every column, times its group's scale, beside columns of the weight's own."""
    count, rows = 96, 256
    g = torch.Generator().manual_seed(0)
    codes = torch.randn(16, generator=g) if kind == torch.uint8 else None
    width = count if codes is None else count // 2
    stored = (torch.arange(rows).unsqueeze(1) + torch.arange(width + 3)).to(torch.uint8)
    if kind == torch.float8_e4m3fn:
        stored = torch.where(stored.view(kind).float().isnan(), 0, stored)
    base = torch.randn(rows, width, generator=g).to(kind) if kind == torch.bfloat16 else stored.view(kind)[:, :width]
    scale = torch.randn(rows, groups, generator=g) if groups else None
    weight = torch.randn(rows, own, generator=g)
    want = widened(base, scale, codes, rounded).float()
    for compute in {torch.float32, rounded}:
        hidden, out = torch.eye(count + own, dtype=compute), torch.empty(count + own, rows)
        parts = {"base": base, "group_scale": scale, "codes": codes, "rounded": cpu_library.scalar(rounded)}
        cpu_library.head_products(hidden, weight.to(compute), out, **parts)
        assert torch.equal(out[:count].T, want)
        assert torch.equal(out[count:].T, weight.to(compute).float())


@pytest.mark.parametrize("hidden_size", [1, H])
def test_strides_of_a_single_row_or_column_are_any(hidden_size):
    """As in torch, whose `.contiguous()` leaves them as they are."""
    hidden, out = torch.randn(3, hidden_size + 1)[:1, :hidden_size], torch.empty(1, V)
    weight = torch.randn(1, V).T if hidden_size == 1 else torch.randn(V, H)
    assert hidden.is_contiguous()
    assert hidden.stride(0) == hidden_size + 1
    assert weight.stride() == ((1, V) if hidden_size == 1 else (H, 1))
    cpu_library.head_products(hidden, weight, out)
    torch.testing.assert_close(out, hidden @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "in_gradient"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1)], ids=str
)
def test_scratch_holds_the_exponentials_of_all_tokens_or_what_fits(dtype, in_gradient):
    """Two panels of 64 tokens, of which dW's rows of 80 numbers hold none, or one."""
    shape, kept = torch.Size([V, 80]), torch.empty(V if in_gradient else 0, 80, dtype=dtype)
    panel = V * 64 * dtype.itemsize
    enough = cpu_library.scratch_plan(shape, dtype, N, kept, 2**40)
    assert enough.spill_bytes == (2 - in_gradient) * panel
    assert enough.kept_tokens == N
    exactly = cpu_library.scratch_plan(shape, dtype, N, kept, enough.fixed_bytes + enough.spill_bytes + panel // 2)
    assert exactly.fixed_bytes + exactly.spill_bytes <= enough.fixed_bytes + enough.spill_bytes + panel // 2
    assert cpu_library.scratch_plan(shape, dtype, N, kept, 0).spill_bytes == 0
    assert cpu_library.scratch_plan(shape, dtype, N, kept, 0).kept_tokens == 64 * in_gradient


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
        cpu_library.head_products(torch.randn(N, H), torch.randn(V, H), out)


def test_tensors_elsewhere_are_refused():
    """Their pointers are none of this process's memory; with no token, the library would not use them."""
    with pytest.raises(RuntimeError, match="all tensors must be on the CPU; got one on meta"):
        cpu_library.head_products(torch.empty(0, H, device="meta"), torch.randn(V, H), torch.empty(0, V))
