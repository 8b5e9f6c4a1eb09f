"""The fields of a call that ranks compare, and which must be equal; without processes."""

from __future__ import annotations

import pytest
import torch

from grpo_fused.call.calls import LMHead, LogprobsCall, LogprobsGradientCall, Needs, Run, TokenSets
from grpo_fused.ranks.handshake import checksum, contents_of, form_of

IDS, MASK = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])


def call(ids=IDS, mask=MASK, compact=True, **coefficients):
    hidden, weight = torch.zeros(2, 3, 8), torch.zeros(10, 8)
    given = {"dlogps": None, "dentropies": None, "dalternative_logps": None, **coefficients}
    forward = LogprobsCall(hidden, LMHead(weight), ids, mask, TokenSets(), False, Run("chunked", None, compact))
    return LogprobsGradientCall(forward, None, **given, needs=Needs(True, True, False))


def contents(**changes):
    return contents_of(call(**changes))


def test_form_has_options_and_which_tensors_are_given():
    same = call(ids=IDS + 1)
    assert form_of(same) == form_of(call())
    assert form_of(call(compact=False)) != form_of(call())
    assert form_of(call(mask=None)) != form_of(call())
    assert form_of(call(dlogps=IDS)) != form_of(call(dlogps=None)) != form_of(call(dentropies=IDS))
    assert form_of(call().forward) != form_of(call())


def test_contents_cover_active_positions_only():
    changed = IDS.clone()
    changed[0, 2] = -100  # masked
    assert contents(ids=changed) == contents()
    changed[0, 1] = 2
    assert contents(ids=changed) != contents()
    swapped = IDS.clone()
    swapped[0, :2] = swapped[0, :2].flip(0)
    assert contents(ids=swapped) != contents()
    assert contents(mask=torch.ones_like(MASK)) != contents()


@pytest.mark.parametrize("name", ["dlogps", "dentropies", "dalternative_logps"])
def test_coefficients_are_compared_by_the_positions_of_zeros(name):
    g = torch.tensor([[0.5, 0.0, 7.0], [1.0, 2.0, 3.0]])
    assert contents(**{name: g}) == contents(**{name: -2 * g})
    assert contents(**{name: g}) != contents(**{name: g + 1})
    masked = g.clone()
    masked[0, 2] = 0.0
    assert contents(**{name: g}) == contents(**{name: masked})


def test_checksums_are_numbers_that_a_collective_can_send():
    assert checksum(None, None) == 0
    huge = checksum(torch.full((1000,), torch.finfo(torch.float64).max, dtype=torch.float64), None)
    assert torch.tensor(huge, dtype=torch.int64) == huge


def test_checksums_see_the_last_bit():
    one = torch.ones(3, dtype=torch.float64)
    assert checksum(one, None) != checksum(one.nextafter(2 * one), None)
