"""The parts of a call in which `native` makes the gradient of an adapter: where they save a product, and no others."""

from __future__ import annotations

import pytest
import torch

from grpo_fused import GRPOLossConfig, HeadAdapter, fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.call.calls import LMHead
from grpo_fused.engines import cpu_library, native
from grpo_fused.engines.base import MANY, longest_chunk

pytestmark = pytest.mark.usefixtures("cpu_extension")

N, H, V = 300, 32, 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_hold_as_many_tokens_as_exponentials_fit(dtype):
    """Two products for each, of whole panels of 64 tokens; where none fits, a call is one part, with three."""
    base, b = torch.empty(2**15, 64, dtype=dtype), torch.empty(2**15, 16)
    head = LMHead(b, compute_dtype=dtype, base=base, terms=1 if dtype == torch.float32 else 3)
    engine, frozen = native.NativeEngine(), head._replace(weight=b[:, :0])
    of_panel = 64 * 2**15 * dtype.itemsize
    for panels in (2, 4, 8):
        budget = round((panels + 0.5) * of_panel / native.STORED)
        assert engine.chunk_rows(head, 1024, budget) == 64 * panels
        cost = engine.cost(head, 1024, budget)
        assert cost.products == 2.0
        assert panels * of_panel < cost.scratch_bytes <= budget
    assert engine.chunk_rows(head, 100, budget) == 512
    assert engine.cost(head, 100, budget).products == 2.0
    assert engine.chunk_rows(head, MANY, budget) == MANY, "without dW dH is summed and nothing stored"
    assert engine.chunk_rows(frozen, 1000, budget) == MANY
    assert engine.cost(frozen, 1000, budget).products == 2.0
    wide = head._replace(base=torch.empty(1, 2**15, dtype=dtype).expand(2**15, -1))
    budget = 2 * native._plan(wide, 64, torch.empty(0), 0).fixed_bytes  # of which operands take more than their part
    rows = engine.chunk_rows(wide, 1024, budget)
    kept = [native._plan(wide, count, torch.empty(0), budget).kept_tokens for count in (rows, rows + 64)]
    assert kept[0] == rows >= 64
    assert kept[1] < rows + 64 < native.STORED * budget / of_panel * 64
    assert engine.chunk_rows(head, 1000, of_panel // 2) == MANY
    assert engine.cost(head, 1000, of_panel // 2).products == 3.0


def test_a_part_that_keeps_two_panels_of_three_is_too_long(monkeypatch):
    monkeypatch.setattr(native, "STORED", 2.0)
    base, b = torch.empty(1, 64).expand(2**15, -1), torch.empty(1, 16).expand(2**15, -1)
    head = LMHead(b, compute_dtype=torch.float32, base=base, terms=1)
    fixed = native._plan(head, 192, torch.empty(0), 0).fixed_bytes
    assert native.NativeEngine().chunk_rows(head, 1024, fixed + round(2.5 * 64 * 2**15 * 4)) == 128


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("vocab", "rows"), [(65536, 320), (151936, 128), (256000, 64)])
def test_the_number_of_threads_does_not_change_the_parts(vocab, rows, threads):
    """The gradient of B is summed over them."""
    base, b = torch.empty(1, 1024, dtype=torch.bfloat16).expand(vocab, -1), torch.empty(1, 16).expand(vocab, -1)
    head = LMHead(b, compute_dtype=torch.bfloat16, base=base, terms=3)
    for count in (1, 2, 8, 16):
        threads(count)
        assert native.NativeEngine().chunk_rows(head, 4096, None) == rows


def test_the_parts_that_are_made_fit(threads):
    """They share the tokens evenly."""
    threads(8)
    base, b = torch.empty(1, 64, dtype=torch.bfloat16).expand(8000, -1), torch.empty(1, 256).expand(8000, -1)
    head, nothing = LMHead(b, compute_dtype=torch.bfloat16, base=base, terms=3), torch.empty(0)
    budget = native._budget(None, nothing)
    engine = native.NativeEngine()
    rows = longest_chunk(3000, engine.chunk_rows(head, 3000, None))
    plan, cost = native._plan(head, rows, nothing, budget), engine.cost(head, 3000, None)
    assert plan.kept_tokens == rows
    assert (cost.products, cost.scratch_bytes) == (2.0, plan.fixed_bytes + plan.spill_bytes)


@pytest.fixture
def parts(monkeypatch):
    """Of tokens with a gradient in each call of the library, and whether dH came from sums. They are short."""
    found, real = [], cpu_library.head_gradient

    def gradient(*args):
        found.append((len(args[3]), args[9] is not None))
        return real(*args)

    monkeypatch.setattr(cpu_library, "head_gradient", gradient)
    monkeypatch.setattr(native, "STORED", 130 * V * 4 / native.SCRATCH_BYTES)
    return found


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("trained", ["adapter", "bias", "nothing"])
def test_parts_of_a_loss(level, trained, parts, monkeypatch):
    """A sequence that fits no part: all is scored first. Without a gradient of the adapter there are no parts."""
    if trained == "adapter" and level == "sequence":
        monkeypatch.delattr(native, "_sum_offset")  # no sums are made after that
    hidden, bias = torch.randn(2, N // 2, H, requires_grad=True), torch.randn(V, requires_grad=trained == "bias")
    adapter = HeadAdapter(torch.randn(4, H) / 8, torch.randn(V, 4).requires_grad_(trained == "adapter"))
    fused_linear_grpo_loss(
        hidden, torch.randn(V, H) / 8, torch.randint(V, (2, N // 2)), torch.tensor([1.0, -1.0]), lm_head_bias=bias,
        lm_head_adapter=adapter, impl="native", config=GRPOLossConfig(importance_sampling_level=level),
    ).loss.backward()  # fmt: skip
    if trained == "adapter" and level == "token":
        assert parts == [(112, True), (112, True), (76, True)]
    else:
        assert parts == [(N, trained != "adapter")]


def test_known_scores_are_one_part(parts):
    hidden, b = torch.randn(N, H, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    out = fused_linear_logprobs(
        hidden, torch.randn(V, H) / 8, torch.randint(V, (N,)), impl="native",
        lm_head_adapter=HeadAdapter(torch.randn(4, H) / 8, b),
    )  # fmt: skip
    out.logps.sum().backward()
    assert parts == [(N, False)]


@pytest.mark.parametrize("columns", [1, 500, 40000])
def test_rows_of_any_width_are_copied(columns):
    """A few at a time, and at least one."""
    rows = torch.arange(0, 400, 2)
    dhidden, out = torch.randn(len(rows), columns), torch.zeros(400, columns + 3)
    native._copy_rows(dhidden, out, rows)
    assert torch.equal(out[rows, :columns], dhidden)
    assert not out[1::2].any()
    assert not out[:, columns:].any()
