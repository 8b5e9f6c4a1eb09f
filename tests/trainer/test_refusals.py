"""Errors of the trainer, and their texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, tracking
from accelerate.utils import DistributedType
from trainer.runs import Recording
from trainer.small_model import build_small_model
from trainer.small_trainer import SMALL, count_ones, make_trainer
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    RwkvConfig,
)

from grpo_fused import GRPOLossConfig
from grpo_fused.trainer import GRPOTrainer, GRPOTrainerConfig, HuggingFaceEngine, setup
from grpo_fused.trainer.prompts import PromptError

EXACT = GRPOLossConfig(beta=0.1, kl_estimator="exact")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param({"num_generations": 1}, ValueError, "num_generations must be at least 2; got 1", id="one"),
        pytest.param({"steps": 0}, ValueError, "steps must be at least 1; got 0", id="no-steps"),
        pytest.param({"steps": 1.5}, TypeError, "steps must be an integer; got 1.5", id="float-steps"),
        pytest.param({"num_iterations": True}, TypeError, "num_iterations must be an integer; got True", id="bool"),
        pytest.param({"temperature": 0.0}, ValueError, "temperature must be > 0; got 0.0", id="temperature"),
        pytest.param({"learning_rate": float("nan")}, ValueError, "learning_rate must be finite; got nan", id="nan"),
        pytest.param({"learning_rate": "1e-3"}, TypeError, "learning_rate must be a number; got '1e-3'", id="text"),
        pytest.param({"adam_betas": (0.9, 1.0)}, ValueError, "adam_betas", id="betas"),
        pytest.param({"scale_rewards": "std"}, ValueError, "scale_rewards must be .* got 'std'", id="scale"),
        pytest.param({"impl": "fast"}, ValueError, "impl must be one of auto, .* got 'fast'", id="impl"),
        pytest.param(
            {"loss": GRPOLossConfig(kl_estimator="k1")}, ValueError, "kl_estimator is not used .* got 'k1'", id="kl"
        ),
        pytest.param(
            {"loss": GRPOLossConfig(use_bias_correction_kl=False)}, ValueError, "with loss.beta 0; got False", id="bias"
        ),
        pytest.param({"loss": EXACT, "top_p": 0.9}, ValueError, "leave top_p, top_k and min_p unset", id="exact-top-p"),
        pytest.param({"loss": EXACT, "impl": "triton"}, ValueError, "got 'triton'", id="exact-triton"),
        pytest.param({"loss": {"beta": 0.1}}, TypeError, "loss must be a GRPOLossConfig; got {'beta'", id="loss"),
        pytest.param({"top_p": 1.5}, ValueError, r"top_p must be in \(0, 1\]; got 1.5", id="top-p"),
        pytest.param({"min_p": -0.1}, ValueError, r"min_p must be in \[0, 1\]; got -0.1", id="min-p"),
        pytest.param({"stop_strings": "stop"}, TypeError, "stop_strings must be a list .*; got 'stop'", id="stop"),
        pytest.param({"stop_strings": ("a", "")}, TypeError, "stop_strings must be a list .*; got", id="empty stop"),
        pytest.param({"report_to": None}, TypeError, "report_to must be a list .*; got None", id="report-to"),
        pytest.param({"adam_betas": 0.9}, ValueError, r"adam_betas must be two .*; got \(0.9,\)", id="beta"),
        pytest.param({"eval_samples": 1}, ValueError, "eval_samples must be 0 .* got 1", id="one-sample"),
        pytest.param({"lr_scheduler_type": "poly"}, ValueError, "lr_scheduler_type must be one of", id="schedule"),
        pytest.param({"gradient_checkpointing": 1}, TypeError, "must be true or false; got 1", id="checkpointing"),
        pytest.param({"run_name": "a"}, ValueError, "run_name must come with a tracker .*; got 'a'", id="run-name"),
        pytest.param(
            {"importance_sampling": None, "importance_sampling_clip": 2.0},
            ValueError,
            "importance_sampling_clip must come with importance_sampling; got 2.0 without",
            id="clip-alone",
        ),
        pytest.param({"importance_sampling": "clip"}, ValueError, "importance_sampling must be", id="correction"),
    ],
)
def test_config_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GRPOTrainerConfig(**(SMALL | options))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        pytest.param(
            [1.0], ValueError, "'broken' must return one reward for each of 8 completions; got 1", id="length"
        ),
        pytest.param(None, TypeError, "'broken' must return a list of 8 floats .* got NoneType", id="none"),
        pytest.param(torch.ones(8), TypeError, "'broken' must return a list .* got Tensor", id="tensor"),
        pytest.param(["good"] * 8, TypeError, "'broken' must return floats or None; got 'good'", id="text"),
        pytest.param([float("nan")] * 8, ValueError, "'broken' must return finite rewards .*; got nan", id="nan"),
        pytest.param([float("inf")] * 8, ValueError, "'broken' must return finite rewards .*; got inf", id="inf"),
    ],
)
def test_broken_reward_functions_are_named(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    answer: object,
    error: type[Exception],
    message: str,
) -> None:
    def broken(**columns: object) -> object:
        return answer

    with pytest.raises(error, match=message):
        make_trainer(model, tokenizer, rows, [count_ones, broken]).step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "./model"}, "model must be a causal LM, as of AutoModelForCausalLM; got str"),
        ({"tokenizer": "./model"}, "tokenizer must be a tokenizer, as of AutoTokenizer; got str"),
        ({"config": {"steps": 2}}, "config must be a GRPOTrainerConfig; got dict"),
        ({"reference_model": "./teacher"}, "reference_model must be a causal LM or None; got str"),
        ({"evaluate": 0.5}, "evaluate must be a function or None; got float"),
        ({"reward_functions": "length"}, "reward_functions must be a function or a list of functions; got 'length'"),
        ({"reward_functions": None}, "reward_functions must be a function or a list of functions; got None"),
        ({"reward_functions": ["length"]}, r"0 must be callable; got 'length': pass built_in\('length'\)"),
        ({"train_dataset": "rows.jsonl"}, "train_dataset must be a list of rows, or another sequence; got str"),
        ({"train_dataset": {"train": []}}, "train_dataset must be a list of rows, or another sequence; got dict"),
    ],
)
def test_arguments_of_another_kind_are_named(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    change: dict[str, Any],
    message: str,
) -> None:
    given = {"model": model, "tokenizer": tokenizer, "reward_functions": count_ones, "train_dataset": rows}
    with pytest.raises(TypeError, match=message):
        GRPOTrainer(**{**given, "config": GRPOTrainerConfig(**SMALL), **change})


def test_a_model_without_a_head_is_named(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    with pytest.raises(TypeError, match="model must be a causal LM, as of AutoModelForCausalLM; got Qwen2Model"):
        make_trainer(model.model, tokenizer, rows)  # type: ignore[arg-type]


def test_what_evaluate_returns_is_checked(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    trainer = make_trainer(model, tokenizer, rows, evaluate=lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="evaluate must return a mapping of names to numbers; got NoneType"):
        trainer.evaluate()


def test_wrong_set_ups_are_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    with pytest.raises(TypeError, match="reward function 1 must be callable; got 'format'"):
        make_trainer(model, tokenizer, rows, [count_ones, "format"])
    with pytest.raises(ValueError, match="at least one function"):
        make_trainer(model, tokenizer, rows, [])
    with pytest.raises(ValueError, match="one finite weight for each of 1 functions; got .1.0, 2.0."):
        make_trainer(model, tokenizer, rows, reward_weights=[1.0, 2.0])
    for weight in ("nan", "inf"):
        with pytest.raises(ValueError, match=f"one finite weight .* got .*{weight}"):
            make_trainer(model, tokenizer, rows, reward_weights=[float(weight)])
    with pytest.raises(ValueError, match="at least 2 rows, as many as a step takes; got 1"):
        make_trainer(model, tokenizer, rows[:1])
    with pytest.raises(ValueError, match='row 1 of train_dataset must have a column "prompt"; got the columns'):
        make_trainer(model, tokenizer, [rows[0], {"question": "1+1="}])
    with pytest.raises(ValueError, match=r"row 1 of train_dataset must have the columns \['answer', 'prompt'\]"):
        make_trainer(model, tokenizer, [rows[0], {"prompt": "1+1="}])
    with pytest.raises(ValueError, match=r"got \['completions'\]"):
        make_trainer(model, tokenizer, [row | {"completions": ""} for row in rows])
    for unused in ("eval_steps", "eval_samples"):
        with pytest.raises(ValueError, match=f"{unused} must come with an eval_dataset.*; got 2 without"):
            make_trainer(model, tokenizer, rows, **{unused: 2})
    config = GRPOTrainerConfig(**SMALL, generation_batch_size=2)
    with pytest.raises(ValueError, match="generation_batch_size must be None with a rollout engine, .*; got 2"):
        GRPOTrainer(
            model, tokenizer, [count_ones], rows, config, engine=HuggingFaceEngine(model, tokenizer, batch_size=3)
        )
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs an EOS token"):
        make_trainer(model, tokenizer, rows)


@pytest.mark.parametrize("wrong", ["beta", "vocabulary", "scale", "itself", "embedding"])
def test_a_reference_model_that_does_not_fit_is_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], wrong: str
) -> None:
    other, loss, message = build_small_model(len(tokenizer)), EXACT, "only used with loss.beta > 0; got beta 0"
    if wrong == "beta":
        loss = GRPOLossConfig()
    elif wrong == "vocabulary":
        other, message = build_small_model(len(tokenizer) + 1), f"same vocabulary; got .{len(tokenizer)}, "
    elif wrong == "itself":
        other, message = model, "another model, with none of the weights that the policy trains"
    elif wrong == "embedding":  # which the frozen reference would freeze in the policy, too
        other.set_input_embeddings(model.get_input_embeddings())
        message = "another model, with none of the weights that the policy trains"
    else:
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        config = GraniteConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, logits_scaling=4.0)
        other, message = GraniteForCausalLM(config), "heads with the same scale and softcap"
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(model, tokenizer, [count_ones], rows, GRPOTrainerConfig(**SMALL, loss=loss), reference_model=other)


def test_a_trained_parameter_that_peft_does_not_save_is_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    """Checkpoints would lack it, and a resumed run would begin with another policy."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], bias="all", use_dora=True)
    adapted: Any = get_peft_model(model, lora)
    make_trainer(adapted, tokenizer, rows, output_dir=tmp_path)
    model.model.norm.weight.requires_grad_(True)
    make_trainer(adapted, tokenizer, rows)  # without checkpoints nothing is lost
    with pytest.raises(ValueError, match=r"got base_model.model.model.norm.weight, .* modules_to_save"):
        make_trainer(adapted, tokenizer, rows, output_dir=tmp_path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(DistributedType.FSDP, "version 2 .*; got version 1"), (DistributedType.DEEPSPEED, "DDP or FSDP2; got DEEPSPEED")],
    ids=["fsdp1", "deepspeed"],
)
def test_other_ways_to_share_a_model_are_refused(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    kind: DistributedType,
    message: str,
) -> None:
    """They shard the head that the loss reads; the error comes at set-up, not after the first rollout."""
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: kind))
    with pytest.raises(ValueError, match=message):
        make_trainer(model, tokenizer, rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts_per_step": 3}, "prompts_per_step must be divisible by the 2 processes; got 3"),
        ({"loss": GRPOLossConfig(top_entropy_quantile=0.5)}, "top_entropy_quantile < 1 ranks all .*; got 2"),
    ],
    ids=["prompts", "quantile"],
)
def test_what_processes_cannot_share_is_refused(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match=message):
        make_trainer(model, tokenizer, rows, **options)


def test_processes_that_accelerate_does_not_see_are_refused(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun without a GPU: each process would train alone, all in one folder."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"among the 2 processes .*; got 1. .* ACCELERATE_USE_CPU=true"):
        make_trainer(model, tokenizer, rows)


def test_a_tracker_without_its_package_is_named(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accelerate would continue without it."""
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    for name in ("wandb", "comet_ml"):
        with pytest.raises(ImportError, match=f"packages are installed; got '{name}': pip install {name}"):
            make_trainer(model, tokenizer, rows, report_to=(name,))
    with pytest.raises(ValueError, match="wandbb"):
        make_trainer(model, tokenizer, rows, report_to=("wandbb",))
    make_trainer(model, tokenizer, rows, report_to=("all",))  # those that are installed


def test_an_accelerator_that_does_not_log_is_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    pytest.importorskip("tensorboard")
    config = GRPOTrainerConfig(**(SMALL | {"report_to": ("tensorboard",)}))
    with pytest.raises(ValueError, match=r"accelerator must log with report_to, \['tensorboard'\]; got \[\]"):
        GRPOTrainer(model, tokenizer, [count_ones], rows, config, accelerator=Accelerator())


@pytest.mark.parametrize("generated", [False, True], ids=["list", "function"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1+<new>=", r"row 0 of train_dataset: token ids must be less than 21, .*; got 21, the token '<new>'"),
        (
            [{"role": "user", "content": "1+1="}],
            "row 0 of train_dataset: chat messages need .* chat_template is not set",
        ),
    ],
    ids=["token", "template"],
)
def test_a_prompt_that_cannot_be_encoded_is_refused_before_the_first_step(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, text: Any, message: str, generated: bool
) -> None:
    tokenizer.add_tokens(["<new>"])
    rows: Any = [{"prompt": text}] * 2
    message = message.replace("row 0 of train_dataset", r"train_dataset\(0\)") if generated else message
    with pytest.raises(PromptError, match=message):
        make_trainer(model, tokenizer, (lambda index: rows[0]) if generated else rows)


SIZES = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_sees_later_tokens_is_refused(tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype) -> None:
    bert = BertConfig(**SIZES, initializer_range=0.2)
    rows = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    with pytest.raises(
        ValueError, match="depend on later tokens; those of BertLMHeadModel differ by .*is_decoder=True"
    ):
        make_trainer(AutoModelForCausalLM.from_config(bert, dtype=dtype), tokenizer, rows)
    bert.is_decoder = True
    make_trainer(AutoModelForCausalLM.from_config(bert, dtype=dtype), tokenizer, rows)


def test_states_may_differ_by_the_rounding_of_their_dtype() -> None:
    bert = BertConfig(**SIZES, initializer_range=0.05)  # away by 3e-3
    setup.check_states(AutoModelForCausalLM.from_config(bert, dtype=torch.bfloat16), padded=False)
    with pytest.raises(ValueError, match="more than 1e-03"):
        setup.check_states(AutoModelForCausalLM.from_config(bert, dtype=torch.float32), padded=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4),
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, initializer_range=0.2),
        Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=2, initializer_range=0.2),
        MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=8),
    ],
    ids=lambda config: config.model_type,
)
def test_causal_models_that_heed_the_mask_are_taken(config: Any, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    setup.check_states(model, padded=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_ignores_the_mask_is_not_sampled_with_padding(
    tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> None:
    config = RwkvConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=32)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rows = [{"prompt": "1+1="}, {"prompt": "12+1="}]
    trainer = partial(GRPOTrainer, model, tokenizer, [count_ones], rows, GRPOTrainerConfig(**SMALL))  # type: ignore[arg-type]
    for padding in (None, HuggingFaceEngine(model, tokenizer)):
        with pytest.raises(ValueError, match="depend on masked tokens before a prompt; those of RwkvForC.* differ by"):
            trainer(engine=padding)
    trainer(engine=Recording())


def test_virtual_tokens_are_refused(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """Completions would be those of the model without them."""
    from peft import PrefixTuningConfig, get_peft_model

    prefix: Any = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="must have no virtual tokens"):
        make_trainer(prefix, tokenizer, rows)


@pytest.mark.parametrize("build", [GPT2Config, OPTConfig], ids=["gpt2", "opt"])
def test_a_prompt_and_its_completion_must_have_positions(
    build: Any, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16}
    config = build(**sizes, vocab_size=len(tokenizer), max_position_embeddings=8, pad_token_id=0, eos_token_id=1)
    model: Any = AutoModelForCausalLM.from_config(config)
    rows = [{"prompt": "1+1="}, {"prompt": "1+12="}]
    with pytest.raises(PromptError, match="row 1 of train_dataset: .* at most 8 tokens, .* a prompt of 5 and .* 4 "):
        make_trainer(model, tokenizer, rows)
    make_trainer(model, tokenizer, rows, max_completion_length=3).step()
    made: Any = lambda index: rows[index > 2]  # noqa: E731
    trainer = make_trainer(model, tokenizer, made)
    trainer.step()
    with pytest.raises(PromptError, match=r"train_dataset\(3\): .* at most 8 tokens, .* a prompt of 5"):
        trainer.step()
    assert make_trainer(model, tokenizer, made, max_prompt_length=4).batches.fits(rows[0])  # type: ignore[union-attr]


def test_tokens_beyond_the_embedding_may_exist(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]
) -> None:
    """Gemma 3's tokenizer has one for images, its text models have no embedding for it."""
    tokenizer.add_tokens(["<new>"])
    assert make_trainer(model, tokenizer, rows).step()["completion_length"] > 0
    with pytest.raises(PromptError, match="row 1 of eval_dataset: token ids must be less than 21"):
        make_trainer(model, tokenizer, rows, eval_dataset=[rows[0], rows[1] | {"prompt": "<new>"}])
    tokenizer.add_special_tokens({"pad_token": "<another>"})
    with pytest.raises(ValueError, match="the pad token's id must be less than 21, .*; got 22"):
        make_trainer(model, tokenizer, rows)
