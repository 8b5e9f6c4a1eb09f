"""The loss of a micro-batch: of a loss type, or of an objective."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor

from grpo_fused import GRPOLossConfig, fused_linear_grpo_loss, fused_linear_objective
from grpo_fused.call.outputs import GRPOLossOutput
from grpo_fused.objectives import token_weights
from grpo_fused.objectives.weights import Aggregation
from grpo_fused.trainer.policy import Policy, Reference
from grpo_fused.trainer.rollout import Rollout


class Part(NamedTuple):
    """A micro-batch of b sequences, and what its loss takes."""

    micro: Rollout
    advantages: Tensor  # [b]
    tables: dict[str, Any]  # tensors [b, t], by name
    loss: GRPOLossConfig
    num_items_in_batch: float | None  # tokens of all micro-batches and processes, for loss types that divide by them


def of_loss_type(policy: Policy, reference: Reference | None, part: Part) -> GRPOLossOutput:
    """`fused_linear_grpo_loss` of the part."""
    micro, config = part.micro, part.loss
    exact = {} if reference is None or config.kl_estimator != "exact" else reference.states(micro)
    return fused_linear_grpo_loss(
        policy.hidden_states(micro),
        completion_ids=micro.completion_ids,
        advantages=part.advantages,
        completion_mask=micro.completion_mask,
        candidates=micro.candidates,
        **policy.trained_head(),
        **part.tables,
        **exact,
        sampling_per_token_logps=micro.sampling_logps if config.off_policy_mask_threshold is not None else None,
        num_items_in_batch=part.num_items_in_batch,
        config=config,
    )


def of_objective(policy: Policy, reference: Reference | None, part: Part) -> GRPOLossOutput:
    """`fused_linear_objective` of the part, its tokens weighted as the loss type averages."""
    micro, chosen = part.micro, policy.config.objective
    assert chosen is not None
    objective, mask, others = chosen.objective, micro.completion_mask, micro.alternatives
    weights = token_weights(
        mask,
        cast(Aggregation, part.loss.loss_type),
        num_items_in_batch=part.num_items_in_batch,
        max_completion_length=part.loss.max_completion_length,
    )
    inputs = {
        "advantages": part.advantages.unsqueeze(1).expand_as(mask),
        "weights": weights,
        "sampling_per_token_logps": micro.sampling_logps,
        **part.tables,
    }
    out = fused_linear_objective(
        policy.hidden_states(micro),
        token_ids=micro.completion_ids,
        objective=objective,
        mask=mask,
        inputs={name: x for name, x in inputs.items() if x is not None and name in (objective.reads or ())},
        scope=objective.scope,
        with_entropy=True,
        alternatives=None if others is None else others.sets,
        alternative_inputs=None if others is None else {"sampling_alternative_logps": others.logps},
        candidates=micro.candidates,
        **policy.trained_head(),
    )
    assert out.entropies is not None
    means = {"entropy": out.entropies.sum() / mask.sum()}  # 0 where masked
    if micro.sampling_logps is not None:
        means["sampler_kl"] = (micro.sampling_logps - out.per_token_logps)[mask].sum() / mask.sum()
    return GRPOLossOutput(out.loss, out.per_token_logps, out.entropies, means)
