"""The operators that have no head: the objective from log-probs, and log-probs from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused._ops.common import fake_scores, plain, scores_like, tokens_of, unneeded
from grpo_fused.batch import LossInputs, TokenBatch
from grpo_fused.config import GRPOLossConfig
from grpo_fused.layout import Layout
from grpo_fused.metrics import compute_metrics, metric_names
from grpo_fused.objective import evaluate
from grpo_fused.pipeline import run_logits_gradient, run_scores_of_logits
from grpo_fused.validation import check_loss_values, check_token_values


@torch.library.custom_op("grpo_fused::grpo_objective", mutates_args=())
def grpo_objective(
    per_token_logps: Tensor,
    entropies: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor | None,
    old_per_token_logps: Tensor | None,
    ref_per_token_logps: Tensor | None,
    sampling_per_token_logps: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    num_items_in_batch: Tensor | None,
    cu_seqlens: Tensor | None,
    config: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, logps, entropies, metrics, dlogps, dentropies): the loss from log-probs; empty where there is none."""
    layout = Layout.of(per_token_logps, cu_seqlens)
    options = GRPOLossConfig.decode(config)
    inputs = LossInputs(
        advantages=advantages,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        sampling_per_token_logps=sampling_per_token_logps,
        importance_sampling_ratio=importance_sampling_ratio,
        num_items_in_batch=num_items_in_batch,
    )
    with plain(per_token_logps.device):
        check_loss_values(inputs, layout, entropies)
        dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
        batch = TokenBatch.build(inputs, layout, options, dtype)
        logp = torch.where(batch.mask, per_token_logps.reshape(-1).to(dtype), 0.0)
        entropy = None if entropies is None else torch.where(batch.mask, entropies.reshape(-1).to(dtype), 0.0)
        result = evaluate(logp, entropy, batch, options)
        metrics = compute_metrics(result, entropy, batch, options)
        names = _metric_names(config, ref_per_token_logps, entropies)
        return (
            result.loss,
            logp.view(layout.shape),
            unneeded(logp) if entropy is None else entropy.view(layout.shape),
            torch.stack([metrics[name].to(torch.float32) for name in names]),
            result.dlogp.view(layout.shape),
            unneeded(logp) if result.dentropy is None or entropies is None else result.dentropy.view(layout.shape),
        )


@grpo_objective.register_fake
def _(  # type: ignore[no-untyped-def]
    per_token_logps,
    entropies,
    advantages,
    completion_mask,
    old_per_token_logps,
    ref_per_token_logps,
    sampling_per_token_logps,
    importance_sampling_ratio,
    num_items_in_batch,
    cu_seqlens,
    config,
):
    shape, dtype = per_token_logps.shape, torch.promote_types(per_token_logps.dtype, torch.float32)
    logp = per_token_logps.new_empty(shape, dtype=dtype)
    names = _metric_names(config, ref_per_token_logps, entropies)
    bonus = entropies is not None and GRPOLossConfig.decode(config).entropy_coef != 0.0
    return (
        logp.new_empty(()),
        logp,
        unneeded(logp) if entropies is None else logp.new_empty(shape),
        logp.new_empty(len(names), dtype=torch.float32),
        logp.new_empty(shape),
        logp.new_empty(shape) if bonus else unneeded(logp),
    )


@torch.library.custom_op("grpo_fused::selective_logprobs", mutates_args=())
def selective_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """(logps, entropies or empty) from logits."""
    with plain(logits.device):
        layout = Layout.of_tokens(token_ids)
        check_token_values(token_ids, mask, logits.shape[-1], temperatures, layout)
        tokens = tokens_of(logits, token_ids, mask, temperatures, temperature, layout)
        return scores_like(token_ids, run_scores_of_logits(tokens, with_entropy=with_entropy))


@selective_logprobs.register_fake
def _(logits, token_ids, mask, temperatures, temperature, with_entropy):  # type: ignore[no-untyped-def]
    return fake_scores(logits, token_ids, torch.promote_types(logits.dtype, torch.float32), with_entropy)


@torch.library.custom_op("grpo_fused::selective_logprobs_backward", mutates_args=())
def selective_logprobs_backward(
    dlogps: Tensor | None,
    dentropies: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
) -> Tensor:
    """dlogits in the dtype of the logits."""
    with plain(logits.device):
        tokens = tokens_of(logits, token_ids, mask, temperatures, temperature, Layout.of_tokens(token_ids))
        dlogp = None if dlogps is None else dlogps.reshape(-1)
        dentropy = None if dentropies is None else dentropies.reshape(-1)
        return run_logits_gradient(tokens, dlogp, dentropy).view(logits.shape)


@selective_logprobs_backward.register_fake
def _(dlogps, dentropies, logits, token_ids, mask, temperatures, temperature):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape)


def _metric_names(config: str, ref: Tensor | None, entropies: Tensor | None) -> tuple[str, ...]:
    return metric_names(GRPOLossConfig.decode(config), with_kl=ref is not None, with_entropy=entropies is not None)
