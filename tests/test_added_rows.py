"""`add_to_weight_grad`: rows of dW are added to a gradient that is there, and nothing of [V, H] is made."""

from __future__ import annotations

import pytest
import torch
from helpers import frobenius_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_fused import (
    CandidateSets,
    HeadAdapter,
    engines,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    fused_linear_objective,
)
from grpo_fused import objectives as losses
from grpo_fused.call import validation

B, T, H, V, K = 2, 40, 32, 900, 6
CALLS = {
    "loss": lambda x, **options: (
        fused_linear_grpo_loss(x["hidden"], x["weight"], x["ids"], torch.tensor([1.0, -2.0]), **options).loss
    ),
    "objective": lambda x, **options: (
        fused_linear_objective(
            x["hidden"], x["weight"], x["ids"], losses.gpg(), inputs={"advantages": torch.ones(B, T)}, **options
        ).loss
    ),
    "logprobs": lambda x, **options: (
        fused_linear_logprobs(x["hidden"], x["weight"], x["ids"], **options).logps * torch.linspace(-1, 1, T)
    ).sum(),
}


def problem(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor | CandidateSets]:
    g = torch.Generator().manual_seed(seed)
    kept = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(B * T)])
    return {
        "hidden": torch.randn(B, T, H, generator=g).to(dtype).requires_grad_(),
        "weight": (0.2 * torch.randn(V, H, generator=g)).to(dtype).requires_grad_(),
        "bias": torch.zeros(V, requires_grad=True),
        "ids": kept[:, 0].view(B, T),
        "sets": CandidateSets(kept.reshape(-1), torch.arange(0, B * T * K + 1, K)),
    }


def backward(call, x, impl="chunked", **options):
    CALLS[call](x, candidates=x["sets"], lm_head_bias=x["bias"], impl=impl, **options).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["native", "chunked"])
@pytest.mark.parametrize("call", list(CALLS))
def test_the_gradient_is_that_of_autograd(call, impl, dtype):
    if engines.unavailable(impl, torch.device("cpu"), dtype):
        pytest.skip("not here")
    x = problem(dtype)
    leaves = [x["hidden"], x["weight"], x["bias"]]
    for _ in range(3):
        backward(call, x, impl)
    want = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    backward(call, x, impl, add_to_weight_grad=True)
    first = x["weight"].grad
    for _ in range(2):
        backward(call, x, impl, add_to_weight_grad=True)
    assert x["weight"].grad is first
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-3}
    for leaf, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, **tolerance)


@pytest.mark.parametrize("call", list(CALLS))
def test_megatrons_gradient_comes_first(call):
    """`main_grad`, in fp32 beside a bf16 weight, also where `grad` is None; the upstream gradient counts."""
    x = problem(torch.bfloat16)
    backward(call, x)
    want = x["weight"].grad.float()
    x["weight"].grad, x["weight"].main_grad = None, torch.ones(V, H)
    (3 * CALLS[call](x, candidates=x["sets"], add_to_weight_grad=True)).backward()
    assert x["weight"].grad is None
    assert frobenius_error(x["weight"].main_grad - 1, 3 * want) < 5e-3  # that one is rounded to bf16
    untouched = torch.ones(V, dtype=torch.bool).index_fill(0, x["sets"].ids, False)
    assert (x["weight"].main_grad[untouched] == 1).all()


@pytest.mark.parametrize("call", list(CALLS))
def test_without_the_option_a_new_tensor_is_added(call):
    x = problem()
    x["weight"].main_grad = torch.zeros(V, H)
    backward(call, x)
    assert not x["weight"].main_grad.any()
    assert x["weight"].grad.any()


@pytest.mark.parametrize("call", list(CALLS))
def test_dense_calls_and_frozen_weights_are_as_ever(call):
    """A token without a set needs the whole head, whose dW is dense."""
    x, y = problem(), problem()
    x["sets"] = y["sets"] = CandidateSets(x["sets"].ids[K:], (x["sets"].offsets - K).clamp(min=0))
    for _ in range(2):
        backward(call, x)
        backward(call, y, add_to_weight_grad=True)
    torch.testing.assert_close(y["weight"].grad, x["weight"].grad)
    frozen = problem()
    frozen["weight"] = frozen["weight"].detach()
    backward(call, frozen, add_to_weight_grad=True)
    assert frozen["hidden"].grad.any()


@pytest.mark.parametrize("call", list(CALLS))
def test_only_a_gradient_that_is_asked_for_gets_rows(call):
    """`backward(inputs=...)` and `torch.autograd.grad` for another leaf leave it as it is; for the weight they get dW."""
    x = problem()
    backward(call, x)
    first = x["weight"].grad.clone()

    def loss():
        return CALLS[call](x, candidates=x["sets"], add_to_weight_grad=True)

    loss().backward(inputs=[x["hidden"]])
    torch.autograd.grad(loss(), x["hidden"])
    assert torch.equal(x["weight"].grad, first)
    torch.testing.assert_close(torch.autograd.grad(loss(), x["weight"])[0], first)
    assert torch.equal(x["weight"].grad, first)
    split = loss()
    split.backward(inputs=[x["hidden"]], retain_graph=True)
    split.backward(inputs=[x["weight"]])
    torch.testing.assert_close(x["weight"].grad, 2 * first)


@pytest.mark.parametrize("call", list(CALLS))
def test_megatrons_hook_keeps_dense_gradients_too(call):
    """It drops a `grad` where `grad_added_to_main_grad` is set; nothing of ours is in `grad` after rows were added."""
    x, y = problem(), problem(seed=1)
    y["sets"] = CandidateSets(y["sets"].ids[K:], (y["sets"].offsets - K).clamp(min=0))  # the first token has none
    y["weight"] = x["weight"]
    for part in (x, y):
        backward(call, part)
    want, x["weight"].grad, x["weight"].main_grad = x["weight"].grad, None, torch.zeros(V, H)
    for part in (x, y):
        backward(call, part, add_to_weight_grad=True)
        if x["weight"].grad is not None:
            assert not getattr(x["weight"], "grad_added_to_main_grad", False)
            x["weight"].main_grad += x["weight"].grad
            x["weight"].grad = None
    torch.testing.assert_close(x["weight"].main_grad, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        lambda g: g.T.contiguous().T,
        lambda g: torch.cat([g, g], dim=1)[:, ::2],
        lambda g: g.double(),
        lambda g: torch.zeros(1, H).expand(V, H),
        Tensor.to_sparse,
    ],
    ids=["columns", "every second column", "fp64", "expanded", "sparse"],
)
def test_gradients_that_take_no_rows(layout):
    """As ever for `grad`; a `main_grad` must take them."""
    x = problem()
    backward("loss", x)
    one = x["weight"].grad.clone()
    if layout not in (Tensor.to_sparse,):
        x["weight"].main_grad = layout(torch.zeros(V, H))
        with pytest.raises(ValueError, match=r"main_grad of lm_head_weight must be \[900, 32\] of torch.float32"):
            backward("loss", x, add_to_weight_grad=True)
        del x["weight"].main_grad
    x["weight"] = x["weight"].detach().T.contiguous().T.requires_grad_()  # autograd lays its gradient out alike
    for _ in range(2):
        backward("loss", x, add_to_weight_grad=True)
    assert x["weight"].grad.stride() == (1, V)
    torch.testing.assert_close(x["weight"].grad, 2 * one)


def test_main_grad_of_another_shape_is_refused():
    x = problem()
    for wrong in (torch.zeros(2 * V, H), torch.zeros(V * H), torch.zeros(V, H - 1)):
        x["weight"].main_grad = wrong
        with pytest.raises(ValueError, match="row by row; got"):
            backward("loss", x, add_to_weight_grad=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("call", list(CALLS))
def test_adapters_checkpoints_and_graphs(call):
    """A weight with an adapter is no leaf inside; a checkpoint unpacks another tensor; `create_graph` adds no rows."""
    x = problem()
    adapter = HeadAdapter(torch.randn(2, H).requires_grad_(), torch.randn(V, 2).requires_grad_())
    frozen = {**x, "weight": x["weight"].detach()}
    for _ in range(2):
        CALLS[call](frozen, candidates=x["sets"], lm_head_adapter=adapter, add_to_weight_grad=True).backward()
    assert adapter.b.grad.any()
    x["weight"].main_grad = torch.zeros(V, H)

    def run(hidden: Tensor) -> Tensor:
        return CALLS[call]({**x, "hidden": hidden}, candidates=x["sets"], add_to_weight_grad=True)

    checkpoint(run, x["hidden"], use_reentrant=False).backward()
    assert x["weight"].grad is None
    assert x["weight"].main_grad.any()
    del x["weight"].main_grad
    x["weight"].grad = torch.zeros(V, H)
    version = x["weight"].grad._version
    run(x["hidden"]).backward()
    assert x["weight"].grad._version > version
    (gradient,) = torch.autograd.grad(run(x["hidden"]), x["weight"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


def hooked(weight: Tensor) -> Tensor:
    weight.register_hook(lambda gradient: gradient)
    return weight


def hooked_after(weight: Tensor) -> Tensor:
    weight.register_post_accumulate_grad_hook(lambda _: None)
    return weight


def partitioned(weight: Tensor) -> Tensor:
    """As DeepSpeed ZeRO-3 marks a parameter."""
    weight.ds_id = 0
    return weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "one with hooks"),
        (hooked_after, "one with hooks"),
        (lambda weight: weight * 1, "no leaf"),
        (partitioned, "no plain tensor"),
        (lambda weight: weight.as_subclass(type("Sharded", (Tensor,), {})), "no plain tensor"),
    ],
)
def test_what_waits_for_the_gradient_is_refused(change, reason):
    x = problem()
    x["weight"] = change(x["weight"])
    with pytest.raises(ValueError, match=f"without hooks, in eager mode; got {reason}"):
        backward("loss", x, add_to_weight_grad=True)


def test_a_process_of_several_is_not_alone(monkeypatch):
    weight = torch.zeros(V, H, requires_grad=True)
    assert validation.is_alone_with(weight)
    assert not validation.is_alone_with(hooked(torch.zeros(V, H, requires_grad=True)))
    monkeypatch.setattr(validation.dist, "is_initialized", lambda: True)
    assert not validation.is_alone_with(weight)
