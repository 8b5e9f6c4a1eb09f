"""The head kernels' ways to dlogits, interpreted, against fp64: stored exponentials, and known statistics."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import frobenius_error, make_case, make_config

pytest.importorskip("triton")
from grpo_fused.kernels.configs import padded
from grpo_fused.kernels.head_launch import (
    Exponentials,
    exponentials_factor,
    exponentials_to_dlogits,
    head_dlogits,
    head_scores,
)
from grpo_fused.kernels.row_types import Coefficients, Transform
from head_cases import CONFIGS, OPTIONS, SMALL, case, exact, transform_of, z_of


def exact_dlogits(hidden, weight, targets, transform, dlogp, dentropy):
    product = (hidden.double() @ weight.double().T).requires_grad_()
    log_p = z_of(product, transform).log_softmax(1)
    loss = (log_p.gather(1, targets.unsqueeze(1)).squeeze(1) * dlogp.double()).sum()
    if dentropy is not None:
        loss = loss - ((log_p.exp() * log_p).sum(1) * dentropy.double()).sum()
    return torch.autograd.grad(loss, product)[0]


def from_exponentials(way, room, targets, coefficients, transform):
    """[N, V] dlogits: in the place of E, or E times a factor for each row."""
    if way == "exponentials":
        exponentials_to_dlogits(room, targets, coefficients, transform)
        return room.values
    factor = exponentials_factor(room, targets, coefficients, transform)
    assert factor[coefficients.dlogp == 0].eq(0).all()
    room.values.copy_(room.values.double() * factor.double().unsqueeze(1))  # in place: with the padding as it was
    return room.values


def dlogits_in_gate(option, with_entropy, way):
    """Every option both ways to dlogits, with entropies; without them, and by descriptors, one of each kind."""
    if way == "factor":
        return option in ("scale", "bias", "temperatures")
    return option in ("plain", "all", "softcap") or (with_entropy and way != "known-descriptors")


@pytest.mark.pairs
@pytest.mark.gate(keep=dlogits_in_gate)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logp", "logp+entropy"])
@pytest.mark.parametrize("way", ["exponentials", "factor", "known-pointers", "known-descriptors"])
def test_dlogits(option, with_entropy, way):
    """Both ways to dlogits, in fp32 against fp64; poisoned memory must be overwritten or not used."""
    N, H, V = 21, 40, 77
    hidden, weight, targets = case((N, H, V))
    transform = transform_of(option, N, V)
    if way in ("exponentials", "factor") and transform.softcap is not None:
        pytest.skip("exponentials do not give the gradient of a softcap")
    if way == "factor" and with_entropy:
        pytest.skip("a factor does not give the gradient of an entropy")
    g = torch.Generator().manual_seed(3)
    dlogp = torch.randn(N, generator=g)
    dlogp[4] = 0.0
    dentropy = torch.randn(N, generator=g) if with_entropy else None
    if way in ("exponentials", "factor"):
        room = Exponentials.empty(N, weight, torch.float32, SMALL)
        room.values.fill_(torch.nan)
        stats = head_scores(
            hidden, weight, targets, transform, with_entropy=with_entropy, exponentials=room, config=SMALL
        )
        got = from_exponentials(way, room, targets, Coefficients(stats, dlogp, dentropy), transform)
    else:
        config = CONFIGS[way.removeprefix("known-")]
        stats = head_scores(hidden, weight, targets, transform, with_entropy=with_entropy, config=config)
        got = torch.full((N, padded(V)), torch.nan)[:, :V]
        head_dlogits(hidden, weight, targets, Coefficients(stats, dlogp, dentropy), transform, got, config=config)
    want = exact_dlogits(hidden, weight, targets, transform, dlogp, dentropy)
    assert frobenius_error(got, want) < 1e-5
    assert got.as_strided((N, padded(V)), got.stride())[:, V:].eq(0).all(), "on a CPU products read the padding"
    if not with_entropy:
        assert got[4].eq(0).all()


@pytest.mark.parametrize("way", ["exponentials", "factor", "known"])
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
    room = Exponentials.empty(8, weight, torch.float32, SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room, config=SMALL)
    assert (stats.logp <= 0).all()
    ones = torch.ones(8)
    if way in ("exponentials", "factor"):
        got = from_exponentials(way, room, targets, Coefficients(stats, ones, None), transform)
    else:
        got = torch.empty(8, padded(V))[:, :V]
        head_dlogits(hidden, weight, targets, Coefficients(stats, ones, None), transform, got, config=SMALL)
    want = exact_dlogits(hidden, weight, targets, transform, ones, None)
    assert (got.double() - want).abs().max() < 2e-7
    at_target = got.double().gather(1, targets.unsqueeze(1)) / want.gather(1, targets.unsqueeze(1))
    assert (at_target - 1).abs().max() < 1e-4


def rounded_once(hidden, weight, targets, transform, dlogp, dentropy, dtype):
    """Relative error of exact dlogits rounded to `dtype`, scaled by a power of two in fp16."""
    want = exact_dlogits(hidden, weight, targets, transform, dlogp, dentropy)
    scale = 2.0 ** (8 - want.abs().max().log2().floor()) if dtype == torch.float16 else 1.0
    return want, frobenius_error((want * scale).to(dtype).double() / scale, want), scale


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda with_entropy, way, **_: with_entropy or way == "factor")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logp", "logp+entropy"])
@pytest.mark.parametrize("std", [1.0, 5.0, 30.0], ids=lambda std: f"std{std:g}")
@pytest.mark.parametrize("likely", [False, True], ids=["any-target", "top-target"])
@pytest.mark.parametrize("way", ["exponentials", "factor"])
def test_rounded_exponentials_make_gradients_as_good_as_rounding_once(dtype, with_entropy, std, likely, way):
    """Stored in 16 bits, for targets 60 nats below their tile's maximum and for certain ones; twice one rounding."""
    if way == "factor" and (with_entropy or dtype == torch.float16):
        pytest.skip("neither an entropy's gradient nor fp16")
    N, H, V = 16, 24, 77
    hidden, weight, targets = case((N, H, V), std=std)
    if likely:
        targets = (hidden.double() @ weight.double().T).argmax(1)
    transform = transform_of("temperature", N, V)
    g = torch.Generator().manual_seed(3)
    dlogp, dentropy = torch.randn(N, generator=g), torch.randn(N, generator=g) * 0.1 if with_entropy else None
    want, once, scale = rounded_once(hidden, weight, targets, transform, dlogp, dentropy, dtype)
    room = Exponentials.empty(N, weight, dtype, SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=with_entropy, exponentials=room, config=SMALL)
    coefficients = Coefficients(stats, dlogp * scale, None if dentropy is None else dentropy * scale)
    from_exponentials(way, room, targets, coefficients, transform)
    # the interpreter truncates to bf16, twice: each time up to twice the error of rounding
    allowed = 6.5 if dtype == torch.bfloat16 else 2.5
    assert frobenius_error(room.values.double() / scale, want) <= allowed * max(once, torch.finfo(dtype).eps / 8)


@pytest.mark.parametrize("far", [80.0, 200.0, math.inf], ids=str)
def test_a_slice_far_below_the_rest_of_the_vocabulary(far):
    """Statistics are of all slices: those of the whole, whose other logits are far above."""
    N, H, V, begin = 6, 16, 96, 64
    hidden, weight, targets = case((N, H, V))
    targets[:3] = begin + torch.arange(3)
    bias = torch.where(torch.arange(V) < begin, 0.0, -far)
    whole, here = Transform(bias, 1.0, None, 1.0), Transform(bias[begin:].contiguous(), 1.0, None, 1.0)
    stats = head_scores(hidden, weight, targets, whole, with_entropy=False, config=SMALL)
    room = Exponentials.empty(N, weight[begin:], torch.float32, SMALL)
    head_scores(hidden, weight[begin:], targets - begin, here, with_entropy=False, exponentials=room, config=SMALL)
    dlogp = torch.tensor([1.0, -2.0, 0.0, 1.0, 2.0, 0.0])
    got = from_exponentials("factor", room, targets - begin, Coefficients(stats, dlogp, None), here)
    p = z_of(hidden.double() @ weight.double().T, whole).softmax(1)[:, begin:]
    at_target = (torch.arange(begin, V) == targets.unsqueeze(1)).double()
    torch.testing.assert_close(got.double(), dlogp.double().unsqueeze(1) * (at_target - p), rtol=1e-5, atol=1e-30)


def test_fp16_exponentials_reach_far_below_their_maximum():
    """Without scaling, those 20 nats below their tile's maximum would be 0."""
    weight = torch.zeros(24, 8, dtype=torch.float16)
    weight[:, 0] = -20.0
    weight[0, 0] = 0.0
    hidden, targets = torch.eye(1, 8, dtype=torch.float16), torch.tensor([0])
    transform = Transform(None, 1.0, None, 1.0)
    room = Exponentials.empty(1, weight, torch.float16, SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room, config=SMALL)
    exponentials_to_dlogits(room, targets, Coefficients(stats, torch.tensor([2.0**15]), None), transform)
    want = torch.full((23,), -(2.0**15) * math.exp(-20.0))
    torch.testing.assert_close(room.values[0, 1:].float(), want, rtol=2e-3, atol=0)


@pytest.mark.parametrize("sampled", [True, False], ids=["", "nor-a-sampled-one"])
def test_a_tile_without_a_possible_entry(sampled):
    """All of its logits -inf, the others far below 0: its exponentials count 0 and make no NaN."""
    N, H, V = 5, 16, 96
    hidden, weight, targets = case((N, H, V))
    bias = torch.full((V,), -120.0)
    bias[32:64] = -torch.inf
    if not sampled:
        bias[:: V // SMALL.block_v] = -torch.inf
    live = bias.isfinite().nonzero().squeeze(1)
    of_live = targets % 20
    targets = live[of_live]
    transform = Transform(bias, 1.0, None, 1.0)
    room = Exponentials.empty(N, weight, torch.float32, SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=True, exponentials=room, config=SMALL)
    exponentials_to_dlogits(room, targets, Coefficients(stats, torch.ones(N), torch.ones(N)), transform)
    small = Transform(bias[live], 1.0, None, 1.0)
    want = exact_dlogits(hidden, weight[live], of_live, small, torch.ones(N), torch.ones(N))
    assert frobenius_error(room.values[:, live], want) < 1e-5
    assert room.values[:, 32:64].eq(0).all()


@pytest.mark.parametrize("far", [30.0, 43.0, 60.0, 150.0, 400.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["exponentials", "factor"])
def test_an_offset_far_below_the_maximum(far, dtype, way):
    """The sampled columns say nothing of the largest logits, in two tiles: they get offsets of their own, or E is
    below 2^64."""
    N, H, V = 6, 16, 200
    hidden, weight, targets = case((N, H, V), std=1.0)
    high = torch.tensor([33, 37, 130])
    sampled = torch.arange(0, V, V // SMALL.block_v)[: SMALL.block_v]
    assert not set(high.tolist()) & set(sampled.tolist())
    bias = torch.zeros(V)
    bias[high] = torch.tensor([far, far - 1.0, far - 2.0])
    targets[:3], transform = high, Transform(bias, 1.0, None, 1.0)
    dlogp = torch.linspace(-1.0, 1.0, N)
    room = Exponentials.empty(N, weight, dtype, SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room, config=SMALL)
    assert room.values.isfinite().all()
    assert room.offsets.eq(room.offsets[:, :1]).all(1).any() == (far < 44.0)
    got = from_exponentials(way, room, targets, Coefficients(stats, dlogp, None), transform)
    want = exact_dlogits(hidden, weight, targets, transform, dlogp, None)
    allowed = 1e-5 + far * torch.finfo(torch.float32).eps  # the digits of a logit of that size
    assert frobenius_error(got, want) < (allowed if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("target", [-1, 77, 10**6])
def test_a_target_that_is_not_in_the_slice_is_not_written(target):
    """-1 is another rank's; one outside the vocabulary has the log-prob NaN, and its row the gradient NaN."""
    hidden, weight, _ = case((3, 24, 77))
    transform, targets = Transform(None, 1.0, None, 1.0), torch.tensor([5, target, 7])
    room = Exponentials.empty(3, weight, torch.float32, SMALL)
    stats = head_scores(hidden, weight, targets, transform, with_entropy=False, exponentials=room, config=SMALL)
    before = room.values.clone()
    coefficients = Coefficients(stats._replace(logp=torch.zeros(3)), torch.ones(3), None)
    factor = exponentials_factor(room, targets, coefficients, transform)
    assert torch.equal(room.values[1], before[1])
    changed = [int(row.nonzero().squeeze(1)) for row in (room.values != before)[[0, 2]]]
    assert changed == [5, 7]
    assert factor.lt(0).all()


def test_softcap_uses_no_exponentials():
    """Their rounding loses its slope: the engine computes dlogits directly, and the launcher refuses exponentials."""
    hidden, weight, targets = case((4, 24, 20))
    transform = transform_of("softcap", 4, 20)
    room = Exponentials.empty(4, weight, torch.float32, SMALL)
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


def test_entropy_gradient_of_a_confident_target():
    """18 nats above the next token: log p of the target is -1.5e-8, no difference of its logit and the sum."""
    for z in (50.0, 61.7, 88.3, 119.1):
        hidden, weight = torch.ones(1, 32) * (torch.arange(32) == 0), torch.zeros(40, 32)
        weight[:, 0] = torch.tensor([-90.0, -90.0, -90.0, z, 0.0, z - 18.0, *[0.0] * 34])
        targets, transform = torch.tensor([3]), Transform()
        statistics = head_scores(hidden, weight, targets, transform, with_entropy=True)
        coefficients = Coefficients(statistics, torch.zeros(1), torch.ones(1))
        out = torch.zeros(1, padded(40))[:, :40]
        head_dlogits(hidden, weight, targets, coefficients, transform, out)
        want = exact_dlogits(hidden, weight, targets, transform, torch.zeros(1), torch.ones(1))
        torch.testing.assert_close(out[0, 3].double(), want[0, 3], rtol=1e-4, atol=0)


def test_entropy_gradient_beside_an_impossible_token():
    bias = torch.zeros(40).index_fill(0, torch.tensor([7]), -math.inf)
    hidden, weight, targets = torch.randn(2, 32), torch.randn(40, 32), torch.tensor([3, 4])
    statistics = head_scores(hidden, weight, targets, Transform(bias), with_entropy=True)
    out = torch.full((2, padded(40)), math.nan)[:, :40]
    head_dlogits(hidden, weight, targets, Coefficients(statistics, torch.ones(2), torch.ones(2)), Transform(bias), out)
    assert out.isfinite().all()
    assert (out[:, 7] == 0).all()
