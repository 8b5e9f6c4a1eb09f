"""`impl="reference"`: the public calls on `grpo_fused.reference`, packed inputs laid out as `[S, longest]` first."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused import reference
from grpo_fused import validation as check
from grpo_fused.calls import HeadCall, LossInputs
from grpo_fused.config import GRPOLossConfig
from grpo_fused.engines.products import ieee_products
from grpo_fused.layout import Layout
from grpo_fused.outputs import GRPOLossOutput, LogprobOutput
from grpo_fused.reference import PaddedInputs


def reference_logprobs(head: HeadCall, token_ids: Tensor, mask: Tensor | None, layout: Layout) -> LogprobOutput:
    """The reference's scores: fp32 of what the dtypes (and autocast) say the inputs are."""
    hidden, weight, bias, compute = head.hidden_states, head.lm_head_weight, head.lm_head_bias, head.compute_dtype
    check.check_token_values(token_ids, mask, weight.shape[0], head.temperatures, layout)
    dtype = torch.promote_types(compute, torch.float32)
    by_autocast = compute != torch.promote_types(hidden.dtype, weight.dtype)
    each = None if head.temperatures is None else layout.per_token(head.temperatures).view(layout.shape)
    with torch.autocast(hidden.device.type, enabled=False), ieee_products():
        return reference.linear_logprobs(
            hidden.to(compute),
            weight.to(compute),
            None if bias is None else bias.to(compute if by_autocast else dtype),
            token_ids,
            mask,
            temperature=head.temperature if each is None else each,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            dtype=dtype,
        )


class _Padding:
    """Packed [N] to padded [S, longest] and back; padded inputs pass through."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        if layout.cu_seqlens is None:
            return
        offsets = layout.cu_seqlens.to(device, torch.int64)
        lengths = offsets.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        column = torch.arange(longest, device=device)
        self.exists = column < lengths.unsqueeze(1)
        self.source = torch.where(self.exists, offsets[:-1].unsqueeze(1) + column, 0)
        self.sequence = layout.sequence_ids(device)
        self.column = torch.arange(layout.num_tokens, device=device) - offsets[self.sequence]

    def pad(self, x: Tensor, neutral: float = 0.0) -> Tensor:
        """[S, longest] from per-token x, `neutral` where there is no token."""
        if self.layout.cu_seqlens is None:
            return x
        if x.shape[0] == 0:
            nothing = x.new_full(self.source.shape, neutral)
            return nothing + x.sum() if x.requires_grad else nothing  # the loss of nothing is differentiable, too
        return torch.where(self.exists, x[self.source], torch.full((), neutral, dtype=x.dtype, device=x.device))

    def unpad(self, x: Tensor) -> Tensor:
        """[N] from [S, longest]."""
        return x if self.layout.cu_seqlens is None else x[self.sequence, self.column]

    def spread(self, x: Tensor) -> Tensor:
        """[B, 1] from a value for each sequence, [B, T] from one for each token."""
        if self.layout.is_per_token(x):
            return self.pad(x)
        return x.reshape(-1, 1)


def loss_from_logprobs(
    logps: Tensor, entropies: Tensor | None, inputs: LossInputs, layout: Layout, config: GRPOLossConfig
) -> GRPOLossOutput:
    """The reference loss in the layout of the call; differentiable in log-probs and entropies."""
    padding = _Padding(layout, logps.device)
    active = torch.ones(layout.shape, dtype=torch.bool, device=logps.device)
    if inputs.completion_mask is not None:
        active = inputs.completion_mask != 0
    mask = padding.pad(active, False)

    def neutral(x: Tensor | None, value: float = 0.0) -> Tensor | None:
        if x is None:
            return None
        x = x.detach().to(logps.dtype)
        x = padding.pad(x, value) if x.shape == layout.shape else x.reshape(-1, 1)
        return torch.where(mask, x, value)

    def logps_of(x: Tensor | None) -> Tensor | None:
        x = neutral(x)
        return None if x is None else x.clamp(min=-1e4)

    advantages = padding.spread(inputs.advantages.detach().to(logps.dtype))
    per_token = layout.is_per_token(inputs.advantages)
    advantages = torch.where(mask if per_token else mask.any(1, keepdim=True), advantages, 0.0)
    out = reference.grpo_loss(
        padding.pad(logps),
        None if entropies is None else padding.pad(entropies),
        PaddedInputs(
            mask=mask,
            advantages=advantages,
            old=logps_of(inputs.old_per_token_logps),
            ref=logps_of(inputs.ref_per_token_logps),
            sampling=logps_of(inputs.sampling_per_token_logps),
            is_ratio=neutral(inputs.importance_sampling_ratio, 1.0),
            num_items=inputs.num_items_in_batch,
            advantage_per_token=per_token,
        ),
        config,
    )
    return out._replace(
        per_token_logps=padding.unpad(out.per_token_logps),
        entropies=None if out.entropies is None else padding.unpad(out.entropies),
        metrics={name: value.to(torch.float32) for name, value in out.metrics.items()},
    )
