"""Objectives that read several tokens of a position: score centering, and divergences on K tokens.

They are called with `alternatives` (`fused_linear_objective`): tokens a of each position, with probabilities p_a of the
policy and an input for each of them, such as the sampler's log-probs. sg is a stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from grpo_fused.call.options import check_choice, check_number
from grpo_fused.objective.formulas import MAX_LOG_RATIO
from grpo_fused.objectives.base import Objective, Tokens, described
from grpo_fused.objectives.token import SAMPLER, check_band

Support = Literal["mask", "top_k"]
Tail = Literal["left_out", "lumped"]

SAMPLED = "sampling_alternative_logps"
SMALLEST_TAIL = 1e-6
"""what the mass outside of K tokens is at least: in fp32 it can be rounded to 0"""

Weight = Callable[[Tensor, Tensor], Tensor]
"""w(log p, log q), without a gradient."""


def score_centered_reinforce(support: Support = "mask") -> Objective:
    """REINFORCE without the drift towards the sampler.

        l = -A (sg(w_y) log p_y - sum_a sg(c_a) log p_a),   w = 1

    | support | alternatives | c_a |
    |---|---|---|
    | `"mask"` | all tokens that could be sampled (`alternatives=candidates`), log-probs over them | q_a w_a |
    | `"top_k"` | the sampler's K most likely tokens, log-probs over the whole vocabulary | q_a w_a - alpha p_a |

    q are the sampler's probabilities. The sum over a is the expected score under the sampler: what is subtracted has
    mean 0 with respect to rewards, so a constant advantage moves nothing. Over the mask that is exact. In "top_k" the
    sampler is taken to be p outside the K tokens, rescaled to its mass there: alpha = r w(1 / r) with r = (1 - sum q) /
    (1 - sum p), both masses at least 1e-6. A third form, exact without truncation, takes the sampler's hidden states
    and head: `fused_linear_divergence(kind="forward_kl", weights=...)` (docs/alternatives.md).

    Scope "token". Inputs: `advantages`, `sampling_per_token_logps` (NaN: ratio 1), optional `weights`; for each
    alternative `sampling_alternative_logps`.

    Args:
        support: see the table.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: score centering (arXiv 2609.20807); as vime and torchtitan have it ("top_k"), and prime-rl ("mask").
    """
    return _centered("score_centered_reinforce", support, lambda log_p, log_q: torch.ones_like(log_p), {})


def score_centered_tis(support: Support = "mask", cap: float = 2.0) -> Objective:
    """`score_centered_reinforce` with truncated importance sampling: w = min(p / q, cap).

    Scope "token". Inputs: those of `score_centered_reinforce`.

    Args:
        support: "mask" or "top_k".
        cap: Largest ratio, > 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: score centering (arXiv 2609.20807), its equation 14; checked against the functions of vime, torchtitan and
    a development branch of verl.
    """
    bound = check_number(cap, "cap", above=0.0)
    return _centered("score_centered_tis", support, lambda *logs: _ratio(*logs).clamp(max=bound), {"cap": cap})


def score_centered_icepop(support: Support = "mask", low: float = 0.2, high: float = 5.0) -> Objective:
    """`score_centered_reinforce` with IcePop's weight: w = p / q where low <= p / q <= high, else 0.

    Scope "token". Inputs: those of `score_centered_reinforce`.

    Args:
        support: "mask" or "top_k".
        low: Smallest ratio that counts, > 0.
        high: Largest ratio that counts, >= `low`.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: score centering (arXiv 2609.20807); checked against the functions of vime and a
    development branch of verl.
    """
    check_band(low, high)

    def weight(log_p: Tensor, log_q: Tensor) -> Tensor:
        ratio = _ratio(log_p, log_q)
        return ratio * ((ratio >= low) & (ratio <= high))

    return _centered("score_centered_icepop", support, weight, {"low": low, "high": high})


def score_centered_ipo(threshold: float = 0.3, cap: float = 1e4) -> Objective:
    """`score_centered_reinforce` over the mask with IPO's weight.

        w = min(p / q, cap) where |p - q| <= threshold, else 0

    Not from the top K: the weight of the tail must be a function of the ratio alone.

    Scope "token". Inputs: those of `score_centered_reinforce`.

    Args:
        threshold: Largest change in probability, >= 0.
        cap: Largest ratio, > 0.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: prime-rl's `ipo` with `score_centering` (without its penalty); checked against its function.
    """
    bound, largest = check_number(threshold, "threshold", least=0.0), check_number(cap, "cap", above=0.0)

    def weight(log_p: Tensor, log_q: Tensor) -> Tensor:
        return _ratio(log_p, log_q).clamp(max=largest) * ((log_p.exp() - log_q.exp()).abs() <= bound)

    return _centered("score_centered_ipo", "mask", weight, {"threshold": threshold, "cap": cap})


def topk_forward_kl(tail: Tail = "left_out", teacher: str = "teacher_alternative_logps") -> Objective:
    """The forward KL divergence from a teacher on K tokens: on-policy distillation.

        l = sum_a q_a (log q_a - log p_a)  [+ (1 - Q) log((1 - Q) / (1 - P)) with tail="lumped"]

    q are the teacher's probabilities over the whole vocabulary, Q and P the sums over the alternatives: the teacher's K
    most likely tokens. Lumped, all other tokens are one event, and the sum is a divergence; left out, it can be
    negative.

    Scope "token". Inputs: optional `weights`; `teacher` for each alternative, NaN where it is none of this teacher's
    tokens.

    Args:
        tail: "left_out" or "lumped".
        teacher: The name of the input. With several teachers, each with a name, `mixture` sums their objectives.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: verl's `forward_kl_topk` (its bound at 0 left out) and `forward_kl_topk_tail`.
    """
    return _topk("topk_forward_kl", tail, teacher, lambda log_p, log_q: log_q.exp() * (log_q - log_p))


def topk_reverse_kl(tail: Tail = "left_out", teacher: str = "teacher_alternative_logps") -> Objective:
    """The reverse KL divergence from a teacher on K tokens.

        l = sum_a p_a (log p_a - log q_a)  [+ (1 - P) log((1 - P) / (1 - Q)) with tail="lumped"]

    As `topk_forward_kl`; the alternatives are the student's K most likely tokens, or the teacher's. Left out, the sum
    can be made small by small p_a, and training may collapse.

    Scope "token". Inputs and arguments: those of `topk_forward_kl`.

    Returns:
        An `Objective`, for `fused_linear_objective`.

    Raises:
        ValueError, TypeError: An option is out of range, or of another type.

    Source: verl's `reverse_kl_topk` (its PR 7590).
    """
    return _topk("topk_reverse_kl", tail, teacher, lambda log_p, log_q: log_p.exp() * (log_p - log_q))


def _ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p - log_q).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _centered(name: str, support: Support, weight: Weight, options: dict[str, float]) -> Objective:
    check_choice(support, "support", Support)

    def loss(tokens: Tokens) -> Tensor:
        others = tokens.alternatives
        log_p, log_q = others.logps.detach(), others.inputs[SAMPLED]
        coefficient = log_q.exp() * weight(log_p, log_q)
        if support == "top_k":
            left = (1.0 - others.sum(log_q.exp())).clamp(min=SMALLEST_TAIL)
            kept = (1.0 - others.sum(log_p.exp())).clamp(min=SMALLEST_TAIL)
            alpha = left / kept * weight(kept.log(), left.log())
            coefficient = coefficient - others.at(alpha) * log_p.exp()
        score = weight(tokens.logps.detach(), tokens.sampling) * tokens.logps
        return -tokens.advantages * (score - others.sum(coefficient * others.logps))

    return Objective(described(name, support=support, **options), loss, needs=SAMPLER, of_alternatives=(SAMPLED,))


def _topk(name: str, tail: Tail, teacher: str, term: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    check_choice(tail, "tail", Tail)
    if not teacher.endswith("_logps"):
        raise ValueError(f"teacher must be the name of an input that ends in _logps; got {teacher!r}")

    def loss(tokens: Tokens) -> Tensor:
        others = tokens.alternatives
        given = others.inputs[teacher]
        has = ~given.isnan()
        log_p, log_q = others.logps, torch.where(has, given, 0.0)
        total = others.sum(torch.where(has, term(log_p, log_q), 0.0))
        if tail == "left_out":
            return total
        # of one event more: what is left of both distributions
        kept, left = (
            (1.0 - others.sum(torch.where(has, x.exp(), 0.0))).clamp(min=SMALLEST_TAIL).log() for x in (log_p, log_q)
        )
        return total + term(kept, left)

    return Objective(described(name, tail=tail, teacher=teacher), loss, needs=(), of_alternatives=(teacher,))
