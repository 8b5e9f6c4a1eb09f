"""The results of the public functions: always these tuples, with any options; fp64 in place of fp32 for fp64 inputs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GRPOLossOutput(NamedTuple):
    """Result of `fused_linear_grpo_loss` and `grpo_loss`.

    Args:
        loss: 0-d fp32, differentiable.
        per_token_logps: fp32, nats, shaped like the token ids; detached, 0 where masked.
        entropies: fp32, nats, shaped like the token ids; detached, 0 where masked. None if the caller of `grpo_loss`
            gave none, and with `with_metrics=False` where the loss does not need them (`impl="reference"` always has
            them).
        metrics: 0-d fp32 tensors on the device, with TRL's names; detached.
    """

    loss: Tensor
    per_token_logps: Tensor
    entropies: Tensor | None
    metrics: dict[str, Tensor]


class ObjectiveOutput(NamedTuple):
    """Result of `fused_linear_objective`.

    Args:
        loss: 0-d fp32, differentiable.
        per_token_logps: fp32, nats, shaped like the token ids; detached, 0 where masked.
        entropies: fp32, nats, shaped like the token ids; detached, 0 where masked. None unless requested.
    """

    loss: Tensor
    per_token_logps: Tensor
    entropies: Tensor | None


class DivergenceOutput(NamedTuple):
    """Result of `fused_linear_divergence`.

    Args:
        loss: 0-d fp32, differentiable.
        divergence: fp32, nats, `[B, T]` or `[N]`: each token's; detached, 0 where masked.
        entropies: fp32, nats, `[B, T]` or `[N]`: of the policy; detached, 0 where masked.
    """

    loss: Tensor
    divergence: Tensor
    entropies: Tensor


class LogprobOutput(NamedTuple):
    """Result of `fused_linear_logprobs` and `selective_logprobs`.

    Args:
        logps: fp32, nats, shaped like the token ids; differentiable, 0 where masked.
        entropies: fp32, nats, shaped like the token ids; differentiable, 0 where masked. None unless requested.
        alternative_logps: fp32, nats, `[M]`: of `alternatives`, in their order; differentiable, 0 where masked. None if
            none were given.
    """

    logps: Tensor
    entropies: Tensor | None
    alternative_logps: Tensor | None = None


class AdvantageOutput(NamedTuple):
    """Result of `group_advantages` for N samples in N / num_generations groups.

    Args:
        advantages: [N] fp32; 0 for samples that no reward function judged.
        mean: [N / num_generations] fp32: mean weighted reward of each group over its judged samples (NaN if none).
        std: [N / num_generations] fp32: Bessel-corrected standard deviation of the same (NaN below two judged samples).
        unjudged: 0-d int64: samples that no reward function judged.
        zero_std_groups: 0-d int64: groups whose judged samples (two or more) all have the same reward; they give no
            gradient.
    """

    advantages: Tensor
    mean: Tensor
    std: Tensor
    unjudged: Tensor
    zero_std_groups: Tensor


class ImportanceSamplingOutput(NamedTuple):
    """Result of `importance_sampling_correction`.

    Args:
        ratio: fp32 (fp64 for fp64 inputs), for `importance_sampling_ratio=`: shaped like the log-probs in the token
            modes, `[B, 1]` (`[S, 1]` packed) in the sequence modes.
        metrics: 0-d fp32 tensors on the device, with TRL's names.
    """

    ratio: Tensor
    metrics: dict[str, Tensor]
