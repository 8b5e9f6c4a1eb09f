"""Liger's interfaces on our kernels, held against Liger 0.8.5 itself: its module on the CPU, its kernels interpreted.

Where Liger is wrong the test shows that it differs from float64 autograd of the formula, and that we do not.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from helpers import make_case
from torch.testing import assert_close

from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss
from grpo_fused.integrations.liger import FusedLinearGRPOLoss, grpo_loss_from_logits

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
PPO = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
REQUIRED = {"cispo": {"epsilon_high": 1.1}, "dr_grpo": {"max_completion_length": 11}}
TOL = {"rtol": 3e-5, "atol": 3e-6}


@pytest.fixture(scope="module")
def liger():
    return pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss


@pytest.fixture(scope="module")
def liger_triton():
    pytest.importorskip("triton")
    return pytest.importorskip("liger_kernel.transformers.grpo_loss").triton_grpo_loss


def problem(seed=0, dtype=torch.float32, **shape):
    """Tensors of a call by Liger's names, with a bias; every sequence has tokens."""
    case = make_case(seed, dtype=dtype, **{"B": 4, "T": 7, "H": 12, "V": 29, **shape})
    case.completion_mask[:, 0] = True
    g = torch.Generator().manual_seed(seed)
    options = {name: value.float() for name, value in case.options.items()}
    return {
        "_input": case.hidden_states,
        "lin_weight": case.lm_head_weight,
        "bias": (0.1 * torch.randn(case.lm_head_weight.shape[0], generator=g)).to(dtype),
        "selected_token_ids": case.completion_ids,
        "attention_mask": case.completion_mask.float(),
        "advantages": case.advantages.float(),
        "old_per_token_logps": options["old_per_token_logps"],
        "ref_per_token_logps": options["ref_per_token_logps"],
    }


def run(module, inputs, upstream=1.0):
    """Loss, metrics, and gradients by name."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in ("_input", "lin_weight", "bias")}
    loss, metrics = module(**{**inputs, **leaves})
    (upstream * loss).backward()
    return loss.detach(), metrics, {name: leaf.grad for name, leaf in leaves.items()}


def assert_same(got, want, **tol):
    assert_close(got[0], want[0], **tol)
    assert type(got[1]) is type(want[1]) is tuple
    assert len(got[1]) == len(want[1])
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert mine.shape == ()
        assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-6)
    for name, gradient in want[2].items():
        assert gradient.norm() > 0, name
        error = (got[2][name].double() - gradient.double()).norm() / gradient.double().norm()
        assert error < 3e-5, (name, float(error))


def oracle(inputs, **options):
    """Float64 autograd of the formulas on full logits."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}

    def loss(_input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, old_per_token_logps=None,
             ref_per_token_logps=None, vllm_is_ratio=None):  # fmt: skip
        config = GRPOLossConfig(**options)
        out = fused_linear_grpo_loss(
            _input, lin_weight, selected_token_ids, advantages, attention_mask, lm_head_bias=bias,
            old_per_token_logps=old_per_token_logps, importance_sampling_ratio=vllm_is_ratio,
            ref_per_token_logps=ref_per_token_logps if config.beta else None, config=config, impl="reference",
        )  # fmt: skip
        return out.loss, ()

    return run(loss, wide)


def relative_error(got, want):
    return {name: float((got[2][name].double() - g).norm() / g.norm()) for name, g in want[2].items()}


OPTIONS = {
    "plain": {},
    "no-kl": {"beta": 0.0},
    "corrected-kl": {"use_bias_correction_kl": True, "temperature": 0.8},
    "clip": {"epsilon_low": 0.1, "epsilon_high": 0.15, "temperature": 1.3},
    "delta": {"delta": 1.15, "epsilon_high": 0.28},
    "gates": {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4},
    "gamma": {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 2.5},
}


def cases():
    for loss_type, level, name in itertools.product(LOSS_TYPES, ("token", "sequence"), OPTIONS):
        ppo = loss_type in PPO
        if level == "sequence" and not ppo:
            continue  # Liger refuses
        if loss_type == "luspo" and (level == "token" or name != "no-kl"):
            continue  # another formula in Liger, see test_luspo
        if name in ("clip", "delta", "gates", "gamma") and loss_type not in {
            "gates": ("sapo",),
            "gamma": ("vespo",),
        }.get(name, PPO):
            continue
        yield pytest.param(loss_type, level, name, id=f"{loss_type}-{level}-{name}")


@pytest.mark.parametrize(("loss_type", "level", "name"), list(cases()))
def test_module(liger, loss_type, level, name):
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        **REQUIRED.get(loss_type, {}),
        **OPTIONS[name],
    }
    theirs, ours = (module(**options, compiled=False, chunk_size=2) for module in (liger, FusedLinearGRPOLoss))
    inputs = problem(4, B=6, drift=0.7)
    want = run(theirs, inputs, upstream=1.7)
    assert loss_type in ("sapo", "vespo") or want[1][-1] > 0  # something is clipped
    assert_same(run(ours, inputs, upstream=1.7), want, **TOL)
    without = {**inputs, "old_per_token_logps": None}
    assert_same(run(ours, without), run(theirs, without), **TOL)


@pytest.mark.parametrize("shape", ["B", "B,1", "B,T"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo", "vespo"])
def test_vllm_is_ratio(liger, loss_type, shape):
    inputs = problem(2)
    B, T = inputs["selected_token_ids"].shape
    ratio = torch.rand({"B": (B,), "B,1": (B, 1), "B,T": (B, T)}[shape]) + 0.5
    ratio[0] = 0.0
    if shape == "B,T":
        ratio[inputs["attention_mask"] == 0] = 1.0  # Liger's vespo does not mask it
    inputs["vllm_is_ratio"] = ratio
    options = {"loss_type": loss_type, **REQUIRED.get(loss_type, {}), "beta": 0.0}
    theirs, ours = (module(**options, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    assert_same(run(ours, inputs), run(theirs, inputs), **TOL)


@pytest.mark.parametrize("items", [50, 0.5, torch.tensor(40)], ids=["number", "below-1", "tensor"])
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo", "grpo"])
def test_num_items_in_batch(liger, monkeypatch, loss_type, processes, items):
    if processes > 1:
        pretend_distributed(monkeypatch, processes)
    inputs = {**problem(3), "num_items_in_batch": items}
    theirs, ours = (module(loss_type=loss_type, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    assert_same(run(ours, inputs), run(theirs, inputs), **TOL)


def pretend_distributed(monkeypatch, processes):
    """As in a group of processes that all hold the same."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op=None: x.mul_(processes - 1))  # one has no tokens


def test_the_normaliser_is_averaged_over_processes(liger, monkeypatch):
    pretend_distributed(monkeypatch, 4)
    inputs = problem(3)
    theirs, ours = (module(compiled=False) for module in (liger, FusedLinearGRPOLoss))
    assert_same(run(ours, inputs), run(theirs, inputs), **TOL)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_reference_model(liger, with_bias):
    """Its log-probs from its own states and head, whose width may be another."""
    inputs = problem(4)
    ref = inputs.pop("ref_per_token_logps")
    inputs["ref_input"] = torch.randn(*ref.shape, 6)
    inputs["ref_weight"] = torch.randn(29, 6) * 0.5
    inputs["ref_bias"] = torch.randn(29) * 0.1 if with_bias else None
    theirs, ours = (module(temperature=0.7, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    want = run(theirs, inputs)
    assert want[1][0] > 0.1
    assert_same(run(ours, inputs), want, **TOL)
    with pytest.warns(UserWarning, match="both ref_per_token_logps and ref_input were given"):
        both = run(ours, {**inputs, "ref_per_token_logps": ref})
    assert not torch.equal(both[0], want[0])


def test_without_reference_model(liger):
    """beta, 0.04 by default, then has no effect, and the KL metric is there and 0."""
    inputs = problem(5)
    inputs["ref_per_token_logps"] = None
    theirs, ours = (module(use_ref_model=False, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    got = run(ours, inputs)
    assert float(got[1][0]) == 0.0
    assert_same(got, run(theirs, inputs), **TOL)


@pytest.mark.parametrize("case", ["frozen-head", "no-bias", "bool-mask", "options-changed"])
def test_calls(liger, case):
    inputs = problem(6)
    modules = [module(compiled=False) for module in (liger, FusedLinearGRPOLoss)]
    if case == "no-bias":
        inputs["bias"] = None
    if case == "bool-mask":
        inputs["attention_mask"] = inputs["attention_mask"].bool()
    results = []
    for module in modules:
        if case == "options-changed":
            module.beta, module.temperature = 0.3, 0.6
        hidden = inputs["_input"].clone().requires_grad_()
        weight = inputs["lin_weight"].clone().requires_grad_(case != "frozen-head")
        loss, metrics = module(**{**inputs, "_input": hidden, "lin_weight": weight})
        loss.backward()
        gradients = {"_input": hidden.grad} | ({} if weight.grad is None else {"lin_weight": weight.grad})
        results.append((loss.detach(), metrics, gradients))
    assert ("lin_weight" in results[1][2]) == (case != "frozen-head")
    assert_same(results[1], results[0], **TOL)


@pytest.mark.parametrize("impl", ["native", "chunked", "reference"])
def test_engines(impl):
    inputs = problem(7)
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence", "use_bias_correction_kl": True}
    want = oracle(inputs, beta=0.04, **options)
    got = run(FusedLinearGRPOLoss(**options, impl=impl), inputs)
    assert_close(got[0].double(), want[0], **TOL)
    assert max(relative_error(got, want).values()) < 3e-5


def test_interfaces_are_liger_s(liger, liger_triton):
    def parameters(function):
        return [
            (p.name, p.default) for p in inspect.signature(function).parameters.values() if p.kind != p.KEYWORD_ONLY
        ]

    assert parameters(FusedLinearGRPOLoss.__init__) == parameters(liger.__init__)
    assert parameters(FusedLinearGRPOLoss.forward) == parameters(liger.forward)
    assert parameters(grpo_loss_from_logits) == parameters(liger_triton)


# where Liger is wrong


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_luspo(liger, level):
    """LUSPO sums a sequence's token losses; Liger weights by length, divides by padded length, counts masked tokens."""
    inputs = problem(8)
    options = {"loss_type": "luspo", "importance_sampling_level": level, "beta": 0.04, "use_bias_correction_kl": False}
    want = oracle(inputs, **options)
    ours = run(FusedLinearGRPOLoss(**options), inputs)
    theirs = run(liger(**options, compiled=False), inputs)
    assert_close(ours[0].double(), want[0], **TOL)
    assert max(relative_error(ours, want).values()) < 3e-5
    assert min(relative_error(theirs, want).values()) > (0.2 if level == "token" else 1e-3)
    masked = inputs["attention_mask"] == 0
    assert theirs[2]["_input"][masked].abs().max() > 0
    assert ours[2]["_input"][masked].abs().max() == 0


def test_advantages_of_tokens(liger):
    """`[B, T]`: right in Liger with a sequence in each chunk, sequences mixed up with two."""
    inputs = problem(9)
    inputs["advantages"] = torch.randn_like(inputs["attention_mask"])
    want = oracle(inputs, loss_type="dapo", beta=0.04, use_bias_correction_kl=False)
    for chunk_size, is_right in ((1, True), (2, False)):
        ours = run(FusedLinearGRPOLoss(chunk_size=chunk_size), inputs)
        theirs = run(liger(chunk_size=chunk_size, compiled=False), inputs)
        assert max(relative_error(ours, want).values()) < 3e-5
        assert (max(relative_error(theirs, want).values()) < 3e-5) is is_right


def test_bf16_logits(liger):
    """Liger rounds the logits of a bf16 head before the log-sum-exp, and its gradients show it."""
    inputs = problem(10, dtype=torch.bfloat16, H=64, V=500, T=40, logit_std=4.8)
    want = oracle(inputs, loss_type="dapo", beta=0.0)
    ours = run(FusedLinearGRPOLoss(beta=0.0), inputs)
    theirs = run(liger(beta=0.0, compiled=False), inputs)
    our_errors, their_errors = relative_error(ours, want), relative_error(theirs, want)
    assert abs(ours[0] - want[0]) < 1e-5
    assert abs(theirs[0] - want[0]) > 10 * abs(ours[0] - want[0])
    for name in ("_input", "lin_weight", "bias"):
        assert our_errors[name] < 4e-3, our_errors  # the results are rounded to bf16
        assert their_errors[name] > 1.5 * our_errors[name], (name, our_errors, their_errors)


@pytest.mark.parametrize("where", ["clipped", "masked"])
def test_overflowing_ratios(liger, where):
    inputs = problem(11)
    inputs["advantages"] = inputs["advantages"].abs()
    masked = inputs["attention_mask"] == 0
    inputs["old_per_token_logps"][(0, 0) if where == "clipped" else masked] = -200.0
    ours = run(FusedLinearGRPOLoss(beta=0.0), inputs)
    theirs = run(liger(beta=0.0, compiled=False), inputs)
    want = oracle(inputs, loss_type="dapo", beta=0.0)
    assert theirs[2]["_input"].isnan().any()
    assert_close(ours[0].double(), want[0], **TOL)
    assert max(relative_error(ours, want).values()) < 3e-5


def test_delta_without_a_clip(liger):
    """Liger's module ignores it; its other interface refuses it, and so do we."""
    liger(loss_type="cispo", delta=1.5)
    with pytest.raises(ValueError, match=r"delta=1\.5 is not read by loss_type='cispo'"):
        FusedLinearGRPOLoss(loss_type="cispo", delta=1.5)


def test_vespo_ratios_of_masked_tokens(liger):
    """They do not count; in Liger's product over a sequence they do."""
    inputs = {**problem(2), "vllm_is_ratio": torch.rand(4, 7) + 0.5}
    changed = dict(inputs, vllm_is_ratio=torch.where(inputs["attention_mask"] == 0, 1.7, inputs["vllm_is_ratio"]))
    theirs, ours = (module(loss_type="vespo", compiled=False) for module in (liger, FusedLinearGRPOLoss))
    assert run(ours, inputs)[0] == run(ours, changed)[0]
    assert not torch.isclose(run(theirs, inputs)[0], run(theirs, changed)[0])


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_sequence_level_that_liger_refuses(loss_type):
    inputs = problem(12)
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": "sequence",
        "beta": 0.04,
        **REQUIRED.get(loss_type, {}),
    }
    got = run(FusedLinearGRPOLoss(**options), inputs)
    want = oracle(inputs, use_bias_correction_kl=False, **options)
    assert_close(got[0].double(), want[0], **TOL)
    assert max(relative_error(got, want).values()) < 3e-5


# from logits


def logits_problem(seed=0, dtype=torch.float32):
    inputs = problem(seed)
    logits = inputs["_input"] @ inputs["lin_weight"].T
    logits = torch.cat([logits, torch.randn_like(logits[:, :1])], 1)  # the position that predicts nothing here
    return {
        "logits": logits.to(dtype),
        "old_logp": inputs["old_per_token_logps"],
        "ref_logp": inputs["ref_per_token_logps"],
        "completion_ids": inputs["selected_token_ids"],
        "advantages": inputs["advantages"],
        "completion_mask": inputs["attention_mask"],
    }


def run_logits(function, inputs, upstream, **options):
    """All results, and the gradient of the first towards `upstream`."""
    leaf = inputs["logits"].detach().clone().requires_grad_()
    out = function(**{**inputs, "logits": leaf * 1.0}, **options)
    out[0].backward(upstream)
    rest = out[1] if isinstance(out[1], list) else out[1:]
    return [out[0].detach(), *rest], leaf.grad


def triton_cases():
    grid = itertools.product(LOSS_TYPES, ("token", "sequence"), ("plain", "corrected-kl", "no-kl"), (True, False))
    for loss_type, level, name, reduce in grid:
        if level == "sequence" and loss_type not in PPO:
            continue
        if reduce and loss_type == "luspo":
            continue  # another formula in Liger, see test_luspo_from_logits
        if not reduce and loss_type in ("bnpo", "dr_grpo", "luspo") and name != "plain":
            continue  # the same per-token loss as grpo's
        yield loss_type, level, name, reduce
    yield "dapo", "token", "delta", True
    yield "grpo", "sequence", "delta", False


@pytest.mark.parametrize(("loss_type", "level", "name", "reduce"), list(triton_cases()))
def test_from_logits(liger_triton, loss_type, level, name, reduce):
    options = {
        "plain": {},
        "no-kl": {"beta": 0.0, "temperature": 1.0},
        "corrected-kl": {"use_bias_correction_kl": True, "eps_low": 0.1 if loss_type in PPO else 0.2},
        "delta": {"delta": 1.15, "eps_high": 0.28},
    }[name]
    options |= {"loss_type": loss_type, "importance_sampling_level": level, "reduce": reduce}
    if loss_type == "cispo":
        options["eps_high"] = 1.1
    inputs = logits_problem(1)
    if name == "corrected-kl" and loss_type != "vespo":
        inputs["vllm_is_ratio"] = torch.rand(4, 7) + 0.5
    upstream = torch.tensor(1.7) if reduce else torch.randn(4, 7)
    (theirs, their_gradient), (ours, gradient) = (
        run_logits(function, inputs, upstream, **options) for function in (liger_triton, grpo_loss_from_logits)
    )
    assert len(ours) == len(theirs) == (3 if not reduce else 2 if name == "no-kl" else 3)
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None
        else:
            assert_close(mine, other.detach(), **TOL)
    assert their_gradient.norm() > 0
    assert (gradient - their_gradient).norm() / their_gradient.norm() < 3e-5


@pytest.mark.parametrize("ratio", [(4,), (4, 1)], ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_from_logits_with_sequence_ratios(liger_triton, loss_type, ratio):
    inputs = {**logits_problem(2), "vllm_is_ratio": torch.rand(ratio) + 0.5}
    options = {"loss_type": loss_type, "reduce": True, "num_items_in_batch": 30, "beta": 0.0}
    (theirs, their_gradient), (ours, gradient) = (
        run_logits(function, inputs, torch.tensor(1.0), **options) for function in (liger_triton, grpo_loss_from_logits)
    )
    assert_close(ours[0], theirs[0], **TOL)
    assert (gradient - their_gradient).norm() / their_gradient.norm() < 3e-5


def test_luspo_from_logits(liger_triton):
    inputs = logits_problem(3)
    inputs["completion_mask"][0, 2:] = 0  # of unequal lengths
    leaf = inputs["logits"].double().requires_grad_()
    logp = (leaf[:, :-1] / 0.9).log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    r, A = (logp - inputs["old_logp"]).exp(), inputs["advantages"].unsqueeze(1)
    loss = -torch.minimum(r * A, r.clamp(0.8, 1.4) * A) * inputs["completion_mask"]
    loss.sum(1).mean().backward()
    options = {"loss_type": "luspo", "reduce": True, "beta": 0.0}
    ours, gradient = run_logits(grpo_loss_from_logits, inputs, torch.tensor(1.0), **options)
    _, their_gradient = run_logits(liger_triton, inputs, torch.tensor(1.0), **options)
    assert_close(ours[0].double(), loss.sum(1).mean().detach(), **TOL)
    assert (gradient - leaf.grad).norm() / leaf.grad.norm() < 3e-5
    assert (their_gradient - leaf.grad).norm() / leaf.grad.norm() > 0.2


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_delta_within_the_clip_range(liger_triton, level):
    """delta < c < 1 + eps_high, A < 0: min(delta A, c A) is c A, whose gradient Liger's kernel takes for clipped."""
    inputs = logits_problem(3)
    inputs["advantages"] = -inputs["advantages"].abs()
    leaf = inputs["logits"].double().requires_grad_()
    logp = (leaf[:, :-1] / 0.9).log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    mask, A = inputs["completion_mask"], inputs["advantages"].unsqueeze(1)
    inputs["old_logp"] = (logp.detach() - 0.2).float()  # c = 1.22
    log_ratio = logp - inputs["old_logp"]
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    r = log_ratio.exp()
    loss = (-torch.minimum(r.clamp(max=1.1) * A, r.clamp(0.8, 1.4) * A) * mask).sum() / mask.sum()
    loss.backward()
    options = {"delta": 1.1, "importance_sampling_level": level, "reduce": True, "beta": 0.0}
    ours, gradient = run_logits(grpo_loss_from_logits, inputs, torch.tensor(1.0), **options)
    theirs, their_gradient = run_logits(liger_triton, inputs, torch.tensor(1.0), **options)
    assert_close(ours[0].double(), loss.detach(), **TOL)
    assert_close(theirs[0].double(), loss.detach(), **TOL)
    assert (gradient - leaf.grad).norm() / leaf.grad.norm() < 3e-5
    assert their_gradient.norm() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_logits_are_left_alone(dtype):
    """`inplace=True`, Liger's default, overwrites them there; here they, and a second call, see no change."""
    inputs = logits_problem(4, dtype)
    logits = inputs["logits"].requires_grad_()
    before = logits.detach().clone()
    for _ in range(2):
        loss, _ = grpo_loss_from_logits(**inputs, reduce=True)
        loss.backward()
    assert torch.equal(logits, before)
    assert logits.grad.dtype == dtype
    assert logits.grad[:, :-1].abs().max() > 0
    assert logits.grad[:, -1].abs().max() == 0
    assert logits.grad[inputs["completion_mask"].bool().logical_not().nonzero(as_tuple=True)].abs().max() == 0


def test_masked_logits_do_not_matter():
    inputs = logits_problem(5)
    want, gradient = run_logits(grpo_loss_from_logits, inputs, torch.ones(4, 7))
    masked = inputs["completion_mask"] == 0
    inputs["logits"][:, :-1][masked] = float("nan")
    inputs["completion_ids"][masked] = -100
    inputs["old_logp"][masked] = float("inf")
    got, with_nan = run_logits(grpo_loss_from_logits, inputs, torch.where(masked, float("nan"), 1.0))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(gradient, with_nan)


def test_more_tokens_than_a_grid_has_blocks():
    """Liger launches a block a token on an axis that CUDA limits to 65,535."""
    L = 65_537
    inputs = {"logits": torch.randn(1, L + 1, 2), "completion_ids": torch.randint(0, 2, (1, L))}
    call = {**inputs, "old_logp": None, "ref_logp": None, "advantages": torch.ones(1), "beta": 0.0}
    (losses, _, clipped), gradient = run_logits(grpo_loss_from_logits, call, torch.ones(1, L))
    assert_close(losses, -torch.ones(1, L))
    assert clipped.sum() == 0
    p = (inputs["logits"][:, :-1] / 0.9).softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    assert_close(gradient[:, :-1].abs().amax(-1), (1 - p) / 0.9, rtol=1e-4, atol=1e-6)


def test_compiled_callers():
    """A module within `torch.compile` gives what it gives without."""
    inputs = problem(13)
    module = FusedLinearGRPOLoss(loss_type="grpo")
    assert_same(run(torch.compile(module, backend="aot_eager"), inputs), run(module, inputs), rtol=1e-6, atol=1e-7)


# wrong calls

BAD_OPTIONS = {
    "loss_type": ({"loss_type": "gmpo"}, "loss_type must be one of grpo"),
    "level": ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
    "beta": ({"beta": -0.1}, "beta must be >= 0"),
    "temperature": ({"temperature": 0.0}, "temperature must be > 0"),
    "delta": ({"delta": 0.0}, "delta must be > 0"),
    "sapo": ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be > 0"),
    "sapo-unread": ({"sapo_temperature_pos": 0.5}, "sapo_temperature_pos=0.5 is not read by loss_type='dapo'"),
    "vespo-unread": ({"loss_type": "sapo", "vespo_k_pos": 1.0}, "vespo_k_pos=1.0 is not read by loss_type='sapo'"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_wrong_options(name):
    options, message = BAD_OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        FusedLinearGRPOLoss(**options)
    with pytest.raises(ValueError, match=message):
        grpo_loss_from_logits(**logits_problem(), **options)


def test_wrong_options_of_one_of_them():
    with pytest.raises(ValueError, match="chunk_size must be >= 1; got 0"):
        FusedLinearGRPOLoss(chunk_size=0)
    with pytest.raises(ValueError, match="requires max_completion_length"):
        FusedLinearGRPOLoss(loss_type="dr_grpo")
    with pytest.raises(ValueError, match="epsilon_low must be > 0; got 0"):
        FusedLinearGRPOLoss(epsilon_low=0)
    with pytest.raises(ValueError, match=r"epsilon_low=0\.1 is not read by loss_type='cispo'"):
        FusedLinearGRPOLoss(loss_type="cispo", epsilon_low=0.1)
    with pytest.raises(ValueError, match="epsilon_high must be a number; got None"):
        FusedLinearGRPOLoss(epsilon_high=None)
    with pytest.raises(ValueError, match="eps_high must be > 0; got -1"):
        grpo_loss_from_logits(**logits_problem(), eps_high=-1)
    FusedLinearGRPOLoss(max_completion_length=256)  # trainers pass it with every loss type


BAD_INPUTS = {
    "no-reference": ({"ref_per_token_logps": None}, ValueError, "need ref_per_token_logps"),
    "no-head": (
        {"ref_per_token_logps": None, "ref_input": torch.zeros(4, 7, 12)},
        ValueError,
        "ref_input needs ref_weight",
    ),
    "ratio": (
        {"vllm_is_ratio": torch.ones(7)},
        ValueError,
        r"vllm_is_ratio must have shape \(4,\) or \(4, 1\) or \(4, 7\)",
    ),
    "flat": ({"_input": torch.zeros(28, 12)}, ValueError, r"hidden_states must be \[4, 7, H\]"),
    "mask": ({"attention_mask": torch.ones(4, 6)}, ValueError, "attention_mask must have shape"),
    "ids": ({"selected_token_ids": torch.zeros(4, 7)}, TypeError, "selected_token_ids must have an integer dtype"),
    "old": ({"old_per_token_logps": torch.zeros(4)}, ValueError, "old_per_token_logps must have shape"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_wrong_inputs(name):
    changed, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message):
        FusedLinearGRPOLoss()(**{**problem(), **changed})


def test_a_reference_that_would_be_ignored():
    with pytest.raises(ValueError, match="use_ref_model=False does not read"):
        FusedLinearGRPOLoss(use_ref_model=False)(**problem())


def test_wrong_inputs_from_logits():
    inputs = logits_problem()
    with pytest.raises(ValueError, match=r"beta=0\.04 needs ref_logp"):
        grpo_loss_from_logits(**{**inputs, "ref_logp": None})
    with pytest.raises(ValueError, match=r"logits must be \[4, 8, V\], one position more"):
        grpo_loss_from_logits(**{**inputs, "logits": inputs["logits"][:, :-1]})
    with pytest.raises(ValueError, match="advantages must have shape"):
        grpo_loss_from_logits(**{**inputs, "advantages": torch.ones(3)})
