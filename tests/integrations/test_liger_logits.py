"""Liger's function of logits on our operators, compared with its kernels, interpreted."""

from __future__ import annotations

import itertools

import pytest
import torch
from integrations.liger_cases import LOSS_TYPES, PPO, TOL, logits_problem, run_logits, unread
from torch.testing import assert_close

from grpo_fused.integrations.liger import grpo_loss_from_logits


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


def in_gate(loss_type, level, name, reduce):
    """Every loss type, level and option; reduced and unreduced results in turns."""
    return name == "delta" or reduce == (name != "corrected-kl") or loss_type in ("dapo", "luspo", "vespo")


@pytest.mark.gate(keep=in_gate)
@pytest.mark.pairs
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
    if loss_type == "dr_grpo" and name == "no-kl":
        options["max_completion_length"] = 11
    if loss_type == "vespo" and name == "no-kl":
        options |= {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 2.2}
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


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "vespo"])
def test_options_that_the_loss_type_does_not_read(liger_triton, loss_type):
    options = {name.replace("epsilon", "eps"): value for name, value in unread(loss_type).items() if name != "delta"}
    inputs = logits_problem(1)
    with pytest.warns(UserWarning, match="is ignored, as in Liger: loss_type=") as caught:
        ours, gradient = run_logits(grpo_loss_from_logits, inputs, torch.ones(4, 7), loss_type=loss_type, **options)
    assert sorted(str(warning.message).split()[0] for warning in caught) == sorted(options)
    theirs, their_gradient = run_logits(liger_triton, inputs, torch.ones(4, 7), loss_type=loss_type, **options)
    assert_close(ours[0], theirs[0], **TOL)
    assert (gradient - their_gradient).norm() / their_gradient.norm() < 3e-5
    if loss_type == "cispo":
        with pytest.raises(ValueError, match="not supported for loss_type='cispo'"):
            run_logits(liger_triton, inputs, torch.ones(4, 7), loss_type=loss_type, delta=1.5)


@pytest.mark.parametrize(("ratio", "processes"), [((4,), 1), ((4, 1), 4)], ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_from_logits_with_sequence_ratios(liger_triton, loss_type, ratio, processes, monkeypatch):
    """And a number of items over all processes."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
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
    """delta < c < 1 + eps_high, A < 0: min(delta A, c A) is c A, whose gradient Liger's kernel treats as clipped."""
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
def test_logits_are_not_changed(dtype):
    """`inplace=True`, Liger's default, overwrites them there; here they do not change, so a second call agrees."""
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


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_completions_without_tokens(loss_type):
    call = {"completion_ids": torch.zeros(4, 0, dtype=torch.int64), "advantages": torch.ones(4), "beta": 0.0}
    logits = torch.randn(4, 1, 29, requires_grad=True)
    loss, (clipped,) = grpo_loss_from_logits(logits, None, None, **call, loss_type=loss_type, reduce=True)
    loss.backward()
    assert loss == clipped == logits.grad.norm() == 0


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
