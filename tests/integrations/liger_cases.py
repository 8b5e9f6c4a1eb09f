"""Problems with Liger's names, how they are run, and their expected results."""

from __future__ import annotations

import torch
from helpers import make_case
from torch.testing import assert_close

from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
PPO = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
REQUIRED = {"cispo": {"epsilon_high": 1.1}, "dr_grpo": {"max_completion_length": 11}}
CHANGED = {
    "epsilon_low": 0.1,
    "epsilon_high": 0.15,
    "delta": 1.15,
    "sapo_temperature_pos": 0.7,
    "sapo_temperature_neg": 1.4,
    "vespo_k_pos": 1.5,
    "vespo_lambda_pos": 2.0,
    "vespo_k_neg": 2.0,
    "vespo_lambda_neg": 2.5,
}
"""Options that not all loss types read, none at its default."""
TOL = {"rtol": 3e-5, "atol": 3e-6}


def unread(loss_type):
    """The options of `CHANGED` that the loss type does not read."""
    reads = {"cispo": ("epsilon_high",), "sapo": ("sapo",), "vespo": ("vespo",)}.get(loss_type, ("epsilon", "delta"))
    return {name: value for name, value in CHANGED.items() if not name.startswith(reads)}


def problem(seed=0, dtype=torch.float32, **shape):
    """Tensors of a call with Liger's names, with a bias; every sequence has tokens."""
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


def logits_problem(seed=0, dtype=torch.float32):
    inputs = problem(seed)
    logits = inputs["_input"] @ inputs["lin_weight"].T
    logits = torch.cat([logits, torch.randn_like(logits[:, :1])], 1)  # the position that is not used
    return {
        "logits": logits.to(dtype),
        "old_logp": inputs["old_per_token_logps"],
        "ref_logp": inputs["ref_per_token_logps"],
        "completion_ids": inputs["selected_token_ids"],
        "advantages": inputs["advantages"],
        "completion_mask": inputs["attention_mask"],
    }


def run_logits(function, inputs, upstream, **options):
    """All results, and the gradient of the first for `upstream`."""
    leaf = inputs["logits"].detach().clone().requires_grad_()
    out = function(**{**inputs, "logits": leaf * 1.0}, **options)
    out[0].backward(upstream)
    rest = out[1] if isinstance(out[1], list) else out[1:]
    return [out[0].detach(), *rest], leaf.grad
