"""The study of sampling masks, on a small policy: each of its figures notices a wrong set or a lost byte."""

from __future__ import annotations

import pytest
import torch
from with_vllm.conftest import HAS_MASKS
from with_vllm.models import build_policy

from benchmarks import masks
from grpo_fused import CandidateSets
from grpo_fused.trainer import Sampling


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}], ids=["top_p", "top_k"])
def test_a_case_has_the_sets_of_the_logits_and_the_hosts_cost(engine, truncation):
    engine.sync_weights(build_policy())
    sampling = Sampling(num_generations=2, max_completion_length=4, seed=5, **truncation)
    found = masks.case(engine, [5, 6, 7], sampling)
    assert ("size" in found) == HAS_MASKS
    if HAS_MASKS:
        assert found["differs"] == {"positions": 0, "tokens": 0}
        assert found["set_bytes"] == 8 * found["size"]["mean"]
    assert 0 < found["ours_us"] < 1e4
    assert 0 < found["vllm_us"] < 1e5
    assert found["vllm_bytes"] > found["set_bytes"]  # a pointer for each token, and the number


def test_a_set_that_is_not_that_of_the_logits_is_counted():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    right = CandidateSets.from_logits(logits, top_k=4)
    sampling = Sampling(num_generations=1, max_completion_length=3, top_k=4)
    assert masks.compare(right, logits, sampling) == {"positions": 0, "tokens": 0}
    other = right.ids.clone()
    other[4] = next(token for token in range(50) if token not in right.ids[4:8])
    assert masks.compare(CandidateSets(other, right.offsets), logits, sampling) == {"positions": 1, "tokens": 2}


def test_a_meter_counts_the_processors_time_or_what_is_left():
    class Work:
        kept: list[bytes] = []  # noqa: RUF012

        def do(self, size: int) -> None:
            sum(range(10**5))
            self.kept.append(bytes(size))

    seconds, space = masks.Meter(), masks.Meter(memory=True)
    with seconds.on(Work, "do"):
        Work().do(10)
    with space.on(Work, "do"):
        for size in (10_000, 30_000, 20_000):
            Work().do(size)
    Work().do(10**6)
    assert 0 < seconds.of_token(1) < 0.1
    assert space.of_token(2) == pytest.approx(3 * 20_000 / 2, rel=0.05)


def test_the_chain_is_learned_by_its_own_probabilities():
    """The loss is the cross-entropy with the table of successors; it is least, the entropy, where they agree."""
    chain = masks.Chain(2048)
    words = chain.words(2, 40, seed=1)
    assert chain.followers.shape == (masks.WORDS, masks.SUCCESSORS)
    followed = (chain.followers[words[:, :-1]] == words[:, 1:].unsqueeze(-1)).any(-1)
    assert followed.all()
    table = torch.full((2048, 2048), -30.0)
    sources = torch.arange(masks.WORDS).unsqueeze(1) * chain.spacing
    table[sources, chain.followers * chain.spacing] = chain.probabilities.log()

    def model(ids):
        return type("Output", (), {"logits": table[ids]})

    p = chain.probabilities[words.flatten()]
    entropy = -(p * p.log()).sum(1).mean()
    torch.testing.assert_close(chain.loss(model, words), entropy, rtol=1e-4, atol=1e-5)
