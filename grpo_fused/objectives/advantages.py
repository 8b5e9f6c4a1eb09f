"""Group-relative advantages from rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_fused.call.options import check_choice, check_integer
from grpo_fused.call.outputs import AdvantageOutput

ScaleRewards = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

_EPS = 1e-4  # TRL's: keeps the quotient finite if all rewards of a group are equal


def group_advantages(
    rewards: Tensor | Sequence[float | None] | Sequence[Sequence[float | None]],
    num_generations: int,
    *,
    weights: Tensor | Sequence[float] | None = None,
    scale_rewards: ScaleRewards | bool = "group",
    aggregation: Aggregation = "sum_then_normalize",
) -> AdvantageOutput:
    """How much better each sample is than its group, in standard deviations.

        A = (r - mean_group(r)) / (std(r) + 1e-4),   r = sum_f weight_f * reward_f

    Args:
        rewards: `[N]` or `[N, F]` for F reward functions, a tensor or nested lists; groups are contiguous. None or NaN
            marks a sample that a function did not judge; +-inf raises.
        num_generations: Samples per group, >= 2; divides N.
        weights: `[F]`, default all 1.
        scale_rewards: `"group"` (or True) divides by the group's standard deviation, `"batch"` by that of all summed
            rewards, `"none"` (or False) not at all (Dr. GRPO).
        aggregation: `"sum_then_normalize"` sums the functions first; `"normalize_then_sum"` takes z-scores of each
            function within the group, sums them with the weights, and takes z-scores over the batch (GDPO); it
            does not read `scale_rewards`.

    Returns:
        `AdvantageOutput(advantages, mean, std, unjudged, zero_std_groups)`, fp32. A sample that no function judged has
        A = 0 and is left out of the baseline. If fewer than two samples are judged there is no z-score: A = 0.

    Raises:
        ValueError: Group size below 2, rewards not divisible into groups, wrong shapes, infinite rewards, unknown
            options.
        TypeError: Rewards or weights are not numbers.

    Equivalent for one function and all samples judged::

        groups = rewards.view(-1, num_generations)
        ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

    Source: DeepSeekMath (arXiv 2402.03300); missing rewards and the two aggregations follow TRL 1.16.
    """
    scale = ("group" if scale_rewards else "none") if isinstance(scale_rewards, bool) else scale_rewards
    check_choice(scale, "scale_rewards", ScaleRewards)
    check_choice(aggregation, "aggregation", Aggregation)
    table = as_table(rewards)
    check_groups(len(table), num_generations)

    summed = weighted_sum(table, weights)
    groups = summed.view(-1, num_generations)
    std = nan_std(groups, dim=1)
    several = (~groups.isnan()).sum(dim=1) >= 2
    equal = all_equal(groups, dim=1).squeeze(1)
    if aggregation == "normalize_then_sum":
        scores = z_score(table.view(-1, num_generations, table.shape[1]), dim=1).view_as(table)
        advantages = z_score(weighted_sum(scores, weights), dim=0)
    else:
        centred = groups - groups.nanmean(dim=1, keepdim=True)
        if scale == "group":
            centred = centred / (std + _EPS)
        elif scale == "batch":
            centred = centred / (nan_std(summed, dim=0) + _EPS)
        advantages = torch.where((several & ~equal).unsqueeze(1), centred, 0.0).flatten()

    return AdvantageOutput(
        advantages=advantages.nan_to_num(nan=0.0).float(),
        mean=groups.nanmean(dim=1).float(),
        std=std.flatten().float(),
        unjudged=summed.isnan().sum(),
        zero_std_groups=(several & equal).sum(),
    )


def check_groups(count: int, num_generations: int) -> None:
    """Raise unless so many samples are groups of two or more."""
    check_integer(num_generations, "num_generations", least=2)
    if count % num_generations:
        raise ValueError(f"{count} rewards cannot be divided into groups of num_generations={num_generations}")


def weighted_sum(table: Tensor, weights: Tensor | Sequence[float] | None) -> Tensor:
    """[N] of [N, F], with weights [F], 1 by default; NaN where no function judged."""
    given = [1.0] * table.shape[1] if weights is None else weights
    try:
        weight = torch.as_tensor(given, dtype=torch.float64, device=table.device).detach()
    except (TypeError, ValueError) as error:
        raise TypeError(f"weights must be a tensor or a list of numbers; {error}") from None
    if weight.shape != table.shape[1:] or not weight.isfinite().all():
        raise ValueError(
            f"weights must be [{table.shape[1]}], a finite one for each reward function; got {weight.tolist()}"
        )
    return torch.where(table.isnan().all(dim=1), torch.nan, (table * weight).nansum(dim=1))


def nan_std(x: Tensor, dim: int) -> Tensor:
    """Bessel-corrected standard deviation over judged samples, NaN below two of them; keeps `dim`."""
    count = (~x.isnan()).sum(dim=dim, keepdim=True)
    squares = (x - x.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return torch.where(count > 1, squares / (count - 1), torch.nan).sqrt()


def all_equal(x: Tensor, dim: int) -> Tensor:
    """Whether the judged samples are all the same, without the rounding of a mean; keeps `dim`."""
    steps = x.sort(dim=dim).values.diff(dim=dim)  # NaN comes last
    return ((steps == 0) | steps.isnan()).all(dim=dim, keepdim=True)


def z_score(x: Tensor, dim: int, eps: float = _EPS) -> Tensor:
    """(x - mean) / (std + eps) over judged samples, NaN for others; 0 if all are equal."""
    mean = torch.where(all_equal(x, dim), x, x.nanmean(dim=dim, keepdim=True))
    return (x - mean) / (nan_std(x, dim) + eps)


def as_table(rewards: Tensor | Sequence[float | None] | Sequence[Sequence[float | None]]) -> Tensor:
    """[N, F] fp64: sums and standard deviations of rewards as large as 1e6 stay accurate."""
    if getattr(getattr(rewards, "dtype", None), "kind", None) in ("O", "U"):  # an array with None, or of texts
        rewards = rewards.tolist()  # type: ignore[union-attr]
    if isinstance(rewards, Tensor):  # on its device, whatever the default one is
        table = rewards.detach()
    elif hasattr(rewards, "__array__"):
        table = torch.as_tensor(rewards)
    else:
        try:
            rows = [[_number(r) for r in (row if isinstance(row, (list, tuple)) else [row])] for row in rewards]
        except (TypeError, ValueError) as error:
            raise TypeError(f"rewards must be a tensor or (nested) lists of numbers and None; {error}") from None
        widths = {len(row) for row in rows}
        if len(widths) > 1:
            raise ValueError(f"every sample must have one reward per function; got rows of {sorted(widths)} rewards")
        table = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), max(widths, default=1))
    if table.dim() not in (1, 2):
        raise ValueError(f"rewards must be [N] or [N, F]; got shape {tuple(table.shape)}")
    if table.is_complex():
        raise TypeError(f"rewards must be real numbers; got {table.dtype}")
    if table.isinf().any():
        raise ValueError("rewards must be finite (None or NaN marks a sample that was not judged); got an infinite one")
    table = table.to(torch.float64)
    return table.unsqueeze(1) if table.dim() == 1 else table


def _number(reward: Any) -> float:
    if isinstance(reward, str):
        raise TypeError(f"got the string {reward!r}")
    return torch.nan if reward is None else float(reward)
