"""`CandidateSets`: containers, sets from logits as those of transformers, and errors of calls with wrong sets."""

from __future__ import annotations

import pytest
import torch
from helpers import ENGINES

from grpo_fused import CandidateSets, fused_linear_grpo_loss, fused_linear_logprobs


class TestErrors:
    """Invalid candidate sets raise, and the error names what was expected."""

    def call(self, ids, offsets, *, targets=(0, 1), mask=None, **options):
        return fused_linear_grpo_loss(
            torch.randn(1, 2, 4), torch.randn(9, 4), torch.tensor([targets]), torch.ones(1), mask,
            candidates=CandidateSets(torch.tensor(ids), torch.tensor(offsets)), **options,
        )  # fmt: skip

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    @pytest.mark.parametrize(
        ("ids", "offsets", "match"),
        [
            ([2, 3, 1], [0, 2, 3], "target of an active token must be in its candidate set; got 1"),
            ([2, 1], [0, 1, 2], "target of an active token must be in its candidate set; got 1"),
            ([0, 3, 3, 1], [0, 3, 4], "different ids; got 1"),
            ([0, 9, 1], [0, 2, 3], r"lie in \[0, 9\); got 0 to 9"),
            ([0, -1, 1], [0, 2, 3], r"lie in \[0, 9\); got -1 to 1"),
            ([0, 3, 1], [0, 2, 4], "rise from 0 to 3"),
            ([0, 3, 1], [0, 4, 3], "rise from 0 to 3"),
            ([0, 3, 1], [0, 3], "a set for each of 2 positions; got 1"),
        ],
    )
    def test_sets(self, ids, offsets, match, impl):
        with pytest.raises(ValueError, match=match):
            self.call(ids, offsets, impl=impl)

    @pytest.mark.parametrize("compact", [True, False])
    @pytest.mark.parametrize("impl", [*ENGINES, "reference"])
    def test_masked_positions_may_have_any_values(self, impl, compact):
        self.call([0, 3, 99, -5], [0, 2, 4], mask=torch.tensor([[1, 0]]), impl=impl, compact=compact)

    @pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps"])
    def test_log_probs_of_the_whole_distribution(self, name):
        with pytest.raises(ValueError, match=f"{name} must be 0 where a token is alone"):
            self.call([0, 3, 1], [0, 2, 3], **{name: torch.tensor([[-1.0, -0.5]])})

    def test_types(self):
        with pytest.raises(
            TypeError, match="offsets of CandidateSets must be a tensor of torch.int64; got torch.int32"
        ):
            CandidateSets(torch.tensor([1]), torch.tensor([0, 1], dtype=torch.int32))
        with pytest.raises(TypeError, match="candidates must be CandidateSets; got Tensor"):
            fused_linear_logprobs(torch.randn(1, 4), torch.randn(9, 4), torch.tensor([0]), candidates=torch.ones(1))
        with pytest.raises(ValueError, match="must keep a token; got none in row 1"):
            CandidateSets.from_mask(torch.tensor([[True, False], [False, False]]))
        some = torch.tensor([0])
        with pytest.raises(ValueError, match=r"ids of CandidateSets must be one-dimensional; got shape \(1, 1\)"):
            CandidateSets(some[None], some)
        with pytest.raises(ValueError, match=r"offsets of CandidateSets must be \[N \+ 1\]; got an empty tensor"):
            CandidateSets(some, some[:0])
        with pytest.raises(ValueError, match="ids and offsets must be on one device; got cpu and meta"):
            CandidateSets(some, some.to("meta"))
        with pytest.raises(ValueError, match="at least one CandidateSets; got none"):
            CandidateSets.cat([])

    @pytest.mark.parametrize("make", [CandidateSets.from_padded, CandidateSets.from_mask, CandidateSets.from_logits])
    @pytest.mark.parametrize("rows", [[[1, 0]], torch.tensor(1)], ids=["list", "number"])
    def test_rows_that_are_no_tensor(self, make, rows):
        with pytest.raises(TypeError, match=r"\w+ must be a tensor of one dimension or more; got (list|Tensor)"):
            make(rows)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"temperature": -1.0}, "temperature must be > 0; got -1.0"),
            ({"temperature": 0.0}, "temperature must be > 0; got 0.0"),
            ({"top_k": 0}, "top_k must be at least 1; got 0"),
            ({"top_p": -1.0}, r"top_p must be in \(0, 1\]; got -1.0"),
            ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
            ({"top_p": 1.5}, r"top_p must be in \(0, 1\]; got 1.5"),
            ({"top_p": torch.nan}, "top_p must be finite"),
            ({"min_p": -0.1}, r"min_p must be in \[0, 1\]; got -0.1"),
            ({"min_p": 1.1}, r"min_p must be in \[0, 1\]; got 1.1"),
            ({"logits": torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])}, "got a row of maximum nan"),
            ({"logits": torch.tensor([[0.0, torch.inf]])}, "got a row of maximum inf"),
            ({"logits": torch.full((2, 3), -torch.inf)}, "not -inf only; got a row of maximum -inf"),
        ],
        ids=str,
    )
    def test_from_logits(self, options, match):
        given = {"logits": torch.tensor([[0.0, 1.0, -torch.inf]]), "top_k": 2} | options
        with pytest.raises(ValueError, match=match):
            CandidateSets.from_logits(given.pop("logits"), **given)

    def test_limits_of_from_logits(self):
        logits = torch.tensor([[0.0, 1.0, -torch.inf]])
        assert CandidateSets.from_logits(logits, top_k=1, top_p=1.0, min_p=0.0).ids.tolist() == [1]
        assert CandidateSets.from_logits(logits, top_p=1e-9, min_p=1.0).ids.tolist() == [1]
        assert len(CandidateSets.from_logits(logits[:0])) == 0
        with pytest.raises(TypeError, match="top_k must be an int; got 2.0"):
            CandidateSets.from_logits(logits, top_k=2.0)


def test_sets_from_logits_are_those_of_transformers():
    from transformers.generation import logits_process as hf

    g = torch.Generator().manual_seed(0)
    for case in range(200):
        logits = 3 * torch.randn(3, 17, generator=g)
        if case % 4 == 0:
            logits = logits.round()  # ties
        top_k, top_p, min_p = [(5, None, None), (None, 0.8, None), (None, None, 0.2), (9, 0.9, 0.05)][case % 4]
        temperature = 0.5 + float(torch.rand((), generator=g))
        scores = hf.TemperatureLogitsWarper(temperature)(None, logits)
        for warper, value in ((hf.TopKLogitsWarper, top_k), (hf.TopPLogitsWarper, top_p), (hf.MinPLogitsWarper, min_p)):
            scores = scores if value is None else warper(value)(None, scores)
        sets = CandidateSets.from_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert torch.equal(sets.to_mask(17), scores > -torch.inf)


def test_the_most_probable_token_is_always_kept():
    sets = CandidateSets.from_logits(torch.tensor([[0.0, 3.0, 1.0]]), top_p=1e-9)
    assert sets.ids.tolist() == [1]


def test_containers():
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[:, 0], mask[3] = True, True
    sets = CandidateSets.from_mask(mask)
    assert len(sets) == 5
    assert sets.sizes[3] == 0  # the whole vocabulary
    assert torch.equal(sets.to_mask(7), mask)
    rows = torch.tensor([4, 0, 3])
    assert torch.equal(sets.select(rows).to_mask(7), mask[rows])
    assert torch.equal(CandidateSets.cat([sets, sets.select(rows)]).to_mask(7), torch.cat([mask, mask[rows]]))
    padded = torch.tensor([[3, 1, -1], [-1, -1, -1], [0, -1, 2]])
    assert CandidateSets.from_padded(padded).ids.tolist() == [3, 1, 0, 2]
    assert CandidateSets.from_padded(padded).offsets.tolist() == [0, 2, 2, 4]
    assert CandidateSets.from_padded(padded.view(3, 1, 3)).sizes.tolist() == [2, 0, 2]


def test_tokens_that_sum_to_top_p_exactly_are_enough():
    assert CandidateSets.from_logits(torch.zeros(1, 4), top_p=0.5).sizes.tolist() == [2]


def test_a_token_alone_in_its_set_may_have_an_old_logp_of_a_thousandth_only():
    sets, old = CandidateSets(torch.tensor([0, 1]), torch.tensor([0, 1, 2])), torch.tensor([[0.0, -2e-3]])
    with pytest.raises(ValueError, match="further away than 1e-3"):
        fused_linear_grpo_loss(
            torch.randn(1, 2, 4), torch.randn(9, 4), torch.tensor([[0, 1]]), torch.ones(1), candidates=sets,
            old_per_token_logps=old,
        )  # fmt: skip
