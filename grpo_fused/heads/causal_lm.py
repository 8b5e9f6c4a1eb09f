"""The loss and log-probs of a causal LM in one call, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from grpo_fused.api import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.call.options import check_integer
from grpo_fused.call.outputs import GRPOLossOutput, LogprobOutput
from grpo_fused.heads.check import lm_head_inputs
from grpo_fused.heads.hidden import head_hidden_states


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
        model_inputs: further arguments of the model's forward, such as `position_ids` and `pixel_values`.
        **options: those of `fused_linear_grpo_loss`: `config`, `old_per_token_logps` and others, `[B, T]` each, and
            `HeadOptions` besides what the model's head determines (bias, adapter, scale and softcap); no `cu_seqlens`.

    Returns:
        `GRPOLossOutput`; the loss is differentiable in all trainable parameters.

    Raises:
        ValueError, TypeError, RuntimeError: as `head_hidden_states`, `lm_head_inputs`, `fused_linear_grpo_loss`.

    Example::

        out = grpo_loss_of(model, input_ids, attention_mask, prompt_length, advantages, old_per_token_logps=old)
        out.loss.backward()
    """
    hidden_states, completion_ids, mask = _completions(model, input_ids, attention_mask, prompt_length, model_inputs)
    return fused_linear_grpo_loss(
        hidden_states,
        completion_ids=completion_ids,
        advantages=advantages,
        completion_mask=mask if completion_mask is None else completion_mask,
        **lm_head_inputs(model),
        **options,
    )


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
    hidden_states, completion_ids, mask = _completions(model, input_ids, attention_mask, prompt_length, model_inputs)
    return fused_linear_logprobs(
        hidden_states,
        token_ids=completion_ids,
        mask=mask if completion_mask is None else completion_mask,
        **lm_head_inputs(model),
        **options,
    )


def _completions(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    prompt_length: int,
    model_inputs: Mapping[str, Any] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden states that predict the completions [B, T, H], their ids [B, T], the mask [B, T])."""
    check_integer(prompt_length, "prompt_length", least=1)
    if input_ids.dim() != 2 or input_ids.shape[1] <= prompt_length:
        raise ValueError(
            f"input_ids must be [B, P + T] with P = prompt_length = {prompt_length} and T >= 1; "
            f"got {tuple(input_ids.shape)}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}; "
            f"got {tuple(attention_mask.shape)}"
        )
    hidden_states = head_hidden_states(model, input_ids, attention_mask, **(model_inputs or {}))
    mask = None if attention_mask is None else attention_mask[:, prompt_length:]
    return hidden_states[:, prompt_length - 1 : -1], input_ids[:, prompt_length:], mask
