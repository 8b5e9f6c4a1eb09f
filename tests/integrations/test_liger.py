"""Liger's module on our kernels, compared with Liger 0.8.5 itself on the CPU.

Where Liger is wrong the test shows that it differs from float64 autograd of the formula, and that we do not.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from integrations.liger_cases import (
    LOSS_TYPES,
    PPO,
    REQUIRED,
    TOL,
    assert_same,
    oracle,
    problem,
    relative_error,
    run,
    unread,
)
from torch.testing import assert_close

from grpo_fused.integrations.liger import FusedLinearGRPOLoss, grpo_loss_from_logits

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


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "luspo"])  # see test_luspo
def test_options_that_the_loss_type_does_not_read(liger, loss_type):
    """Liger ignores them without a warning. We ignore them too, with one warning for each in a process."""
    options = {"loss_type": loss_type, **REQUIRED.get(loss_type, {}), **unread(loss_type)}
    with pytest.warns(UserWarning, match="is ignored, as in Liger: loss_type=") as caught:
        ours = FusedLinearGRPOLoss(**options)
    assert sorted(str(warning.message).split()[0] for warning in caught) == sorted(unread(loss_type))
    FusedLinearGRPOLoss(**options)
    inputs = problem(4, B=6, drift=0.7)
    assert_same(run(ours, inputs), run(liger(**options, compiled=False), inputs), **TOL)


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("name", ["ref_per_token_logps", "ref_input"])
def test_a_reference_that_is_not_read(liger, name):
    inputs = problem(5)
    ref = inputs.pop("ref_per_token_logps")
    inputs[name] = ref if name == "ref_per_token_logps" else inputs["_input"]
    theirs, ours = (module(use_ref_model=False, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    with pytest.warns(UserWarning, match=f"{name} is ignored, as in Liger: use_ref_model=False"):
        got = run(ours, inputs)
    assert_same(got, run(theirs, inputs), **TOL)
    run(ours, inputs)  # no second warning


@pytest.mark.parametrize("shape", ["B", "B,1", "B,T"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo", "vespo"])
def test_vllm_is_ratio(liger, loss_type, shape):
    inputs = problem(2)
    B, T = inputs["selected_token_ids"].shape
    ratio = torch.rand({"B": (B,), "B,1": (B, 1), "B,T": (B, T)}[shape]) + 0.5
    ratio[0] = 0.0
    inputs["attention_mask"][2, 0] = 0.0  # its first token is another one
    assert inputs["attention_mask"][2].any()
    if shape == "B,T":
        ratio[inputs["attention_mask"] == 0] = 1.0  # Liger's vespo does not mask it
    inputs["vllm_is_ratio"] = ratio
    options = {"loss_type": loss_type, **REQUIRED.get(loss_type, {}), "beta": 0.0}
    theirs, ours = (module(**options, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    assert_same(run(ours, inputs), run(theirs, inputs), **TOL)


@pytest.mark.parametrize(
    "items",
    [50, 0.5, torch.tensor(40), torch.tensor(0.5)],
    ids=["number", "below-1", "tensor", "tensor-below-1"],
)
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo", "grpo"])
def test_num_items_in_batch(liger, monkeypatch, loss_type, processes, items):
    if processes > 1:
        pretend_distributed(monkeypatch, processes)
    inputs = {**problem(3), "num_items_in_batch": items}
    theirs, ours = (module(loss_type=loss_type, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    assert_same(run(ours, inputs), run(theirs, inputs), **TOL)


def pretend_distributed(monkeypatch, processes):
    """As in a group of processes with the same data."""
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
    """Its log-probs from its own states and head, which may have another width."""
    inputs = problem(4)
    ref = inputs.pop("ref_per_token_logps")
    inputs["ref_input"] = torch.randn(*ref.shape, 6)
    inputs["ref_weight"] = torch.randn(29, 6) * 0.5
    inputs["ref_bias"] = torch.randn(29) * 0.1 if with_bias else None
    theirs, ours = (module(temperature=0.7, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    want = run(theirs, inputs)
    assert want[1][0] > 0.1
    assert_same(run(ours, inputs), want, **TOL)
    masked = inputs["attention_mask"] == 0
    inputs["ref_input"][masked], inputs["selected_token_ids"][masked] = torch.nan, -100
    assert_same(run(ours, inputs), want, **TOL)
    with pytest.warns(UserWarning, match="both ref_per_token_logps and ref_input were given"):
        both = run(ours, {**inputs, "ref_per_token_logps": ref})
    assert not torch.equal(both[0], want[0])


@pytest.mark.parametrize("beta", [0.04, 0.0])
def test_without_reference_model(liger, beta):
    """beta, 0.04 by default, then has no effect, and the KL metric exists and is 0."""
    inputs = problem(5)
    inputs["ref_per_token_logps"] = None
    theirs, ours = (module(beta, use_ref_model=False, compiled=False) for module in (liger, FusedLinearGRPOLoss))
    got = run(ours, inputs)
    assert [float(x) for x in got[1][:-1]] == [0.0] * (beta != 0)
    assert_same(got, run(theirs, inputs), **TOL)


@pytest.mark.parametrize("name", ["ref_per_token_logps", "ref_input"])
def test_a_reference_without_a_penalty_is_not_read(name):
    inputs, module = {**problem(5), "ref_per_token_logps": None}, FusedLinearGRPOLoss(beta=0.0)
    ref = torch.full((4, 7, 6) if name == "ref_input" else (4, 7), torch.nan)
    assert_same(run(module, {**inputs, name: ref}), run(module, inputs), rtol=0, atol=0)


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


def test_interfaces_are_those_of_liger(liger, liger_triton):
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
    """Liger rounds the logits of a bf16 head before the log-sum-exp, with an effect on its gradients."""
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


def test_vespo_ratios_of_masked_tokens(liger):
    """They do not count; Liger includes them in its product over a sequence."""
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


def test_compiled_callers():
    """A module within `torch.compile` gives the same results as without."""
    inputs = problem(13)
    module = FusedLinearGRPOLoss(loss_type="grpo")
    assert_same(run(torch.compile(module, backend="aot_eager"), inputs), run(module, inputs), rtol=1e-6, atol=1e-7)
