"""`triton_grpo_loss`, from given logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_fused.api.autograd import first_order
from grpo_fused.api.from_logits import selective_logprobs
from grpo_fused.call import validation as check
from grpo_fused.call.calls import LossInputs
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.layout import Layout
from grpo_fused.call.loss_types import LOSS_TYPES
from grpo_fused.integrations.liger import options
from grpo_fused.objective.batch import TokenBatch
from grpo_fused.objective.formulas import evaluate


def grpo_loss_from_logits(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: float | Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, list[Tensor]] | tuple[Tensor, Tensor | None, Tensor]:
    """`liger_kernel.transformers.grpo_loss.triton_grpo_loss` (0.8.5), on any device: GRPO from given logits.

        logp_t = log_softmax(logits_t / temperature)[completion_ids_t];  objectives as in `GRPOLossConfig`

    Args:
        logits: `[B, L + 1, V]`, any float dtype; the last position is not used. Never changed.
        old_logp: `[B, L]`, nats; None means on-policy.
        ref_logp: `[B, L]`, nats; needed if beta is not 0.
        completion_ids: `[B, L]` integers in `[0, V)` where active.
        advantages: `[B]` or `[B, L]`.
        completion_mask: `[B, L]`, bool or 0/1, default all active.
        temperature: Divides the logits, > 0.
        beta: Weight of the KL penalty, >= 0.
        eps_low: Lower clip distance, > 0.
        eps_high: Upper clip distance, > 0; for cispo the bound on the ratio itself.
        inplace: No effect: the gradient never overwrites the logits.
        loss_type: As `FusedLinearGRPOLoss`.
        max_completion_length: Tokens; read by dr_grpo, default L.
        importance_sampling_level: `token` or `sequence`, with every loss type.
        reduce: What is returned, see below.
        sapo_temperature_pos, sapo_temperature_neg: SAPO's gate temperatures, > 0.
        vllm_is_ratio: `[B, L]`, `[B, 1]` or `[B]`, >= 0.
        delta: Upper bound on the ratio before clipping, > 0 (grpo, bnpo, dr_grpo, dapo, luspo).
        use_bias_correction_kl: Multiply the KL estimate by the importance ratio.
        num_items_in_batch: As `FusedLinearGRPOLoss.forward`; read with `reduce=True`.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: VESPO's gamma shapes and rates. An option that the
            loss type does not read is ignored, as by `FusedLinearGRPOLoss`.

    Returns:
        With `reduce=True` `(loss, metrics)`: 0-d, differentiable in the logits, and the list `[kl, clip_ratio]`
        (`[clip_ratio]` if beta is 0), means over active tokens. With `reduce=False`
        `(per_token_loss, per_token_kl, is_clipped)`, `[B, L]` each and 0 where masked: the first differentiable in the
        logits, before any averaging; the second None if beta is 0; the last 0 or 1. fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: Shapes, ranges, unknown options, delta with a loss type without a clip, beta without `ref_logp`.
        TypeError: A wrong type or dtype.

    Source: liger-kernel 0.8.5, `liger_kernel/transformers/grpo_loss.py`, for the interface.
    """
    check.check_tokens(completion_ids, "completion_ids", check.INTEGER, None)
    check.check_mask(completion_mask, completion_ids)
    B, L = completion_ids.shape
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != (B, L + 1):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be [{B}, {L + 1}, V], one position more than completion_ids; got {got}")
    # as in Liger
    if delta is not None and loss_type in options.SUPPORTED and "delta" not in LOSS_TYPES[loss_type].options:
        raise ValueError(f"delta must be None for loss_type={loss_type!r}, which has no clip; got {delta}")
    given = {
        "loss_type": loss_type, "beta": beta, "importance_sampling_level": importance_sampling_level,
        "use_bias_correction_kl": use_bias_correction_kl, "eps_low": eps_low, "eps_high": eps_high, "delta": delta,
        "max_completion_length": max(L, 1) if max_completion_length is None else max_completion_length,
        "sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg,
        "vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg,
        "vespo_lambda_neg": vespo_lambda_neg,
    }  # fmt: skip
    config = options.as_config(given, _DEFAULTS)
    if config.beta != 0.0 and ref_logp is None:
        raise ValueError(f"beta={config.beta} needs ref_logp ({B}, {L}); got None")
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask
    layout = Layout.of(completion_ids, None)
    inputs = LossInputs(
        advantages=advantages,
        completion_mask=mask,
        old_per_token_logps=old_logp,
        ref_per_token_logps=ref_logp if config.beta != 0.0 else None,
        importance_sampling_ratio=options.rollout_ratio(vllm_is_ratio, mask, config),
        num_items_in_batch=check.as_num_items(options.num_items(num_items_in_batch, mask, config), logits.device),
    )
    check.check_loss_inputs(inputs, layout, config)
    check.check_one_device(logits=logits, completion_ids=completion_ids, completion_mask=completion_mask,
                        advantages=advantages, old_logp=old_logp, ref_logp=ref_logp,
                        vllm_is_ratio=vllm_is_ratio)  # fmt: skip
    check.check_loss_values(inputs, layout)

    # one more masked token in each sequence: the backward of a slice would copy the gradient
    with_last = torch.nn.functional.pad
    logps = selective_logprobs(
        logits, with_last(completion_ids, (0, 1)), with_last(mask != 0, (0, 1)), temperature=temperature
    ).logps[:, :L]
    batch = TokenBatch.build(inputs, layout, config, logps.dtype)
    losses = _PerTokenLoss.apply(logps, batch, config)
    assert isinstance(losses, Tensor)
    if reduce:
        loss = (losses * batch.weight.view_as(losses)).to(torch.float64).sum().to(losses.dtype)
        return loss, options.liger_metrics(logps.detach(), inputs, config)
    kl, clipped = options.kl_and_clipped(logps.detach(), batch, config)
    return losses, kl, clipped.to(losses.dtype)


_DEFAULTS = options.defaults_of(grpo_loss_from_logits)


class _PerTokenLoss(torch.autograd.Function):
    """[B, T] losses of tokens, with the analytic derivative for any upstream gradient."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, batch: TokenBatch, config: GRPOLossConfig) -> Tensor:
        ctx.save_for_backward(logps)
        ctx.batch, ctx.config = batch, config
        return evaluate(logps.reshape(-1), None, batch, config).per_token().view_as(logps)

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: tuple[Any, ...], upstream: Tensor) -> tuple[Tensor, None, None]:
        (logps,) = saved
        weight = torch.where(ctx.batch.mask, upstream.to(logps.dtype).reshape(-1), 0.0)
        weighted = replace(ctx.batch, weight=weight)
        found = evaluate(logps.reshape(-1), None, weighted, ctx.config).derivatives()
        return found.dlogp.view_as(logps), None, None
