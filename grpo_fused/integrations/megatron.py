"""Megatron-Core's models on our head: callbacks for `GPTModel.forward(output_processor=...)` (megatron-core 0.18).

    model(ids, positions, mask, labels=labels, loss_mask=mask, output_processor=logprobs_processor(temperature=0.7))

The callback gets the decoder's hidden states and the rank's slice of the vocabulary; no rank holds logits. Log-probs,
entropies and the loss are of the whole vocabulary, over the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from typing_extensions import Unpack

from grpo_fused.api.fused_linear import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_fused.api.head import HeadOptions
from grpo_fused.integrations.releases import check_release

SUPPORTED = {"0.18": "nothing; GPTModel.forward takes output_processor"}
"""Releases of megatron-core. It may lie on the path without being installed."""

check_release("megatron-core", SUPPORTED, optional=True)

OutputProcessor = Callable[..., Any]
_OF_THE_MODEL = ("lm_head_bias", "logit_scale", "process_group")


def logprobs_processor(*, with_entropy: bool = False, **options: Unpack[HeadOptions]) -> OutputProcessor:
    """A callback that makes log-probs the output of the model.

    The model is called with `labels` [B, S], the token that each position is to predict (already shifted, as Megatron's
    are), and perhaps `loss_mask` [B, S], 1 where a token is scored. Under context parallelism they are the rank's.

    Args:
        with_entropy: whether entropies come with them.
        **options: `temperature`, `softcap`, `candidates`, `impl`, `max_scratch_bytes`, `compact`: see `HeadOptions`.

    Returns:
        The callback. The model then returns log-probs [B, S], fp32 nats, 0 where masked; with `with_entropy` a pair
        with the entropies, differentiable too. All ranks of the tensor-parallel group have the same.

    Raises:
        TypeError: An option that the model determines (bias, scale, process group).
        ValueError: When the model runs, without labels.
    """
    _check(options)

    def process(*, labels: Tensor | None, loss_mask: Tensor | None, **given: Any) -> Any:
        scores = fused_linear_logprobs(
            token_ids=_labels(labels), mask=loss_mask, with_entropy=with_entropy, **_head(**given), **options
        )
        return (scores.logps, scores.entropies) if with_entropy else scores.logps

    return process


def grpo_loss_processor(**options: Any) -> OutputProcessor:
    """A callback that makes the GRPO loss the output of the model: three head products, forward and backward.

    As `logprobs_processor`, with `output_processor_context` a mapping of what the loss needs of the batch: `advantages`
    [B] or [B, S], and where they are used `old_per_token_logps`, `ref_per_token_logps`, `sampling_per_token_logps`
    [B, S], `importance_sampling_ratio`, `num_items_in_batch`. `loss_mask` says which tokens count.

    Args:
        **options: `config`, `with_metrics`, and those of `logprobs_processor`: see `fused_linear_grpo_loss`.

    Returns:
        The callback. The model then returns a `GRPOLossOutput`; its loss is the mean over this rank's sequences. A
        `Float16Module` around the model makes a plain tuple of it, with the loss first.

    Raises:
        TypeError: As `logprobs_processor`.
        ValueError: When the model runs, without labels or a mapping, or where a row is no whole sequence: under
            context parallelism and with packed sequences.
    """
    _check(options)

    def process(
        *, labels: Tensor | None, loss_mask: Tensor | None, context: Any, config: Any, packed_seq_params: Any = None,
        **given: Any,
    ) -> Any:  # fmt: skip
        if packed_seq_params is not None:
            raise ValueError(
                "grpo_loss_processor needs a sequence in each row; got packed_seq_params. Use logprobs_processor, and "
                "its log-probs for the loss (grpo_loss with cu_seqlens)"
            )
        if config.context_parallel_size > 1:
            raise ValueError(
                f"grpo_loss_processor needs whole sequences; context_parallel_size is {config.context_parallel_size}. "
                "Use logprobs_processor, and gather its log-probs for the loss"
            )
        if not isinstance(context, Mapping) or "advantages" not in context:
            raise ValueError(
                "output_processor_context must be a mapping with advantages and what else the loss needs; "
                f"got {type(context).__name__}"
            )
        return fused_linear_grpo_loss(
            completion_ids=_labels(labels), completion_mask=loss_mask, **_head(config=config, **given), **context,
            **options,
        )  # fmt: skip

    return process


def _check(options: Mapping[str, Any]) -> None:
    for name in _OF_THE_MODEL:
        if name in options:
            raise TypeError(f"{name} is the model's; it cannot be an option")


def _labels(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise ValueError("the model must be called with labels: the token that each position is to predict")
    return labels


def _head(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> dict[str, Any]:
    """The head as the fused functions take it: hidden states [B, S, H] and the rank's slice of the weight."""
    group = output_layer.tp_group
    if output_layer.sequence_parallel:
        # backward takes the rank's part of the gradient, which the fused functions have summed over the group
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=group
        )
    return {
        "hidden_states": hidden_states.transpose(0, 1),
        "lm_head_weight": output_layer.weight if output_weight is None else output_weight,  # tied: that of embeddings
        "lm_head_bias": output_layer.bias,
        "logit_scale": float(scale_logits(torch.ones(()))),
        "process_group": group if group.size() > 1 else None,
    }
