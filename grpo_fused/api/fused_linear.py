"""The functions of hidden states and the lm head: the loss, and log-probs."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from grpo_fused.api import reference
from grpo_fused.api.autograd import LinearLogprobs, LinearLoss
from grpo_fused.api.head import HeadOptions, beside, checking, early, head_of, needs_of
from grpo_fused.call import validation as check
from grpo_fused.call.calls import LogprobsCall, LossCall, LossInputs, TokenSets, tensors_of
from grpo_fused.call.candidates import CandidateSets
from grpo_fused.call.config import GRPOLossConfig
from grpo_fused.call.head_parts import QuantizedWeight
from grpo_fused.call.layout import Layout
from grpo_fused.call.options import check_flag
from grpo_fused.call.outputs import GRPOLossOutput, LogprobOutput
from grpo_fused.objective.metrics import loss_metric_names

_DEFAULT_CONFIG = GRPOLossConfig()


def fused_linear_grpo_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor | QuantizedWeight,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    ref_hidden_states: Tensor | None = None,
    ref_lm_head_weight: Tensor | None = None,
    ref_lm_head_bias: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    config: GRPOLossConfig = _DEFAULT_CONFIG,
    with_metrics: bool = True,
    **head: Unpack[HeadOptions],
) -> GRPOLossOutput:
    """GRPO loss from hidden states and the lm-head weight; the logits of the batch are never all in memory.

        logits = softcap_c(logit_scale * (h W^T + b)) / temperature
        r_t = exp(logp_t - old_t),   l_t = -min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t) + beta KL_t
        loss = sum_t l_t / number of active tokens          (loss_type "dapo"; the others are in GRPOLossConfig)

    With `kl_estimator="exact"`, KL_t = sum_j p_tj (log p_tj - log ref_tj) over the whole vocabulary.

    Args:
        hidden_states: `[B, T, H]`, or packed `[N, H]`: the state that *predicts* each completion token. fp32, bf16,
            fp16 or fp64.
        lm_head_weight: `[V, H]`; its dtype may differ, products are taken in the promoted one.
        completion_ids: `[B, T]` or `[N]` integers in `[0, V)` where active.
        advantages: floating point, `[B]` or `[B, 1]` (packed `[S]` or `[S, 1]`), or one for each token. A packed 1-d
            tensor with N = S counts as one for each sequence, and raises unless both readings are the same.
        completion_mask: like `completion_ids`, bool or 0/1, default all active. Masked positions may hold any
            values.
        old_per_token_logps: like `completion_ids`, nats; None means on-policy (ratio 1, gradient kept).
        ref_per_token_logps: like `completion_ids`, nats; needed if `config.beta` is not 0, otherwise only for the
            metric `kl`.
        ref_hidden_states, ref_lm_head_weight, ref_lm_head_bias: `[B, T, H']` or `[N, H']`, `[V, H']` and `[V]`: those
            of the reference, in place of its log-probs, with `config.kl_estimator="exact"` (see `KL_t` above). They
            get no gradient; temperature, logit scale and softcap are the policy's. One more head product; runs on the
            engine `chunked`, without `candidates` and `process_group`.
        sampling_per_token_logps: like `completion_ids`, nats, by the rollout engine; only with
            `off_policy_mask_threshold`. NaN where it has none.
        importance_sampling_ratio: like `completion_ids`, or `[B, 1]` (not for `vespo`): correction for the rollout
            engine, >= 0.
        cu_seqlens: `[S + 1]` int32/int64, the offsets of packed sequences.
        num_items_in_batch: the divisor of dapo, cispo and vespo, > 0; default the number of active tokens of this call.
        config: the objective; see `GRPOLossConfig`.
        with_metrics: False skips scoring rows that have no gradient, entropies, and all metrics but `policy_loss`,
            `active_tokens` and `gradient_tokens`; log-probs of skipped rows are then 0.
        **head: those of `HeadOptions`.

    A weight that is a `DTensor` (FSDP2) is gathered for the call, and its gradient comes back in the same sharding,
    averaged over the mesh as FSDP2 does.

    Returns:
        `GRPOLossOutput`: `loss` (0-d fp32), differentiable in hidden states, weight and bias; `per_token_logps`,
        `entropies` and `metrics`, detached fp32. fp64 inputs give fp64 results, and metrics in fp32.

    Raises:
        ValueError: a shape, range, option or combination that is not supported; ids outside the vocabulary or NaN on
            active tokens (CPU; elsewhere with `GRPO_FUSED_DEBUG=1` in the environment, since the check synchronises).
        TypeError: a wrong type or dtype, a quantised weight that is no `QuantizedWeight`, a module in place of its
            weight.
        RuntimeError: the named `impl` cannot run here.

    Equivalent in plain PyTorch (dapo, beta 0)::

        logps = (hidden_states.float() @ lm_head_weight.float().T / temperature).log_softmax(-1)
        logps = logps.gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
        ratio = (logps - old_per_token_logps).exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        A = advantages.unsqueeze(1)
        loss = (-torch.min(ratio * A, clipped * A) * completion_mask).sum() / completion_mask.sum()

    Source: GRPO, DeepSeekMath (arXiv 2402.03300); options and defaults as in TRL 1.16's `GRPOTrainer`.
    """
    with checking(fused_linear_grpo_loss, head, with_tokens=True):
        check_flag(with_metrics, "with_metrics")
        check.check_tokens(completion_ids, "completion_ids", check.INTEGER, cu_seqlens)
        layout = Layout.of(completion_ids, cu_seqlens)
        hidden_states, lm_head, candidates, run = head_of(
            hidden_states, lm_head_weight, completion_ids, completion_mask, layout, head,
            names=("completion_ids", "completion_mask"),
        )  # fmt: skip
        inputs = LossInputs(
            advantages=advantages,
            completion_mask=completion_mask,
            old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps,
            sampling_per_token_logps=sampling_per_token_logps,
            importance_sampling_ratio=importance_sampling_ratio,
            num_items_in_batch=check.as_num_items(num_items_in_batch, hidden_states.device),
        )
        check.check_loss_inputs(inputs, layout, config, with_heads=True)
        needs = needs_of(hidden_states, lm_head.weight, lm_head.bias)
        call = LossCall(
            hidden_states, lm_head, completion_ids, inputs, cu_seqlens, candidates, config.encoded, with_metrics,
            needs, run,
        )  # fmt: skip
        ref = ref_hidden_states, ref_lm_head_weight, ref_lm_head_bias
        if config.kl_estimator == "exact":
            reference_head = check.check_exact_kl(call, *ref, head.get("impl", "auto"), head.get("process_group"))
            scale_and_cap = lm_head.logit_scale, lm_head.softcap
            lm_head, other = beside(lm_head, layout, "reference", *reference_head, *scale_and_cap)
            run = run._replace(engine="reference" if run.engine == "reference" else "chunked")
            call = call._replace(lm_head=lm_head, run=run, ref_hidden_states=reference_head[0], ref_lm_head=other)
        elif any(x is not None for x in ref):
            raise ValueError(
                "ref_hidden_states, ref_lm_head_weight and ref_lm_head_bias are used with kl_estimator='exact' only; "
                f"got {config.kl_estimator!r}"
            )
        check.check_devices(call)

    if run.engine == "reference":
        scores = reference.linear_logprobs(call)
        out = reference.grpo_loss(scores.logps, scores.entropies, call, reference.exact_kl(call))
        # autograd goes through every position, and computes only the gradients that are required
        worked = completion_ids.numel() if out.loss.requires_grad else 0
        return out._replace(
            metrics={"gradient_tokens": torch.full_like(out.loss, worked, dtype=torch.float32), **out.metrics}
        )

    loss, logps, entropies, metrics, _ = LinearLoss.apply(*tensors_of(call), call)
    names = loss_metric_names(config, with_kl=call.with_kl, complete=with_metrics)
    entropies = entropies if with_metrics or config.needs_entropy else None
    return GRPOLossOutput(loss, logps, entropies, dict(zip(names, metrics.unbind(), strict=True)))


def fused_linear_logprobs(
    hidden_states: Tensor,
    lm_head_weight: Tensor | QuantizedWeight,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    with_entropy: bool = False,
    alternatives: CandidateSets | None = None,
    **head: Unpack[HeadOptions],
) -> LogprobOutput:
    """Log-probabilities (and entropies) of given tokens, from hidden states and the lm-head weight.

        logp_t = z_{t,y_t} - log sum_j exp z_tj,   z = softcap_c(logit_scale * (h W^T + b)) / temperature

    Differentiable in both results, so that any objective can use it: DPO, KTO, RLOO, or a custom one. Where hidden
    states alone have a gradient (a frozen head), dlogp/dh `[N, H]` is made in the forward pass: two head products in
    all, and two more for a gradient of entropies. Under `torch.no_grad()` there is one.

    Args:
        hidden_states: `[B, T, H]` or packed `[N, H]`: the state that *predicts* each token.
        lm_head_weight: `[V, H]`.
        token_ids: `[B, T]` or `[N]` integers in `[0, V)` where active.
        mask: like `token_ids`, bool or 0/1, default all active. Masked positions give 0 and get no gradient.
        with_entropy: also return the Shannon entropy of each token's distribution, in nats.
        alternatives: `CandidateSets`: other tokens of each position, [M] in all, whose log-probs are returned too: any
            of the vocabulary (of the position's candidate set, if it has one), also several times, the token itself, or
            none. They cost the product of a row of the weight each.
        **head: those of `HeadOptions`.

    Returns:
        `LogprobOutput(logps, entropies, alternative_logps)`, fp32 (fp64 for fp64 inputs); the last two are None unless
        requested.

    Raises:
        ValueError, TypeError, RuntimeError: as `fused_linear_grpo_loss`.

    Equivalent in plain PyTorch::

        log_p = (hidden_states.float() @ lm_head_weight.float().T / temperature).log_softmax(-1)
        logps = log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        entropies = -(log_p.exp() * log_p).sum(-1)
        alternative_logps = log_p.flatten(0, -2)[alternatives.positions, alternatives.ids]
    """
    with checking(fused_linear_logprobs, head):
        check_flag(with_entropy, "with_entropy")
        check.check_token_ids(token_ids, "token_ids")
        layout = Layout.of(token_ids)
        hidden_states, lm_head, candidates, run = head_of(hidden_states, lm_head_weight, token_ids, mask, layout, head)
        check.check_alternatives(alternatives, {}, token_ids, ())
        others = TokenSets.of(alternatives)
        call = early(LogprobsCall(hidden_states, lm_head, token_ids, mask, candidates, with_entropy, run, others))
        check.check_devices(call)

    if run.engine == "reference":
        scores = reference.linear_logprobs(call)
        return scores if with_entropy else scores._replace(entropies=None)
    logps, entropies, of_others = LinearLogprobs.apply(*tensors_of(call), call)
    return LogprobOutput(logps, entropies if with_entropy else None, None if alternatives is None else of_others)
