"""Our callbacks in Megatron-Core's GPTModel against the model's own logits: `make megatron`."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core.models.gpt.gpt_model")

from with_megatron.checks import check_errors, check_log_probs, check_loss, check_pipeline
from with_megatron.gpt import run

from grpo_fused.integrations.megatron import grpo_loss_processor, logprobs_processor


@pytest.mark.parametrize("check", [check_log_probs, check_loss], ids=lambda check: check.__name__)
@pytest.mark.parametrize("tensor", [1, 2])
def test_equal_to_the_models_own_logits(tensor, check):
    run(check, tensor)


def test_pipeline():
    run(check_pipeline, 1, pipeline=2)


@pytest.mark.parametrize("name", ["lm_head_bias", "logit_scale", "process_group"])
@pytest.mark.parametrize("processor", [logprobs_processor, grpo_loss_processor])
def test_what_the_model_determines_is_no_option(processor, name):
    with pytest.raises(TypeError, match=f"{name} is the model's"):
        processor(**{name: None})


def test_errors():
    run(check_errors, 1)
