"""Adapters of peft: on the backbone, on the head, merged, disabled; expressed exactly or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from integrations.tiny import build, fused, log_probs, token_ids
from peft import IA3Config, LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model

from grpo_fused import check_head, fused_linear_logprobs, head_hidden_states, lm_head_inputs
from grpo_fused.heads import check
from grpo_fused.heads.modules import adapter_state

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames checkpointing
HEAD = ["q_proj", "lm_head"]


def adapted(name: str = "qwen2", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model with a LoRA adapter that has learned something: B is not zero."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": HEAD, "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(build(name, tie_word_embeddings=False).to(dtype), LoraConfig(**options)).eval()
    learn(model)
    return model


@torch.no_grad()
def learn(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))


def own(model: Any, ids: Tensor) -> Tensor:
    return log_probs(model(input_ids=ids, use_cache=False).logits.float(), ids)


def assert_right(model: Any) -> Tensor:
    ids = token_ids()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        got = fused(model, ids)
    torch.testing.assert_close(
        got, log_probs(logits, ids), rtol=0, atol=1e-4 * max(1.0, float(logits.abs().max()) / 32)
    )
    return got


def base_log_probs(model: Any) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        return own(model, token_ids())


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], HEAD], ids=["backbone", "head"])
def test_lora_and_its_reference(name: str, targets: list[str]) -> None:
    model = adapted(name, target_modules=targets)
    policy = assert_right(model)
    with model.disable_adapter():
        reference = assert_right(model)
    assert (policy - reference).abs().max() > 0.05
    torch.testing.assert_close(reference, base_log_probs(model), rtol=0, atol=2e-4)
    torch.testing.assert_close(assert_right(model), policy, rtol=0, atol=0)  # enabled again


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"lora_bias": True},
        {"rank_pattern": {"lm_head": 2}, "alpha_pattern": {"lm_head": 16}},
        {"init_lora_weights": "gaussian"},
        {"lora_dropout": 0.5},  # in eval mode
    ],
    ids=["rslora", "lora-bias", "own-rank", "gaussian", "dropout"],
)
def test_forms_of_lora_on_the_head(options: dict[str, Any]) -> None:
    model = adapted(**options)
    assert (assert_right(model) - base_log_probs(model)).abs().max() > 0.05


def test_lora_on_a_head_with_a_bias() -> None:
    assert_right(adapted("phi", lora_bias=True))


def test_a_bf16_bias_does_not_round_that_of_the_adapter_away() -> None:
    model = adapted("phi", torch.bfloat16, lora_bias=True).bfloat16()
    layer = model.get_output_embeddings()
    with torch.no_grad():
        layer.base_layer.bias.fill_(1.0)
        layer.lora_B["default"].bias.fill_(1e-3)
    bias = lm_head_inputs(model)["lm_head_bias"]
    assert bias is not None
    assert float(bias[0].detach()) == pytest.approx(1.0 + 1e-3 * layer.scaling["default"], abs=1e-5)


def test_gradients_reach_the_adapter_and_not_the_frozen_weight() -> None:
    ids = token_ids()
    gradients = []
    for score in (own, fused):
        model = adapted()
        logps = score(model, ids)
        (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    want, got = gradients
    reached = [n for n, g in want.items() if g is not None]
    assert sum("lm_head.lora_" in n for n in reached) == 2
    assert sum("q_proj.lora_" in n for n in reached) == 4
    assert [n for n, g in got.items() if g is not None] == reached
    for name in reached:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4 * float(want[name].abs().max()))


@pytest.mark.parametrize("widen", [True, False], ids=["fp32-adapter", "bf16-adapter"])
def test_a_bf16_model_does_not_round_the_adapter_away(widen: bool) -> None:
    """Adapters of fp32 over bf16, as peft makes them, or of bf16: h (s B A)^T has its digits, and W is not copied."""
    model, ids = adapted(dtype=torch.bfloat16), token_ids()
    if not widen:
        model.bfloat16()
    layer = model.get_output_embeddings()
    inputs = lm_head_inputs(model)
    assert inputs["lm_head_weight"] is layer.base_layer.weight
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * b @ a
    with torch.no_grad():
        hidden_states = head_hidden_states(model, ids)
        want = log_probs(hidden_states.double() @ exact.T, ids)
        rounded = log_probs(hidden_states.double() @ exact.bfloat16().double().T, ids)
        torch.testing.assert_close(fused(model, ids).double(), want, rtol=0, atol=3e-4)
    assert (rounded - want).abs().max() > 1e-2


def test_dropout_in_training_mode() -> None:
    model = adapted(lora_dropout=0.5).train()
    assert [adapter.dropout for adapter in lm_head_inputs(model)["lm_head_adapter"]] == [0.5]
    assert [adapter.dropout for adapter in lm_head_inputs(model.eval())["lm_head_adapter"]] == [0.0]


def test_several_adapters_and_their_switches() -> None:
    model = adapted()
    model.add_adapter("second", LoraConfig(r=2, target_modules=HEAD))
    learn(model)
    first = assert_right(model)
    model.set_adapter("second")
    second = assert_right(model)
    model.base_model.set_adapter(["default", "second"])
    both = assert_right(model)
    ids, names = token_ids(), {"adapter_names": ["default", *["second"] * (len(token_ids()) - 1)]}
    with pytest.raises(ValueError, match="adapter_names must not be given where the head has adapters"):
        head_hidden_states(model.eval(), ids, **names)
    assert min((first - second).abs().max(), (first - both).abs().max(), (second - both).abs().max()) > 0.05


def test_an_active_adapter_may_have_no_part_in_the_head() -> None:
    model = adapted()
    model.add_adapter("body", LoraConfig(r=2, target_modules=["q_proj"]))
    learn(model)
    model.base_model.set_adapter(["default", "body"])
    assert [adapter.a.shape[0] for adapter in lm_head_inputs(model)["lm_head_adapter"]] == [4]
    assert_right(model)
    model.set_adapter("body")
    assert lm_head_inputs(model)["lm_head_adapter"] == ()
    assert_right(model)


def test_adapters_around_an_adapted_head_are_all_read() -> None:
    """And are checked again where one within is switched off."""
    model = adapted()
    outer = adapted().get_output_embeddings()
    outer.base_layer = inner = model.get_output_embeddings()
    model.base_model.model.lm_head = outer
    assert len(lm_head_inputs(model)["lm_head_adapter"]) == 2
    both, state = assert_right(model), adapter_state(outer)
    inner.enable_adapters(False)
    assert adapter_state(outer) != state
    assert (assert_right(model) - both).abs().max() > 0.05


def test_other_adapters_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run, checked = adapted(), check._run_own_head, list[int]()
    model.add_adapter("second", LoraConfig(r=2, target_modules=HEAD))
    learn(model)
    monkeypatch.setattr(check, "_run_own_head", lambda *given: checked.append(1) or run(*given))
    for name, times in (("default", 1), ("second", 2), ("second", 2), ("default", 2)):
        model.set_adapter(name)
        lm_head_inputs(model)
        assert len(checked) == times, name
    with model.disable_adapter():
        lm_head_inputs(model)
    assert len(checked) == 3
    model.merge_adapter()
    lm_head_inputs(model)
    assert len(checked) == 4


def test_merged_adapters() -> None:
    model = adapted()
    policy = assert_right(model)
    model.merge_adapter()
    torch.testing.assert_close(assert_right(model), policy, rtol=0, atol=5e-4)
    with model.disable_adapter(), pytest.raises(ValueError, match=r"\['default'\] are merged .* but disabled"):
        lm_head_inputs(model)
    model.unmerge_adapter()
    torch.testing.assert_close(assert_right(model), policy, rtol=0, atol=5e-4)
    torch.testing.assert_close(assert_right(model.merge_and_unload()), policy, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", ["qwen2", "phi"])
def test_modules_to_save(name: str) -> None:
    model = adapted(name, target_modules=["q_proj"], modules_to_save=["lm_head"])
    wrapper = model.get_output_embeddings()
    inputs = lm_head_inputs(model)
    assert inputs["lm_head_weight"] is wrapper.modules_to_save["default"].weight
    policy = assert_right(model)
    with model.disable_adapter():
        assert lm_head_inputs(model)["lm_head_weight"] is wrapper.original_module.weight
        reference = assert_right(model)
    assert (policy - reference).abs().max() > 0.5
    fused(model, token_ids()).sum().backward()
    assert inputs["lm_head_weight"].grad is not None
    assert wrapper.original_module.weight.grad is None
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))  # has no copy of the head
    model.base_model.set_adapter("default")
    assert_right(model)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["q_proj", "lm_head"]], ids=["embedding", "head"])
@pytest.mark.filterwarnings("ignore:.*tie.*:UserWarning")
def test_lora_on_one_side_of_tied_embeddings(targets: list[str]) -> None:
    model = get_peft_model(build("gemma2", tie_word_embeddings=True), LoraConfig(target_modules=targets)).eval()
    learn(model)
    assert_right(model)


def test_heads_that_no_weight_expresses_are_refused() -> None:
    for options, match in (
        ({"use_dora": True}, "Dora.*not a plain LoRA"),
        ({"trainable_token_indices": {"lm_head": [3, 4]}, "target_modules": ["q_proj"]}, "replaced rows"),
    ):
        with pytest.raises(ValueError, match=match):
            lm_head_inputs(adapted(**options))
    for config in (
        IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        VeraConfig(target_modules=["lm_head"], r=4),
    ):
        model = get_peft_model(build("qwen2", tie_word_embeddings=False), config)
        with pytest.raises(ValueError, match="is not a LoRA|must be two nn.Linear|merge it first"):
            lm_head_inputs(model)
        with model.disable_adapter():
            lm_head_inputs(model)
    model = adapted()
    model.get_output_embeddings().lora_A["default"] = nn.Sequential(nn.Linear(1, 1))  # as FSDP1 wraps it in verl
    with pytest.raises(ValueError, match="is a Linear of Sequential, Linear, not a plain LoRA"):
        lm_head_inputs(model)


def test_a_module_in_place_of_its_weight_is_refused() -> None:
    """The fused functions themselves refuse a head whose adapter would be lost."""
    model, ids = adapted(), token_ids()
    with pytest.raises(TypeError, match="with lm_head_adapter for a low-rank change"):
        fused_linear_logprobs(head_hidden_states(model, ids), model.get_output_embeddings(), ids)


def test_prompt_tuning_moves_positions() -> None:
    model = get_peft_model(build("qwen2"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()
    check_head(model)
    with pytest.raises(RuntimeError, match=r"one state for each of input_ids, \(2, 9\); it saw \(2, 12\)"):
        head_hidden_states(model, token_ids())


def test_the_check_does_not_change_the_adapters() -> None:
    model = adapted(lora_dropout=0.0).train()
    before = {n: (p.clone(), p.requires_grad) for n, p in model.named_parameters()}
    check_head(model)
    assert all(torch.equal(p, before[n][0]) and p.requires_grad == before[n][1] for n, p in model.named_parameters())
    assert all(m.training for m in model.modules() if isinstance(m, nn.Linear))


def test_the_trainer_trains_an_adapted_head() -> None:
    """Two micro-batches add up."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from grpo_fused.trainer import GRPOTrainerConfig, Policy, Rollout, Updater
    from grpo_fused.trainer.update import Window

    AcceleratorState._reset_state(reset_partial_state=True)  # other tests train in bf16
    model, accelerator = adapted(), Accelerator()
    ids, mask = token_ids(shape=(4, 3)), torch.ones(4, 3, dtype=torch.bool)
    rollout = Rollout(prompt_ids=ids, prompt_mask=mask, completion_ids=ids + 1, completion_mask=mask)
    rows, advantages = torch.arange(4), torch.tensor([1.0, -1.0, 0.5, -0.5])
    gradients = []
    for tokens in (24, 12):
        config = GRPOTrainerConfig(micro_batch_tokens=tokens)
        policy = Policy(model, accelerator, config)
        assert not policy._is_plain  # FSDP may not shard it
        pieces = policy.micro_batches(rollout, rows)
        assert len(pieces) == 24 // tokens
        model.zero_grad()
        updater = Updater(policy, None, torch.optim.SGD(model.parameters()), config)
        updater.accumulate_gradients(rollout, pieces, advantages, Window(rollout, rows, accelerator), {})
        gradients.append([p.grad for n, p in model.named_parameters() if "lm_head.lora" in n])
    for whole, halves in zip(*gradients, strict=True):
        assert whole.abs().max() > 0
        torch.testing.assert_close(halves, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("own_model", [False, True], ids=["as-it-was", "another-model"])
def test_the_exact_kl_towards_a_reference_with_an_adapter(own_model: bool) -> None:
    """Of the policy as it was before training, or of another model with an adapter on its head."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from grpo_fused import GRPOLossConfig
    from grpo_fused.trainer import GRPOTrainerConfig, Policy, Rollout
    from grpo_fused.trainer.policy import Reference

    model, other = adapted(), adapted(r=2)
    config = GRPOTrainerConfig(loss=GRPOLossConfig(beta=0.1, kl_estimator="exact"))
    reference = Reference(Policy(model, Accelerator(), config), other if own_model else None)
    head = copy.deepcopy((other if own_model else model).get_output_embeddings())
    torch.nn.init.zeros_(model.get_output_embeddings().lora_B["default"].weight)  # as training changes it
    ids, mask = token_ids(shape=(4, 3)), torch.ones(4, 3, dtype=torch.bool)
    given = reference.states(Rollout(prompt_ids=ids, prompt_mask=mask, completion_ids=ids + 1, completion_mask=mask))
    with torch.no_grad():
        want = head(given["ref_hidden_states"])
        got = given["ref_hidden_states"] @ given["ref_lm_head_weight"].T
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_a_reference_without_its_new_adapter_changes_nothing_of_it() -> None:
    """What is frozen in the adapter stays so, and a bias that the adapter alone has is 0 in the reference."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from grpo_fused import GRPOLossConfig
    from grpo_fused.trainer import GRPOTrainerConfig, Policy, Rollout
    from grpo_fused.trainer.policy import Reference

    model = adapted(lora_bias=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)
        if "lora_A" in name:
            parameter.requires_grad_(False)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    config = GRPOTrainerConfig(loss=GRPOLossConfig(beta=0.1, kl_estimator="exact"))
    policy = Policy(model, Accelerator(), config)
    reference = Reference(policy)
    assert reference.policy.unwrapped is model
    ids, mask = token_ids(shape=(4, 3)), torch.ones(4, 3, dtype=torch.bool)
    rollout = Rollout(prompt_ids=ids, prompt_mask=mask, completion_ids=ids + 1, completion_mask=mask)
    given = reference.states(rollout)
    assert torch.equal(given["ref_lm_head_bias"], torch.zeros(len(given["ref_lm_head_weight"])))
    reference.score(rollout, policy.micro_batches(rollout, torch.arange(4)))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained


def test_lora_on_a_head_with_padding_rows() -> None:
    model = adapted("inkling_text", target_modules=["lm_head"])
    assert lm_head_inputs(model)["lm_head_adapter"][0].b.shape[0] == 101
    assert_right(model)
