"""Objectives around other objectives (rejection, truncation, mixtures), and the weights of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from objective_cases import SEEDS, case, evaluate

from grpo_fused import objectives


class TestRejection:
    @pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    @pytest.mark.parametrize("policy", ["current", "old"])
    def test_leaves_out_tokens_that_diverge(self, level, estimator, policy):
        if (level, estimator) == ("sequence_max", "k1"):
            with pytest.raises(ValueError, match="sequence_max' needs estimator 'k2' or 'k3'.*got 'k1'"):
                objectives.rollout_rejection(objectives.gpg(), level, estimator, high=1.2)
            return
        high, low = (1.2, 0.95) if estimator == "k1" else (0.04, None)
        objective = objectives.rollout_rejection(objectives.gpg(), level, estimator, high=high, low=low, policy=policy)
        assert objective.scope == ("token" if level == "token" else "sequence")
        kept = total = 0
        for seed in SEEDS:
            logps, inputs, cu_seqlens = case(seed)
            first = logps if policy == "current" else inputs["old_per_token_logps"]
            d = first - inputs["sampling_per_token_logps"]
            k = {"k1": -d, "k2": d * d / 2, "k3": torch.expm1(d) - d}[estimator]
            plain = evaluate(objectives.gpg(), logps, inputs, None)[0]
            want = plain.clone()
            for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
                for t in range(start, stop):
                    own = k[start:stop] if level != "token" else k[t : t + 1]
                    value = getattr(own, level.removeprefix("sequence_"))() if level != "token" else own[0]
                    inside = math.log(low) <= value <= math.log(high) if estimator == "k1" else value <= high
                    want[t] *= float(inside)
                    kept, total = kept + bool(inside), total + 1
            torch.testing.assert_close(evaluate(objective, logps, inputs, cu_seqlens)[0], want, rtol=1e-12, atol=0)
        assert 0 < kept < total

    @pytest.mark.parametrize("level", ["token", "sequence_sum"])
    def test_nan_is_not_left_out(self, level):
        logps, inputs, cu_seqlens = case(0)
        inputs["old_per_token_logps"][4] = math.nan
        del inputs["ref_per_token_logps"]
        made = objectives.rollout_rejection(objectives.gpg(), level, high=1e3, policy="old")
        got = evaluate(made, logps, inputs, cu_seqlens)[0]
        assert got[4].isnan()
        assert got[:3].isfinite().all()

    def test_a_divergence_that_is_rounded_below_zero_is_kept(self):
        """k3 of 1e-8 in float64 is -6e-17."""
        logps = torch.tensor([1e-8], dtype=torch.float64)
        made = objectives.rollout_rejection(objectives.gpg(), "token", "k3", high=1.0)
        assert made(logps, advantages=torch.ones(1), sampling_per_token_logps=torch.zeros(1)) == -logps

    def test_around_a_custom_objective(self):
        """A plain function with a scope gets every input, and offsets if it takes them."""
        seen = {}

        def mine(logps, entropies, *, cu_seqlens, mine, **inputs):
            seen.update(inputs, entropies=entropies, offsets=cu_seqlens)
            return logps * mine

        mine.scope = "batch"
        objective = objectives.rollout_rejection(mine, high=1.2)
        assert objective.scope == "batch"
        logps, inputs, cu_seqlens = case(0)
        entropies, sampling = torch.rand_like(logps), inputs["sampling_per_token_logps"]
        out = objective(
            logps, entropies, cu_seqlens=cu_seqlens, mine=torch.ones_like(logps), sampling_per_token_logps=sampling,
            weights=inputs["weights"],
        )  # fmt: skip
        inside = (logps - sampling).abs() <= math.log(1.2)
        torch.testing.assert_close(out, logps * inside * inputs["weights"])
        assert set(seen) == {"sampling_per_token_logps", "entropies", "offsets"}
        assert seen["entropies"] is entropies

    def test_stacks(self):
        inner = objectives.rollout_truncation(objectives.vanilla(), high=1.2)
        objective = objectives.rollout_rejection(inner, "sequence_max", "k2", high=0.1)
        logps, inputs, cu_seqlens = case(5)
        kept = evaluate(objectives.rollout_rejection(objectives.cross_entropy(), "sequence_max", "k2", high=0.1),
                        logps, inputs, cu_seqlens)[0] != 0  # fmt: skip
        ratio = (logps - inputs["sampling_per_token_logps"]).exp().clamp(max=1.2)
        plain = evaluate(objectives.vanilla(), logps, inputs, None)[0]
        torch.testing.assert_close(evaluate(objective, logps, inputs, cu_seqlens)[0], plain * ratio * kept)
        assert kept.any()
        assert not kept.all()


@pytest.mark.parametrize(("low", "high"), [(None, 1.1), (0.8, 1.2)], ids=["cap", "band"])
def test_truncation_by_the_policy_before_the_update(low, high):
    made = objectives.rollout_truncation(objectives.gpg(), "sequence_sum", low=low, high=high, policy="old")
    bounded = 0
    for seed in SEEDS:
        logps, inputs, cu_seqlens = case(seed)
        factors = []
        for old, mu in zip(
            *(inputs[f"{x}_per_token_logps"].split(cu_seqlens.diff().tolist()) for x in ("old", "sampling")),
            strict=True,
        ):
            ratio = math.exp((old - mu).sum())
            factors += len(old) * [min(ratio, high) if low is None else ratio * (low <= ratio <= high)]
            bounded += ratio > high
        plain = evaluate(objectives.gpg(), logps, inputs, None)
        want = tuple(x * torch.tensor(factors, dtype=torch.float64) for x in plain)
        torch.testing.assert_close(evaluate(made, logps, inputs, cu_seqlens), want, rtol=1e-12, atol=0)
    assert 0 < bounded < 4 * len(SEEDS)


class TestMixture:
    def test_is_the_weighted_sum_of_its_parts(self):
        mixed = objectives.mixture(rl=objectives.ipo(), ce=objectives.cross_entropy(), kl=objectives.ref_kl())
        assert mixed.scope == "token"
        for seed in SEEDS:
            logps, inputs, _ = case(seed)
            want = sum(
                torch.stack(evaluate(part, logps, {**inputs, "weights": inputs["weights"] * inputs[key]}, None))
                for part, key in (
                    (objectives.ipo(), "rl_weights"),
                    (objectives.cross_entropy(), "ce_weights"),
                    (objectives.ref_kl(), "kl_weights"),
                )
            )
            torch.testing.assert_close(torch.stack(evaluate(mixed, logps, inputs, None)), want, rtol=1e-12, atol=1e-14)

    def test_a_part_of_scope_batch_needs_no_sequences(self):
        logps, inputs, _ = case(0)
        part, ones = objectives.kl_cov(0.2), torch.ones_like(logps)
        given = {"advantages": inputs["advantages"], "old_per_token_logps": inputs["old_per_token_logps"]}
        assert torch.equal(objectives.mixture(rl=part)(logps, **given, rl_weights=ones), part(logps, **given))

    def test_a_part_does_not_get_tokens_of_weight_zero(self):
        """Their inputs may be NaN, and they do not count in the part's sequences."""
        mixed = objectives.mixture(rl=objectives.gspo(0.05), ce=objectives.cross_entropy())
        logps, inputs, cu_seqlens = case(0)
        inputs["rl_weights"] = torch.tensor([1.0, 0, 1, 0, 0, 2, 0.5, 0, 0], dtype=torch.float64)
        inputs["ce_weights"] = (inputs["rl_weights"] == 0).double()
        seen = inputs["rl_weights"] != 0
        for key in ("advantages", "old_per_token_logps"):
            inputs[key] = inputs[key].masked_fill(~seen, math.nan)
        losses, grad = evaluate(mixed, logps, inputs, cu_seqlens)
        own = {key: x[seen] for key, x in inputs.items()}
        own["weights"] = own["weights"] * own["rl_weights"]
        want = evaluate(objectives.gspo(0.05), logps[seen], own, torch.tensor([0, 2, 2, 4, 4]))
        torch.testing.assert_close((losses[seen], grad[seen]), want, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad[~seen], -inputs["weights"][~seen])

    def test_scope_is_the_widest(self):
        parts = {"a": objectives.gpg(), "b": objectives.kl_cov(), "c": objectives.gspo()}
        assert objectives.mixture(**parts).scope == "batch"

    def test_needs_what_its_parts_need(self):
        needs = objectives.mixture(rl=objectives.ipo(), ce=objectives.cross_entropy()).needs
        assert needs == {"rl_weights", "ce_weights", "advantages", "sampling_per_token_logps"}
        assert objectives.mixture(ce=objectives.cross_entropy()).needs == {"ce_weights"}

    def test_a_part_without_alternatives_beside_one_that_reads_them(self):
        logps, one = torch.tensor([-1.0, -2.0]), torch.ones(2)
        parts = {"rl": objectives.gpg(), "kd": objectives.topk_forward_kl()}
        others = {
            "alternative_logps": torch.tensor([-1.0, -3.0, -4.0]),
            "alternative_offsets": torch.tensor([0, 1, 3]),
            "teacher_alternative_logps": torch.full((3,), -2.0),
        }
        got = objectives.mixture(**parts)(logps, advantages=logps, rl_weights=one, kd_weights=one, **others)
        torch.testing.assert_close(got, parts["rl"](logps, advantages=logps) + parts["kd"](logps, **others))

    def test_of_a_custom_function(self):
        """It gets all inputs of its tokens, and their alternatives, but no weights; weights may be negative."""

        def mine(logps, entropies, *, x, alternative_logps, alternative_offsets):
            assert alternative_offsets.tolist() == [0, 1, 3]
            assert alternative_logps.tolist() == [-2.0, -5.0, -6.0]
            return logps * x + entropies

        mine.scope = "token"
        logps = torch.tensor([-1.0, -2.0, -3.0])
        got = objectives.mixture(mine=mine)(
            logps, 10.0 * logps, x=logps, mine_weights=torch.tensor([2.0, 0.0, -1.0]),
            alternative_logps=torch.tensor([-2.0, -3.0, -4.0, -4.0, -5.0, -6.0]),
            alternative_offsets=torch.tensor([0, 1, 4, 6]),
        )  # fmt: skip
        assert got.tolist() == [2.0 * (1.0 - 10.0), 0.0, -(9.0 - 30.0)]


class TestTokenWeights:
    MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])

    @pytest.mark.parametrize(("aggregation", "options", "rows"), [
        ("grpo", {}, [1 / 8, 1 / 4, 0, 1 / 12]),
        ("bnpo", {}, [1 / 6] * 4),
        ("dapo", {}, [1 / 6] * 4),
        ("dapo", {"num_items_in_batch": 48}, [1 / 48] * 4),
        ("dr_grpo", {"max_completion_length": 10}, [1 / 40] * 4),
        ("luspo", {}, [1 / 4] * 4),
    ])  # fmt: skip
    def test_averages(self, aggregation, options, rows):
        want = torch.tensor(rows)[:, None] * self.MASK
        got = objectives.token_weights(self.MASK, aggregation, **options)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want)
        packed = objectives.token_weights(
            self.MASK.flatten(), aggregation, cu_seqlens=torch.tensor([0, 3, 6, 9, 12]), **options
        )
        assert torch.equal(packed, got.flatten())

    def test_no_active_tokens(self):
        for aggregation in ("grpo", "bnpo", "dapo", "luspo"):
            assert not objectives.token_weights(torch.zeros(2, 3), aggregation).any()

    @pytest.mark.parametrize(("error", "message", "call"), [
        (ValueError, "aggregation must be one of grpo, bnpo, dr_grpo, dapo, luspo; got 'mean'", {"aggregation": "mean"}),
        (ValueError, "dr_grpo' requires max_completion_length", {"aggregation": "dr_grpo"}),
        (ValueError, "num_items_in_batch is not used by loss_type='grpo'",
         {"aggregation": "grpo", "num_items_in_batch": 3}),
        (ValueError, "num_items_in_batch must be > 0; got 0", {"aggregation": "dapo", "num_items_in_batch": 0}),
        (ValueError, "a mask must hold only 0 and 1", {"aggregation": "dapo", "mask": torch.full((2, 2), 2)}),
        (ValueError, r"mask must be \[B, T\], or packed \[N\].*got \(3,\)", {"aggregation": "dapo", "mask": torch.ones(3)}),
        (ValueError, "cu_seqlens must rise from 0",
         {"aggregation": "dapo", "mask": torch.ones(3), "cu_seqlens": torch.tensor([0, 2])}),
        (TypeError, "mask must be a torch.Tensor; got list", {"aggregation": "dapo", "mask": [1, 1]}),
        (TypeError, "dtype must be fp16, bf16, fp32 or fp64; got torch.int64",
         {"aggregation": "grpo", "dtype": torch.int64}),
    ])  # fmt: skip
    def test_refuses(self, error, message, call):
        with pytest.raises(error, match=message):
            objectives.token_weights(**{"mask": self.MASK, **call})
