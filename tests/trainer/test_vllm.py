"""The vLLM engine with a test double of the package: its requests, and its use of the results."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from trainer.small_model import build_small_model
from trainer.small_trainer import count_ones

from examples.arithmetic.model import build_tokenizer
from grpo_fused import GRPOLossConfig
from grpo_fused.rollouts.errors import DivergedError
from grpo_fused.rollouts.vllm import SyncError, _pack_tied_head, log, named_weights
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, Sampling, VLLMEngine, roll_out
from grpo_fused.trainer.prompts import PromptError


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The part of the package that the engine uses; records the calls. It has sampling masks if calls["masks"]."""
    module = ModuleType("vllm")
    module.__version__ = "0.32.0"
    sampler = SimpleNamespace(return_sampling_mask=True)
    calls: dict[str, Any] = {"loaded": {}, "resets": 0, "vocab_size": 21, "rpc": [], "masks": False, "kept": 99}
    calls["sampler"] = sampler

    class LLM:
        llm_engine = SimpleNamespace(
            output_processor=SimpleNamespace(request_states=calls.setdefault("requests", {})),
            abort_request=lambda ids, internal: [calls["requests"].pop(own) for own in ids if internal],
        )

        def __init__(self, **options: Any) -> None:
            calls["starts"] = calls.get("starts", 0) + 1
            if calls.get("error"):
                raise ValueError(calls["error"])
            if options.get("return_sampling_mask") and not calls["masks"]:
                raise ValueError("sampling distribution replay requires Model Runner V2")
            calls["options"] = options
            self.model_config = SimpleNamespace(
                get_vocab_size=lambda: calls["vocab_size"], max_model_len=options.get("max_model_len", 64),
                dtype=options.get("dtype", torch.float32), quantization=options.get("quantization"),
                return_sampling_mask=options.get("return_sampling_mask", False),
            )  # fmt: skip

        def collective_rpc(self, method: Any, kwargs: dict[str, Any] | None = None) -> None:
            if callable(method):
                method(SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)))
            elif method == "reload_weights":
                assert kwargs is not None
                calls["loaded"].update(kwargs["weights_iterator"])
            else:
                calls["rpc"].append((method, kwargs))

        def apply_model(self, function: Any) -> None:
            calls["applied"] = function

        def reset_prefix_cache(self) -> None:
            calls["resets"] += 1

        def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
            sampling_params = sampling_params if isinstance(sampling_params, list) else [sampling_params]
            assert not calls["requests"]  # they would be completed too
            calls["prompts"], calls["parameters"] = prompts, sampling_params
            calls["rpc"].append("generate")

            def position(token: int) -> dict[int, Any]:
                return {token: SimpleNamespace(logprob=-token / 10), 99: SimpleNamespace(logprob=-9.0)}

            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(
                            token_ids=ids,
                            logprobs=[position(token) for token in ids],
                            sampling_mask=SimpleNamespace(token_ids=[[token, calls["kept"]] for token in ids])
                            if calls["masks"] and sampler.return_sampling_mask
                            else None,
                        )
                        for ids in ([5, 1], [6, 7, 1])[: vars(parameters).get("n", 1)]
                    ]
                )
                for parameters in sampling_params
            ]

    module.LLM = LLM  # type: ignore[attr-defined]
    module.SamplingParams = lambda **options: SimpleNamespace(**options)  # type: ignore[attr-defined]
    module.calls = calls  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def synced_engine(**options: Any) -> VLLMEngine:
    engine = VLLMEngine("folder", **options)
    engine.synced = True
    return engine


def test_completions_come_with_the_log_probs_of_their_sampling(vllm: Any) -> None:
    engine = synced_engine(max_model_len=64, gpu_memory_utilization=0.4)
    sampling = Sampling(
        num_generations=2,
        max_completion_length=8,
        temperature=0.7,
        repetition_penalty=1.1,
        eos_token_ids=(1,),
        stop_strings=("x",),
        seed=2**31 - 1,
    )
    rollout = roll_out(engine, [[3, 4], [3]], sampling)
    assert vllm.calls["prompts"] == [{"prompt_token_ids": [3, 4]}, {"prompt_token_ids": [3]}]
    asked, other = map(vars, vllm.calls["parameters"])
    assert other == asked | {"seed": 1}  # two completions later, of 2**31 seeds
    expected = {
        "n": 2,
        "max_tokens": 8,
        "temperature": 0.7,
        "repetition_penalty": 1.1,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": 0,
        "stop_token_ids": [1],
        "seed": 2**31 - 1,
    }
    assert expected.items() <= asked.items()
    assert asked["stop"] == ["x"]
    assert asked["include_stop_str_in_output"]
    assert asked["detokenize"]
    assert not asked["skip_special_tokens"]  # vLLM would not see a stop string that is one
    options = {"logprobs_mode": "processed_logprobs", "load_format": "dummy", "gpu_memory_utilization": 0.4}
    assert options.items() <= vllm.calls["options"].items()  # log-probs after the temperature
    assert rollout.completions() == [[5, 1], [6, 7, 1]] * 2
    assert rollout.sampling_logps is not None
    torch.testing.assert_close(rollout.sampling_logps[:2], torch.tensor([[-0.5, -0.1, 0.0], [-0.6, -0.7, -0.1]]))


def test_requests_that_an_interruption_left_are_dropped(vllm: Any) -> None:
    engine = synced_engine()
    vllm.calls["requests"]["7"] = ...
    assert len(engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8)).ids) == 2


def test_exact_log_probs_are_asked_for_during_a_rollout(vllm: Any) -> None:
    engine = synced_engine(exact_logprobs=True)
    module, _, name = vllm.calls["options"]["worker_extension_cls"].rpartition(".")
    assert callable(getattr(import_module(module), name).score_exactly)
    engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, temperature=0.7))
    engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, temperature=0.7, greedy=True))
    temperatures = [call[1]["temperature"] for call in vllm.calls["rpc"] if call[0] == "score_exactly"]
    assert temperatures == [0.7, 1.0]
    assert vllm.calls["rpc"][1:3] == ["generate", ("score_as_vllm", None)]
    with pytest.raises(ValueError, match="repetition_penalty must be 1 with exact_logprobs"):
        engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, repetition_penalty=1.1))
    with pytest.raises(ValueError, match="worker_extension_cls must not be set with exact_logprobs"):
        VLLMEngine("folder", exact_logprobs=True, worker_extension_cls="a.B")


def test_the_most_likely_tokens_come_without_a_less_likely_sampled_one(vllm: Any) -> None:
    """vLLM's dictionaries have it beside the K that were asked for: here 99 and the sampled token, with K = 1."""
    sampling = Sampling(num_generations=2, max_completion_length=8, records="top_k", num_alternatives=1)
    others = roll_out(synced_engine(), [[3]], sampling).alternatives
    assert [vars(parameters)["logprobs"] for parameters in vllm.calls["parameters"]] == [1]
    assert others is not None
    assert others.sets.ids.tolist() == [99] * 5
    assert others.logps.tolist() == [-9.0] * 5
    assert others.sets.sizes.tolist() == [1, 1, 0, 1, 1, 1]
    both = roll_out(synced_engine(), [[3]], replace(sampling, num_alternatives=50)).alternatives
    assert [vars(parameters)["logprobs"] for parameters in vllm.calls["parameters"]] == [21]  # the vocabulary
    assert both is not None
    assert both.sets.ids.tolist() == [5, 99, 1, 99, 6, 99, 7, 99, 1, 99]
    torch.testing.assert_close(both.logps[:4], torch.tensor([-0.5, -9.0, -0.1, -9.0]))


def test_log_probs_of_a_mask_are_asked_for_and_all_there(vllm: Any) -> None:
    vllm.calls["masks"] = True
    sampling = Sampling(num_generations=2, max_completion_length=8, records="mask", top_k=2)
    engine = synced_engine()
    rollout = roll_out(engine, [[3]], sampling)
    assert [vars(parameters)["logprobs"] for parameters in vllm.calls["parameters"]] == [20]
    others = rollout.alternatives
    assert others is not None
    assert others.sets.ids.tolist() == [5, 99, 1, 99, 6, 99, 7, 99, 1, 99]
    torch.testing.assert_close(others.logps[:4], torch.tensor([-0.5, -9.0, -0.1, -9.0]))
    roll_out(engine, [[3]], replace(sampling, records=None))
    assert [vars(parameters)["logprobs"] for parameters in vllm.calls["parameters"]] == [0]
    vllm.calls["kept"] = 98
    with pytest.raises(RuntimeError, match="those of 2 of 4 in a completion were not returned. Set top_k"):
        roll_out(engine, [[3]], sampling)


@pytest.mark.parametrize("options", [{"records": "top_k", "num_alternatives": 4}, {"records": "mask", "top_p": 0.9}])
def test_log_probs_are_fp32_by_any_default_dtype(vllm: Any, options: dict[str, Any]) -> None:
    vllm.calls["masks"] = True
    torch.set_default_dtype(torch.bfloat16)
    try:
        rollout = roll_out(synced_engine(), [[3]], Sampling(num_generations=2, max_completion_length=8, **options))
    finally:
        torch.set_default_dtype(torch.float32)
    assert rollout.sampling_logps is not None
    assert rollout.alternatives is not None
    assert rollout.sampling_logps.dtype == rollout.alternatives.logps.dtype == torch.float32


@pytest.mark.parametrize("options", [{"records": "top_k", "num_alternatives": 4}, {"records": "mask", "top_p": 0.9}])
def test_exact_log_probs_are_not_those_of_other_tokens(vllm: Any, options: dict[str, Any]) -> None:
    sampling = Sampling(num_generations=1, max_completion_length=8, **options)
    with pytest.raises(ValueError, match="exact_logprobs must be off where the objective reads .*; got records '"):
        synced_engine(exact_logprobs=True).generate([[3]], sampling)


def test_an_engine_whose_log_probs_are_not_the_policys_is_refused(vllm: Any) -> None:
    vllm.calls["vocab_size"] = 100
    model, engine = build_small_model(100), VLLMEngine("folder")
    with pytest.raises(SyncError, match="log-probs of 4 tokens differ by .* nats on average .at most 0.0005"):
        engine.sync_weights(model)
    assert vllm.calls["resets"] == 1
    assert vllm.calls["applied"] is _pack_tied_head
    assert vllm.calls["loaded"].keys() == dict(model.named_parameters()).keys()
    with pytest.raises(RuntimeError, match="sync_weights must be called before generate"):
        engine.generate([[3]], Sampling(num_generations=1, max_completion_length=8))


def answers_of(engine: VLLMEngine, model: Any, difference: float) -> Any:
    """What vLLM answers in the check of a sync, with log-probs that are off, but for those of the likeliest tokens."""
    reference = copy.deepcopy(model)

    def generate(prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        prompt, ids = prompts[0]["prompt_token_ids"], [5, 9, 2, 7, 1, 3, 8, 4]
        with torch.no_grad():
            rows = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        logprobs = []
        for row, token in zip(rows, ids, strict=True):
            first, *others = row.topk(sampling_params[0].logprobs).indices.tolist()
            off = dict.fromkeys([token, *others], difference) | {first: 0.0}
            logprobs.append({other: SimpleNamespace(logprob=row[other].item() + off[other]) for other in off})
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)])]

    return generate


HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "policy", "difference", "bound"),
    [
        ({}, torch.float32, 2e-4, None),
        ({}, torch.float32, 1e-3, "0.0005"),
        ({}, torch.float32, float("nan"), "0.0005"),
        ({}, torch.bfloat16, 0.1, None),  # the policy rounds
        ({}, "autocast", 0.1, None),
        ({"dtype": torch.float16}, torch.float32, 0.01, None),
        ({"dtype": torch.float16}, torch.float32, 0.05, "0.03"),
        (HALF, torch.float32, 0.1, None),
        (HALF, torch.float32, 0.3, "0.2"),
        (HALF | {"quantization": "fp8"}, torch.float32, 0.3, None),
        (HALF | {"quantization": "fp8"}, torch.float32, 0.8, "0.5"),
        ({"max_logprob_difference": 1e-5}, torch.float32, 2e-4, "1e-05"),
        ({"max_logprob_difference": 0.2}, torch.float32, 0.1, None),
    ],
    ids=str,
)
def test_log_probs_may_differ_by_what_the_dtypes_round(
    vllm: Any, options: dict[str, Any], policy: Any, difference: float, bound: str | None
) -> None:
    model = build_small_model(21)
    if policy == "autocast":
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model, evaluation_mode=True)
    else:
        model = model.to(policy)
    engine = VLLMEngine("folder", **options)
    engine.synced = True  # of an earlier sync
    engine.llm.generate = answers_of(engine, model, difference)
    if bound is None:
        engine.sync_weights(model)
    else:
        with pytest.raises(SyncError, match=rf"of 1[0-9]+ tokens differ by .* nats .*\(at most {bound}, max_logprob_"):
            engine.sync_weights(model)
    assert engine.synced == (bound is None)


def test_all_tokens_of_a_small_vocabulary_are_compared(vllm: Any) -> None:
    vllm.calls["vocab_size"] = 10
    model, engine = build_small_model(10), VLLMEngine("folder")
    engine.llm.generate = answers_of(engine, model, 0.0)
    engine.sync_weights(model)


def test_several_processes_have_an_engine_each(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_fused.rollouts.vllm.PartialState", lambda cpu: SimpleNamespace(num_processes=2))
    VLLMEngine("folder")
    assert vllm.calls["options"]["distributed_executor_backend"] == "external_launcher"
    VLLMEngine("folder", distributed_executor_backend="uni")
    assert vllm.calls["options"]["distributed_executor_backend"] == "uni"


def test_a_policy_with_another_vocabulary_is_refused(vllm: Any) -> None:
    with pytest.raises(ValueError, match="must be that of the files .*, 21 tokens; got 22: save the resized model"):
        VLLMEngine("folder").sync_weights(build_small_model(22))


def test_a_policy_that_has_diverged_is_not_the_engines_fault(vllm: Any) -> None:
    model, engine = build_small_model(21), VLLMEngine("folder")
    engine.llm.generate = answers_of(engine, model, 0.0)
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(DivergedError, match="the policy's logits must be finite"):
        engine.sync_weights(model)


def test_an_adapter_that_is_disabled_is_not_merged() -> None:
    from peft import LoraConfig, get_peft_model

    base = build_small_model(21)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    )
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    with model.disable_adapter():
        weights = dict(named_weights(model))
    assert weights.keys() == before.keys()
    for name, value in weights.items():
        assert torch.equal(value, before[name]), name
    enabled = dict(named_weights(model))
    assert not torch.equal(enabled["lm_head.weight"], before["lm_head.weight"])


def test_adapters_that_vllm_cannot_have_are_refused() -> None:
    from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

    tied = "embedding and head are tied, and vLLM has one weight for both"
    for config, message in (
        (LoraConfig(r=2, target_modules=["lm_head"]), tied),
        (LoraConfig(r=2, target_modules=["embed_tokens"]), tied),
        (LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]), tied),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "must be LoRA .*k_proj is a peft.tuners.ia3"),
        (
            LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1]),
            "must be LoRA .*TrainableTokens",
        ),
    ):
        model: Any = get_peft_model(build_small_model(21, tied=True), config)
        with pytest.raises(ValueError, match=message):
            dict(named_weights(model))
        with model.disable_adapter():
            dict(named_weights(model))
    model = get_peft_model(build_small_model(21), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="must be LoRA .*prompt_encoder.default is a peft.tuners.prompt_tuning"):
        dict(named_weights(model))
    model = get_peft_model(build_small_model(21, tied=True), LoraConfig(r=2, target_modules="all-linear"))
    weights = [name for name, _ in named_weights(model)]
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights


def test_adapters_on_two_tensors_of_the_experts_are_merged() -> None:
    """peft wraps the module twice."""
    from peft import LoraConfig, get_peft_model
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=21, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    model: Any = get_peft_model(MixtralForCausalLM(config), lora).eval()
    plain, ids = MixtralForCausalLM(config).eval(), torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        want, before = model(ids).logits, plain(ids).logits
        assert not plain.load_state_dict(dict(named_weights(model))).missing_keys
        torch.testing.assert_close(plain(ids).logits, want, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=0)
    assert (want - before).abs().max() > 0.1


def test_adapters_are_merged_while_weights_are_read() -> None:
    from peft import LoraConfig, get_peft_model

    base = build_small_model(21)
    names = list(dict(base.named_parameters()))
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    )
    torch.nn.init.normal_(model.get_output_embeddings().weight)  # as if it were trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = dict(named_weights(model))
    assert list(weights) == names
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    merged = model.merge_and_unload().state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(value, merged[name], rtol=0, atol=1e-6)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(weights[q], before["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"])


@pytest.mark.parametrize("merged", [["default"], ["default", "second"]])
def test_adapters_that_are_merged_stay_merged(merged: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model: Any = get_peft_model(build_small_model(21), lora).eval()
    model.add_adapter("second", lora)
    model.base_model.set_adapter(["default", "second"])
    ids, plain = torch.arange(9).unsqueeze(0), build_small_model(21)
    model.merge_adapter(merged)
    with torch.no_grad():
        before = model(ids).logits
        for _ in range(2):
            plain.load_state_dict(dict(named_weights(model)))
            torch.testing.assert_close(plain(ids).logits, before, rtol=0, atol=1e-4)
            assert torch.equal(model(ids).logits, before)
    with model.disable_adapter(), pytest.raises(ValueError, match="must not be merged where they are disabled"):
        dict(named_weights(model))


def test_a_temperature_that_vllm_raises_is_refused(vllm: Any) -> None:
    engine = synced_engine()
    with pytest.raises(ValueError, match="temperature must be at least 0.01 where vLLM samples.*got 0.005"):
        engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, temperature=0.005))
    engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, temperature=0.01))
    engine.generate([[3]], Sampling(num_generations=1, max_completion_length=8, temperature=0.005, greedy=True))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="vllm"):
        VLLMEngine("folder")


def test_what_vllm_cannot_do_is_refused(vllm: Any) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        with pytest.raises(ValueError, match=f"{name} must be 1: .*; got 2"):
            VLLMEngine("folder", **{name: 2})
    vllm.__version__ = "0.31.1"
    with pytest.raises(ImportError, match=r"vllm must be 0.32 or newer; got 0.31.1"):
        VLLMEngine("folder")


def test_a_release_that_was_not_tested_is_named_once(vllm: Any) -> None:
    for version, expected in (("0.33.2", 0), ("0.34.0", 1), ("0.34.0", 0), ("1.0", 1)):
        vllm.__version__ = version
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            VLLMEngine("folder")
        found = [str(warning.message) for warning in seen]
        assert len(found) == expected
        assert all(f"vllm 0.32 to 0.33 were tested with grpo_fused; got {version}" in message for message in found)


def test_an_engine_in_another_process_is_refused(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING must be 0 or unset: .*; got '1'"):
        VLLMEngine("folder")
    assert "options" not in vllm.calls  # vLLM did not start
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    VLLMEngine("folder")


@pytest.mark.parametrize("generated", [False, True], ids=["list", "function"])
def test_a_prompt_without_room_for_its_completion_is_refused_before_the_first_rollout(
    vllm: Any, rows: list[dict[str, str]], generated: bool
) -> None:
    """vLLM fails on a prompt that is too long, and shortens the completions of one that nearly is."""
    tokenizer = build_tokenizer()

    def make(room: int, **options: Any) -> GRPOTrainer:
        model, config = build_small_model(len(tokenizer)), GRPOTrainerConfig(prompts_per_step=2, **options)
        data: Any = (lambda index: rows[-1]) if generated else rows
        return GRPOTrainer(
            model, tokenizer, [count_ones], data, config, engine=VLLMEngine("folder", max_model_len=room)
        )

    longest = len(tokenizer(rows[-1]["prompt"]).input_ids)
    make(longest + 16, max_completion_length=16)
    row = 0 if generated else 3  # the first that is too long
    place = r"train_dataset\(0\)" if generated else f"row {row} of train_dataset"
    where = f"{place}: a prompt and its completion must have at most {longest + 14} tokens in vLLM"
    with pytest.raises(PromptError, match=f"{where} .*; got a prompt of .* and max_completion_length 16"):
        make(longest + 14, max_completion_length=16)
    if not generated:
        make(longest + 14, max_completion_length=16, max_prompt_length=longest - 2)
    with pytest.raises(
        PromptError, match="at most 10 tokens in vLLM .*; got a prompt of 3 and max_completion_length 8"
    ):
        synced_engine(max_model_len=10).generate([[3], [3, 4, 5]], Sampling(num_generations=1, max_completion_length=8))


@pytest.mark.parametrize(
    ("reader", "options"),
    [
        ("importance_sampling", {}),
        (
            "loss.off_policy_mask_threshold",
            {"importance_sampling": None, "loss": GRPOLossConfig(off_policy_mask_threshold=0.1)},
        ),
    ],
)
def test_a_repetition_penalty_is_refused_before_the_first_rollout(
    vllm: Any, rows: list[dict[str, str]], reader: str, options: dict[str, Any]
) -> None:
    tokenizer = build_tokenizer()
    config = GRPOTrainerConfig(repetition_penalty=1.1, prompts_per_step=2, **options)
    with pytest.raises(ValueError, match=f"^{reader} must be null with a repetition_penalty.*; got .* 1.1"):
        GRPOTrainer(
            build_small_model(len(tokenizer)), tokenizer, [count_ones], rows, config, engine=VLLMEngine("folder")
        )


def test_truncated_sampling_requests_the_tokens_that_were_kept(vllm: Any) -> None:
    """The test double returns two tokens of many: no candidate set."""
    sampling = Sampling(num_generations=1, max_completion_length=8, top_p=0.9, eos_token_ids=(1,))
    for vocab_size, top_k, asked in ((50_000, 0, 1024), (50_000, 1000, 1024), (50_000, 5, 26), (21, 0, 21)):
        vllm.calls["vocab_size"] = vocab_size
        with pytest.raises(RuntimeError, match="must return all tokens that could be sampled"):
            synced_engine().generate([[3]], replace(sampling, top_k=top_k))
        assert vllm.calls["parameters"][0].logprobs == asked
    assert vllm.calls["options"]["max_logprobs"] == 1024
    assert synced_engine(exact_logprobs=True).generate([[3]], sampling).candidates is not None  # checked by the plugin


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(log, "info", lambda text, *values: messages.append(text % values))
    return messages


TRUNCATED = Sampling(num_generations=2, max_completion_length=8, top_p=0.9, min_p=0.1, eos_token_ids=(1,))


def test_candidate_sets_come_from_sampling_masks(vllm: Any, logged: list[str]) -> None:
    """vLLM refuses a temperature or top_k of 0 while it records them; where nothing is truncated they are all tokens."""
    vllm.calls["masks"] = True
    engine = synced_engine()
    assert logged == ["where sampling is truncated, candidate sets come from vLLM's sampling masks"]
    assert engine.masks
    found = engine.generate([[3]], TRUNCATED)
    assert found.candidates is not None
    assert found.candidates.ids.tolist() == [5, 99, 1, 99, 6, 99, 7, 99, 1, 99]
    assert found.candidates.sizes.tolist() == [2, 2, 0, 2, 2, 2]
    (asked,) = map(vars, vllm.calls["parameters"])
    expected = {"temperature": 1.0, "top_k": 21, "top_p": 0.9, "min_p": 0.1, "logprobs": 0}
    assert expected.items() <= asked.items()
    assert vllm.calls["sampler"].return_sampling_mask
    engine.generate([[3]], replace(TRUNCATED, top_k=5))
    assert vllm.calls["parameters"][0].top_k == 5

    for sampling, temperature in (
        (replace(TRUNCATED, top_p=1.0, min_p=0.0), 1.0),
        (replace(TRUNCATED, greedy=True), 0),
    ):
        engine.generate([[3]], TRUNCATED)
        assert engine.llm.model_config.return_sampling_mask
        assert engine.generate([[3]], sampling).candidates is None
        (asked,) = map(vars, vllm.calls["parameters"])
        assert (asked["temperature"], asked["top_k"]) == (temperature, -1)
        assert not vllm.calls["sampler"].return_sampling_mask
        assert not engine.llm.model_config.return_sampling_mask


def test_a_sync_is_compared_without_masks(vllm: Any) -> None:
    """The log-probs of a greedy completion, which vLLM refuses while it records masks."""
    vllm.calls["masks"] = True
    model, engine, asked = build_small_model(21), VLLMEngine("folder"), []
    answers = answers_of(engine, model, 0.0)

    def generate(prompts: Any, sampling_params: Any, use_tqdm: bool) -> Any:
        (given,) = sampling_params
        asked.append((given.temperature, given.ignore_eos, vllm.calls["sampler"].return_sampling_mask))
        return answers(prompts, sampling_params, use_tqdm)

    engine.llm.generate = generate
    engine.sync_weights(model)
    assert asked == [(0.0, True, False)]
    assert not engine.llm.model_config.return_sampling_mask
    assert engine.masks


def test_an_engine_without_masks_says_so(vllm: Any, logged: list[str]) -> None:
    assert not VLLMEngine("folder").masks
    assert logged == [
        "where sampling is truncated, candidate sets come from vLLM's log-probs, of at most 1024 tokens each"
    ]
    with pytest.raises(ValueError, match="requires Model Runner V2"):  # asked for
        VLLMEngine("folder", return_sampling_mask=True)
    vllm.calls["masks"] = True
    assert not VLLMEngine("folder", return_sampling_mask=False).masks
    vllm.calls |= {"error": "max_model_len must be positive", "starts": 0}
    with pytest.raises(ValueError, match="max_model_len must be positive"):
        VLLMEngine("folder")
    assert vllm.calls["starts"] == 1  # not once more without masks
