"""What a trainer prepares before its first step, and refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_fused import engines, head_hidden_states
from grpo_fused.heads.check import ordinary_tokens, undisturbed
from grpo_fused.rollouts.engine import RolloutEngine, Sampling, check_room
from grpo_fused.rollouts.vllm import VLLMEngine
from grpo_fused.trainer.config import GRPOTrainerConfig, check_for_vllm, check_used
from grpo_fused.trainer.policy import disable_dropout
from grpo_fused.trainer.rollout import ending_token_ids


def check_kinds(model: object, tokenizer: object, config: object, reference_model: object, evaluate: object) -> None:
    """Raises unless these arguments of the trainer are of their kinds."""
    is_teacher = reference_model is None or isinstance(reference_model, nn.Module)
    kinds = {
        "model": (model, hasattr(model, "generation_config"), "a causal LM, as of AutoModelForCausalLM"),
        "tokenizer": (tokenizer, isinstance(tokenizer, PreTrainedTokenizerBase), "a tokenizer, as of AutoTokenizer"),
        "config": (config, isinstance(config, GRPOTrainerConfig), "a GRPOTrainerConfig"),
        "reference_model": (reference_model, is_teacher, "a causal LM or None"),
        "evaluate": (evaluate, evaluate is None or callable(evaluate), "a function or None"),
    }
    for name, (value, fits, must) in kinds.items():
        if not fits:
            raise TypeError(f"{name} must be {must}; got {type(value).__name__}")


def check_accelerator(accelerator: Accelerator, config: GRPOTrainerConfig) -> None:
    """Raises if a caller's accelerator would train in another way than the options say."""
    if (found := accelerator.mixed_precision) != config.mixed_precision:
        raise ValueError(f"accelerator must have mixed_precision={config.mixed_precision!r}, as config; got {found!r}")
    if (steps := accelerator.gradient_accumulation_steps) != 1:  # it would divide each gradient by them
        raise ValueError(
            f"accelerator must have gradient_accumulation_steps=1 (micro_batch_tokens splits a rollout); got {steps}, "
            "from its argument or ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        )


def check_effects(config: GRPOTrainerConfig, engine: RolloutEngine | None, *, has_rows: bool, evaluates: bool) -> None:
    """Raises if an option has no effect with these arguments of the trainer."""
    if engine is not None and config.generation_batch_size is not None:
        raise ValueError(
            "generation_batch_size must be None with a rollout engine, which makes its own batches; got "
            f"{config.generation_batch_size}"
        )
    check_used(config, has_rows, "an eval_dataset", "eval_samples")
    check_used(config, has_rows or evaluates, "an eval_dataset or evaluate", "eval_steps")


def engine_of_loss(config: GRPOTrainerConfig, model: PreTrainedModel, device: torch.device) -> str:
    """The engine that the loss will run on, by the dtype of its products.

    Raises:
        RuntimeError: The named engine cannot run on the device.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.mixed_precision, model.dtype)
    impl = "chunked" if config.impl == "auto" and config.loss.kl_estimator == "exact" else config.impl
    return engines.choose(impl, device, dtype, model.config.get_text_config().hidden_size)


def ready(model: PreTrainedModel, config: GRPOTrainerConfig, device: torch.device) -> PreTrainedModel:
    """The model on its device, without dropout."""
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        raise ValueError(
            "model must have no virtual tokens (peft's prefix and prompt tuning): its generate leaves them out, and "
            "completions would be those of another policy"
        )
    disable_dropout(model)
    if config.gradient_checkpointing:
        # transformers 5.2x renames it, with the same default: non-reentrant
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    cast(nn.Module, model).to(device).eval()
    return model


def check_states(model: PreTrainedModel, *, padded: bool) -> None:
    """Raises if a state depends on tokens that only scoring has, or only sampling.

    Scoring has the later tokens (on which BERT without `is_decoder` depends). Sampling, if it is `padded`, has masked
    tokens before a prompt (on which RWKV, xLSTM and RecurrentGemma depend).
    """
    a, b, c, d = (ordinary_tokens(model, embeddings_of(model)) * 4)[:4]
    ids = torch.tensor([[a, b, c, d], [a, b, d, c], [d, a, b, c]], device=model.device)
    mask = torch.ones_like(ids)
    mask[2, 0] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with undisturbed(model):
        states = head_hidden_states(model, ids, mask, position_ids=places).float()
    expected, most = states[0, :2], 1e-3 if model.dtype == torch.float32 else 5e-2
    found = [("later tokens", "is_decoder=True, where a config has it", states[1, :2])]
    if padded:
        found.append(("masked tokens before a prompt", "give an engine that samples without padding", states[2, 1:3]))
    for tokens, remedy, state in found:
        away = float((state - expected).norm() / expected.norm())
        if away > most:  # NaN is found in the first step
            raise ValueError(
                f"states of the model must not depend on {tokens}; those of {type(model).__name__} differ by "
                f"{away:.1e} (relative), more than {most:.0e} ({remedy})"
            )


def check_saved(model: PreTrainedModel) -> None:
    """Raises if a parameter is trained that checkpoints of a model with adapters lack: peft saves the adapters."""
    if not hasattr(model, "peft_config"):
        return
    from peft import get_peft_model_state_dict  # slow to import

    state = model.state_dict(keep_vars=True)
    saved = {id(p) for name in model.peft_config for p in get_peft_model_state_dict(model, state, name).values()}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in saved:
            raise ValueError(
                f"with adapters, peft must save all that is trained; got {name}, which it does not: freeze it, or name "
                "its module in the adapter's modules_to_save"
            )


def embeddings_of(model: PreTrainedModel) -> int:
    """The number of tokens that a model has an embedding for."""
    return len(cast(Tensor, model.get_input_embeddings().weight))


def sampling_of(config: GRPOTrainerConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """The sampling of a run: the options of `Sampling` that the run has, and what its objective reads."""
    ends, pad, objective = ending_token_ids(model, tokenizer), tokenizer.pad_token_id, config.objective
    options: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(Sampling) if hasattr(config, f.name)}
    options |= {"eos_token_ids": ends, "pad_token_id": ends[0] if pad is None else pad, "seed": None}
    if objective is not None:
        options |= {"records": objective.records, "num_alternatives": objective.num_alternatives}
    sampling = Sampling(**options)
    if sampling.pad_token_id >= embeddings_of(model):
        raise ValueError(
            f"the pad token's id must be less than {embeddings_of(model)}, the rows of the model's embedding; got "
            f"{sampling.pad_token_id}"
        )
    return sampling


def length_check(
    engine: RolloutEngine | None, model: PreTrainedModel, config: GRPOTrainerConfig
) -> Callable[[int], None]:
    """Raises PromptError if engine or model has no room for a prompt of as many tokens and its completion."""
    completion, positions = config.max_completion_length, learned_positions(model)
    if isinstance(engine, VLLMEngine):
        check_for_vllm(config)
        return lambda prompt: engine.check_length(prompt, completion)
    if positions is None:
        return lambda prompt: None
    return lambda prompt: check_room(prompt, completion, positions, ", the positions that the model has")


def learned_positions(model: PreTrainedModel) -> int | None:
    """The number of positions that a model has an embedding for (GPT-2, OPT); None if they are computed."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m not in tokens]
    # OPT's table begins with two rows that are no position
    return positions if any(table.num_embeddings in (positions, (positions or 0) + 2) for table in tables) else None


def adamw(model: PreTrainedModel, config: GRPOTrainerConfig) -> torch.optim.AdamW:
    """The optimizer of the parameters that are trained; weights decay, biases and the scales of norms do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay}
    vectors = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW(
        [group for group in (matrices, vectors) if group["params"]],
        lr=config.learning_rate,
        betas=config.adam_betas,
        # one pass over weights, gradients and moments; accelerate does not notice the steps that it skips in fp16
        fused=config.mixed_precision != "fp16",
    )
