"""`group_advantages` against hand-computed cases and TRL's arithmetic."""

from __future__ import annotations

import pytest
import torch

from grpo_fused import group_advantages


def test_worked_example():
    """8 answers, 4 correct: mean 0.5, std 0.5345, A = +-0.9352 (course texts round to 0.94)."""
    out = group_advantages([1, 0, 0, 1, 1, 0, 1, 0], 8)
    sign = torch.tensor([1, -1, -1, 1, 1, -1, 1, -1])
    torch.testing.assert_close(out.mean, torch.tensor([0.5]))
    torch.testing.assert_close(out.std, torch.tensor([0.5345]), atol=5e-5, rtol=0)
    torch.testing.assert_close(out.advantages, 0.9352 * sign, atol=5e-5, rtol=0)
    assert out.unjudged == 0
    assert out.zero_std_groups == 0


def test_scales():
    rewards = torch.tensor([0.0, 2.0, 5.0, 5.0])
    assert group_advantages(rewards, 2, scale_rewards="none").advantages.tolist() == [-1.0, 1.0, 0.0, 0.0]
    torch.testing.assert_close(
        group_advantages(rewards, 2, scale_rewards="batch").advantages,
        torch.tensor([-1.0, 1.0, 0.0, 0.0]) / (rewards.std() + 1e-4),
    )
    out = group_advantages(rewards, 2, scale_rewards=True)
    torch.testing.assert_close(out.advantages[:2], torch.tensor([-1.0, 1.0]) / (2**0.5 + 1e-4))
    assert out.zero_std_groups == 1
    same = group_advantages(rewards, 2, scale_rewards=False)
    assert torch.equal(same.advantages, group_advantages(rewards, 2, scale_rewards="none").advantages)


def test_unjudged_samples_stay_out_of_the_baseline():
    out = group_advantages([[1.0, None], [None, None], [None, 3.0], [2.0, 0.0]], 4, weights=[1.0, 0.5])
    judged = torch.tensor([1.0, 1.5, 2.0])
    assert out.unjudged == 1
    assert out.advantages[1] == 0
    torch.testing.assert_close(out.mean, judged.mean().reshape(1))
    expected = (judged - judged.mean()) / (judged.std() + 1e-4)
    torch.testing.assert_close(out.advantages[[0, 2, 3]], expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_fewer_than_two_judged_give_no_advantage(scale):
    out = group_advantages([7.0, None, None, None, 1.0, 2.0, 3.0, 4.0], 4, scale_rewards=scale)
    assert out.advantages[:4].tolist() == [0.0] * 4
    assert out.advantages[4:].abs().min() > 0
    assert out.unjudged == 3
    assert out.zero_std_groups == 0
    assert out.std[0].isnan()
    none = group_advantages([None, None], 2, scale_rewards=scale)
    assert none.advantages.tolist() == [0.0, 0.0]


def test_normalize_then_sum():
    rewards = torch.tensor([[1.0, 10.0], [2.0, 30.0], [3.0, 20.0], [0.0, 1.0], [4.0, 1.0], [1.0, 1.0]])
    out = group_advantages(rewards, 3, weights=[1.0, 2.0], aggregation="normalize_then_sum")
    groups = rewards.view(2, 3, 2)
    z = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(6, 2)
    summed = z @ torch.tensor([1.0, 2.0])
    torch.testing.assert_close(out.advantages, (summed - summed.mean()) / (summed.std() + 1e-4))


def test_missing_z_scores_stay_out_of_the_batch():
    """One judged sample of three has no z-score, nor has one that nobody judged: the batch's std is of the others."""
    rewards = [[7.0, None], [None, None], [None, None], [1.0, 5.0], [2.0, None], [6.0, 5.0]]
    out = group_advantages(rewards, 3, weights=[1.0, 2.0], aggregation="normalize_then_sum")
    judged = torch.tensor([1.0, 2.0, 6.0])
    z = (judged - judged.mean()) / (judged.std() + 1e-4)  # the second function's are 0: its two rewards agree
    assert out.advantages[:3].tolist() == [0.0] * 3
    torch.testing.assert_close(out.advantages[3:], (z - z.mean()) / (z.std() + 1e-4))
    assert out.unjudged == 2


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_matches_trl_arithmetic(aggregation, missing):
    utils = pytest.importorskip("trl.trainer.utils")
    g = torch.Generator().manual_seed(3)
    rewards = torch.rand(24, 3, generator=g, dtype=torch.float64)
    rewards[torch.rand(24, 3, generator=g) < missing] = torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    unscorable = rewards.isnan().all(1)
    if aggregation == "sum_then_normalize":
        summed = (rewards * weights).nansum(1)
        summed[unscorable] = torch.nan
        groups = summed.view(-1, 6)
        expected = (groups - groups.nanmean(1, keepdim=True)) / (utils.nanstd(groups, dim=1).unsqueeze(1) + 1e-4)
    else:
        groups = rewards.view(-1, 6, 3)
        z = (groups - groups.nanmean(1, keepdim=True)) / (utils.nanstd(groups, dim=1, keepdim=True) + 1e-4)
        summed = (z.view(-1, 3) * weights).nansum(1)
        summed[unscorable] = torch.nan
        expected = (summed - summed.nanmean()) / (utils.nanstd(summed) + 1e-4)
    got = group_advantages(rewards, 6, weights=weights, aggregation=aggregation).advantages
    assert got.abs().max() > 0.5
    torch.testing.assert_close(got, expected.nan_to_num().flatten().float())


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "num_generations must be at least 2.*; got 1", lambda: group_advantages([1.0, 2.0], 1)),
        (ValueError, "3 rewards cannot be divided into groups", lambda: group_advantages([1.0, 2.0, 3.0], 2)),
        (ValueError, r"rewards must be \[N\] or \[N, F\]", lambda: group_advantages(torch.zeros(2, 2, 2), 2)),
        (ValueError, r"weights must be \[1\].*got \[1.0, 2.0\]", lambda: group_advantages([1.0, 2.0], 2, weights=[1, 2])),
        (ValueError, "rewards must be finite", lambda: group_advantages([1.0, float("inf")], 2)),
        (ValueError, "scale_rewards must be one of group, batch, none; got 'max'",
         lambda: group_advantages([1.0, 2.0], 2, scale_rewards="max")),
        (ValueError, "aggregation must be one of", lambda: group_advantages([1.0, 2.0], 2, aggregation="mean")),
        (ValueError, "one reward per function; got rows of", lambda: group_advantages([[1.0], [1.0, 2.0]], 2)),
        (TypeError, "rewards must be a tensor or .*'good'", lambda: group_advantages(["good", 1.0], 2)),
        (TypeError, "num_generations must be an int; got 2.0", lambda: group_advantages([1.0, 2.0], 2.0)),
    ],
)  # fmt: skip
def test_refuses(error, message, call):
    with pytest.raises(error, match=message):
        call()
