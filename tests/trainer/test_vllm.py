"""The vLLM engine with a test double of the package: its requests, and its use of the results."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trainer.small_model import build_small_model
from trainer.small_trainer import count_ones

from examples.arithmetic.model import build_tokenizer
from grpo_fused.integrations.vllm import named_weights
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, Sampling, VLLMEngine, roll_out


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The part of the package that the engine uses; records the calls."""
    module = ModuleType("vllm")
    module.__version__ = "0.32.0"
    calls: dict[str, Any] = {"loaded": {}, "resets": 0, "vocab_size": 21, "rpc": []}

    class LLM:
        def __init__(self, **options: Any) -> None:
            calls["options"] = options
            self.model_config = SimpleNamespace(get_vocab_size=lambda: calls["vocab_size"])

        def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
            if method == "reload_weights":
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
            calls["prompts"], calls["parameters"] = prompts, sampling_params
            calls["rpc"].append("generate")

            def position(token: int) -> dict[int, Any]:
                return {token: SimpleNamespace(logprob=-token / 10), 99: SimpleNamespace(logprob=-9.0)}

            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(token_ids=ids, logprobs=[position(token) for token in ids])
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
    engine = synced_engine(max_model_len=64)
    sampling = Sampling(
        num_generations=2,
        max_completion_length=8,
        temperature=0.7,
        eos_token_ids=(1,),
        stop_strings=("x",),
        seed=3,
    )
    rollout = roll_out(engine, [[3, 4], [3]], sampling)
    assert vllm.calls["prompts"] == [{"prompt_token_ids": [3, 4]}, {"prompt_token_ids": [3]}]
    asked, other = map(vars, vllm.calls["parameters"])
    assert other == asked | {"seed": 5}  # two completions later
    expected = {
        "n": 2,
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": 0,
        "stop_token_ids": [1],
        "seed": 3,
    }
    assert expected.items() <= asked.items()
    assert asked["stop"] == ["x"]
    assert asked["include_stop_str_in_output"]
    assert vllm.calls["options"]["logprobs_mode"] == "processed_logprobs"  # those after the temperature
    assert rollout.completions() == [[5, 1], [6, 7, 1]] * 2
    assert rollout.sampling_logps is not None
    torch.testing.assert_close(rollout.sampling_logps[:2], torch.tensor([[-0.5, -0.1, 0.0], [-0.6, -0.7, -0.1]]))


def test_exact_log_probs_are_asked_for_during_a_rollout(vllm: Any) -> None:
    engine = synced_engine(exact_logprobs=True)
    module, _, name = vllm.calls["options"]["worker_extension_cls"].rpartition(".")
    assert callable(getattr(import_module(module), name).score_exactly)
    engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, temperature=0.7))
    engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, greedy=True))
    temperatures = [call[1]["temperature"] for call in vllm.calls["rpc"] if call[0] == "score_exactly"]
    assert temperatures == [0.7, 1.0]
    assert vllm.calls["rpc"][1:3] == ["generate", ("score_as_vllm", None)]
    with pytest.raises(ValueError, match="repetition_penalty must be 1 with exact_logprobs"):
        engine.generate([[3]], Sampling(num_generations=2, max_completion_length=8, repetition_penalty=1.1))
    with pytest.raises(ValueError, match="worker_extension_cls must not be set with exact_logprobs"):
        VLLMEngine("folder", exact_logprobs=True, worker_extension_cls="a.B")


def test_an_engine_whose_log_probs_are_not_the_policys_is_refused(vllm: Any) -> None:
    model, engine = build_small_model(21), VLLMEngine("folder")
    with pytest.raises(RuntimeError, match="log-probs of 2 tokens differ by .* nats on average .at most 0.5"):
        engine.sync_weights(model)
    assert vllm.calls["resets"] == 1
    assert vllm.calls["loaded"].keys() == dict(model.named_parameters()).keys()
    with pytest.raises(RuntimeError, match="sync_weights must be called before generate"):
        engine.generate([[3]], Sampling(num_generations=1, max_completion_length=8))


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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="vllm"):
        VLLMEngine("folder")


def test_what_vllm_cannot_do_is_refused(vllm: Any) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1: .*; got 2"):
        VLLMEngine("folder", tensor_parallel_size=2)
    vllm.__version__ = "0.31.1"
    with pytest.raises(ImportError, match=r"vllm must be 0.32 or newer; got 0.31.1"):
        VLLMEngine("folder")


def test_a_repetition_penalty_is_refused_before_the_first_rollout(vllm: Any, rows: list[dict[str, str]]) -> None:
    tokenizer = build_tokenizer()
    config = GRPOTrainerConfig(repetition_penalty=1.1, prompts_per_step=2)
    with pytest.raises(ValueError, match="importance_sampling must be null with a repetition_penalty.*; got .* 1.1"):
        GRPOTrainer(
            build_small_model(len(tokenizer)), tokenizer, [count_ones], rows, config, engine=VLLMEngine("folder")
        )


def test_truncated_sampling_requests_the_tokens_that_were_kept(vllm: Any) -> None:
    """The test double returns two tokens of many: no candidate set."""
    sampling = Sampling(num_generations=1, max_completion_length=8, top_p=0.9, eos_token_ids=(1,))
    for vocab_size, asked in ((50_000, 1024), (21, 21)):
        vllm.calls["vocab_size"] = vocab_size
        with pytest.raises(RuntimeError, match="must return all tokens that could be sampled"):
            synced_engine().generate([[3]], sampling)
        assert vllm.calls["parameters"][0].logprobs == asked
    assert vllm.calls["options"]["max_logprobs"] == 1024
