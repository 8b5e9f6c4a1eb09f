"""Scores of the head kernels, interpreted, against fp64: every option and way of loading; the same in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import make_case, make_config

triton = pytest.importorskip("triton")

import kernel_cases
import triton.language as tl
from grpo_fused.kernels import head_launch
from grpo_fused.kernels.head import from_e4m3
from grpo_fused.kernels.head_configs import (
    CANDIDATES,
    FP32_CONFIGS,
    HEAD_CONFIGS,
)
from grpo_fused.kernels.head_launch import Exponentials, head_scores
from grpo_fused.kernels.row_types import Extras, Transform
from head_cases import CONFIGS, OPTIONS, SMALL, case, exact, transform_of, z_of

from grpo_fused import HeadAdapter, QuantizedWeight, fused_linear_grpo_loss, fused_linear_logprobs

MORE = torch.zeros(20, 8, dtype=torch.bfloat16)
SHAPES = [(1, 8, 3), (1, 24, 1), (3, 16, 16), (37, 40, 131), (18, 64, 160)]  # N, H, V; 8 for a descriptor's rows


@pytest.mark.pairs
@pytest.mark.gate(
    keep=lambda config, shape, **_: config in (SMALL, CONFIGS["descriptors-persistent"]) or shape[0] in (1, 37)
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("exponentials", [False, True], ids=["score", "exponentials"])
def test_scores(shape, config, exponentials):
    hidden, weight, targets = case(shape)
    transform = transform_of("all" if shape[0] == 37 else "plain", shape[0], shape[2])
    room = Exponentials.empty(shape[0], weight, torch.float32, config) if exponentials else None
    got = head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room, config=config)
    for mine, want in zip(got, exact(hidden, weight, targets, transform), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)
    if room is not None:
        z = z_of(hidden.double() @ weight.double().T, transform)
        offsets = room.offsets.repeat_interleave(config.block_v, dim=1)[:, : shape[2]].double()
        torch.testing.assert_close(room.values.double(), (z - offsets).exp(), rtol=1e-5, atol=1e-7)
        powers = room.offsets.double() / math.log(2.0)
        assert (powers - powers.round()).abs().max() < 1e-4
        assert room.offsets.eq(room.offsets[:, :1]).all(), "one of the row, near the maximum of some columns"
        assert room.offsets[:, 0].double().sub(z.amax(1)).max() <= math.log(2.0)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_first_rows(dtype, count):
    kernel_cases.first_rows(count, dtype, N=100)


@pytest.mark.gate(keep=lambda option, dtype: dtype == torch.float32 or option == "all")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_options(option, dtype):
    hidden, weight, targets = case((21, 40, 77), dtype)
    transform = transform_of(option, 21, 77)
    got = head_scores(hidden, weight, targets, transform, with_entropy=True, config=SMALL)
    for mine, want in zip(got, exact(hidden, weight, targets, transform), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)
    plain = head_scores(hidden, weight, targets, transform, with_entropy=False, config=SMALL)
    assert plain.entropy is None
    assert torch.equal(plain.logp, got.logp)


@pytest.mark.parametrize(("scale", "temperature"), [(0.0, 1.0), (1.3, 0.7), (-0.6, 1.0)])
def test_one_factor_for_scale_and_temperature_is_accurate(scale, temperature):
    """log-probs within 1e-4 while |z| <= 32, and 1 - p of a confident token to 1e-3, in both modes."""
    hidden, weight, _ = case((16, 32, 77), std=1.0)
    transform = Transform(None, scale, None, temperature)
    z = z_of(hidden.double() @ weight.double().T, transform)
    largest = z.abs().amax(1, keepdim=True).clamp(min=1e-6)
    hidden = hidden * (32.0 / largest if scale else largest).float()  # of every row
    z = z_of(hidden.double() @ weight.double().T, transform)
    assert scale == 0.0 or 31.9 < z.abs().max() < 32.1
    for targets in (z.argmax(1), z.argmin(1)):
        want = exact(hidden, weight, targets, transform)
        for room in (None, Exponentials.empty(16, weight, torch.float32, SMALL)):
            got = head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room, config=SMALL)
            assert (got.logp.double() - want.logp).abs().max() < 1e-4
            torch.testing.assert_close(got.log_sum.double(), want.log_sum, rtol=1e-3, atol=0)
            torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-3, atol=1e-6)


@pytest.mark.gate(keep=lambda config: config in (SMALL, CONFIGS["descriptors-persistent"]))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_score_does_not_depend_on_the_batch(config):
    """Permuted, alone, among others, training or scoring, with or without entropy: the same bits.

    Interpreted, this shows that no choice depends on N; `make gpu` shows that products on a GPU round the same way.
    """
    hidden, weight, targets = case((25, 40, 77), torch.bfloat16)  # two panels, two splits
    transform = transform_of("plain", 25, 77)

    def scores(rows, **options):
        return head_scores(
            hidden[rows].contiguous(), weight, targets[rows], transform, config=config,
            **{"with_entropy": True, **options},
        )  # fmt: skip

    every = torch.arange(25)
    together = scores(every)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(1))
    for rows in (order, every[16:17], every[3:20]):
        for mine, want in zip(scores(rows), together, strict=True):
            assert torch.equal(mine, want[rows])
    room = Exponentials.empty(25, weight, torch.float32, config)
    for mine, want in zip(scores(every, exponentials=room), together, strict=True):
        assert torch.equal(mine, want)
    assert torch.equal(scores(every, with_entropy=False).logp, together.logp)


def test_panels_in_groups(monkeypatch):
    """Groups of two panels, the last one of one: each panel is computed once, in every split."""
    hidden, weight, targets = case((70, 40, 131))
    monkeypatch.setattr(head_launch, "GROUP_BYTES", 2 * SMALL.block_n * 40 * hidden.itemsize)
    transform = transform_of("plain", 70, 131)
    got = head_scores(hidden, weight, targets, transform, with_entropy=True, config=SMALL)
    for mine, want in zip(got, exact(hidden, weight, targets, transform), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)


def test_on_policy_ratio_is_exactly_one():
    """Old scores taken sequence by sequence from longer padding, new ones in training: no ratio but 1."""
    batch = make_case(5, B=4, T=9, H=40, V=300, dtype=torch.bfloat16, extras=False)
    mask = batch.completion_mask
    old = torch.zeros(4, 9)
    for row in range(4):
        padded = torch.cat([batch.hidden_states[row : row + 1], torch.full((1, 5, 40), torch.nan).bfloat16()], 1)
        ids = torch.cat([batch.completion_ids[row : row + 1], torch.full((1, 5), -100)], 1)
        live = torch.cat([mask[row : row + 1], torch.zeros(1, 5, dtype=torch.bool)], 1)
        old[row] = fused_linear_logprobs(padded, batch.lm_head_weight, ids, live, impl="triton").logps[0, :9]
    out = fused_linear_grpo_loss(
        batch.hidden_states, batch.lm_head_weight, batch.completion_ids, batch.advantages, mask,
        old_per_token_logps=old, config=make_config("grpo", epsilon=1e-9), impl="triton",
    )  # fmt: skip
    assert torch.equal(out.per_token_logps, old)
    assert out.metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("where", ["width", "start", "row-stride", "nowhere"])
def test_operands_of_odd_widths_are_padded(where, monkeypatch):
    """Kernels get rows of whole 16-byte loads: a copy with columns of 0, or the weight itself where it has them."""
    H = 23 if where == "width" else 32
    weight = {
        "width": torch.randn(29, 23),
        "start": torch.randn(29 * 32 + 1)[1:].view(29, 32),
        "row-stride": torch.randn(29, 33)[:, :32],
        "nowhere": torch.randn(29, 32),
    }[where].requires_grad_()
    hidden, ids = torch.randn(1, 5, H, requires_grad=True), torch.randint(0, 29, (1, 5))
    taken = []

    def record(h, w, *rest, **options):
        taken.append((h, w))
        return head_scores(h, w, *rest, **options)

    monkeypatch.setattr(head_launch, "head_scores", record)
    got = fused_linear_logprobs(hidden, weight, ids, impl="triton").logps
    want = (hidden.double() @ weight.double().T).log_softmax(2).gather(2, ids.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(got.sum(), (hidden, weight)), torch.autograd.grad(want.sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert taken
    for h, w in taken:
        for x in (h, w):
            assert x.shape[1] == x.stride(0) == 32
            assert x.data_ptr() % 16 == 0
            assert x[:, H:].eq(0).all()
        assert (w.data_ptr() == weight.data_ptr()) == (where == "nowhere")


def test_a_k_step_of_fp32_is_whole():
    """Its loads have no mask, with which triton 3.8 would spill a register on sm_90."""
    wide, narrow = torch.randn(3, 48), torch.randn(3, 48, dtype=torch.bfloat16)
    assert head_launch.aligned(wide).shape == (3, 64)
    assert head_launch.aligned(narrow) is narrow
    steps = {config.block_k for name, table in FP32_CONFIGS.items() if name != "interpreter" for config in table}
    assert all(head_launch.aligned_width(1, torch.float32) % step == 0 for step in steps)


def test_splits_cover_every_head():
    """Tiles are covered once, for any V and H; a token's partial statistics stay small; N has no effect."""
    tables = [*HEAD_CONFIGS.values(), *FP32_CONFIGS.values()]
    configs = {config for table in tables for config in table} | {c for cs in CANDIDATES.values() for c in cs}
    for config in configs:
        for V, H in ((1, 1), (29, 12), (32000, 2048), (151936, 896), (262208, 4096), (50304, 768)):
            splits, each = config.splits(V, H)
            tiles = -(-V // config.block_v)
            assert (splits - 1) * each < tiles <= splits * each
            assert splits <= 128


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("form", ["int8", "adapter"])
def test_a_frozen_weight_and_what_is_beside_it(form, config):
    """An adapter of several k steps; factors of rows also in the columns that are sampled for the rows' offsets."""
    N, H, V, C = 21, 64, 300, 80
    hidden, weight, targets = case((N, H + C, V))
    base, more, scale = weight[:, :H].contiguous(), weight[:, H:].contiguous(), None
    if form == "int8":
        base, scale = (20.0 * base).round().to(torch.int8), torch.linspace(0.005, 0.08, V)
    dense = torch.cat([base.double(), more.double()], 1) * (1.0 if scale is None else scale.double().unsqueeze(1))
    transform, extras = transform_of("plain", N, V), Extras(more, scale)
    room = Exponentials.empty(N, base, torch.float32, config)
    for out in (None, room):
        got = head_scores(
            hidden, base, targets, transform, with_entropy=True, exponentials=out, extras=extras, config=config
        )
        for mine, want in zip(got, exact(hidden, dense, targets, transform), strict=True):
            torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)
    step = V // config.block_v
    sampled = (hidden.double() @ dense.T)[:, : step * config.block_v : step].amax(1)
    want = ((sampled / math.log(2.0)).ceil() * math.log(2.0)).unsqueeze(1).expand_as(room.offsets)
    torch.testing.assert_close(room.offsets.double(), want, rtol=1e-5, atol=1e-5)


def test_what_the_kernel_reads_of_a_frozen_weight():
    """Bytes as they are, other numbers in the dtype of the computation, both with contiguous rows."""
    ids, adapter = torch.randint(0, 40, (2, 9)), HeadAdapter(torch.randn(3, 32), torch.randn(40, 3))
    hidden = torch.randn(2, 9, 32, dtype=torch.bfloat16)
    for weight in (
        torch.randn(32, 40).T,
        QuantizedWeight(torch.randint(-9, 9, (32, 40)).to(torch.int8).T, torch.rand(40)),
    ):
        dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            got = fused_linear_logprobs(hidden, weight, ids, impl="triton", lm_head_adapter=adapter).logps
        wide = dense.double() if isinstance(weight, QuantizedWeight) else dense.bfloat16().double()
        z = hidden.double() @ (wide + adapter.b.double() @ adapter.a.double()).T
        want = z.log_softmax(2).gather(2, ids.unsqueeze(2)).squeeze(2)
        assert (got - want).abs().max() < 2e-4


def test_wrong_operands_are_refused():
    hidden, weight, targets = case((4, 24, 20))
    for bad in (hidden.bfloat16(), hidden.T.contiguous().T):
        with pytest.raises(ValueError, match="contiguous hidden states and weight rows of one dtype, or .*; got"):
            head_scores(bad, weight, targets, transform_of("plain", 4, 20), with_entropy=False)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (Extras(torch.zeros(8, 20, dtype=torch.bfloat16).T), "one dtype, or a weight of int8 .* more torch.bfloat16 \\(1, 20"),
        (Extras(torch.zeros(20, 8)), "one dtype, or a weight of int8 or float8_e4m3fn with a row scale; .* more torch.float32"),
        (Extras(torch.zeros(20, 4, dtype=torch.bfloat16)), "columns of .* got \\(4, 32\\), weight \\(20, 24\\), more \\(20, 4"),
        (Extras(torch.zeros(19, 8, dtype=torch.bfloat16)), "more \\(19, 8"),
        (Extras(MORE, torch.ones(40)[::2]), "row_scale must be float32 \\[20\\], contiguous; got .* with stride \\(2,\\)"),
        (Extras(MORE, torch.ones(19)), "got torch.float32 \\(19,\\)"),
        (Extras(MORE, torch.ones(20).double()), "got torch.float64"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_operands_beside_a_frozen_weight_are_refused(extras, message):
    hidden, weight = torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(20, 24, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        head_scores(hidden, weight, torch.zeros(4, dtype=torch.int64), Transform(), with_entropy=False, extras=extras)


@pytest.mark.parametrize("extras", [Extras(), Extras(MORE)], ids=["alone", "adapter"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2], ids=str)
def test_bytes_without_their_scales_are_refused(dtype, extras):
    hidden, weight = torch.zeros(4, 24 + 8 * extras.any(), dtype=torch.bfloat16), torch.zeros(20, 24).to(dtype)
    with pytest.raises(ValueError, match=f"a row scale; got hidden states .* weight {dtype}"):
        head_scores(hidden, weight, torch.zeros(4, dtype=torch.int64), Transform(), with_entropy=False, extras=extras)


@pytest.mark.parametrize("layout", ["transposed", "every-other-column", "expanded-column", "every-other-row"])
def test_weights_without_contiguous_rows(layout):
    weight = {
        "transposed": torch.randn(16, 29).T,
        "every-other-column": torch.randn(29, 32)[:, ::2],
        "expanded-column": torch.randn(29, 1).expand(29, 16),
        "every-other-row": torch.randn(58, 16)[::2],
    }[layout]
    bias = torch.randn(58)[::2]
    hidden, ids = torch.randn(5, 16), torch.randint(0, 29, (5,))
    got = fused_linear_logprobs(hidden, weight, ids, lm_head_bias=bias, impl="triton").logps
    want = (hidden.double() @ weight.double().T + bias.double()).log_softmax(1).gather(1, ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tracing_reads_no_pointers(dtype):
    """The operators' fake results for torch.compile must not depend on a pointer."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden = torch.empty(2, 8, 24, dtype=dtype, requires_grad=True)
        weight = torch.empty(300, 24, dtype=dtype, requires_grad=True)
        ids, advantages = torch.empty(2, 8, dtype=torch.int64), torch.empty(2)
        out = fused_linear_grpo_loss(hidden, weight, ids, advantages, impl="triton")
        out.loss.backward()
        assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("rows", [1, 3])
def test_pointers_have_the_alignment_that_is_compiled_in(rows, monkeypatch):
    """Whatever the number of rows: else the kernel would be compiled again for some."""
    kernel, odd = head_launch.head_fwd_kernel, []

    class Seen:
        def __getitem__(self, grid):
            def launch(**arguments):
                tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
                odd.extend(name for name, x in tensors.items() if x.data_ptr() % 16)
                assert tensors.keys() >= {"x", "w", "max_ptr", "rest_ptr"}
                return kernel[grid](**arguments)

            return launch

    monkeypatch.setattr(head_launch, "head_fwd_kernel", Seen())
    hidden, weight, targets = case((rows, 16, 40), torch.bfloat16)
    room = Exponentials.empty(rows, weight, torch.bfloat16, SMALL)
    head_scores(hidden, weight, targets, Transform(), with_entropy=True, exponentials=room, config=SMALL)
    assert set(odd) <= set(kernel.kwargs["do_not_specialize_on_alignment"])


def test_targets_outside_the_vocabulary_are_not_read():
    hidden, weight = torch.randn(3, 20), torch.randn(37, 20)
    transform = Transform(torch.zeros(37), 1.0, None, 1.0)
    got = head_scores(hidden, weight, torch.tensor([-1, 37, 10**9]), transform, with_entropy=True, config=SMALL)
    assert got.logp.isnan().all()
    assert got.entropy.isfinite().all()


@triton.jit
def _widen(x_ptr, out_ptr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, from_e4m3(tl.load(x_ptr + at)))


def test_every_byte_of_fp8():
    """NaN too: float8_e4m3fn has no infinity."""
    numbers, out = torch.arange(256).to(torch.uint8), torch.empty(256)
    _widen[(1,)](numbers, out)
    torch.testing.assert_close(out, numbers.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
