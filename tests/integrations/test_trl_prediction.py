"""`PredictedLogprobs`: what it takes for its prediction, what it refuses, in both of TRL's layouts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl")

from helpers import frobenius_error, make_case

from grpo_fused import GRPOLossConfig
from grpo_fused.integrations.trl import FusedLogProbFunction
from grpo_fused.integrations.trl.prediction import Prediction, _median_of_nonzero, _multiple, predict


def problem(compact: bool):
    """A prompt of 3 positions before each completion; (hidden, weight, targets, prediction, rows of the completions)."""
    case = make_case(1, dtype=torch.float32)
    ids, mask = case.completion_ids, case.completion_mask
    prompt = torch.randn(4, 3, 12, generator=torch.Generator().manual_seed(0))
    hidden = torch.cat([prompt, case.hidden_states], 1)
    targets = torch.cat([torch.zeros(4, 3, dtype=torch.int64), torch.where(mask, ids, 0)], 1)
    tensors = {
        "advantages": case.advantages.float(), "old_per_token_logps": case.options["old_per_token_logps"].float(),
        "ref_per_token_logps": None, "sampling_per_token_logps": None, "importance_sampling_ratio": None,
        "num_items_in_batch": None,
    }  # fmt: skip
    prediction = Prediction(GRPOLossConfig(loss_type="grpo"), ids, mask, mask, tensors)
    grid = torch.cat([torch.zeros(4, 3, dtype=torch.bool), mask], 1)
    if compact:
        return hidden[grid], case.lm_head_weight, targets[grid], prediction, torch.arange(int(grid.sum()))
    return hidden.view(-1, 12), case.lm_head_weight, targets.view(-1), prediction, grid.view(-1).nonzero().squeeze(1)


def host_loss(logps, prediction, rows, factor=1.0):
    """TRL's own formula, on padded tensors."""
    mask = prediction.completion_mask
    padded = logps.new_zeros(mask.shape).masked_scatter(mask, logps[rows])
    ratio = (padded - prediction.tensors["old_per_token_logps"]).exp()
    advantages = prediction.tensors["advantages"].unsqueeze(1)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return factor * ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def gradients(compact, loss_of, announce=True):
    hidden, weight, targets, prediction, rows = problem(compact)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with predict(prediction if announce else None):
        logps = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ("entropy",))[0]
    loss_of(logps, prediction, rows).backward()
    return hidden.grad, weight.grad, prediction.counts


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "every-position"])
@pytest.mark.parametrize("factor", [1.0, 0.25, -3.0])
def test_a_multiple_of_the_predicted_loss(compact, factor):
    def loss(logps, prediction, rows):
        return host_loss(logps, prediction, rows, factor)

    got, want = gradients(compact, loss), gradients(compact, loss, announce=False)
    assert (got[2].fused, got[2].recomputed) == (1, 0)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert frobenius_error(mine, theirs) < 1e-5


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "every-position"])
def test_another_loss_is_made_again(compact):
    def loss(logps, prediction, rows):
        return host_loss(logps, prediction, rows) + 1e-4 * logps[rows][5]

    got, want = gradients(compact, loss), gradients(compact, loss, announce=False)
    assert (got[2].fused, got[2].recomputed) == (0, 1)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert frobenius_error(mine, theirs) < 1e-5


def test_scores_of_anything_else_are_what_they_are():
    """A second call, other targets, and rows that the prediction does not name."""
    hidden, weight, targets, prediction, _ = problem(False)
    other = torch.randint(0, 29, targets.shape, generator=torch.Generator().manual_seed(4))
    hidden.requires_grad_()
    with predict(prediction):
        wrong_targets = FusedLogProbFunction.apply(hidden, weight, None, other, 1.0, 16, None, 1.0, ())[0]
        FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())
        second = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())[0]
    log_p = (hidden.detach() @ weight.T).log_softmax(1)
    for got, ids in ((wrong_targets, other), (second, targets)):
        torch.testing.assert_close(got.detach(), log_p.gather(1, ids.unsqueeze(1)).squeeze(1), rtol=1e-5, atol=1e-5)


def test_one_token_for_each_sequence_is_scored_without_a_prediction():
    """There is nothing to gain, and nothing to warn of: the scores are those that were announced."""
    hidden, weight, _, prediction, _ = problem(True)
    prediction.completion_mask = torch.arange(7).eq(0).expand(4, 7)
    with predict(prediction):
        logps = FusedLogProbFunction.apply(
            hidden[:4].clone().requires_grad_(), weight, None, prediction.completion_ids[:, 0], 1.0, 16, None, 1.0, ()
        )[0]
    logps.sum().backward()
    assert prediction.used
    assert (prediction.counts.fused, prediction.counts.recomputed) == (0, 0)


def test_a_target_outside_of_the_completions_is_no_loss_s():
    """All completions are the announced ones, but a score of the prompt is wanted too: it must not come back as 0."""
    hidden, weight, targets, prediction, _ = problem(False)
    targets[0] = 7
    hidden.requires_grad_()
    with predict(prediction):
        got = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())[0]
    assert not prediction.used
    want = (hidden.detach() @ weight.T).log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)


def test_tokens_beside_the_loss_have_their_scores():
    """What a tool wrote may be as unlikely as it likes: TRL exponentiates before it masks."""
    hidden, weight, targets, prediction, _ = problem(True)
    prediction.loss_mask = prediction.completion_mask & (torch.arange(7) % 2 == 0)
    hidden.requires_grad_()
    with predict(prediction):
        got = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())[0]
    assert prediction.used
    want = (hidden.detach() @ weight.T).log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)


def test_each_row_is_held_against_its_own_coefficient():
    rows = torch.arange(6)
    g = torch.tensor([1e6, 1.0, -2.0, 0.5, 0.0, 3.0])
    h = torch.full((6,), -0.1)
    assert _multiple(g * 0.5, h * 0.5, rows, g, h) == pytest.approx(0.5)
    assert _multiple(g, None, rows, g, torch.empty(0)) == pytest.approx(1.0)
    zero = torch.zeros(6)
    assert _multiple(zero, None, rows, zero, torch.empty(0)) == 0
    for row in range(6):
        off = g.clone()
        off[row] += 1e-3 * max(abs(float(g[row])), 1.0)
        assert _multiple(off, h, rows, g, h) is None, row
    assert _multiple(g, -h, rows, g, h) is None
    assert _multiple(g, None, rows, g, h) is None
    assert _multiple(g, h, rows, g, torch.empty(0)) is None
    longer = torch.cat([g, torch.tensor([1e-6])])
    assert _multiple(longer, None, rows, g, torch.empty(0)) is None


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6])
def test_median_of_nonzero(count):
    x = torch.zeros(6)
    x[torch.randperm(6)[:count]] = torch.rand(count) + 0.1
    assert _median_of_nonzero(x) == (x[x > 0].median() if count else 0.0)
