"""Row kernels, interpreted, against fp64: every mode and option, odd sizes, poisoned memory."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from grpo_fused.kernels import launch
from grpo_fused.kernels.configs import PAD
from grpo_fused.kernels.launch import TritonRows
from grpo_fused.kernels.row_types import Coefficients, ObjectiveNumbers, Rows, TokenInputs, Transform

SHAPES = [(1, 1), (5, 37), (3, 256), (2, 257), (2, 1031)]


def row_statistics(logits, targets, transform, *, with_entropy):
    return TritonRows().statistics(Rows(logits, targets, transform), with_entropy=with_entropy)


def row_gradient(logits, out, targets, statistics, dlogp, dentropy, transform):
    TritonRows().gradient(Rows(logits, targets, transform), Coefficients(statistics, dlogp, dentropy), out)


def padded_logits(values: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """[R, V] view of rows padded to `PAD` elements; the padding is NaN."""
    rows, vocab_size = values.shape
    width = (vocab_size + PAD - 1) // PAD * PAD
    slab = torch.full((rows, width), torch.nan, dtype=dtype)
    slab[:, :vocab_size] = values.to(dtype)
    return slab[:, :vocab_size]


def transforms(rows: int, vocab_size: int):
    g = torch.Generator().manual_seed(5)
    bias = torch.randn(vocab_size, generator=g)
    temperatures = torch.rand(rows, generator=g) + 0.5
    return {
        "plain": Transform(None, 1.0, None, 1.0),
        "temperature": Transform(None, 1.0, None, 0.7),
        "temperatures": Transform(None, 1.0, None, temperatures),
        "scale": Transform(None, 0.3, None, 1.0),
        "softcap": Transform(None, 1.0, 5.0, 1.0),
        "bias": Transform(bias, 1.0, None, 1.0),
        "all": Transform(bias, 1.3, 7.0, temperatures),
    }


TRANSFORMS = list(transforms(1, 1))


def exact(raw, targets, transform):
    """fp64: z, log-probs of the targets, entropies."""
    z = raw
    if transform.bias is not None:
        z = z + transform.bias.double()
    z = z * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    t = transform.temperature
    z = z / (t.double().unsqueeze(1) if isinstance(t, torch.Tensor) else t)
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def case(shape, std=4.0):
    g = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    return torch.randn(shape, generator=g) * std, torch.randint(0, shape[1], shape[:1], generator=g)


@pytest.mark.pairs
@pytest.mark.gate(keep=lambda name, dtype, **_: dtype == torch.float32 or name in ("plain", "all"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(shape, name, dtype):
    values, targets = case(shape)
    logits = padded_logits(values, dtype)
    transform = transforms(*shape)[name]
    stats = row_statistics(logits, targets, transform, with_entropy=True)
    logp, entropy = exact(logits.double(), targets, transform)
    assert (stats.logp.double() - logp).abs().max() <= 1e-5
    assert (stats.entropy.double() - entropy).abs().max() <= 2e-5
    bare = row_statistics(logits, targets, transform, with_entropy=False)
    assert torch.equal(bare.logp, stats.logp)
    assert bare.entropy is None


@pytest.mark.pairs
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 256), (2, 299)], ids=str)
def test_gradient_in_place(shape, name, with_entropy, out_dtype):
    """The gradient is written to the memory of the logits, in fp32 or over their first halves in bf16."""
    values, targets = case(shape)
    transform = transforms(*shape)[name]
    g = torch.Generator().manual_seed(1)
    dlogp, dentropy = torch.randn(2, shape[0], generator=g)

    raw = values.double().requires_grad_()
    logp, entropy = exact(raw, targets, transform)
    ((logp * dlogp).sum() + ((entropy * dentropy).sum() if with_entropy else 0.0)).backward()

    logits = padded_logits(values)
    stats = row_statistics(logits, targets, transform, with_entropy=with_entropy)
    slab = logits.as_strided((shape[0], logits.stride(0)), (logits.stride(0), 1))
    out = slab.view(out_dtype)[:, : shape[1]]
    row_gradient(logits, out, targets, stats, dlogp, dentropy if with_entropy else None, transform)
    tol = 2e-6 if out_dtype == torch.float32 else 2**-7  # the interpreter truncates to bf16
    scale = raw.grad.abs().amax(1, keepdim=True)
    assert ((out.double() - raw.grad).abs() <= tol * scale + 1e-6).all()
    assert (slab.view(out_dtype)[:, shape[1] : slab.shape[1]] == 0).all(), "the padding of a row"


def test_unpadded_rows_and_a_separate_buffer():
    values, targets = case((3, 37))
    transform = Transform(None, 1.0, None, 1.0)
    stats = row_statistics(values, targets, transform, with_entropy=True)
    logp, _ = exact(values.double(), targets, transform)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=0, atol=1e-5)
    out = torch.full((3, 37), torch.nan, dtype=torch.bfloat16)
    before = values.clone()
    row_gradient(values, out, targets, stats, torch.ones(3), None, transform)
    assert torch.equal(values, before)
    assert out.isfinite().all()


def test_gradient_refuses_memory_that_it_would_overwrite_too_early():
    values, targets = case((4, 32))
    stats = row_statistics(values, targets, Transform(None, 1.0, None, 1.0), with_entropy=False)
    wrong = values.view(torch.bfloat16).view(-1)[: 4 * 32].view(4, 32)  # rows packed: row 1 is written to row 0
    with pytest.raises(ValueError, match="row by row"):
        row_gradient(values, wrong, targets, stats, torch.ones(4), None, Transform(None, 1.0, None, 1.0))


def test_in_place_where_loads_may_pass_a_barrier(monkeypatch):
    """AMD: the memory of fp32 logits takes an fp32 gradient, element by element, and no narrower one."""
    config = launch.row_config(torch.device("cpu"), 37)._replace(in_place=False)
    monkeypatch.setattr(launch, "row_config", lambda device, vocab_size: config)
    values, targets = case((3, 37))
    transform = Transform(None, 1.0, None, 1.0)
    stats = row_statistics(values, targets, transform, with_entropy=False)
    want = torch.empty(3, 37)
    row_gradient(values, want, targets, stats, torch.ones(3), None, transform)
    narrow = values.view(torch.bfloat16).as_strided((3, 37), (74, 1))
    with pytest.raises(ValueError, match=r"only if their elements have one size; got torch.bfloat16 for torch.float32"):
        row_gradient(values, narrow, targets, stats, torch.ones(3), None, transform)
    row_gradient(values, values, targets, stats, torch.ones(3), None, transform)
    assert torch.equal(values, want)


@pytest.mark.parametrize("offset", [-1e4, 1e4], ids=str)
def test_common_offset(offset):
    values, targets = case((4, 300))
    logits = padded_logits(values + offset)
    transform = Transform(None, 1.0, None, 1.0)
    stats = row_statistics(logits, targets, transform, with_entropy=True)
    logp, entropy = exact(logits.double(), targets, transform)
    assert (stats.logp.double() - logp).abs().max() <= 1e-5
    assert (stats.entropy.double() - entropy).abs().max() <= 1e-4


def test_all_negative_logits():
    """A running maximum that starts at 0 would be wrong here."""
    values, targets = case((3, 300))
    logits = padded_logits(-values.abs() - 50.0)
    transform = Transform(None, 1.0, None, 1.0)
    stats = row_statistics(logits, targets, transform, with_entropy=True)
    logp, entropy = exact(logits.double(), targets, transform)
    assert (stats.max < -49).all()
    torch.testing.assert_close(stats.logp.double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered in add:RuntimeWarning")  # -inf - -inf, unused
def test_impossible_tokens():
    """-inf logits, at the row's beginning (an empty first block) and elsewhere: no NaN in value or gradient."""
    values, _ = case((3, 600))
    values[:, :300] = -math.inf
    values[1, 400:] = -math.inf
    targets = torch.tensor([310, 350, 5])
    transform = Transform(None, 1.0, None, 1.0)
    logits = padded_logits(values)
    stats = row_statistics(logits, targets, transform, with_entropy=True)
    logp, entropy = exact(logits.double(), targets, transform)
    torch.testing.assert_close(stats.logp.double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=0, atol=1e-4)
    out = torch.empty(3, 600)
    row_gradient(logits, out, targets, stats, torch.tensor([1.0, -2.0, 0.0]), torch.ones(3), transform)
    assert out.isfinite().all()
    assert out[:2, :300].eq(0).all()


def test_certain_tokens():
    """log-probs are never above 0, and a confident token's gradient is accurate."""
    values = torch.zeros(3, 64)
    values[:, 7] = torch.tensor([12.0, 16.0, 200.0])
    targets = torch.full((3,), 7)
    transform = Transform(None, 1.0, None, 1.0)
    stats = row_statistics(values, targets, transform, with_entropy=True)
    raw = values.double().requires_grad_()
    logp, _ = exact(raw, targets, transform)
    logp.sum().backward()
    assert (stats.logp <= 0).all()
    assert (stats.entropy >= 0).all()
    out = torch.empty(3, 64)
    row_gradient(values, out, targets, stats, torch.ones(3), None, transform)
    torch.testing.assert_close(out[:2].double(), raw.grad[:2], rtol=2e-2, atol=0)
    torch.testing.assert_close(out[:2, 7].double(), -torch.expm1(stats.logp[:2].double()), rtol=1e-5, atol=0)


def test_no_rows():
    empty = torch.zeros(0, 16)
    stats = row_statistics(empty, torch.zeros(0, dtype=torch.int64), Transform(None, 1.0, None, 1.0), with_entropy=True)
    assert stats.logp.shape == (0,)


def test_targets_outside_the_vocabulary_are_not_read():
    """Nor is what lies beyond a row taken for a logit: zeros here, which would make a log-prob."""
    logits = torch.zeros(3, 48)[:, :37]
    targets = torch.tensor([-1, 37, 10**9])
    stats = row_statistics(logits, targets, Transform(torch.zeros(37), 1.0, None, 1.0), with_entropy=True)
    assert stats.logp.isnan().all()
    assert stats.entropy.isfinite().all()


def test_columns_that_may_be_touched_are_in_the_storage():
    assert launch.padded_width(torch.empty(3 * 64).as_strided((3, 40), (64, 1))) == launch.padded(40)
    assert launch.padded_width(torch.empty(2 * 64 + 40).as_strided((3, 40), (64, 1))) == 40


def test_a_wider_gradient_is_not_written_over_logits():
    memory = torch.randn(64)
    logits, out = memory.view(torch.bfloat16).as_strided((2, 16), (64, 1)), memory.as_strided((2, 16), (32, 1))
    scores = row_statistics(logits, torch.zeros(2, dtype=torch.int64), Transform(), with_entropy=False)
    with pytest.raises(ValueError, match="got torch.float32 for torch.bfloat16"):
        row_gradient(logits, out, torch.zeros(2, dtype=torch.int64), scores, torch.ones(2), None, Transform())


def test_an_impossible_token_of_an_old_policy_that_found_it_impossible_too():
    """A ratio of 1: both log-probs count as the lowest one."""
    objective = ObjectiveNumbers(0, "k3", True, 0.2, 0.2, math.inf, math.inf, 1.0, 1.0, 0.0)
    logits = torch.zeros(1, 64).index_fill(1, torch.tensor([1]), -math.inf)
    inputs = TokenInputs(-torch.ones(1), torch.ones(1), torch.full((1,), -math.inf), None, None, None)
    rows = Rows(logits, torch.tensor([1]), Transform())
    found = TritonRows().loss(rows, inputs, objective, torch.zeros(1, 64), with_entropy=False)
    assert found.loss.tolist() == [1.0]
