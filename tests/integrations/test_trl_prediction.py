"""`PredictedLogprobs`: what it takes for its prediction, what it refuses, in both of TRL's layouts."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("trl")

from helpers import frobenius_error, make_case
from integrations import trl_runs
from trl import GRPOConfig

from grpo_fused import GRPOLossConfig
from grpo_fused.call.calls import LossInputs
from grpo_fused.integrations.context import holding
from grpo_fused.integrations.trl import FusedGRPOTrainer, FusedLogProbFunction
from grpo_fused.integrations.trl.prediction import Prediction, _median_of_nonzero, _multiple, announced
from grpo_fused.integrations.trl.release import RELEASE

LAYOUTS = {"compact": (True, 3), "every-position": (False, 3), "prompts-of-one-token": (False, 0)}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def problem(compact: bool, before: int = 3):
    """As many positions before each completion; (hidden, weight, targets, prediction, rows of the completions)."""
    case = make_case(1, dtype=torch.float32)
    ids, mask = case.completion_ids, case.completion_mask
    prompt = torch.randn(4, before, 12, generator=torch.Generator().manual_seed(0))
    hidden = torch.cat([prompt, case.hidden_states], 1)
    targets = torch.cat([torch.zeros(4, before, dtype=torch.int64), torch.where(mask, ids, 0)], 1)
    inputs = LossInputs(case.advantages.float(), mask, case.options["old_per_token_logps"].float())
    prediction = Prediction(GRPOLossConfig(loss_type="grpo"), ids, mask, inputs)
    grid = torch.cat([torch.zeros(4, before, dtype=torch.bool), mask], 1)
    if compact:
        return hidden[grid], case.lm_head_weight, targets[grid], prediction, torch.arange(int(grid.sum()))
    return hidden.view(-1, 12), case.lm_head_weight, targets.view(-1), prediction, grid.view(-1).nonzero().squeeze(1)


def host_loss(logps, prediction, rows, factor=1.0):
    """TRL's own formula, on padded tensors."""
    mask = prediction.completion_mask
    padded = logps.new_zeros(mask.shape).masked_scatter(mask, logps[rows])
    ratio = (padded - prediction.inputs.old_per_token_logps).exp()
    advantages = prediction.inputs.advantages.unsqueeze(1)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return factor * ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def gradients(layout, loss_of, announce=True):
    hidden, weight, targets, prediction, rows = problem(*layout)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with holding(announced, prediction if announce else None):
        logps = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ("entropy",))[0]
    loss_of(logps, prediction, rows).backward()
    return hidden.grad, weight.grad, prediction.counts


@layouts
@pytest.mark.parametrize("factor", [1.0, 0.25, -3.0])
def test_a_multiple_of_the_predicted_loss(layout, factor):
    def loss(logps, prediction, rows):
        return host_loss(logps, prediction, rows, factor)

    got, want = gradients(layout, loss), gradients(layout, loss, announce=False)
    assert (got[2].fused, got[2].recomputed) == (1, 0)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert frobenius_error(mine, theirs) < 1e-5


@layouts
def test_another_loss_is_made_again(layout):
    def loss(logps, prediction, rows):
        return host_loss(logps, prediction, rows) + 1e-4 * logps[rows][5]

    got, want = gradients(layout, loss), gradients(layout, loss, announce=False)
    assert (got[2].fused, got[2].recomputed) == (0, 1)
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        assert frobenius_error(mine, theirs) < 1e-5


def test_scores_of_anything_else_are_what_they_are():
    """A call without a gradient, a second one, other targets, and rows that the prediction does not name."""
    hidden, weight, targets, prediction, _ = problem(False)
    other = torch.randint(0, 29, targets.shape, generator=torch.Generator().manual_seed(4))
    hidden.requires_grad_()
    with holding(announced, prediction):
        with torch.no_grad():
            FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())
        assert not prediction.used
        wrong_targets = FusedLogProbFunction.apply(hidden, weight, None, other, 1.0, 16, None, 1.0, ())[0]
        FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())
        second = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())[0]
    log_p = (hidden.detach() @ weight.T).log_softmax(1)
    for got, ids in ((wrong_targets, other), (second, targets)):
        torch.testing.assert_close(got.detach(), log_p.gather(1, ids.unsqueeze(1)).squeeze(1), rtol=1e-5, atol=1e-5)


def test_as_many_tokens_as_sequences_are_scored_without_a_prediction():
    """There is little to gain, and nothing to warn of: the scores are those that were announced."""
    hidden, weight, _, prediction, _ = problem(True)
    prediction.completion_mask = torch.arange(7) < torch.tensor([[2], [0], [1], [1]])
    ids = prediction.completion_ids[prediction.completion_mask]
    with holding(announced, prediction):
        logps = FusedLogProbFunction.apply(
            hidden[:4].clone().requires_grad_(), weight, None, ids, 1.0, 16, None, 1.0, ()
        )[0]
    logps.sum().backward()
    assert prediction.used
    assert (prediction.counts.fused, prediction.counts.recomputed) == (0, 0)


def test_nothing_scored():
    """As where all completions are truncated, and masked for that."""
    hidden, weight, targets, prediction, _ = problem(False)
    prediction.completion_mask = torch.zeros_like(prediction.completion_mask)
    prediction.inputs = prediction.inputs._replace(completion_mask=prediction.completion_mask)
    hidden.requires_grad_()
    with holding(announced, prediction):
        logps = FusedLogProbFunction.apply(hidden, weight, None, targets * 0, 1.0, 16, None, 1.0, ())[0]
    (logps * 0).sum().backward()
    assert prediction.used
    assert not hidden.grad.any()


def test_a_target_outside_of_the_completions_is_no_loss_s():
    """All completions are the announced ones, but a score of the prompt is wanted too: it must not come back as 0."""
    hidden, weight, targets, prediction, _ = problem(False)
    targets[0] = 7
    hidden.requires_grad_()
    with holding(announced, prediction):
        got = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())[0]
    assert not prediction.used
    want = (hidden.detach() @ weight.T).log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)


def test_tokens_beside_the_loss_have_their_scores():
    """What a tool wrote may be as unlikely as it likes: TRL exponentiates before it masks."""
    hidden, weight, targets, prediction, _ = problem(True)
    in_loss = prediction.completion_mask & (torch.arange(7) % 2 == 0)
    prediction.inputs = prediction.inputs._replace(completion_mask=in_loss)
    hidden.requires_grad_()
    with holding(announced, prediction):
        got, entropies, *_ = FusedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ("entropy",))
    assert prediction.used
    log_p = (hidden.detach() @ weight.T).log_softmax(1)
    want = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.detach(), -(log_p.exp() * log_p).sum(1), rtol=1e-5, atol=1e-5)


def test_each_row_is_held_against_its_own_coefficient():
    rows = torch.arange(6)
    g = torch.tensor([1e6, 1.0, -2.0, 0.5, 0.0, 3.0])
    h, none = torch.full((6,), -0.1), torch.zeros(6)
    assert _multiple(g * 0.5, h * 0.5, rows, g, h, none) == pytest.approx(0.5)
    assert _multiple(g, None, rows, g, torch.empty(0), none) == pytest.approx(1.0)
    rounded = g.index_fill(0, torch.tensor([4]), 4e-6)  # of 0, by a share of what most have
    assert _multiple(rounded, None, rows, g, torch.empty(0), none) == pytest.approx(1.0)
    zero = torch.zeros(6)
    assert _multiple(zero, None, rows, zero, torch.empty(0), none) == 0
    assert _multiple(zero, h * 0.5, rows, zero, h, none) == pytest.approx(0.5)  # of equal rewards
    assert _multiple(None, h * 0.5, rows, zero, h, none) == pytest.approx(0.5)
    assert _multiple(None, h, rows, g, h, none) is None
    for row in range(6):
        off = g.clone()
        off[row] += 1e-3 * max(abs(float(g[row])), 1.0)
        assert _multiple(off, h, rows, g, h, none) is None, row
    assert _multiple(g, -h, rows, g, h, none) is None
    assert _multiple(g, None, rows, g, h, none) is None
    assert _multiple(g, h, rows, g, torch.empty(0), none) is None
    longer = torch.cat([g, torch.tensor([1e-6])])
    assert _multiple(longer, None, rows, g, torch.empty(0), none) is None


def test_rows_of_the_kl_alone_have_its_rounding():
    """beta (1 - e^(ref - logp)) of the size of 1e-4 beta, in a loss that is scaled by 1/4."""
    one_nat = torch.full((100,), 0.04).index_fill_(0, torch.arange(50), 0.01)  # two sequences
    g = one_nat * 1e-4 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    rows, none = torch.arange(100), torch.empty(0)
    for row in range(100):
        for change, found in ((2e-7, False), (2e-6, True)):  # shares of beta, which has the precision 1.2e-7
            off = g.clone()
            off[row] += change * one_nat[row]
            assert (_multiple(off / 4, None, rows, g, none, one_nat) is None) == found, (row, change)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6])
def test_median_of_nonzero(count):
    x = torch.zeros(6)
    x[torch.randperm(6)[:count]] = torch.rand(count) + 0.1
    assert _median_of_nonzero(x) == (x[x > 0].median() if count else 0.0)


class LongCompletions(FusedGRPOTrainer):
    """Random completions of 150 to 200 tokens, in place of a minute of `generate`."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        g = torch.Generator().manual_seed(self.state.global_step)
        lengths = torch.randint(150, 201, (len(prompt_ids),), generator=g).tolist()
        ids = [torch.randint(2, 42, (length,), generator=g).tolist() for length in lengths]
        return (ids, None) if RELEASE >= (1, 0) else (ids, None, {})


class Altered(LongCompletions):
    """A small term more: a share of each token's weight 1/N, of beta where no advantage is."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.scores

    def _compute_loss(self, model, inputs):
        loss, mask = super()._compute_loss(model, inputs), inputs["completion_mask"]
        share = 3e-5 if inputs["advantages"].any() else 5e-6 * self.beta
        return loss + share * (self.scores[0] * mask).sum() / mask.sum()


class FarReference(FusedGRPOTrainer):
    """One token that the reference finds e^9 times as likely."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["ref_per_token_logps"][0, 0] += 9.0
        return batch


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.skipif(not hasattr(GRPOConfig, "use_bias_correction_kl"), reason="a release without this option")
def test_a_token_far_below_the_reference(corrected, tmp_path):
    options = {"beta": 0.04, "use_bias_correction_kl": corrected, "max_steps": 1}
    run = trl_runs.train(FarReference, GRPOConfig, trl_runs.save_small_model(tmp_path / "m"), tmp_path / "o", **options)
    assert run.trainer.loss_counts.recomputed == 0


@pytest.mark.parametrize(
    ("options", "Trainer"),
    [
        ({"learning_rate": 1e-5, "top_entropy_quantile": 0.2}, LongCompletions),
        ({"learning_rate": 1e-6, "top_entropy_quantile": 0.2}, LongCompletions),
        ({"learning_rate": 1e-6, "importance_sampling_level": "sequence"}, LongCompletions),
        ({"learning_rate": 1e-5}, Altered),
    ],
    ids=["1e-5", "1e-6", "sequence", "altered"],
)
@pytest.mark.filterwarnings("ignore:Altered computed the gradients")
def test_small_steps_on_long_completions(options, Trainer, tmp_path, monkeypatch):
    """A token's KL is small there; every second batch has no advantages and every token the KL alone."""
    spread, calls = trl_runs.reward, itertools.count()

    def reward(completions, **_):
        return [0.0] * len(completions) if next(calls) % 2 else spread(completions)

    monkeypatch.setattr(trl_runs, "reward", reward)
    options = {"beta": 0.04, "optim": "adamw_torch", "max_completion_length": 200, "max_steps": 4, **options}
    run = trl_runs.train(Trainer, GRPOConfig, trl_runs.save_small_model(tmp_path / "m"), tmp_path / "o", **options)
    assert [row["frac_reward_zero_std"] for row in run.logs[:4]] == [0, 1, 0, 1]
    counts = run.trainer.loss_counts
    assert (counts.fused, counts.recomputed) == ((0, 4) if Trainer is Altered else (4, 0))
