"""The `torch.library` operators behind the public functions.

They are opaque to `torch.compile`: what happens inside depends on data (which rows are active), what comes out does
not. Gradients leave an operator as results, since they are made in the forward pass; `autograd.py` hands them on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_fused import engines
from grpo_fused.batch import LossInputs, TokenBatch
from grpo_fused.config import GRPOLossConfig
from grpo_fused.engines.base import Needs, Tokens
from grpo_fused.engines.head import Head, ieee_products
from grpo_fused.engines.rows import Statistics
from grpo_fused.layout import Layout
from grpo_fused.metrics import compute_metrics, loss_metric_names, metric_names
from grpo_fused.objective import evaluate
from grpo_fused.parallel import Groups, TokenParallel, VocabParallel, agree, checksum
from grpo_fused.pipeline import (
    Execution,
    run_logits_gradient,
    run_logprobs,
    run_logprobs_gradient,
    run_loss,
    run_scores_of_logits,
)
from grpo_fused.validation import check_loss_values, check_token_values


@contextmanager
def _plain(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast (inputs are cast by hand), IEEE products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ieee_products():
        yield


def _tokens(
    hidden: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    temperature: Tensor | float,
    vocab: VocabParallel | None = None,
) -> Tokens:
    flat = ids.reshape(-1).to(torch.int64)
    return Tokens(
        hidden_states=_flat(hidden),
        ids=flat if vocab is None else flat - vocab.first,
        mask=torch.ones_like(ids, dtype=torch.bool).view(-1) if mask is None else mask.reshape(-1) != 0,
        temperature=temperature.reshape(-1) if isinstance(temperature, Tensor) else temperature,
        vocab=vocab,
    )


def _vocab(groups: Groups, what: dict[str, int | str], weight: Tensor, ids: Tensor) -> VocabParallel | None:
    """The head's other slices, once all ranks have been seen to make the same call."""
    if groups.vocab is None:
        return None
    agree(groups.vocab, what, weight.device)
    return VocabParallel(groups.vocab, weight.shape[0], ids.reshape(-1))


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


def _flat(hidden: Tensor) -> Tensor:
    """[N, H] if that is a view; a copy of rows that are masked would be waste, so it stays [B, T, H] otherwise."""
    try:
        return hidden.view(-1, hidden.shape[-1])
    except RuntimeError:
        return hidden


def _unneeded(like: Tensor) -> Tensor:
    return like.new_empty(0)


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
    with _plain(hidden_states.device):
        known = Groups.decode(groups)
        vocab, ranks = None, None
        if known != Groups(None, None, False):
            call = _loss_call(locals())
            if known.vocab is not None:
                exact = {"tokens": completion_ids.numel()}
                exact |= {name: checksum(x, completion_mask) for name, x in vars(inputs).items()}
                exact |= {"completion_ids": checksum(completion_ids, completion_mask)}
                exact |= {"temperatures": checksum(temperatures, completion_mask)}
                vocab = _vocab(known, {**call, **exact}, lm_head_weight, completion_ids)
            if known.tokens is not None:
                ranks = _ranks(known, call, inputs, layout, lm_head_weight, vocab)
        vocab_size = lm_head_weight.shape[0] if vocab is None else vocab.total
        check_token_values(completion_ids, completion_mask, vocab_size, temperatures)
        check_loss_values(inputs, layout)
        head = _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype)
        scale = temperature if temperatures is None else temperatures
        result = run_loss(
            engines.engine(impl),
            head,
            _tokens(hidden_states, completion_ids, completion_mask, scale, vocab),
            inputs,
            layout,
            GRPOLossConfig.decode(config),
            Needs(need_hidden, need_weight, need_bias),
            Execution(max_scratch_bytes, compact, with_metrics, ranks),
        )
        dhidden, dweight, dbias, _ = result.gradients
        names = _loss_metric_names(config, ref_per_token_logps, with_metrics)
        return (
            result.loss,
            result.logps.view(layout.shape),
            _unneeded(result.loss) if result.entropies is None else result.entropies.view(layout.shape),
            torch.stack([result.metrics[name].to(torch.float32) for name in names]),
            _unneeded(hidden_states) if dhidden is None else dhidden.view(hidden_states.shape),
            _unneeded(lm_head_weight) if dweight is None else dweight,
            _unneeded(lm_head_weight) if dbias is None else dbias,
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
        torch.empty_like(statistics) if with_entropy else _unneeded(loss),
        loss.new_empty(len(_loss_metric_names(config, ref_per_token_logps, with_metrics)), dtype=torch.float32),
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
    with _plain(hidden_states.device):
        numbers: dict[str, Any] = {"with_entropy": with_entropy, "compact": compact, "temperature": temperature}
        numbers |= {"logit_scale": logit_scale, "softcap": softcap, "temperatures": checksum(temperatures, mask)}
        vocab = _vocab_of_scores(groups, hidden_states, lm_head_weight, token_ids, mask, compute_dtype, impl, numbers)
        check_token_values(token_ids, mask, lm_head_weight.shape[0] if vocab is None else vocab.total, temperatures)
        scores = run_logprobs(
            engines.engine(impl),
            _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype),
            _tokens(hidden_states, token_ids, mask, temperature if temperatures is None else temperatures, vocab),
            with_entropy=with_entropy,
            how=Execution(max_scratch_bytes, compact, with_metrics=False),
        )
        return *_scores_like(token_ids, scores), scores.max, scores.log_sum


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
    logps, entropies = _fake_scores(hidden_states, token_ids, head.statistics_dtype, with_entropy)
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
    with _plain(hidden_states.device):
        numbers = {"needs": (need_hidden, need_weight, need_bias), "compact": compact}
        for name, x in (("dlogps", dlogps), ("dentropies", dentropies)):
            numbers[name] = None if x is None else checksum(x != 0, mask)
        vocab = _vocab_of_scores(groups, hidden_states, lm_head_weight, token_ids, mask, compute_dtype, impl, numbers)
        dhidden, dweight, dbias, _ = run_logprobs_gradient(
            engines.engine(impl),
            _head(hidden_states, lm_head_weight, lm_head_bias, logit_scale, softcap, compute_dtype),
            _tokens(hidden_states, token_ids, mask, temperature if temperatures is None else temperatures, vocab),
            _known_scores(logps, entropies, maxima, log_sums),
            None if dlogps is None else dlogps.reshape(-1),
            None if dentropies is None else dentropies.reshape(-1),
            Needs(need_hidden, need_weight, need_bias),
            Execution(max_scratch_bytes, compact, with_metrics=False),
        )
        return (
            _unneeded(hidden_states) if dhidden is None else dhidden.view(hidden_states.shape),
            _unneeded(lm_head_weight) if dweight is None else dweight,
            _unneeded(lm_head_weight) if dbias is None else dbias,
        )


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
    with _plain(per_token_logps.device):
        check_loss_values(inputs, layout, entropies)
        dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
        batch = TokenBatch.build(inputs, layout, options, dtype)
        logp = torch.where(batch.mask, per_token_logps.reshape(-1).to(dtype), 0.0)
        entropy = None if entropies is None else torch.where(batch.mask, entropies.reshape(-1).to(dtype), 0.0)
        result = evaluate(logp, entropy, batch, options)
        metrics = compute_metrics(result, entropy, batch, options)
        return (
            result.loss,
            logp.view(layout.shape),
            _unneeded(logp) if entropy is None else entropy.view(layout.shape),
            torch.stack(
                [
                    metrics[name].to(torch.float32)
                    for name in _objective_metric_names(config, ref_per_token_logps, entropies)
                ]
            ),
            result.dlogp.view(layout.shape),
            _unneeded(logp) if result.dentropy is None or entropies is None else result.dentropy.view(layout.shape),
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
    names = _objective_metric_names(config, ref_per_token_logps, entropies)
    bonus = entropies is not None and GRPOLossConfig.decode(config).entropy_coef != 0.0
    return (
        logp.new_empty(()),
        logp,
        _unneeded(logp) if entropies is None else logp.new_empty(shape),
        logp.new_empty(len(names), dtype=torch.float32),
        logp.new_empty(shape),
        logp.new_empty(shape) if bonus else _unneeded(logp),
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
    with _plain(logits.device):
        check_token_values(token_ids, mask, logits.shape[-1], temperatures)
        tokens = _tokens(logits, token_ids, mask, temperature if temperatures is None else temperatures)
        return _scores_like(token_ids, run_scores_of_logits(tokens, with_entropy=with_entropy))


@selective_logprobs.register_fake
def _(logits, token_ids, mask, temperatures, temperature, with_entropy):  # type: ignore[no-untyped-def]
    return _fake_scores(logits, token_ids, torch.promote_types(logits.dtype, torch.float32), with_entropy)


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
    with _plain(logits.device):
        tokens = _tokens(logits, token_ids, mask, temperature if temperatures is None else temperatures)
        dlogp = None if dlogps is None else dlogps.reshape(-1)
        dentropy = None if dentropies is None else dentropies.reshape(-1)
        return run_logits_gradient(tokens, dlogp, dentropy).view(logits.shape)


@selective_logprobs_backward.register_fake
def _(dlogps, dentropies, logits, token_ids, mask, temperatures, temperature):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape)


def _loss_call(given: dict[str, Any]) -> dict[str, int | str]:
    """What all ranks of a loss call must give alike: every number, and which tensors there are."""
    names = ("config", "impl", "temperature", "logit_scale", "softcap", "compute_dtype", "compact", "with_metrics",
             "need_hidden", "need_weight", "need_bias")  # fmt: skip
    present = [name for name, x in vars(given["inputs"]).items() if x is not None]
    if given["temperatures"] is not None:
        present.append("temperatures")
    return {
        **{"loss options" if name == "config" else name: str(given[name]) for name in names},
        "tensors": ", ".join(present),
        "hidden size": given["hidden_states"].shape[-1],
    }


def _ranks(
    known: Groups,
    call: dict[str, int | str],
    inputs: LossInputs,
    layout: Layout,
    weight: Tensor,
    vocab: VocabParallel | None,
) -> TokenParallel:
    """The ranks with other tokens, once all have been seen to make the same call."""
    assert known.tokens is not None
    advantages = inputs.advantages
    padded = layout.cu_seqlens is None
    # a padded [B, 1] may be one for each sequence or the only column of a rank, and no tokens may be anything
    either = (padded and advantages.dim() == 2 and advantages.shape[1] == 1) or layout.num_tokens == 0
    per_token = 2 if either else int(layout.is_per_token(advantages))
    what = {
        **call,
        "split_sequences": int(known.split_sequences),
        "num_items": checksum(inputs.num_items_in_batch, None),
    }
    what["vocabulary"] = weight.shape[0] if vocab is None else vocab.total
    agree(known.tokens, what, weight.device)
    device = weight.device
    return TokenParallel(
        known.tokens, layout.num_tokens, layout.num_sequences, known.split_sequences, per_token, device
    )


def _vocab_of_scores(
    groups: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    compute_dtype: torch.dtype,
    impl: str,
    numbers: dict[str, Any],
) -> VocabParallel | None:
    known = Groups.decode(groups)
    if known.vocab is None:
        return None
    call: dict[str, int | str] = {
        "tokens": ids.numel(), "hidden size": hidden.shape[-1], "compute dtype": str(compute_dtype), "engine": impl,
        "token_ids": checksum(ids, mask), "mask": checksum(mask, None),
    }  # fmt: skip
    call |= {name: str(value) for name, value in numbers.items()}
    return _vocab(known, call, weight, ids)


def _known_scores(
    logps: Tensor | None, entropies: Tensor | None, maxima: Tensor | None, log_sums: Tensor | None
) -> Statistics | None:
    if logps is None or maxima is None or log_sums is None:
        return None
    return Statistics(maxima, log_sums, logps.reshape(-1), None if entropies is None else entropies.reshape(-1))


def _scores_like(token_ids: Tensor, scores: Statistics) -> tuple[Tensor, Tensor]:
    shape = token_ids.shape
    return scores.logp.view(shape), _unneeded(scores.logp) if scores.entropy is None else scores.entropy.view(shape)


def _fake_scores(like: Tensor, token_ids: Tensor, dtype: torch.dtype, with_entropy: bool) -> tuple[Tensor, Tensor]:
    logps = like.new_empty(token_ids.shape, dtype=dtype)
    return logps, torch.empty_like(logps) if with_entropy else _unneeded(logps)


def _fake_gradients(
    head: Head, hidden: Tensor, token_ids: Tensor, impl: str, max_scratch_bytes: int | None, groups: str, needs: Needs
) -> tuple[Tensor, Tensor, Tensor]:
    weight = head.weight
    most = token_ids.numel() if Groups.decode(groups).vocab is None else 2**62  # `Tokens.most_chunks_of`
    dtype = engines.engine(impl).weight_gradient_dtype(head, most, max_scratch_bytes)
    return (
        hidden.new_empty(hidden.shape, dtype=head.product_dtype) if needs.hidden else _unneeded(hidden),
        weight.new_empty(weight.shape, dtype=dtype) if needs.weight else _unneeded(weight),
        weight.new_empty(weight.shape[:1], dtype=head.statistics_dtype) if needs.bias else _unneeded(weight),
    )


def _loss_metric_names(config: str, ref: Tensor | None, with_metrics: bool) -> tuple[str, ...]:
    return loss_metric_names(GRPOLossConfig.decode(config), with_kl=ref is not None, complete=with_metrics)


def _objective_metric_names(config: str, ref: Tensor | None, entropies: Tensor | None) -> tuple[str, ...]:
    return metric_names(GRPOLossConfig.decode(config), with_kl=ref is not None, with_entropy=entropies is not None)
