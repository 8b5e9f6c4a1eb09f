"""The divergence of a policy from another head, over the whole vocabulary."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from grpo_fused.api import reference
from grpo_fused.api.autograd import LinearLoss
from grpo_fused.api.head import HeadOptions, LogitOptions, beside, checking, head_of, needs_of
from grpo_fused.call import validation as check
from grpo_fused.call.calls import DivergenceCall, tensors_of
from grpo_fused.call.head_parts import QuantizedWeight
from grpo_fused.call.layout import Layout
from grpo_fused.call.options import check_choice, check_number
from grpo_fused.call.outputs import DivergenceOutput
from grpo_fused.ranks.parallel import ParallelGroups

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]
DivergenceImpl = Literal["auto", "chunked", "reference"]


def fused_linear_divergence(
    hidden_states: Tensor,
    lm_head_weight: Tensor | QuantizedWeight,
    other_hidden_states: Tensor | None = None,
    other_lm_head_weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    other_ids: Tensor | None = None,
    other_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
    kind: DivergenceKind = "reverse_kl",
    beta: float = 0.5,
    other_lm_head_bias: Tensor | None = None,
    other_logit_scale: float = 1.0,
    other_softcap: float | None = None,
    impl: DivergenceImpl = "auto",
    **head: Unpack[LogitOptions],
) -> DivergenceOutput:
    """Divergence of the policy from a frozen reference or teacher, over the whole vocabulary.

        p = softmax(softcap_c(logit_scale * (h W^T + b)) / temperature),   q: the same of the other head
        loss = sum_t weights_t * D_t

    | kind | D_t |
    |---|---|
    | `"reverse_kl"` | KL(p, q) = sum_j p_j (log p_j - log q_j) |
    | `"forward_kl"` | KL(q, p) = sum_j q_j (log q_j - log p_j) |
    | `"jsd"` | beta KL(q, M) + (1 - beta) KL(p, M), M = (1 - beta) p + beta q |

    The gradient is computed in the forward pass: one head product for the other head and three for the policy's (two
    with a frozen head or body). Logits of both heads are held for a chunk of tokens only.

    A teacher behind an API gives its K most likely tokens instead: `other_ids` and `other_logprobs` take the place of
    `other_hidden_states` and `other_lm_head_weight`. Then D_t = sum_k q_k (log q_k - log p_k) with p of the whole
    vocabulary; the rest of the teacher's distribution is ignored. `kind` must be `"forward_kl"`.

    Args:
        hidden_states: `[B, T, H]`, or packed `[N, H]`: the state that *predicts* each token. fp32, bf16, fp16 or fp64.
        lm_head_weight: `[V, H]`.
        other_hidden_states: `[B, T, H']` or `[N, H']`: those of the reference or teacher; no gradient reaches it.
        other_lm_head_weight: `[V, H']`: of the same vocabulary; no gradient reaches it.
        mask: `[B, T]` or `[N]`, bool or 0/1, default all active. A masked position counts 0, for any values.
        other_ids: `[B, T, K]` or `[N, K]` integers in `[0, V)`, distinct at each position.
        other_logprobs: like `other_ids`, nats, at the temperature of the call; -inf where a position has fewer than K.
        weights: like `mask`; default 1 / number of active tokens. No gradient reaches them.
        kind: the divergence; see the table.
        beta: of `"jsd"` only, 0 < beta < 1. For the limits 0 and 1 use a KL.
        other_lm_head_bias, other_logit_scale, other_softcap: those of the other head.
        impl: `"chunked"` on any device, which `"auto"` takes, or `"reference"`, which holds all logits.
        **head: those of `HeadOptions` without `candidates`. `temperature` is that of both heads, each gets half of
            `max_scratch_bytes`, ranks of a `process_group` hold the same rows of both, and `add_to_weight_grad` has no
            effect.

    Returns:
        `DivergenceOutput`: `loss` (0-d fp32), differentiable in hidden states, weight and bias; `divergence` and
        `entropies` of the policy, detached fp32. fp64 inputs give fp64 results.

    Raises:
        ValueError: a shape, range, option or combination that is not supported; an infinite divergence or NaN on active
            tokens (CPU; elsewhere with `GRPO_FUSED_DEBUG=1`). The reverse KL is infinite where q_j is 0 and p_j is not,
            the forward KL where p_j is 0 and q_j is not. A probability of 0 in the first distribution counts 0.
        TypeError: a wrong type or dtype, a quantised weight that is no `QuantizedWeight` or is the other head's, a
            module in place of its weight.

    Equivalent in plain PyTorch (reverse KL, all active)::

        log_p = (hidden_states.float() @ lm_head_weight.float().T / temperature).log_softmax(-1)
        log_q = (other_hidden_states.float() @ other_lm_head_weight.float().T / temperature).log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        loss = divergence.mean()

    Source: generalised JSD of on-policy distillation, GKD (arXiv 2306.13649).
    """
    with checking(fused_linear_divergence, head, "candidates"):
        if ParallelGroups.of(head.get("process_group")).tokens is not None:
            raise ValueError("a divergence takes slices of the vocabulary only; got a group of ranks with other tokens")
        check_choice(kind, "kind", DivergenceKind)
        check_choice(impl, "impl", DivergenceImpl)
        check_number(beta, "beta")
        if not 0.0 < beta < 1.0 if kind == "jsd" else beta != 0.5:
            raise ValueError(
                f"beta must be in (0, 1) for kind='jsd', left out for other kinds; got {beta} for {kind!r}"
            )
        check.check_tensor(hidden_states, "hidden_states", check.FLOAT, ("B", "T", "H"), ("N", "H"))
        tokens = hidden_states.new_zeros(hidden_states.shape[:-1], dtype=torch.int64)  # no ids are given
        layout = Layout.of(tokens)
        options = cast(HeadOptions, {**head, "impl": "chunked" if impl == "auto" else impl})
        hidden_states, lm_head, _, run = head_of(
            hidden_states, lm_head_weight, tokens, mask, layout, options, names=("mask", "mask")
        )
        check.check_mask(weights, tokens, "weights")  # weights have the shape of a mask
        other = None
        others = {
            "other_hidden_states": other_hidden_states, "other_lm_head_weight": other_lm_head_weight,
            "other_ids": other_ids, "other_logprobs": other_logprobs,
        }  # fmt: skip
        is_there = [x is not None for x in others.values()]
        if other_hidden_states is not None and other_lm_head_weight is not None and not any(is_there[2:]):
            lm_head, other = beside(
                lm_head, layout, "other head", other_hidden_states, other_lm_head_weight, other_lm_head_bias,
                other_logit_scale, other_softcap,
            )  # fmt: skip
        elif other_ids is not None and other_logprobs is not None and not any(is_there[:2]):
            if kind != "forward_kl":
                raise ValueError(f"other_ids and other_logprobs are for kind='forward_kl'; got {kind!r}")
            of_head = {"other_lm_head_bias": other_lm_head_bias, "other_softcap": other_softcap}
            if other_logit_scale != 1.0 or any(x is not None for x in of_head.values()):
                raise ValueError(
                    f"{', '.join(of_head)} and other_logit_scale are of another head; other_logprobs has none"
                )
            check.check_tensor(other_ids, "other_ids", check.INTEGER, (*layout.shape, "K"))
            shape = tuple(other_ids.shape)
            check.check_tensor(other_logprobs, "other_logprobs", check.FLOAT, shape, beside="other_ids")
        else:
            got = ", ".join(name for name, x in others.items() if x is not None) or "none"
            raise ValueError(f"the first two or the last two of {', '.join(others)} must be given; got {got}")
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        weights = (mask != 0).double() / (mask != 0).sum().clamp(min=1) if weights is None else weights
        needs = needs_of(hidden_states, lm_head.weight, lm_head.bias)
        call = DivergenceCall(
            hidden_states, lm_head, mask, weights, kind, beta, other_hidden_states, other, other_ids, other_logprobs,
            needs, run,
        )  # fmt: skip
        check.check_devices(call)

    if run.engine == "reference":
        return reference.linear_divergence(call)
    return DivergenceOutput(*LinearLoss.apply(*tensors_of(call), call)[:3])
