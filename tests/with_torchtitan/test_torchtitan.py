"""Our loss wrapper against torchtitan's own: loss, metrics, gradients; also under FSDP2 on two processes."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._dynamo.decorators import mark_unbacked
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

titan = pytest.importorskip("torchtitan.components.loss")

import spmd_types as spmd
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import get_spmd_context, init_fake_mode
from torchtitan.models.common.linear import Linear

from grpo_fused import engines
from grpo_fused.integrations import torchtitan as ours

B, L, H, V = 2, 16, 24, 90
FOLDED = inspect.signature(titan.GradAccumulator).parameters["seq_dim"].default == 0
"""Whether this torchtitan has no batch dimension: development versions after 0.3.0."""


ROOT = Path(importlib.util.find_spec("torchtitan").origin).parents[1]
PLACES = ("torchtitan.experiments.rl", "torchtitan.rl")
RL = next(package for package in PLACES if ROOT.joinpath(*package.split("."), "losses").is_dir())


def of_file(name: str, package: str = RL):
    """A module of torchtitan's code for RL, which imports vLLM; as if it were in `package`."""
    at = f"{package}.{name}"
    if at not in sys.modules:
        file = ROOT.joinpath(*RL.split("."), *name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(at, file)
        sys.modules[at] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[at])
    return sys.modules[at]


DAPOLoss = of_file("losses.dapo").DAPOLoss
GRPOLoss = of_file("losses.grpo").GRPOLoss
CastLinear = of_file("models.cast_linear").CastLinear

LOSSES = {
    "grpo": lambda: GRPOLoss.Config(clip_eps=0.1),
    "dapo": lambda: DAPOLoss.Config(ratio_clip_low=0.2, ratio_clip_high=0.28),
    "cross-entropy": lambda: titan.CrossEntropyLoss.Config(),
}


def head_of(dtype=torch.float32, bias=False, kind=Linear):
    torch.manual_seed(1)
    return kind.Config(in_features=H, out_features=V, bias=bias).build().to(dtype)


def problem(name: str, dtype=torch.float32, seed=0, folded=FOLDED):
    """Hidden states, labels, divisor and the inputs of the loss: some masked, not finite, or far off the policy."""
    hidden, labels, valid, inputs = batched_problem(name, dtype, seed)
    if not folded:
        return hidden, labels, valid, inputs
    return (
        hidden.detach().flatten(0, 1).requires_grad_(),
        labels.flatten(),
        valid,
        {n: x.flatten() for n, x in inputs.items()},
    )


def batched_problem(name, dtype, seed):
    torch.manual_seed(seed)
    hidden = torch.randn(B, L, H).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, L))
    if name == "cross-entropy":
        labels[:, -3:] = titan.IGNORE_INDEX
        return hidden, labels, torch.tensor(float((labels >= 0).sum())), {}
    logps = (hidden.detach().float() @ head_of(dtype).weight.T.float()).log_softmax(-1)
    old = logps.gather(-1, labels.unsqueeze(-1)).squeeze(-1).detach() + 0.3 * torch.randn(B, L)
    old[0, 1], old[1, 2] = float("nan"), float("-inf")
    old[0, 3], old[1, 3] = old[0, 3] - 12.0, old[1, 3] + 12.0
    mask = torch.rand(B, L) < 0.8
    inputs = {"generator_logprobs": old, "advantages": torch.randn(B, L), "loss_mask": mask}
    return hidden, labels, float((mask & old.isfinite()).sum()), inputs


def run(wrapper, head, hidden, labels, valid, inputs):
    """Loss, metrics and gradients."""
    wrapper.set_lm_head(head)
    hidden = hidden.detach().requires_grad_()
    loss, metrics = wrapper(hidden, labels, valid, **inputs)
    loss.backward()
    return {"loss": loss.detach(), **metrics}, {
        "hidden": hidden.grad,
        **{n: p.grad for n, p in head.named_parameters()},
    }


def wrappers(name):
    return [
        kind(kind.Config(loss_fn=LOSSES[name](), num_chunks=4))
        for kind in (titan.ChunkedLossWrapper, ours.FusedLossWrapper)
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_batch_dimension_may_be_folded(name, auto_takes):
    """Development versions after 0.3.0 fold it (pull request 4121)."""
    results = [run(wrappers(name)[1], head_of(bias=True), *problem(name, folded=folded)) for folded in (False, True)]
    (want, want_gradients), (got, gradients) = results
    torch.testing.assert_close(got, want)
    assert gradients["hidden"].shape == (B * L, H)
    gradients["hidden"] = gradients["hidden"].view(B, L, H)
    torch.testing.assert_close(gradients, want_gradients)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_torchtitan(name, bias, auto_takes):
    theirs, fused = wrappers(name)
    head, data = head_of(bias=bias), problem(name)
    want, want_gradients = run(theirs, head, *data)
    got, gradients = run(fused, copy.deepcopy(head).requires_grad_(), *data)
    assert got.keys() == want.keys()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == want_gradients.keys()
    for key, value in want_gradients.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(gradients[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_ratio", [None, 1.2, 0.9])
def test_score_centering(max_ratio, auto_takes):
    """Of development versions after 0.3.0: its own call on the head's logits, with a temperature for each token."""
    if not ROOT.joinpath("torchtitan", "rl", "losses", "score_centering.py").exists():
        pytest.skip("this torchtitan has no score centering")
    loss = of_file("losses.score_centering").ScoreCenteringLoss
    hidden, labels, valid, inputs = problem("dapo", folded=True)
    K, head = 6, head_of()
    temperature = 0.5 + torch.rand(len(labels))
    with torch.no_grad():
        sampler = (head(hidden) / temperature.unsqueeze(1) + 0.5 * torch.randn(len(labels), V)).log_softmax(-1)
        sampled = sampler.gather(1, labels.unsqueeze(1)).squeeze(1)
        top, ids = sampler.topk(K)
    inputs["generator_logprobs"] = torch.where(inputs["generator_logprobs"].isfinite(), sampled, torch.nan)
    unused = ~(inputs["loss_mask"] & inputs["generator_logprobs"].isfinite())
    inputs |= {
        "temperature": temperature, "generator_topk_token_ids": ids.masked_fill(unused.unsqueeze(1), 0).int(),
        "generator_topk_logprobs": top.masked_fill(unused.unsqueeze(1), torch.nan),
    }  # fmt: skip
    config, valid = loss.Config(max_ratio=max_ratio), torch.tensor(valid)
    want, want_metrics = config.build()(head(hidden), labels, valid, **inputs)
    want_gradients = torch.autograd.grad(want, (hidden, head.weight))
    fused = ours.FusedLossWrapper(ours.FusedLossWrapper.Config(loss_fn=config, num_chunks=4))
    got, gradients = run(fused, copy.deepcopy(head), hidden, labels, valid, inputs)
    torch.testing.assert_close(got.pop("loss"), want.detach(), rtol=1e-5, atol=1e-6)
    assert got.keys() == want_metrics.keys()
    torch.testing.assert_close(got, want_metrics, rtol=1e-4, atol=1e-6)
    for name, value in zip(("hidden", "weight"), want_gradients, strict=True):
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-6)


def test_bf16_is_nearer_to_float64(auto_takes):
    theirs, fused = wrappers("grpo")
    data = problem("grpo", torch.bfloat16)
    exact = copy.deepcopy(head_of(torch.bfloat16)).double()
    want, _ = run(theirs, exact, data[0].double(), *data[1:])
    off = {}
    for name, wrapper in (("theirs", theirs), ("fused", fused)):
        got, _ = run(wrapper, head_of(torch.bfloat16), *data)
        off[name] = float((got["trainer/entropy/mean"] - want["trainer/entropy/mean"]).abs())
    assert off["fused"] < 1e-5 < off["theirs"]


def test_loss_can_be_scaled_and_needs_no_gradient():
    """torchtitan's writes the head's gradient in the call, so a factor on its loss is lost."""
    _, fused = wrappers("grpo")
    head, (hidden, *rest, inputs) = head_of(), problem("grpo")
    fused.set_lm_head(head)
    (fused(hidden, *rest, **inputs)[0] * 2).backward()
    twice = head.weight.grad.clone()
    head.weight.grad = None
    fused(hidden, *rest, **inputs)[0].backward()
    torch.testing.assert_close(twice, 2 * head.weight.grad)
    with torch.no_grad():
        assert not fused(hidden, *rest, **inputs)[0].requires_grad
    fused.num_chunks = 7  # torchtitan refuses what does not divide L
    assert fused(hidden, *rest, **inputs)[0].isfinite()


def test_cast_head():
    _, fused = wrappers("grpo")
    data = problem("grpo", torch.bfloat16)
    cast, _ = run(fused, head_of(torch.bfloat16, kind=CastLinear), *data)
    plain, _ = run(fused, head_of(torch.bfloat16), *data)
    torch.testing.assert_close(cast, plain)


@pytest.mark.parametrize("unbacked", [False, True], ids=["symbolic", "unbacked"])
@pytest.mark.parametrize("name", LOSSES)
def test_traced_with_symbolic_shapes(name, unbacked, auto_takes):
    """One graph for batches of other lengths; without a batch dimension."""
    _, fused = wrappers(name)
    head = head_of(bias=True)
    fused.set_lm_head(head)

    def program(hidden, labels, *inputs):
        loss, metrics = fused(hidden, labels, 20.0, **dict(zip(names, inputs, strict=True)))
        return loss, metrics, torch.autograd.grad(loss, [hidden, *head.parameters()])

    def flat(batch):
        hidden, labels, _, inputs = problem(name, folded=False)
        if inputs:
            inputs["advantages"][~inputs["loss_mask"]] = float("nan")
        return [x.detach().reshape(B * L, *x.shape[2:])[:batch] for x in (hidden, labels, *inputs.values())]

    names = problem(name)[3]
    given = flat(B * L)
    given[0].requires_grad_()
    for x in given if unbacked else ():
        mark_unbacked(x, 0, hint_override=B * L, min=4, max=B * L)
    traced = make_fx(program, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
    for length in (B * L, 11):
        given = flat(length)
        given[0].requires_grad_()
        torch.testing.assert_close(traced(*given), program(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("package", PLACES)
def test_code_that_has_moved(package):
    """Later development versions have the losses and the head in `torchtitan.rl`."""
    data = problem("dapo", torch.bfloat16)
    want, _ = run(wrappers("dapo")[1], head_of(torch.bfloat16, kind=CastLinear), *data)
    for name in ("dapo.DAPOLoss", "grpo.GRPOLoss"):
        module, kind = name.split(".")
        loss = getattr(of_file(f"losses.{module}", package), kind)
        assert loss.__module__ == f"{package}.losses.{module}"
        wrapper = ours.FusedLossWrapper(ours.FusedLossWrapper.Config(loss_fn=loss.Config()))
    wrapper.loss_fn.ratio_clip_high = 0.28
    head = head_of(torch.bfloat16, kind=of_file("models.cast_linear", package).CastLinear)
    got, _ = run(wrapper, head, *data)
    torch.testing.assert_close(got, want)


class Capped(Linear):
    def forward(self, x):
        return super().forward(x).tanh()


class MyLoss(GRPOLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(GRPOLoss.Config):
        pass


def test_refusals():
    fused = ours.FusedLossWrapper
    with pytest.raises(TypeError, match=r"loss_fn must be the config of one of .*; got that of .*MSELoss"):
        fused(fused.Config(loss_fn=titan.MSELoss.Config()))
    with pytest.raises(TypeError, match=r"got that of .*MyLoss"):
        fused(fused.Config(loss_fn=MyLoss.Config()))
    wrapper = fused(fused.Config(loss_fn=GRPOLoss.Config()))
    hidden, labels, valid, inputs = problem("grpo")
    with pytest.raises(ValueError, match="no head is set"):
        wrapper(hidden, labels, valid, **inputs)
    with pytest.raises(TypeError, match=r"lm_head must be a linear layer.*Capped\.forward"):
        wrapper.set_lm_head(Capped(Linear.Config(in_features=H, out_features=V)))
    wrapper.set_lm_head(head_of())
    with pytest.raises(TypeError, match="loss_mask"):
        wrapper(hidden, labels, valid, generator_logprobs=inputs["generator_logprobs"], advantages=inputs["advantages"])
    with pytest.raises(ValueError, match=r"lm_head_weight must have shape \(V, 4\)"):
        wrapper(hidden[..., :4], labels, valid, **inputs)


def test_compilation_is_not_ignored_silently():
    compiled = titan.CompileConfig(enable=True, components=["loss"])
    with pytest.warns(UserWarning, match="does not compile its loss"):
        ours.FusedLossWrapper(ours.FusedLossWrapper.Config(), compile_config=compiled)


def test_types_are_checked():
    """`debug.spmd_typechecking` follows how each tensor is spread over processes, here two, of which one runs."""
    init_fake_mode(2)
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=2)
    dims.build_mesh()
    try:
        for wrapper in wrappers("cross-entropy"):
            hidden, labels, valid, _ = batched_problem("cross-entropy", torch.float32, 0)
            head = head_of()
            wrapper.set_lm_head(head)
            with get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
                for x, dp in ((hidden, spmd.S(0)), (labels, spmd.S(0)), (head.weight, spmd.R)):
                    spmd.assert_type(x, {"dp": dp})
                loss, _ = wrapper(hidden, labels, valid)
            loss.backward()
            assert hidden.grad is not None
    finally:
        dist.destroy_process_group()


class Decoder(nn.Module):
    """A norm and a head in one FSDP group, as torchtitan shards them; the head is called by the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(H, H)
        self.norm = nn.LayerNorm(H)
        self.lm_head = head_of()

    def forward(self, x):
        return self.norm(self.layer(x))


def steps(rank: int, path: str, bf16: bool, impl: str):
    """A validation and two steps of two batches, with torchtitan's wrapper and ours: losses and whole weights."""
    engines.fastest = lambda device, dtype, width: impl
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    results = []
    for wrapper in wrappers("grpo"):
        model = Decoder()
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if bf16
            else MixedPrecisionPolicy()
        )
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.layer, mesh=mesh, mp_policy=policy)
        fully_shard([model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for module in (model, model.layer, model.lm_head):
            module.set_gradient_divide_factor(1.0)  # as torchtitan does
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        wrapper.set_lm_head(model.lm_head)
        with torch.no_grad():  # a validation: the steps after it must not have its weights
            hidden, labels, valid, inputs = problem("grpo", seed=rank)
            wrapper(model(hidden), labels, valid, **inputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        losses = []
        for step in range(2):
            for part in range(2):
                hidden, labels, valid, inputs = problem("grpo", seed=100 * rank + 10 * step + part)
                loss, _ = wrapper(model(hidden.detach()), labels, valid, **inputs)
                # torchtitan calls unshard() for this: else the whole weight is kept once more, with a CUDA event
                assert model.lm_head._get_fsdp_state()._comm_ctx.all_gather_state is None
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        results.append((torch.stack(losses), {n: p.full_tensor().detach() for n, p in model.named_parameters()}))
    start = dict(Decoder().named_parameters())
    (want_losses, want), (got_losses, got) = results
    tolerance = {"rtol": 0.05, "atol": 5e-3} if bf16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got_losses, want_losses, **tolerance)
    for name, value in want.items():
        assert (value - start[name]).abs().max() > 1e-3, name
        torch.testing.assert_close(got[name], value, **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    dist.destroy_process_group()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_fsdp2(tmp_path, bf16, auto_takes):
    mp.spawn(steps, (str(tmp_path / "store"), bf16, auto_takes), nprocs=2)


def test_a_run_ends_without_a_report_of_leaks():
    test = f"{Path(__file__)}::test_compilation_is_not_ignored_silently"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", test], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
