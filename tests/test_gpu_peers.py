"""The peers that need a GPU, as far as a CPU shows them: what is absent, their signatures, and their own arithmetic.

QuACK and verl are tested where they are installed: `pip install --no-deps quack-kernels==0.6.5 verl==0.9.1`,
`pip install nvidia-cutlass-dsl==4.7.1` (4.8 fails in QuACK's import).
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import kept_exponentials, measure, providers
from benchmarks.exact import Exact, wrong
from benchmarks.problem import Case, cross_entropy
from benchmarks.providers import PROVIDERS, available

CASE = Case(5, 16, 128, 300, "fp32", "half-inactive")
PACKAGED = [name for name, provider in PROVIDERS.items() if provider.packages]


def assert_right(name, problem):
    """Loss, gradients and log-probs, as the sweep checks them before it times a provider."""
    provider = PROVIDERS[name]
    errors = measure.check(provider, problem, Exact.of(problem, provider.per_token))
    assert wrong(errors, torch.float32, ours=False) is None
    assert max(errors.values()) < 1e-4


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("name", PACKAGED)
def test_a_package_that_is_absent_is_named(name, hopper, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package, *_: None)
    assert PROVIDERS[name].unavailable("cuda") == f"{PROVIDERS[name].packages[0]} is not installed"
    assert not set(PACKAGED) & available("cuda", "dense").keys()


@pytest.mark.parametrize("name", ["liger-scaled", "quack", "quack-mean"])
def test_kernels_of_cutlass_need_it_and_a_chip(name, monkeypatch):
    """Elsewhere Liger's function takes 512 tokens at a time in torch, which is not its fast head."""
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package, *_: None if package == "cutlass" else object())
    assert PROVIDERS[name].unavailable("cuda") == "cutlass is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda package, *_: object())
    assert str(PROVIDERS[name].unavailable("cuda")).endswith(", this is 8.0")
    capability = (9, 0)
    assert PROVIDERS[name].unavailable("cuda") is None
    capability = (10, 0)
    assert (PROVIDERS[name].unavailable("cuda") is None) == (name != "liger-scaled")


def test_a_torch_without_linear_cross_entropy(monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    for name in ("torch-lce", "torch-lce-chunked"):
        assert PROVIDERS[name].unavailable("cpu") == f"torch {torch.__version__} has no linear_cross_entropy"


def test_liger_scaled(monkeypatch):
    """Its function for other devices has the same signature and result as its kernels; no target is validated."""
    pytest.importorskip("liger_kernel")
    monkeypatch.delenv("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", raising=False)
    assert_right("liger-scaled", CASE.problem("cpu"))
    assert os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] == "0"


@pytest.fixture
def quack(monkeypatch):
    """QuACK's functions in torch, under its names."""

    def none(x, weight, bias, target, *, reduction, inplace_backward):
        assert (bias, reduction, inplace_backward) == (None, "none", True)
        return F.cross_entropy(x @ weight.T, target, reduction="none")

    def mean(x, weight, target, *, reduction):
        return F.cross_entropy(x @ weight.T, target, reduction=reduction)

    double = SimpleNamespace(linear_cross_entropy_func=none, chunked_linear_cross_entropy=mean)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", double)


@pytest.mark.parametrize("name", ["quack", "quack-mean"])
def test_quack(name, quack):
    assert_right(name, CASE.problem("cpu"))


def test_the_mean_cross_entropy_is_another_loss(quack):
    """It is checked against float64 of its own loss, and fails against the policy's."""
    problem, peer = CASE.problem("cpu"), PROVIDERS["quack-mean"]
    assert peer.per_token is cross_entropy
    own = Exact.of(problem, cross_entropy)
    assert float(own.loss_scale) == pytest.approx(float(own.loss))
    assert "zero-advantage-40" not in peer.patterns
    assert "is off by" in wrong(measure.check(peer, problem, Exact.of(problem)), torch.float32, ours=False)
    for pattern in peer.patterns:
        found = measure.measure(replace(CASE, pattern=pattern), "cpu", {"mean": peer, "ours": PROVIDERS["chunked"]},
                                rounds=1)["providers"]  # fmt: skip
        assert all("forward_backward" in row for row in found.values())


def test_ligers_kernels_are_there():
    """What its function calls on sm_90, with the arguments that it passes."""
    pytest.importorskip("cutlass")
    head = pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    inspect.signature(head._load_sm90_function().forward).bind(None, None, None, None, 1.0, -100, 1, False)


def test_quacks_signatures():
    """The names that the sweep passes are those of the installed package."""
    pytest.importorskip("cutlass")
    quack = pytest.importorskip("quack.linear_cross_entropy")
    one = torch.ones(1)
    inspect.signature(quack.linear_cross_entropy_func).bind(
        one, one, None, one, reduction="none", inplace_backward=True
    )
    found = inspect.signature(quack.chunked_linear_cross_entropy).bind(one, one, one, reduction="mean")
    found.apply_defaults()
    assert found.arguments["use_scaled_exp"] is None  # its fast pipeline where that can run
    assert found.arguments["tuned"]


@pytest.mark.parametrize("name", ["verl", "verl-separate"])
def test_verls_triton_kernels(name, monkeypatch):
    """By Triton's interpreter on the CUDA double."""
    pytest.importorskip("triton")
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    from cuda_double import cuda_double

    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda *_: nullcontext())
    with cuda_double() as device:
        kernels = providers.without_inits("verl.utils.kernel.kernels")
        backward = kernels.efficient_entropy_backward
        monkeypatch.setattr(  # autograd makes the gradient of the unused entropies on the CPU there
            kernels,
            "efficient_entropy_backward",
            lambda dlogp, _, *rest: backward(dlogp, torch.zeros_like(dlogp), *rest),
        )
        assert_right(name, CASE.problem("cuda"))
    launched = {kernel for kernel in device.launches if "d_logits" in kernel}
    split = {"verl": "_split_N", "verl-separate": ""}[name]
    assert launched == {f"efficient_entropy_backward_kernel_general_d_logits{split}"}
    assert "ray" not in sys.modules


@pytest.mark.parametrize("shape", kept_exponentials.SHAPES, ids=str)
def test_quacks_arithmetic(shape):
    """Its kernels between the products are Triton's: they give what `benchmarks.kept_exponentials` restates. Triton's
    interpreter truncates to bf16 twice."""
    quack = pytest.importorskip("quack.linear_cross_entropy")
    case = kept_exponentials.Case.of(*shape)
    kept = kept_exponentials.quack_epilogue(case)
    values, strip, factor, scaled = kept_exponentials.quack_glue(case, kept)
    got, tiles, (loss, v) = kept.values.clone(), kept.k.shape[1], torch.empty(2, len(case.targets))
    columns = got.shape[1] // tiles
    strips, xs = strip.new_empty(columns // 64 * tiles, len(strip)), torch.empty_like(scaled)
    quack.lce_glue(kept.k, kept.sums, case.hidden, case.targets, kept.z_y, got, loss, strips, v, xs, columns)
    assert torch.equal(strips, strip.repeat_interleave(columns // 64, 1).T)
    torch.testing.assert_close(v, factor, rtol=1e-5, atol=0)
    torch.testing.assert_close(xs, scaled, rtol=2**-6, atol=0)
    at = case.targets.unsqueeze(1)
    p_minus_1, restated = (x.gather(1, at).float().squeeze(1) * v for x in (got, values))
    torch.testing.assert_close(p_minus_1, restated, rtol=2**-6, atol=2e-6)  # exp(z - lse) - 1 in fp32
    if shape == kept_exponentials.SHAPES[-1]:  # which leaves no digit of a confident token's
        want = kept_exponentials.exact(case).at_target
        assert all((found / want - 1).abs().max() > 1 for found in (p_minus_1, restated))
    assert torch.equal(got.scatter(1, at, 0), values.scatter(1, at, 0))
