"""Liger's scaled cross-entropy on our kernels, compared with Liger 0.8.5 itself on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from grpo_fused.integrations.liger import FusedLinearScaledCrossEntropyFunction as Fused

M, H, V = 11, 16, 70


@pytest.fixture(scope="module")
def liger_scaled():
    return pytest.importorskip("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, V, (M,), generator=generator)
    target[2], target[7] = -100, -100
    return hidden, weight, target


def outputs_and_gradients(function, *options):
    """The results, and the gradients of a sum with other coefficients for each."""
    hidden, weight, target = problem()
    results = function.apply(hidden, weight, target, *options)
    results = (results,) if isinstance(results, torch.Tensor) else results
    generator = torch.Generator().manual_seed(1)
    coefficients = [torch.randn(x.shape, generator=generator) for x in results]
    gradients = torch.autograd.grad(
        sum((x.float() * c).sum() for x, c in zip(results, coefficients, strict=True)), (hidden, weight)
    )
    return results, gradients


@pytest.mark.parametrize("selected", [None, torch.tensor([5, 0, 69, 5])], ids=["", "selected"])
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_liger(liger_scaled, temperature, entropy, selected):
    options = (temperature, -100, 1, entropy, selected)
    want, want_gradients = outputs_and_gradients(liger_scaled, *options)
    got, gradients = outputs_and_gradients(Fused, *options)
    assert len(got) == 1 + entropy + (selected is not None)
    for x, y in zip((*got, *gradients), (*want, *want_gradients), strict=True):
        assert y.abs().max() > 0
        assert_close(x, y, rtol=2e-5, atol=2e-5)
    assert not any(x[row].any() for x in got for row in (2, 7))


def test_other_ignored_target(liger_scaled):
    hidden, weight, target = problem()
    target[target < 0] = 3
    got, want = (f.apply(hidden, weight, target, 1.0, 3) for f in (Fused, liger_scaled))
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (got == 0).sum() == (target == 3).sum() >= 2


def test_ignored_states_may_be_nan():
    hidden, weight, target = problem()
    hidden = hidden.detach().where((target >= 0).unsqueeze(1), torch.nan).requires_grad_()
    results = Fused.apply(hidden, weight, target, 1.0, -100, 1, True, torch.tensor([5, 0]))
    for gradient in torch.autograd.grad(sum(x.sum() for x in results), (hidden, weight)):
        assert gradient.isfinite().all()


def test_no_tokens():
    hidden, weight, target = problem()
    ids = torch.tensor([5, 0])
    losses, logps = Fused.apply(hidden[:0], weight, target[:0], selected_token_ids=ids)
    assert losses.shape == (0,)
    assert logps.shape == (0, 2)


def test_bf16_is_nearer_to_float64(liger_scaled):
    hidden, weight, target = (x.detach() for x in problem(torch.bfloat16))
    exact = liger_scaled.apply(hidden.double(), weight.double(), target, 1.0, -100, 1, True, torch.arange(6))
    for name, function, bound in (("ours", Fused, (0, 1e-4)), ("Liger", liger_scaled, (1e-3, 1.0))):
        got = function.apply(hidden, weight, target, 1.0, -100, 1, True, torch.arange(6))
        off = max(float((x.double() - y.double()).abs().max()) for x, y in zip(got, exact, strict=True))
        assert bound[0] <= off < bound[1], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_rounds_no_logits(dtype):
    """Log-probs of selected tokens and of targets are of the same logits, those of operands in bf16."""
    hidden, weight, target = (x.detach() for x in problem(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        _, selected = Fused.apply(hidden, weight, target, selected_token_ids=torch.arange(6))
    z = hidden.bfloat16().double() @ weight.bfloat16().double().T
    want = torch.where(target.unsqueeze(1) >= 0, z.log_softmax(1)[:, :6], 0.0)
    assert_close(selected.double(), want, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"m_tiles_per_cluster": 0}, ValueError, "m_tiles_per_cluster must be at least 1; got 0"),
        ({"m_tiles_per_cluster": True}, TypeError, "m_tiles_per_cluster must be an int; got True"),
        ({"return_entropy": 1}, TypeError, "return_entropy must be True or False; got 1"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"target": torch.zeros(M - 1, dtype=torch.int64)}, ValueError, "shape"),
        ({"target": torch.full((M,), V)}, ValueError, rf"{V}"),
        ({"selected_token_ids": torch.tensor([V])}, ValueError, rf"must be in \[0, {V}\); got {V} to {V}"),
        ({"selected_token_ids": torch.tensor([-1])}, ValueError, rf"must be in \[0, {V}\); got -1 to -1"),
        ({"selected_token_ids": torch.tensor([1]).int()}, TypeError, r"must be int64 \[K\]; got torch.int32 \(1,\)"),
        ({"selected_token_ids": torch.tensor([1.0])}, TypeError, r"must be int64 \[K\]; got torch.float32 \(1,\)"),
        ({"selected_token_ids": torch.tensor([[1]])}, TypeError, r"must be int64 \[K\]; got torch.int64 \(1, 1\)"),
        ({"ignore_index": 3}, ValueError, "-100"),
        ({"selected_token_ids": [1]}, TypeError, r"must be int64 \[K\]; got list"),
    ],
)
def test_bad_input(change, error, message):
    hidden, weight, target = problem()
    with pytest.raises(error, match=message):
        Fused.apply(hidden, weight, change.pop("target", target), **change)
