"""What each process of a test does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from with_megatron.gpt import TEMPERATURE, B, S, batch, gradients, model_of, own_scores

from grpo_fused import GRPOLossConfig, GRPOLossOutput, grpo_loss
from grpo_fused.integrations.megatron import grpo_loss_processor, logprobs_processor

VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"tied": True}, {"sequence_parallel": True}, {"use_mup": True, "mup_output_mult": 0.5},
    {"tied": True, "sequence_parallel": True},
)  # fmt: skip


def check_log_probs(tensor: int) -> None:
    for variant in VARIANTS:
        _log_probs(model_of(tensor, **variant))


def _log_probs(model: GPTModel) -> None:
    g = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, B, S, generator=g)
    want = own_scores(model)
    theirs = gradients(model, (want[0] * a).sum() + (want[1] * b).sum())
    got = model(**batch(), output_processor=logprobs_processor(temperature=TEMPERATURE, with_entropy=True))
    mine = gradients(model, (got[0] * a).sum() + (got[1] * b).sum())
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    alone = model(**batch(), output_processor=logprobs_processor(temperature=TEMPERATURE))
    assert torch.equal(alone, got[0])


def loss_inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    advantages, old = torch.randn(B, generator=g), -3 + 0.3 * torch.randn(B, S, generator=g)
    return {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": old - 0.1}


CONFIG = GRPOLossConfig(loss_type="grpo", beta=0.05)


def own_loss(model: GPTModel) -> Tensor:
    logps = own_scores(model)[0].float()
    return grpo_loss(logps, completion_mask=batch()["loss_mask"], config=CONFIG, **loss_inputs()).loss


def check_loss(tensor: int) -> None:
    for variant in VARIANTS:
        _loss(model_of(tensor, **variant))
    model = model_of(tensor, bf16=True, params_dtype=torch.bfloat16)
    wrapped = Float16Module(model.config, model)  # it makes plain tuples of all results
    loss, logps, entropies, metrics = wrapped(
        **batch(), output_processor=grpo_loss_processor(), output_processor_context=loss_inputs()
    )
    assert loss.requires_grad
    assert logps.shape == entropies.shape == (B, S)
    assert "entropy" in metrics


def _loss(model: GPTModel) -> None:
    want = own_loss(model)
    theirs = gradients(model, want)
    processor = grpo_loss_processor(config=CONFIG, temperature=TEMPERATURE)
    out = model(**batch(), output_processor=processor, output_processor_context=loss_inputs())
    assert isinstance(out, GRPOLossOutput)
    mine = gradients(model, out.loss)
    torch.testing.assert_close(out.loss, want, rtol=1e-5, atol=1e-6)
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def check_pipeline(tensor: int) -> None:
    """1F1B over two stages: gradients of two micro-batches."""
    model = model_of(tensor, 2)
    processor = grpo_loss_processor(config=CONFIG, temperature=TEMPERATURE)
    last = parallel_state.is_pipeline_last_stage()

    def step(fused: bool) -> dict[str, Tensor]:
        def forward(iterator: Any, model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
            given = batch()
            if not last:
                given.pop("labels"), given.pop("loss_mask")
                return model(**given), lambda output: (output, {})
            if fused:
                out = model(**given, output_processor=processor, output_processor_context=loss_inputs()).loss
            else:
                out = own_loss(model)
            return out, lambda loss: (loss, {"loss": loss.detach()})

        model.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter([0, 0]), model=model, num_microbatches=2, seq_length=S,
            micro_batch_size=B, forward_only=False,
        )  # fmt: skip
        return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    mine, theirs = step(True), step(False)
    assert mine
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def check_errors(tensor: int) -> None:
    model, given = model_of(tensor), batch()
    processor = grpo_loss_processor()
    with pytest.raises(ValueError, match="must be a mapping with advantages .* got NoneType"):
        model(**given, output_processor=processor)
    with pytest.raises(ValueError, match="must be a mapping with advantages .* got dict"):
        model(**given, output_processor=processor, output_processor_context={})
    divided = SimpleNamespace(context_parallel_size=2)
    with pytest.raises(ValueError, match="needs whole sequences; context_parallel_size is 2"):
        processor(labels=given["labels"], loss_mask=None, context=loss_inputs(), config=divided)
    with pytest.raises(ValueError, match="needs a sequence in each row; got packed_seq_params"):
        processor(
            labels=given["labels"], loss_mask=None, context=loss_inputs(), config=model.config,
            packed_seq_params=object(),
        )  # fmt: skip
    given.pop("labels")
    for unlabelled in (processor, logprobs_processor()):
        with pytest.raises(ValueError, match="must be called with labels"):
            model(**given, output_processor=unlabelled, output_processor_context=loss_inputs())
