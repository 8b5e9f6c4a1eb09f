"""Wrong calls of Liger's interfaces raise, and name what was expected."""

from __future__ import annotations

import pytest
import torch
from integrations.liger_cases import logits_problem, problem

from grpo_fused.integrations.liger import FusedLinearGRPOLoss, grpo_loss_from_logits

BAD_OPTIONS = {
    "loss_type": ({"loss_type": "gmpo"}, "loss_type must be one of grpo"),
    "level": ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
    "level-of-trl": (
        {"importance_sampling_level": "sequence_token"},
        "importance_sampling_level must be one of token, seq",
    ),
    "beta": ({"beta": -0.1}, "beta must be at least 0"),
    "temperature": ({"temperature": 0.0}, "temperature must be > 0"),
    "delta": ({"delta": 0.0}, "delta must be (> 0|positive)"),
    "sapo": ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be > 0"),
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
    for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):  # Liger checks them for all loss types
        with pytest.raises(ValueError, match=f"{name} must be > 0; got 0"):
            FusedLinearGRPOLoss(loss_type="vespo", **{name: 0})
    with pytest.raises(ValueError, match="epsilon_high must be a number; got None"):
        FusedLinearGRPOLoss(epsilon_high=None)
    with pytest.raises(ValueError, match="eps_high must be > 0; got -1"):
        grpo_loss_from_logits(**logits_problem(), eps_high=-1)
    with pytest.raises(ValueError, match="delta must be None for loss_type='cispo', which has no clip; got 1.5"):
        grpo_loss_from_logits(**logits_problem(), loss_type="cispo", delta=1.5)
    with pytest.raises(ValueError, match="loss_type must be one of grpo"):
        grpo_loss_from_logits(**logits_problem(), loss_type="gmpo", delta=1.5)
    FusedLinearGRPOLoss(loss_type="sapo", epsilon_low=None)  # does not read it
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
    "flat": ({"_input": torch.zeros(28, 12)}, ValueError, r"hidden_states must have shape \(4, 7, H\)"),
    "mask": ({"attention_mask": torch.ones(4, 6)}, ValueError, "attention_mask must have shape"),
    "ids": ({"selected_token_ids": torch.zeros(4, 7)}, TypeError, "selected_token_ids must have an integer dtype"),
    "old": ({"old_per_token_logps": torch.zeros(4)}, ValueError, "old_per_token_logps must have shape"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_wrong_inputs(name):
    changed, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message):
        FusedLinearGRPOLoss()(**{**problem(), **changed})


def test_wrong_inputs_from_logits():
    inputs = logits_problem()
    with pytest.raises(ValueError, match=r"beta=0\.04 needs ref_logp"):
        grpo_loss_from_logits(**{**inputs, "ref_logp": None})
    with pytest.raises(ValueError, match=r"logits must be \[4, 8, V\], one position more"):
        grpo_loss_from_logits(**{**inputs, "logits": inputs["logits"][:, :-1]})
    with pytest.raises(ValueError, match="advantages must have shape"):
        grpo_loss_from_logits(**{**inputs, "advantages": torch.ones(3)})
    with pytest.raises(ValueError, match="advantages must be finite"):
        grpo_loss_from_logits(**{**inputs, "advantages": torch.full((4,), torch.nan)})
