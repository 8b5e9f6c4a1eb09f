"""The operators of an lm head: the loss, log-probs, and the gradient of log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused import engines
from grpo_fused._ops.common import fake_scores, plain, scores_like, tokens_of, unneeded
from grpo_fused.batch import LossInputs
from grpo_fused.config import GRPOLossConfig
from grpo_fused.engines.base import Gradients, Needs
from grpo_fused.engines.head import Head
from grpo_fused.engines.rows import Statistics
from grpo_fused.handshake import Call, failing_together, join
from grpo_fused.layout import Layout
from grpo_fused.metrics import loss_metric_names
from grpo_fused.parallel import Groups
from grpo_fused.pipeline import Execution, run_logprobs, run_logprobs_gradient, run_loss
from grpo_fused.validation import check_loss_values, check_token_values


@torch.library.custom_op("grpo_fused::linear_grpo_loss", mutates_args=())
def linear_grpo_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None,
    old_per_token_logps: Tensor | None,
    ref_per_token_logps: Tensor | None,
    sampling_per_token_logps: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    num_items_in_batch: Tensor | None,
    cu_seqlens: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    config: str,
    impl: str,
    compute_dtype: torch.dtype,
    max_scratch_bytes: int | None,
    compact: bool,
    groups: str,
    with_metrics: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, logps, entropies, metrics, dhidden, dweight, dbias); what is not needed comes as an empty tensor."""
    layout = Layout.of(completion_ids, cu_seqlens)
    inputs = LossInputs(
        advantages=advantages,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        sampling_per_token_logps=sampling_per_token_logps,
        importance_sampling_ratio=importance_sampling_ratio,
        num_items_in_batch=num_items_in_batch,
    )
    with plain(hidden_states.device):
        call = Call(
            "loss",
            options={
                "loss options": config, "impl": impl, "temperature": temperature, "logit_scale": logit_scale,
                "softcap": softcap, "compute_dtype": compute_dtype, "compact": compact, "with_metrics": with_metrics,
                "need_hidden": need_hidden, "need_weight": need_weight, "need_bias": need_bias,
                "hidden size": hidden_states.shape[-1],
            },
            tensors={
                **vars(inputs), "completion_ids": completion_ids, "temperature tensor": temperatures,
                "cu_seqlens": cu_seqlens,
            },
            mask=completion_mask,
        )  # fmt: skip

        def check(vocab_size: int) -> None:
            check_token_values(completion_ids, completion_mask, vocab_size, temperatures, layout)
            check_loss_values(inputs, layout)

        known = Groups.decode(groups)
        vocab, ranks = join(known, call, completion_ids, lm_head_weight, check, loss=(inputs, layout))
        with failing_together(vocab, ranks):
            result = run_loss(
                engines.engine(impl),
                _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype),
                tokens_of(hidden_states, completion_ids, completion_mask, temperatures, temperature, layout, vocab),
                inputs,
                layout,
                GRPOLossConfig.decode(config),
                Needs(need_hidden, need_weight, need_bias),
                Execution(max_scratch_bytes, compact, with_metrics, ranks),
            )
        names = _metric_names(config, ref_per_token_logps, with_metrics)
        return (
            result.loss,
            result.logps.view(layout.shape),
            unneeded(result.loss) if result.entropies is None else result.entropies.view(layout.shape),
            torch.stack([result.metrics[name].to(torch.float32) for name in names]),
            *_gradients_like(hidden_states, lm_head_weight, result.gradients),
        )


@linear_grpo_loss.register_fake
def _(  # type: ignore[no-untyped-def]
    hidden_states,
    lm_head_weight,
    lm_head_bias,
    completion_ids,
    advantages,
    completion_mask,
    old_per_token_logps,
    ref_per_token_logps,
    sampling_per_token_logps,
    importance_sampling_ratio,
    num_items_in_batch,
    cu_seqlens,
    temperatures,
    temperature,
    logit_scale,
    softcap,
    config,
    impl,
    compute_dtype,
    max_scratch_bytes,
    compact,
    groups,
    with_metrics,
    need_hidden,
    need_weight,
    need_bias,
):
    head = _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype)
    statistics = hidden_states.new_empty(completion_ids.shape, dtype=head.statistics_dtype)
    loss = statistics.new_empty(())
    with_entropy = with_metrics or GRPOLossConfig.decode(config).needs_entropy
    needs = Needs(need_hidden, need_weight, need_bias)
    return (
        loss,
        statistics,
        torch.empty_like(statistics) if with_entropy else unneeded(loss),
        loss.new_empty(len(_metric_names(config, ref_per_token_logps, with_metrics)), dtype=torch.float32),
        *_fake_gradients(head, hidden_states, completion_ids, impl, max_scratch_bytes, groups, needs),
    )


@torch.library.custom_op("grpo_fused::linear_logprobs", mutates_args=())
def linear_logprobs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    impl: str,
    compute_dtype: torch.dtype,
    max_scratch_bytes: int | None,
    compact: bool,
    groups: str,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logps, entropies or empty, maxima, log sums); the backward takes them all."""
    with plain(hidden_states.device):
        call = Call(
            "log-probs",
            options={
                "engine": impl, "compute dtype": compute_dtype, "hidden size": hidden_states.shape[-1],
                "with_entropy": with_entropy, "compact": compact, "temperature": temperature,
                "logit_scale": logit_scale, "softcap": softcap,
            },
            tensors={"token_ids": token_ids, "mask": mask, "temperature tensor": temperatures},
            mask=mask,
        )  # fmt: skip
        layout = Layout.of_tokens(token_ids)

        def check(vocab_size: int) -> None:
            check_token_values(token_ids, mask, vocab_size, temperatures, layout)

        vocab, _ = join(Groups.decode(groups), call, token_ids, lm_head_weight, check)
        with failing_together(vocab, None):
            scores = run_logprobs(
                engines.engine(impl),
                _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype),
                tokens_of(hidden_states, token_ids, mask, temperatures, temperature, layout, vocab),
                with_entropy=with_entropy,
                how=Execution(max_scratch_bytes, compact, with_metrics=False),
            )
        return *scores_like(token_ids, scores), scores.max, scores.log_sum


@linear_logprobs.register_fake
def _(  # type: ignore[no-untyped-def]
    hidden_states,
    lm_head_weight,
    lm_head_bias,
    token_ids,
    mask,
    temperatures,
    temperature,
    logit_scale,
    softcap,
    impl,
    compute_dtype,
    max_scratch_bytes,
    compact,
    groups,
    with_entropy,
):
    head = _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype)
    logps, entropies = fake_scores(hidden_states, token_ids, head.statistics_dtype, with_entropy)
    row = logps.new_empty(token_ids.numel())
    return logps, entropies, row, torch.empty_like(row)


@torch.library.custom_op("grpo_fused::linear_logprobs_backward", mutates_args=())
def linear_logprobs_backward(
    dlogps: Tensor | None,
    dentropies: Tensor | None,
    logps: Tensor | None,
    entropies: Tensor | None,
    maxima: Tensor | None,
    log_sums: Tensor | None,
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    impl: str,
    compute_dtype: torch.dtype,
    max_scratch_bytes: int | None,
    compact: bool,
    groups: str,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, dweight, dbias), empty where not needed, from the scores of `linear_logprobs` or, anew, without."""
    with plain(hidden_states.device):
        call = Call(
            "gradient of log-probs",
            options={
                "engine": impl, "compute dtype": compute_dtype, "hidden size": hidden_states.shape[-1],
                "needs": (need_hidden, need_weight, need_bias), "compact": compact,
            },
            tensors={"token_ids": token_ids, "mask": mask},
            mask=mask,
            coefficients={"dlogps": dlogps, "dentropies": dentropies},
        )  # fmt: skip
        layout = Layout.of_tokens(token_ids)
        vocab, _ = join(Groups.decode(groups), call, token_ids, lm_head_weight, lambda _: None)
        with failing_together(vocab, None):
            gradients = run_logprobs_gradient(
                engines.engine(impl),
                _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype),
                tokens_of(hidden_states, token_ids, mask, temperatures, temperature, layout, vocab),
                _known_scores(logps, entropies, maxima, log_sums),
                None if dlogps is None else dlogps.reshape(-1),
                None if dentropies is None else dentropies.reshape(-1),
                Needs(need_hidden, need_weight, need_bias),
                Execution(max_scratch_bytes, compact, with_metrics=False),
            )
        return _gradients_like(hidden_states, lm_head_weight, gradients)


@linear_logprobs_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    dlogps,
    dentropies,
    logps,
    entropies,
    maxima,
    log_sums,
    hidden_states,
    lm_head_weight,
    lm_head_bias,
    token_ids,
    mask,
    temperatures,
    temperature,
    logit_scale,
    softcap,
    impl,
    compute_dtype,
    max_scratch_bytes,
    compact,
    groups,
    need_hidden,
    need_weight,
    need_bias,
):
    head = _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype)
    return _fake_gradients(
        head, hidden_states, token_ids, impl, max_scratch_bytes, groups, Needs(need_hidden, need_weight, need_bias)
    )


def _head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    compute_dtype: torch.dtype,
) -> Head:
    by_autocast = compute_dtype != torch.promote_types(hidden.dtype, weight.dtype)
    if bias is not None and by_autocast:  # a bias is added in fp32, so that nothing else rounds it
        bias = bias.to(compute_dtype)
    return Head(weight, bias, logit_scale, softcap, compute_dtype)


def _known_scores(
    logps: Tensor | None, entropies: Tensor | None, maxima: Tensor | None, log_sums: Tensor | None
) -> Statistics | None:
    if logps is None or maxima is None or log_sums is None:
        return None
    return Statistics(maxima, log_sums, logps.reshape(-1), None if entropies is None else entropies.reshape(-1))


def _gradients_like(hidden: Tensor, weight: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, dweight, dbias) as the operators give them."""
    dhidden, dweight, dbias, _ = gradients
    return (
        unneeded(hidden) if dhidden is None else dhidden.view(hidden.shape),
        unneeded(weight) if dweight is None else dweight,
        unneeded(weight) if dbias is None else dbias,
    )


def _fake_gradients(
    head: Head, hidden: Tensor, token_ids: Tensor, impl: str, max_scratch_bytes: int | None, groups: str, needs: Needs
) -> tuple[Tensor, Tensor, Tensor]:
    weight = head.weight
    most = token_ids.numel() if Groups.decode(groups).vocab is None else 2**62  # `Tokens.most_chunks_of`
    dtype = engines.engine(impl).weight_gradient_dtype(head, most, max_scratch_bytes)
    return (
        hidden.new_empty(hidden.shape, dtype=head.product_dtype) if needs.hidden else unneeded(hidden),
        weight.new_empty(weight.shape, dtype=dtype) if needs.weight else unneeded(weight),
        weight.new_empty(weight.shape[:1], dtype=head.statistics_dtype) if needs.bias else unneeded(weight),
    )


def _metric_names(config: str, ref: Tensor | None, with_metrics: bool) -> tuple[str, ...]:
    return loss_metric_names(GRPOLossConfig.decode(config), with_kl=ref is not None, complete=with_metrics)
