"""The loss and log-probs of a causal LM in one call, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from grpo_fused.api.custom_objective import eager
from grpo_fused.api.fused_linear import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.call.layout import values_are_checked
from grpo_fused.call.options import check_integer
from grpo_fused.call.outputs import GRPOLossOutput, LogprobOutput
from grpo_fused.call.validation import INTEGER, check_mask, check_tensor, check_zero_or_one, inputs_of
from grpo_fused.heads.check import lm_head_inputs
from grpo_fused.heads.hidden import forward_parameters, head_hidden_states


@eager  # the check of the head, and its forward that is replaced, are not to be traced
def grpo_loss_of(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    prompt_length: int,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    model_inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> GRPOLossOutput:
    """The GRPO loss of a causal LM's completions: the model's forward without its logits, then the fused loss.

    Args:
        model: of transformers, or wrapped (DDP, FSDP2, torch.compile, peft). `lm_head_inputs` checks at the first call
            that its head is the one that its config describes.
        input_ids: `[B, P + T]` integers: prompts (padded on the left) and completions (padded on the right).
        attention_mask: `[B, P + T]`, 0 where padded; None if nothing is.
        prompt_length: P >= 1: the completions begin at this column.
        advantages: `[B]` or `[B, 1]`, or one for each token of the completions, `[B, T]`; see `group_advantages`.
        completion_mask: `[B, T]`, bool or 0/1: the tokens that count; default the attention mask of the completions.
        model_inputs: further arguments of the model's forward, such as `pixel_values`. Without any, `position_ids` are
            those of the attention mask, as in `generate`; give them here, too, if there are others.
        **options: those of `fused_linear_grpo_loss`: `config`, `old_per_token_logps` and others, `[B, T]` each, and
            `HeadOptions` besides what the model's head determines (bias, adapter, scale and softcap); no `cu_seqlens`.

    Returns:
        `GRPOLossOutput`; the loss is differentiable in all trainable parameters.

    Raises:
        ValueError: a negative id (without `model_inputs`), an attention mask that is not of 0 and 1, a prompt that is
            padded on the right, or a completion mask beyond the attention mask (CPU; elsewhere with
            `GRPO_FUSED_DEBUG=1`).
        ValueError, TypeError, RuntimeError: as `head_hidden_states`, `lm_head_inputs`, `fused_linear_grpo_loss`.

    Example::

        out = grpo_loss_of(model, input_ids, attention_mask, prompt_length, advantages, old_per_token_logps=old)
        out.loss.backward()
    """
    hidden, ids, mask = _completions(model, input_ids, attention_mask, prompt_length, completion_mask, model_inputs)
    head = _head_of(model, options)
    return fused_linear_grpo_loss(
        hidden, completion_ids=ids, advantages=advantages, completion_mask=mask, **head, **options
    )


@eager
def logprobs_of(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    prompt_length: int,
    completion_mask: Tensor | None = None,
    *,
    model_inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> LogprobOutput:
    """Log-probs of a causal LM's completions: old ones, those of a reference model, or for a loss of one's own.

    Args:
        model, input_ids, attention_mask, prompt_length, completion_mask, model_inputs: as in `grpo_loss_of`. Call it
            under `torch.no_grad()` where no gradient is needed.
        **options: those of `fused_linear_logprobs`: `with_entropy` and `HeadOptions`.

    Returns:
        `LogprobOutput(logps, entropies)`, `[B, T]` fp32, 0 where masked.

    Raises:
        ValueError, TypeError, RuntimeError: as `grpo_loss_of`.
    """
    hidden, ids, mask = _completions(model, input_ids, attention_mask, prompt_length, completion_mask, model_inputs)
    return fused_linear_logprobs(hidden, token_ids=ids, mask=mask, **_head_of(model, options), **options)


def _head_of(model: nn.Module, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the model's head determines, and the options do not."""
    found: Mapping[str, Any] = lm_head_inputs(model)
    if twice := sorted(found.keys() & options.keys()):
        raise TypeError(f"{', '.join(twice)} must not be given: the model's own head determines it")
    return found


def _completions(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    prompt_length: int,
    completion_mask: Tensor | None,
    model_inputs: Mapping[str, Any] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden states that predict the completions [B, T, H], their ids [B, T], the mask [B, T])."""
    check_integer(prompt_length, "prompt_length", least=1)
    check_tensor(input_ids, "input_ids", INTEGER)
    if input_ids.dim() != 2 or input_ids.shape[1] <= prompt_length:
        raise ValueError(
            f"input_ids must be [B, P + T] with P = prompt_length = {prompt_length} and T >= 1; "
            f"got {tuple(input_ids.shape)}"
        )
    # with images a negative id may be a placeholder (Phi-3.5-vision)
    if not model_inputs and values_are_checked(input_ids.device) and (input_ids < 0).any():
        raise ValueError(
            f"input_ids must be ids of the vocabulary, padding too; got {int(input_ids.min())} (-100 is for labels)"
        )
    completion_ids, inputs = input_ids[:, prompt_length:], inputs_of("model_inputs", model_inputs)
    check_mask(attention_mask, input_ids, "attention_mask")
    check_mask(completion_mask, completion_ids)
    if attention_mask is not None:
        _check_padding(attention_mask, prompt_length, completion_mask)
        if completion_mask is None:
            completion_mask = attention_mask[:, prompt_length:]
        if not inputs and "position_ids" in forward_parameters(model):
            inputs["position_ids"] = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    hidden_states = head_hidden_states(model, input_ids, attention_mask, **inputs)
    return hidden_states[:, prompt_length - 1 : -1], completion_ids, completion_mask


def _check_padding(attention_mask: Tensor, prompt_length: int, completion_mask: Tensor | None) -> None:
    """Refuse padding that would be trained on, or that would predict the first token of a completion."""
    if not values_are_checked(attention_mask.device):
        return
    check_zero_or_one(attention_mask)
    is_token = attention_mask != 0
    active = is_token[:, prompt_length:] if completion_mask is None else completion_mask != 0
    if (active & ~is_token[:, prompt_length:]).any():
        raise ValueError("completion_mask must be 0 where attention_mask is; got tokens that are padding")
    padded = (~is_token[:, prompt_length - 1] & active.any(dim=1)).nonzero().flatten().tolist()
    if padded:
        raise ValueError(
            f"prompts must be padded on the left, so that column {prompt_length - 1} of attention_mask (prompt_length "
            f"- 1) is their last token; got padding there in rows {padded[:8]}"
        )
