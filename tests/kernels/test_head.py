"""Head kernels, interpreted, against fp64: every mode, option and way of loading; the same scores in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import frobenius_error, make_case, make_config

pytest.importorskip("triton")

from grpo_fused.kernels import head_launch
from grpo_fused.kernels.configs import padded
from grpo_fused.kernels.head_configs import (
    CANDIDATES,
    FP32_CONFIGS,
    HEAD_CONFIGS,
    HeadConfig,
)
from grpo_fused.kernels.head_launch import Exponentials, exponentials_to_dlogits, head_dlogits, head_scores
from grpo_fused.kernels.row_types import Coefficients, Statistics, Transform

from grpo_fused import fused_linear_grpo_loss, fused_linear_logprobs

SMALL = HeadConfig(16, 32, 32, 1, 1, 1, max_splits=3, steps_per_split=2)
CONFIGS = {
    "pointers": SMALL,
    "descriptors": SMALL._replace(tma=True),
    "persistent": SMALL._replace(persistent=True),
    "descriptors-persistent": SMALL._replace(tma=True, persistent=True),
}
SHAPES = [(1, 8, 3), (1, 24, 1), (3, 16, 16), (37, 40, 131), (18, 64, 160)]  # N, H, V; 8 for a descriptor's rows
OPTIONS = ["plain", "temperature", "temperatures", "scale", "negative-scale", "softcap", "bias", "all"]


def transform_of(option: str, rows: int, vocab_size: int) -> Transform:
    g = torch.Generator().manual_seed(5)
    bias, temperatures = torch.randn(vocab_size, generator=g), torch.rand(rows, generator=g) + 0.5
    return {
        "plain": Transform(None, 1.0, None, 1.0),
        "temperature": Transform(None, 1.0, None, 0.7),
        "temperatures": Transform(None, 1.0, None, temperatures),
        "scale": Transform(None, 0.3, None, 1.0),
        "negative-scale": Transform(None, -1.2, None, 1.0),
        "softcap": Transform(None, 1.0, 5.0, 1.0),
        "bias": Transform(bias, 1.0, None, 1.0),
        "all": Transform(bias, 1.3, 7.0, temperatures),
    }[option]


def z_of(product: torch.Tensor, transform: Transform) -> torch.Tensor:
    """fp64"""
    z = product if transform.bias is None else product + transform.bias.double()
    z = z * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    t = transform.temperature
    return z / (t.double().unsqueeze(1) if isinstance(t, torch.Tensor) else t)


def case(shape, dtype=torch.float32, std=3.0):
    N, H, V = shape
    g = torch.Generator().manual_seed(N + H + V)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (torch.randn(V, H, generator=g) * std / math.sqrt(H)).to(dtype)
    return hidden, weight, torch.randint(0, V, (N,), generator=g)


def exact(hidden, weight, targets, transform):
    """fp64: (max, log_sum, logp, entropy)."""
    z = z_of(hidden.double() @ weight.double().T, transform)
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    m = z.amax(1)
    return Statistics(m, z.logsumexp(1) - m, log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy)


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
    room = Exponentials.empty(shape[0], weight, torch.float32, transform, config=config) if exponentials else None
    got = head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room, config=config)
    for mine, want in zip(got, exact(hidden, weight, targets, transform), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)
    if room is not None:
        z = z_of(hidden.double() @ weight.double().T, transform)
        offsets = room.offsets.repeat_interleave(config.block_v, dim=1)[:, : shape[2]].double()
        torch.testing.assert_close(room.values.double(), (z - offsets).exp(), rtol=1e-5, atol=1e-7)
        assert room.values.amax(1).eq(1.0).all(), "an offset is its tile's maximum"


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
        for room in (None, Exponentials.empty(16, weight, torch.float32, transform, config=SMALL)):
            got = head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room, config=SMALL)
            assert (got.logp.double() - want.logp).abs().max() < 1e-4
            torch.testing.assert_close(got.log_sum.double(), want.log_sum, rtol=1e-3, atol=0)
            torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-3, atol=1e-6)


def exact_dlogits(hidden, weight, targets, transform, dlogp, dentropy):
    product = (hidden.double() @ weight.double().T).requires_grad_()
    log_p = z_of(product, transform).log_softmax(1)
    loss = (log_p.gather(1, targets.unsqueeze(1)).squeeze(1) * dlogp.double()).sum()
    if dentropy is not None:
        loss = loss - ((log_p.exp() * log_p).sum(1) * dentropy.double()).sum()
    return torch.autograd.grad(loss, product)[0]


def dlogits_in_gate(option, with_entropy, way):
    """Every option both ways to dlogits, with entropies; without them, and by descriptors, one of each kind."""
    return option in ("plain", "all", "softcap") or (with_entropy and way != "known-descriptors")


@pytest.mark.pairs
@pytest.mark.gate(keep=dlogits_in_gate)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logp", "logp+entropy"])
@pytest.mark.parametrize("way", ["exponentials", "known-pointers", "known-descriptors"])
def test_dlogits(option, with_entropy, way):
    """Both ways to dlogits, in fp32 against fp64; poisoned memory must be overwritten or not used."""
    N, H, V = 21, 40, 77
    hidden, weight, targets = case((N, H, V))
    transform = transform_of(option, N, V)
    if way == "exponentials" and transform.softcap is not None:
        pytest.skip("exponentials do not give the gradient of a softcap")
    g = torch.Generator().manual_seed(3)
    dlogp = torch.randn(N, generator=g)
    dlogp[4] = 0.0
    dentropy = torch.randn(N, generator=g) if with_entropy else None
    if way == "exponentials":
        room = Exponentials.empty(N, weight, torch.float32, transform, config=SMALL)
        room.values.fill_(torch.nan)
        stats = head_scores(
            hidden, weight, targets, transform, with_entropy=with_entropy, exponentials=room, config=SMALL
        )
        exponentials_to_dlogits(room, targets, Coefficients(stats, dlogp, dentropy), transform)
        got = room.values
    else:
        config = CONFIGS[way.removeprefix("known-")]
        stats = head_scores(hidden, weight, targets, transform, with_entropy=with_entropy, config=config)
        got = torch.full((N, padded(V)), torch.nan)[:, :V]
        head_dlogits(hidden, weight, targets, Coefficients(stats, dlogp, dentropy), transform, got, config=config)
    want = exact_dlogits(hidden, weight, targets, transform, dlogp, dentropy)
    assert frobenius_error(got, want) < 1e-5
    if not with_entropy:
        assert got[4].eq(0).all()


@pytest.mark.parametrize("way", ["exponentials", "known"])
def test_confident_tokens_have_accurate_gradients(way):
    """Probability 1 - 1e-3 to 1 - 1e-9: the target's gradient is the sum of the others', not a rounded 1 - p."""
    H, V = 64, 48
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=g)
    targets = torch.arange(8)
    hidden = weight[targets] * 0.3
    transform = Transform(None, 1.0, None, 1.0)
    exact_logp = exact(hidden, weight, targets, transform).logp
    assert (exact_logp.abs() < 5e-3).all()
    room = Exponentials.empty(8, weight, torch.float32, transform, config=SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room, config=SMALL)
    assert (stats.logp <= 0).all()
    ones = torch.ones(8)
    if way == "exponentials":
        exponentials_to_dlogits(room, targets, Coefficients(stats, ones, None), transform)
        got = room.values
    else:
        got = torch.empty(8, padded(V))[:, :V]
        head_dlogits(hidden, weight, targets, Coefficients(stats, ones, None), transform, got, config=SMALL)
    want = exact_dlogits(hidden, weight, targets, transform, ones, None)
    assert (got.double() - want).abs().max() < 2e-7


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
    room = Exponentials.empty(25, weight, torch.float32, transform, config=config)
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
    for mine, exact in zip(
        torch.autograd.grad(got.sum(), (hidden, weight)), torch.autograd.grad(want.sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    assert taken
    for h, w in taken:
        for x in (h, w):
            assert x.shape[1] == x.stride(0) == 32
            assert x.data_ptr() % 16 == 0
            assert x[:, H:].eq(0).all()
        assert (w.data_ptr() == weight.data_ptr()) == (where == "nowhere")


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


def test_wrong_operands_are_refused():
    hidden, weight, targets = case((4, 24, 20))
    for bad in (hidden.bfloat16(), hidden.T.contiguous().T):
        with pytest.raises(ValueError, match="contiguous hidden states and weight rows of one dtype; got"):
            head_scores(bad, weight, targets, transform_of("plain", 4, 20), with_entropy=False)


def rounded_once(hidden, weight, targets, transform, dlogp, dentropy, dtype):
    """Relative error of exact dlogits rounded to `dtype`, scaled by a power of two in fp16."""
    want = exact_dlogits(hidden, weight, targets, transform, dlogp, dentropy)
    scale = 2.0 ** (8 - want.abs().max().log2().floor()) if dtype == torch.float16 else 1.0
    return want, frobenius_error((want * scale).to(dtype).double() / scale, want), scale


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda with_entropy, **_: with_entropy)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logp", "logp+entropy"])
@pytest.mark.parametrize("std", [1.0, 5.0, 30.0], ids=lambda std: f"std{std:g}")
@pytest.mark.parametrize("likely", [False, True], ids=["any-target", "top-target"])
def test_rounded_exponentials_make_gradients_as_good_as_rounding_once(dtype, with_entropy, std, likely):
    """Stored in 16 bits, for targets 60 nats below their tile's maximum and for certain ones; twice one rounding."""
    N, H, V = 16, 24, 77
    hidden, weight, targets = case((N, H, V), std=std)
    if likely:
        targets = (hidden.double() @ weight.double().T).argmax(1)
    transform = transform_of("temperature", N, V)
    g = torch.Generator().manual_seed(3)
    dlogp, dentropy = torch.randn(N, generator=g), torch.randn(N, generator=g) * 0.1 if with_entropy else None
    want, once, scale = rounded_once(hidden, weight, targets, transform, dlogp, dentropy, dtype)
    room = Exponentials.empty(N, weight, dtype, transform, config=SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=with_entropy, exponentials=room, config=SMALL)
    exponentials_to_dlogits(
        room, targets, Coefficients(stats, dlogp * scale, None if dentropy is None else dentropy * scale), transform
    )
    # the interpreter truncates to bf16, twice: each time up to twice the error of rounding
    allowed = 5 if dtype == torch.bfloat16 else 2.5
    assert frobenius_error(room.values.double() / scale, want) <= allowed * max(once, torch.finfo(dtype).eps / 8)


def test_fp16_exponentials_reach_far_below_their_maximum():
    """Without scaling, those 20 nats below their tile's maximum would be 0."""
    weight = torch.zeros(24, 8, dtype=torch.float16)
    weight[:, 0] = -20.0
    weight[0, 0] = 0.0
    hidden, targets = torch.eye(1, 8, dtype=torch.float16), torch.tensor([0])
    transform = Transform(None, 1.0, None, 1.0)
    room = Exponentials.empty(1, weight, torch.float16, transform, config=SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room, config=SMALL)
    exponentials_to_dlogits(room, targets, Coefficients(stats, torch.tensor([2.0**15]), None), transform)
    want = torch.full((23,), -(2.0**15) * math.exp(-20.0))
    torch.testing.assert_close(room.values[0, 1:].float(), want, rtol=2e-3, atol=0)


def test_a_tile_without_a_possible_entry():
    """All of its logits -inf, the others far below 0: its exponentials count 0 and make no NaN."""
    N, H, V = 5, 16, 96
    hidden, weight, targets = case((N, H, V))
    bias = torch.full((V,), -120.0)
    bias[32:64] = -torch.inf
    targets %= 32
    transform = Transform(bias, 1.0, None, 1.0)
    room = Exponentials.empty(N, weight, torch.float32, transform, config=SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room, config=SMALL)
    exponentials_to_dlogits(room, targets, Coefficients(stats, torch.ones(N), torch.ones(N)), transform)
    live = torch.cat([torch.arange(32), torch.arange(64, 96)])
    small = Transform(bias[live], 1.0, None, 1.0)
    want = exact_dlogits(hidden, weight[live], targets, small, torch.ones(N), torch.ones(N))
    assert frobenius_error(room.values[:, live], want) < 1e-5
    assert room.values[:, 32:64].eq(0).all()


def test_softcap_uses_no_exponentials():
    """Their rounding loses its slope: the engine computes dlogits directly, and the launcher refuses exponentials."""
    hidden, weight, targets = case((4, 24, 20))
    transform = transform_of("softcap", 4, 20)
    room = Exponentials.empty(4, weight, torch.float32, transform, config=SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room, config=SMALL)
    with pytest.raises(ValueError, match="exponentials do not give the gradient of a softcap; got softcap=5.0"):
        exponentials_to_dlogits(room, targets, Coefficients(stats, torch.ones(4), None), transform)
    for temperature in (1.0, 0.3):
        batch = make_case(6, B=2, T=8, H=16, V=300, dtype=torch.bfloat16, softcap=30.0, temperature=temperature)
        batch.lm_head_weight = batch.lm_head_weight * 8
        batch.options["old_per_token_logps"] = None
        want = batch.to(torch.float64).run(make_config("dapo"), impl="reference")
        got = batch.run(make_config("dapo"), impl="triton")
        assert frobenius_error(got.dhidden, want.dhidden) < 1e-2
        assert frobenius_error(got.dweight, want.dweight) < 1e-2


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


def test_targets_outside_the_vocabulary_are_not_read():
    hidden, weight = torch.randn(3, 20), torch.randn(37, 20)
    transform = Transform(torch.zeros(37), 1.0, None, 1.0)
    got = head_scores(hidden, weight, torch.tensor([-1, 37, 10**9]), transform, with_entropy=True, config=SMALL)
    assert got.logp.isnan().all()
    assert got.entropy.isfinite().all()
