"""The loss of a causal LM in one call, against the model's own logits; and the loss as a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import make_case
from integrations.tiny import VOCAB, build
from torch import Tensor

from grpo_fused import FusedLinearGRPOLoss, GRPOLossConfig, fused_linear_grpo_loss, grpo_loss_of, logprobs_of

PROMPT, LENGTH, ROWS = 4, 6, 3


def batch() -> dict[str, Any]:
    """Prompts padded on the left, completions on the right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, -3:] = 0
    return {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask, "prompt_length": PROMPT}


def own_logprobs(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the completions from the model's own logits, 0 where masked, and their mask."""
    given = batch()
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits.float() / temperature
    targets = given["input_ids"][:, PROMPT:, None]
    logps = logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, targets)[..., 0]
    mask = given["attention_mask"][:, PROMPT:]
    return logps * mask, mask


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "granite", "phi"])
def test_loss_and_gradients_are_those_of_the_models_own_logits(name: str) -> None:
    model, advantages = build(name), torch.tensor([1.0, -0.5, 0.3])
    old = own_logprobs(model, 0.7)[0].detach() + 0.1
    logps, mask = own_logprobs(model, 0.7)
    ratio, a = (logps - old).exp(), advantages[:, None]
    want = (-torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask).sum() / mask.sum()
    want.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    out = grpo_loss_of(model, **batch(), advantages=advantages, old_per_token_logps=old, temperature=0.7)
    out.loss.backward()
    torch.testing.assert_close(out.loss, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out.per_token_logps, logps.detach(), atol=2e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        if name in gradients:
            # both are 7e-6 of a gradient's norm from that in float64 (qwen2), each in its own way
            most = gradients[name].abs().max().item()
            torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-5 * (1 + most), rtol=1e-3, msg=name)
    got = logprobs_of(model, **batch(), temperature=0.7, with_entropy=True)
    torch.testing.assert_close(got.logps, logps, atol=2e-5, rtol=1e-5)
    assert got.entropies is not None


def test_a_mask_of_ones_own_takes_the_place_of_the_attention_mask() -> None:
    """A tool's tokens are read, and do not count."""
    model, mask = build("qwen2"), torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    mask[:, 1:3] = True
    logps = logprobs_of(model, **batch(), completion_mask=mask).logps
    want = own_logprobs(model, 1.0)[0]
    torch.testing.assert_close(logps[mask], want[mask], atol=2e-5, rtol=1e-5)
    assert not logps[~mask].any()
    out = grpo_loss_of(model, **batch(), advantages=torch.ones(ROWS), completion_mask=mask)
    assert out.metrics["active_tokens"] == mask.sum()


def test_further_inputs_reach_the_model() -> None:
    model, given = build("qwen2"), batch()
    given["attention_mask"] = None
    far = torch.arange(PROMPT + LENGTH).expand(ROWS, -1) * 5
    there = logprobs_of(model, **given, model_inputs={"position_ids": far}).logps
    assert (there - logprobs_of(model, **given).logps).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_length": 0}, "prompt_length must be at least 1; got 0"),
        (
            {"prompt_length": 10},
            r"input_ids must be \[B, P \+ T\] with P = prompt_length = 10 and T >= 1; got \(3, 10\)",
        ),
        ({"attention_mask": torch.ones(3, 6)}, r"attention_mask must have the shape of input_ids.*got \(3, 6\)"),
    ],
    ids=["no prompt", "no completion", "mask"],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logprobs_of(build("qwen2"), **{**batch(), **change})


class TestModule:
    def test_is_the_function_with_its_options(self) -> None:
        case, config = make_case(0, extras=False), GRPOLossConfig(loss_type="bnpo")
        given = case.hidden_states, case.lm_head_weight, case.completion_ids, case.advantages, case.completion_mask
        module = FusedLinearGRPOLoss(config, temperature=0.5, impl="chunked")
        want = fused_linear_grpo_loss(*given, config=config, temperature=0.5, impl="chunked")
        assert module(*given).loss == want.loss
        assert module(*given, temperature=0.9).loss == fused_linear_grpo_loss(
            *given, config=config, temperature=0.9, impl="chunked"
        ).loss  # fmt: skip
        assert not list(module.parameters())
        assert "temperature=0.5" in repr(module)

    def test_errors(self) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
            FusedLinearGRPOLoss(temprature=0.5)
        with pytest.raises(TypeError, match="config must be a GRPOLossConfig; got str"):
            FusedLinearGRPOLoss("dapo")  # type: ignore[arg-type]
