"""The loss of a causal LM in one call, against the model's own logits; and the loss as a module."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from helpers import make_case
from integrations.tiny import VOCAB, build
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM

from grpo_fused import (
    FusedLinearGRPOLoss,
    GRPOLossConfig,
    fused_linear_grpo_loss,
    grpo_loss_of,
    head_hidden_states,
    logprobs_of,
)
from grpo_fused.heads.causal_lm import _check_padding

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


def test_ids_below_zero_may_be_places_of_images() -> None:
    class WithImages(Qwen2ForCausalLM):  # as Phi-3.5-vision
        def forward(self, input_ids: Tensor, pixel_values: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids.clamp(min=0), **kwargs)

    model, given = build("qwen2"), batch()
    model.__class__ = WithImages
    given["input_ids"][:, PROMPT - 1] = -1
    scores = logprobs_of(model, **given, model_inputs={"pixel_values": torch.zeros(1)})
    assert scores.logps.shape == (ROWS, LENGTH)


@pytest.mark.parametrize("adapted", [False, True], ids=["", "peft"])
def test_learned_positions_are_those_of_the_sampler(adapted: bool) -> None:
    """`generate` counts positions from the first token that is not padding."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, initializer_range=0.3)).eval()
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"])).eval()
    prompts = {name: x[:, :PROMPT] for name, x in batch().items() if name != "prompt_length"}
    out = model.generate(
        **prompts, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, pad_token_id=0, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    mask = torch.cat([prompts["attention_mask"], torch.ones(ROWS, LENGTH, dtype=torch.int64)], dim=1)
    sampled = torch.stack(out.scores, dim=1).log_softmax(-1).amax(-1)
    got = logprobs_of(model, out.sequences, mask, PROMPT).logps
    torch.testing.assert_close(got[:, 1:], sampled[:, 1:], atol=1e-4, rtol=1e-4)
    at_once = {"position_ids": torch.arange(PROMPT + LENGTH).expand(ROWS, -1)}
    given = logprobs_of(model, out.sequences, mask, PROMPT, model_inputs=at_once).logps
    assert (given - got)[0].abs().max() > 0.1
    others = logprobs_of(model, out.sequences, mask, PROMPT, model_inputs={"use_cache": False}).logps
    assert torch.equal(others, given)  # the model's own, where there are other inputs


@pytest.mark.parametrize("call", [grpo_loss_of, logprobs_of])
def test_the_head_is_checked(call: Any) -> None:
    model, given = build("qwen2"), batch()
    if call is grpo_loss_of:
        given["advantages"] = torch.ones(ROWS)
    model.lm_head.register_forward_hook(lambda head, inputs, logits: 1.5 * logits)
    with pytest.raises(ValueError, match=r"is not softcap\(logit_scale \* .* as its config describes it"):
        call(model, **given)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler
@pytest.mark.parametrize("call", [grpo_loss_of, logprobs_of, head_hidden_states])
def test_a_compiled_step_calls_it_eagerly(call: Any) -> None:
    """The first call, which checks the head, too."""
    model, given = build("qwen2"), batch()
    if call is grpo_loss_of:
        given["advantages"] = torch.tensor([1.0, -0.5, 0.3])
    if call is head_hidden_states:
        del given["prompt_length"]

    def step(scale: float) -> Tensor:
        out = call(model, **given)
        return scale * (out if isinstance(out, Tensor) else out[0]).sum()

    got = torch.compile(step, backend="eager")(2.0)
    torch.testing.assert_close(got, step(2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_length": 0}, "prompt_length must be at least 1; got 0"),
        (
            {"prompt_length": 10},
            r"input_ids must be \[B, P \+ T\] with P = prompt_length = 10 and T >= 1; got \(3, 10\)",
        ),
        ({"input_ids": torch.ones(10, dtype=torch.int64)}, r"input_ids must be \[B, P \+ T\] .* got \(10,\)"),
        (
            {"input_ids": torch.full((3, 10), -1)},
            r"input_ids must be ids of the vocabulary, .*; got -1 \(-100 is for",
        ),
        (
            {"attention_mask": torch.zeros(3, 10).index_fill(1, torch.tensor([0]), -torch.inf)},
            "a mask must hold only 0 and 1",
        ),
        ({"attention_mask": torch.ones(3, 6)}, r"attention_mask must have shape \(3, 10\); got \(3, 6\)"),
        ({"completion_mask": torch.ones(3)}, r"completion_mask must have shape \(3, 6\); got \(3,\)"),
        ({"completion_mask": torch.ones(3, 6)}, "completion_mask must be 0 where attention_mask is"),
        (
            {"attention_mask": batch()["attention_mask"].index_fill(1, torch.tensor([3]), 0)},
            r"prompts must be padded on the left, so that column 3 .*; got padding there in rows \[0, 1, 2\]",
        ),
    ],
    ids=[
        "no prompt",
        "no completion",
        "no batch",
        "labels",
        "additive mask",
        "mask",
        "completion mask",
        "trains on padding",
        "padded on the right",
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logprobs_of(build("qwen2"), **{**batch(), **change})


def test_a_row_without_a_completion_may_have_any_prompt() -> None:
    given, model = batch(), build("qwen2")
    given["attention_mask"] = given["attention_mask"].clone()
    given["attention_mask"][2] = 0
    assert not logprobs_of(model, **given).logps[2].any()


def test_masks_elsewhere_than_on_the_cpu_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would synchronise; on the device `meta` it would fail."""
    monkeypatch.delenv("GRPO_FUSED_DEBUG", raising=False)
    _check_padding(torch.ones(ROWS, PROMPT + LENGTH, device="meta"), PROMPT, None)


def test_options_in_the_wrong_place_are_named() -> None:
    model, advantages = build("qwen2"), torch.ones(ROWS)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'beta': pass config=GRPOLossConfig\(beta=...\)"):
        grpo_loss_of(model, **batch(), advantages=advantages, beta=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'$"):
        logprobs_of(model, **batch(), beta=0.1)
    with pytest.raises(TypeError, match="lm_head_bias, softcap must not be given: the model's own head determines it"):
        logprobs_of(model, **batch(), lm_head_bias=None, softcap=3.0)
    with pytest.raises(
        TypeError, match="must be a torch.Tensor; got LogprobOutput, whose fields are logps, .*: pass one"
    ):
        grpo_loss_of(model, **batch(), advantages=advantages, old_per_token_logps=logprobs_of(model, **batch()))
    with pytest.raises(TypeError, match="input_ids must be a torch.Tensor; got dict"):
        logprobs_of(model, {"input_ids": torch.ones(3, 10)}, None, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model_inputs must be a mapping of names to tensors or None; got list"):
        logprobs_of(model, **batch(), model_inputs=[])  # type: ignore[arg-type]


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
