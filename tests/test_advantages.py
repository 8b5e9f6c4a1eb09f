"""`group_advantages` against hand-computed cases and TRL's arithmetic; the other estimators against their formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from grpo_fused import group_advantages
from grpo_fused.objectives import estimators


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


def test_equal_rewards_have_no_advantage_by_rounding():
    """The mean of six equal sums is 1e-15 off: such rows would be trained on."""
    rewards = torch.tensor([[-20.0, 0.1]]).repeat(12, 1)
    for scale in ("group", "none"):
        out = group_advantages(rewards, 6, weights=[0.5, 0.3], scale_rewards=scale)
        assert out.zero_std_groups == 2
        assert not out.advantages.any()


def test_unjudged_samples_are_left_out_of_the_baseline():
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


@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_equal_judged_rewards_are_equal_beside_an_unjudged_one(reward):
    assert group_advantages([reward, None, reward], 3).zero_std_groups == 1


def test_rewards_may_be_tuples_or_an_array():
    rows = [(1.0, 2.0), (3.0, 5.0)]
    for rewards in (rows, np.array(rows), np.array(rows, dtype=object)):
        assert torch.equal(group_advantages(rewards, 2).advantages, group_advantages([3.0, 8.0], 2).advantages)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_no_rewards_have_no_advantages(aggregation):
    assert group_advantages([], 2, aggregation=aggregation).advantages.shape == (0,)
    assert estimators.pass_at_k([], 2, 1).shape == (0,)


def test_advantages_are_on_the_device_of_the_rewards():
    rewards = torch.tensor([1.0, 0.0])
    with torch.device("meta"):  # another one than the default
        assert group_advantages(rewards, 2).advantages.device == estimators.rloo(rewards, 2).device == rewards.device


def test_normalize_then_sum():
    rewards = torch.tensor([[1.0, 10.0], [2.0, 30.0], [3.0, 20.0], [0.0, 1.0], [4.0, 1.0], [1.0, 1.0]])
    out = group_advantages(rewards, 3, weights=[1.0, 2.0], aggregation="normalize_then_sum")
    groups = rewards.view(2, 3, 2)
    z = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(6, 2)
    summed = z @ torch.tensor([1.0, 2.0])
    torch.testing.assert_close(out.advantages, (summed - summed.mean()) / (summed.std() + 1e-4))


def test_equal_rewards_of_each_function_are_exactly_zero():
    """The mean of three times 0.1 is not 0.1."""
    rewards = torch.tensor([[0.1, 0.7]], dtype=torch.float64).expand(9, 2)
    assert not group_advantages(rewards, 3, aggregation="normalize_then_sum").advantages.any()
    assert not estimators.gdpo(rewards, 3, torch.ones(9, dtype=torch.long)).any()


def test_missing_z_scores_are_left_out_of_the_batch():
    """A single judged sample of three has no z-score, and an unjudged one neither: the batch's std is of the others."""
    rewards = [[7.0, None], [None, None], [None, None], [1.0, 5.0], [2.0, None], [6.0, 5.0]]
    out = group_advantages(rewards, 3, weights=[1.0, 2.0], aggregation="normalize_then_sum")
    judged = torch.tensor([1.0, 2.0, 6.0])
    z = (judged - judged.mean()) / (judged.std() + 1e-4)  # the second function's are 0: its two rewards are equal
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
        (ValueError, "rewards must be finite", lambda: group_advantages([1.0, -math.inf], 2)),
        (ValueError, "scale_rewards must be one of group, batch, none; got 'max'",
         lambda: group_advantages([1.0, 2.0], 2, scale_rewards="max")),
        (ValueError, "aggregation must be one of", lambda: group_advantages([1.0, 2.0], 2, aggregation="mean")),
        (ValueError, "one reward per function; got rows of", lambda: group_advantages([[1.0], [1.0, 2.0]], 2)),
        (TypeError, "rewards must be a tensor or .*'good'", lambda: group_advantages(["good", 1.0], 2)),
        (TypeError, "num_generations must be an int; got 2.0", lambda: group_advantages([1.0, 2.0], 2.0)),
        (ValueError, r"a finite one for each reward function; got \[nan\]",
         lambda: group_advantages([1.0, 2.0], 2, weights=[math.nan])),
        (ValueError, r"a finite one for each reward function; got \[inf\]",
         lambda: group_advantages([1.0, 2.0], 2, weights=[math.inf])),
        (TypeError, "weights must be a tensor or a list of numbers", lambda: group_advantages([1.0, 2.0], 2, weights=["a"])),
        (TypeError, "rewards must be a tensor or .*'1.0'", lambda: group_advantages(np.array(["1.0", "2.0"]), 2)),
        (TypeError, "rewards must be a tensor or .*'1.0'", lambda: group_advantages(["1.0", 2.0], 2)),
        (TypeError, "rewards must be real numbers; got torch.complex64",
         lambda: group_advantages(torch.zeros(2, dtype=torch.complex64), 2)),
    ],
)  # fmt: skip
def test_refuses(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_large_rewards_keep_their_digits():
    rewards = torch.tensor([1e6, 1e6 + 0.01, 1e6 + 0.03], dtype=torch.float64, requires_grad=True)
    out = group_advantages(rewards, 3)
    d = torch.tensor([0.0, 0.01, 0.03], dtype=torch.float64)
    torch.testing.assert_close(out.advantages, ((d - d.mean()) / (d.std() + 1e-4)).float(), rtol=1e-5, atol=0)
    assert not out.advantages.requires_grad


R = [1.0, 0.0, 4.0, 3.0, 2.0, 2.0]
NAN = [1.0, None, 4.0, 3.0, None, None]
"""Two groups of three: one of three has no reward, then two of three."""
LENGTHS = torch.tensor([2, 1, 3, 0, 5, 1])


@pytest.mark.parametrize(("estimate", "plain", "missing"), [
    (lambda r: estimators.rloo(r, 3), [-1, -2.5, 3.5, 1, -0.5, -0.5], [-3, 0, 3, 0, 0, 0]),
    (lambda r: estimators.opo(r, 3, LENGTHS), [-4 / 3, -7 / 3, 5 / 3, 1, 0, 0], [-1.8, 0, 1.2, 3, 0, 0]),
    (lambda r: estimators.maxrl(r, 3), [-0.4, -1, 1.4, 2 / 7, -1 / 7, -1 / 7], [-0.6, 0, 0.6, 0, 0, 0]),
    (lambda r: estimators.remax(r, torch.tensor([1.0, 1, 1, 2, 2, 2])), [0, -1, 3, 1, 0, 0], [0, 0, 3, 1, 0, 0]),
    (lambda r: estimators.best_of_group(r, 3, scale=False), [0, 0, 3, 1, 0, 0], [0, 0, 3, 0, 0, 0]),
    (lambda r: estimators.best_of_group(r, 3), [0, 0, 3 / math.sqrt(13 / 3), 3**0.5, 0, 0], [0, 0, 2**0.5, 0, 0, 0]),
], ids=["rloo", "opo", "maxrl", "remax", "best_of_group", "best_of_group_scaled"])  # fmt: skip
def test_estimators_by_hand(estimate, plain, missing):
    for rewards, want in ((R, plain), (NAN, missing)):
        got = estimate(rewards)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=2e-6, atol=1e-6)


def test_estimators_sum_reward_functions():
    table = [[r, 1.0] for r in R]
    got = estimators.rloo(table, 3, weights=[2.0, 7.0])
    torch.testing.assert_close(got, 2 * estimators.rloo(R, 3))
    table = list(zip(R, reversed(R), strict=True))
    torch.testing.assert_close(
        estimators.gdpo(table, 3, LENGTHS, weights=[1.0, 0.0]), estimators.gdpo(R, 3, LENGTHS), rtol=1e-6, atol=1e-7
    )


def test_maxrl_of_a_group_that_fails_is_zero():
    assert estimators.maxrl([0.0, 0.0, 1.0, 0.0], 2).tolist() == [0.0, 0.0, 1.0, -1.0]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("right", range(6))
def test_pass_at_k_is_the_mean_over_all_subsets(k, right):
    rewards = [1.0] * right + [0.0] * (5 - right)
    subsets = list(itertools.combinations(range(5), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    mean = sum(best) / len(best)
    std = math.sqrt(mean * (1 - mean))
    for i, advantage in enumerate(estimators.pass_at_k(rewards, 5, k).tolist()):
        own = [b for b, subset in zip(best, subsets, strict=True) if i in subset]
        want = 0.0 if std == 0 else (sum(own) / len(own) - mean) / std
        assert advantage == pytest.approx(want, abs=1e-6)


def test_pass_at_k_leaves_out_unjudged_samples():
    got = estimators.pass_at_k([1.0, None, 0.0, 0.0, None, 1.0, None, None], 4, 2)
    assert got[:4].tolist() == pytest.approx([*estimators.pass_at_k([1.0, 0.0, 0.0], 3, 2).tolist()[:1], 0.0,
                                              *estimators.pass_at_k([1.0, 0.0, 0.0], 3, 2).tolist()[1:]])  # fmt: skip
    assert got[0] > 0
    assert got[4:].tolist() == [0.0] * 4


def _spread(advantages, lengths):
    """Each sample's advantage at each of its tokens."""
    return advantages.double().repeat_interleave(lengths)


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline"])
def test_whitened_over_tokens(name):
    """Mean 0 and standard deviation 1 over the tokens of judged samples, in the order of the centred rewards."""
    estimator = getattr(estimators, name)
    for rewards in (R, NAN):
        got = estimator(rewards, 3, LENGTHS)
        judged = torch.tensor([r is not None for r in rewards])
        assert (got[~judged] == 0).all()
        if name == "gdpo" and rewards is NAN:
            judged[3:] = False  # one judged sample of a group has no z-score
        tokens = _spread(got, LENGTHS * judged)
        torch.testing.assert_close(tokens.mean(), torch.zeros((), dtype=torch.float64), atol=1e-6, rtol=0)
        torch.testing.assert_close(tokens.std(), torch.ones((), dtype=torch.float64), atol=1e-5, rtol=0)
        assert got[0] < got[2]


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline"])
def test_a_sample_without_tokens_has_no_advantage(name):
    """Where the tokens of all others have one advantage, its own would be divided by a standard deviation of 0."""
    got = getattr(estimators, name)([0.0, 1.0, 0.0, 1.0], 2, torch.tensor([5, 0, 5, 0]))
    assert got.tolist() == [0.0] * 4


def test_gdpo_adds_a_millionth_to_the_standard_deviation():
    """verl's number: 1e-4, that of `group_advantages`, would take a third off the first group."""
    got = estimators.gdpo([0.0, 2e-4, 0.0, 2.0], 2, torch.ones(4))
    assert float(got[1] / got[3]) == pytest.approx(2**0.5 / (2**0.5 + 0.01), rel=1e-5)


def test_reinforce_plus_plus():
    rewards = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 9.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    # backwards: an active token has half the value of the active token after it; a masked one passes it on
    returns = torch.tensor([0.5 * (0.5 * 2), 0.5 * 2, 2, 3, 0])
    want = (returns - returns.mean()) / returns.std()
    got = estimators.reinforce_plus_plus(rewards, mask, gamma=0.5)
    torch.testing.assert_close(got[mask.bool()], want)
    assert (got[~mask.bool()] == 0).all()
    alone = estimators.reinforce_plus_plus(torch.ones(1, 2), torch.tensor([[1, 0]]))
    assert alone.tolist() == [[0.0, 0.0]]
    without_discount = estimators.reinforce_plus_plus(torch.ones(1, 2), torch.ones(1, 2))  # returns of 2 and 1
    assert without_discount.tolist() == [pytest.approx([0.5**0.5, -(0.5**0.5)])]


def test_whitening_adds_a_hundred_millionth_to_the_variance():
    """verl's number: 1e-6 would take a third off."""
    got = estimators.reinforce_plus_plus(torch.tensor([[1e-3, 1e-3]]), torch.ones(1, 2))
    assert got.tolist() == [pytest.approx([5e-4 / (5e-7 + 1e-8) ** 0.5, -5e-4 / (5e-7 + 1e-8) ** 0.5], rel=1e-5)]


def test_estimators_are_detached():
    one, leaf = torch.ones(2, 2), torch.rand(2, 2, requires_grad=True)
    for got in (
        group_advantages(leaf, 2, weights=leaf[0]).advantages,
        estimators.remax(R[:2], leaf[0]),
        estimators.reinforce_plus_plus(leaf, one),
        estimators.optimal_token_baseline(leaf, one, 2, leaf, leaf, importance_sampling_ratio=leaf),
    ):
        assert not got.requires_grad


def test_optimal_token_baseline():
    """Two samples; only the longer one has a last step."""
    rewards = estimators.at_last_token([1.0, 3.0], torch.tensor([[1, 1, 0], [1, 1, 1]]))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    p = torch.tensor([[0.5, 0.2, math.nan], [0.9, 0.4, 0.1]], dtype=torch.float64)
    squares = torch.tensor([[0.4, 0.3, math.nan], [0.82, 0.3, 0.2]], dtype=torch.float64)
    w = (1 - 2 * p + squares).nan_to_num()
    rho = torch.tensor([[0.5, 2.0, math.nan], [1.5, 0.8, 1.2]], dtype=torch.float64)
    for zero_tail, ratio in itertools.product((True, False), (None, rho)):
        W = (w if ratio is None else (w * ratio**2).nan_to_num()).cumsum(1) * mask
        baseline = (W * torch.tensor([[1.0], [3.0]])).sum(0) / W.sum(0)
        got = estimators.optimal_token_baseline(
            rewards, mask, 2, p.log(), squares, importance_sampling_ratio=ratio, zero_tail=zero_tail
        )
        want = (torch.tensor([[1.0], [3.0]]) - baseline) * mask
        if zero_tail:
            want[1, 2] = 3.0
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6)


def test_optimal_token_baseline_of_a_mask_with_a_hole():
    """A reward on a masked token does not count, and of two equally long samples none has a tail."""
    mask, p = torch.tensor([[1, 0, 1], [1, 0, 1]]), torch.full((2, 3), 0.5)
    rewards = torch.tensor([[0.0, 7.0, 1.0], [0.0, 0.0, 3.0]])
    got = estimators.optimal_token_baseline(rewards, mask, 2, p.log(), p)
    torch.testing.assert_close(got, torch.tensor([[-1.0, 0.0, -1.0], [1.0, 0.0, 1.0]]))


def test_optimal_token_baseline_of_completions_without_tokens():
    none = torch.ones(4, 0)
    assert estimators.optimal_token_baseline(none, none, 2, none, none).shape == (4, 0)


def test_only_the_longest_sample_has_a_tail_without_a_baseline():
    """By default; a token of the other one, behind a hole, keeps its own."""
    mask, p = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]]), torch.full((2, 4), 0.5)
    rewards = estimators.at_last_token([1.0, 3.0], mask)
    got = estimators.optimal_token_baseline(rewards, mask, 2, p.log(), p)
    torch.testing.assert_close(got, torch.tensor([[-1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.2, 0.0]]))


def test_certain_tokens_have_no_baseline():
    """Their gradients have no length, by which the baseline is divided."""
    one = torch.ones(2, 2)
    got = estimators.optimal_token_baseline(one, one, 2, 0.0 * one, one)
    assert got.tolist() == [[2.0, 1.0]] * 2


def test_at_last_token():
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 1]])
    got = estimators.at_last_token([5.0, None, 2.0, 3.0], mask)
    assert got.tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 3.0]]


@pytest.mark.parametrize(("error", "message", "call"), [
    (ValueError, "num_generations must be at least 2", lambda: estimators.rloo(R, 1)),
    (ValueError, "6 rewards cannot be divided into groups of num_generations=4", lambda: estimators.rloo(R, 4)),
    (ValueError, "rewards must be finite", lambda: estimators.rloo([math.inf, 0.0], 2)),
    (TypeError, "rewards must be a tensor or .*'good'", lambda: estimators.rloo(["good", 0.0], 2)),
    (ValueError, r"lengths must have shape \(6,\); got \(3,\)", lambda: estimators.opo(R, 3, torch.ones(3))),
    (ValueError, "rewards must be >= 0 for maxrl.*got -1", lambda: estimators.maxrl([-1.0, 2.0], 2)),
    (ValueError, r"baselines must have shape \(6,\); got \(2,\)", lambda: estimators.remax(R, torch.ones(2))),
    (TypeError, "baselines must be a torch.Tensor; got list", lambda: estimators.remax(R, [1.0] * 6)),
    (ValueError, "baselines must be finite", lambda: estimators.remax(R, torch.full((6,), math.nan))),
    (ValueError, "baselines must be finite", lambda: estimators.remax(R, torch.full((6,), math.inf))),
    (ValueError, "rewards must be 0 or 1 for pass_at_k", lambda: estimators.pass_at_k(R, 3, 2)),
    (ValueError, "k must be at most num_generations=2; got 3", lambda: estimators.pass_at_k([1.0, 0.0], 2, 3)),
    (ValueError, r"gamma must be in \(0, 1\]; got 2",
     lambda: estimators.reinforce_plus_plus(torch.ones(1, 2), torch.ones(1, 2), gamma=2.0)),
    (ValueError, r"token_rewards must have shape \(B, T\); got \(2,\)",
     lambda: estimators.reinforce_plus_plus(torch.ones(2), torch.ones(2))),
    (ValueError, "token_rewards must be finite",
     lambda: estimators.reinforce_plus_plus(torch.full((1, 2), math.nan), torch.ones(1, 2))),
    (ValueError, "token_rewards must be finite",
     lambda: estimators.reinforce_plus_plus(torch.full((1, 2), math.inf), torch.ones(1, 2))),
    (ValueError, r"sum_squared_probs must have shape \(2, 2\); got \(2,\)",
     lambda: estimators.optimal_token_baseline(*[torch.ones(2, 2)] * 2, 2, torch.ones(2, 2), torch.ones(2))),
    (ValueError, "old_per_token_logps must be finite on active tokens",
     lambda: estimators.optimal_token_baseline(*[torch.ones(2, 2)] * 2, 2, torch.full((2, 2), math.nan), torch.ones(2, 2))),
    (ValueError, "sum_squared_probs must be finite on active tokens",
     lambda: estimators.optimal_token_baseline(*[torch.ones(2, 2)] * 2, 2, torch.ones(2, 2), torch.full((2, 2), math.inf))),
    (ValueError, "3 rewards cannot be divided into groups of num_generations=2",
     lambda: estimators.optimal_token_baseline(*[torch.ones(3, 2)] * 2, 2, *[torch.ones(3, 2)] * 2)),
    (ValueError, "lengths must be numbers of tokens, at least 0; got -1",
     lambda: estimators.opo(R, 3, torch.tensor([2, 1, 3, 0, 5, -1]))),
    (ValueError, "k must be at least 1; got 0", lambda: estimators.pass_at_k([1.0, 0.0], 2, 0)),
    (ValueError, r"mask must have shape \(2, T\); got \(3, 2\)", lambda: estimators.at_last_token([1.0, 2.0], torch.ones(3, 2))),
    (ValueError, "a mask must hold only 0 and 1", lambda: estimators.at_last_token([1.0], torch.full((1, 2), 7))),
    (ValueError, "a mask must hold only 0 and 1",
     lambda: estimators.reinforce_plus_plus(torch.ones(1, 2), torch.full((1, 2), 0.5))),
])  # fmt: skip
def test_estimators_refuse(error, message, call):
    with pytest.raises(error, match=message):
        call()
