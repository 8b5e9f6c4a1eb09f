"""The functions that need no head: the loss from log-probs, and log-probs from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused import engines
from grpo_fused.api import reference
from grpo_fused.api.autograd import GRPOObjective, SelectiveLogprobs
from grpo_fused.call import validation as check
from grpo_fused.call.calls import LogitsCall, LossInputs, ObjectiveCall
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import Layout, split_temperature
from grpo_fused.call.options import check_flag
from grpo_fused.call.outputs import GRPOLossOutput, LogprobOutput
from grpo_fused.engines import Impl
from grpo_fused.objective.metrics import metric_names

_DEFAULT_CONFIG = GRPOLossConfig()


def grpo_loss(
    per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    entropies: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    config: GRPOLossConfig = _DEFAULT_CONFIG,
    impl: Impl = "auto",
) -> GRPOLossOutput:
    """The GRPO loss from given log-probabilities; with the options of `GRPOLossConfig`, except `kl_estimator="exact"`.

    Args:
        per_token_logps: `[B, T]` or packed `[N]`, nats; the loss is differentiable in them.
        advantages: `[B]` (`[S]` packed) or one for each token.
        completion_mask: like the log-probs, bool or 0/1, default all active.
        entropies: like the log-probs, nats; needed for `entropy_coef` (and then differentiable) and
            `top_entropy_quantile`, otherwise only for the metric `entropy`.
        old_per_token_logps, ref_per_token_logps, sampling_per_token_logps, importance_sampling_ratio, cu_seqlens,
            num_items_in_batch, config: as in `fused_linear_grpo_loss`.
        impl: `"auto"` (the analytic derivative) or `"reference"` (autograd).

    Returns:
        `GRPOLossOutput`; its `entropies` are None if none were given, and its metrics have no `gradient_tokens`.

    Raises:
        ValueError, TypeError, RuntimeError: as `fused_linear_grpo_loss`; ValueError if required entropies are missing.
    """
    check.check_tokens(per_token_logps, "per_token_logps", check.FLOAT, cu_seqlens)
    layout = Layout.of(per_token_logps, cu_seqlens)
    device = per_token_logps.device
    check.check_mask(completion_mask, per_token_logps)
    inputs = LossInputs(
        advantages=advantages,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        sampling_per_token_logps=sampling_per_token_logps,
        importance_sampling_ratio=importance_sampling_ratio,
        num_items_in_batch=check.as_num_items(num_items_in_batch, device),
    )
    check.check_loss_inputs(inputs, layout, config)
    check.check_entropies(entropies, layout, config)
    call = ObjectiveCall(per_token_logps, entropies, inputs, cu_seqlens, config.encoded)
    check.check_devices(call)
    if engines.choose_from_logits(impl) == "reference":
        check.check_loss_values(inputs, layout, entropies)
        dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
        wide = None if entropies is None else entropies.to(dtype)
        return reference.grpo_loss(per_token_logps.to(dtype), wide, call)
    loss, logps, entropies_out, metrics, _ = GRPOObjective.apply(per_token_logps, entropies, call)
    names = metric_names(config, with_kl=ref_per_token_logps is not None, with_entropy=entropies is not None)
    named = dict(zip(names, metrics.unbind(), strict=True))
    return GRPOLossOutput(loss, logps, None if entropies is None else entropies_out, named)


def selective_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    impl: Impl = "auto",
) -> LogprobOutput:
    """Log-probabilities (and entropies) of given tokens from given logits, in fp32 row by row.

    Args:
        logits: `[B, T, V]` or `[N, V]`, any float dtype; not copied, not changed.
        token_ids: `[B, T]` or `[N]` integers in `[0, V)` where active.
        mask: like `token_ids`, bool or 0/1, default all active. Masked positions give 0 and get no gradient.
        temperature: > 0: a number, one for each sequence, or one for each token.
        with_entropy: also return entropies, in nats.
        impl: `"auto"` or `"reference"`.

    Returns:
        `LogprobOutput(logps, entropies)`, fp32 (fp64 for fp64 logits), differentiable in the logits.

    Raises:
        ValueError, TypeError, RuntimeError: as `fused_linear_grpo_loss`.

    Equivalent in plain PyTorch::

        (logits.float() / temperature).log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    """
    check_flag(with_entropy, "with_entropy")
    check.check_token_ids(token_ids, "token_ids")
    layout = Layout.of(token_ids)
    check.check_logits(logits, token_ids)
    check.check_mask(mask, token_ids, "mask")
    check.check_head_numbers(temperature, 1.0, None, layout)
    number, temperatures = split_temperature(temperature)
    call = LogitsCall(logits, token_ids, mask, temperatures, number, with_entropy)
    check.check_devices(call)
    if engines.choose_from_logits(impl) == "reference":
        scores = reference.selective_logprobs(call)
        return scores if with_entropy else scores._replace(entropies=None)
    logps, entropies = SelectiveLogprobs.apply(logits, call)
    return LogprobOutput(logps, entropies if with_entropy else None)
