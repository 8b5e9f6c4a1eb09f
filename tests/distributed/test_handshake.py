"""What ranks say of a call, and what of it must be alike: no processes, the call alone."""

from __future__ import annotations

import torch

from grpo_fused.handshake import Call, checksum

IDS, MASK = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])


def call(ids=IDS, mask=MASK, options=None, **coefficients) -> Call:
    return Call("loss", options or {"impl": "chunked", "compact": True}, {"ids": ids, "mask": mask}, mask, coefficients)


def test_form_is_of_options_and_of_which_tensors_there_are():
    same = call(ids=IDS + 1)
    assert same.form() == call().form()
    assert call(options={"impl": "chunked", "compact": False}).form() != call().form()
    assert call(mask=None).form() != call().form()
    assert call(dlogps=IDS).form() != call(dlogps=None).form() != call(dentropies=IDS).form()


def test_contents_are_of_active_positions():
    changed = IDS.clone()
    changed[0, 2] = -100  # masked
    assert call(ids=changed).contents() == call().contents()
    changed[0, 1] = 2
    assert call(ids=changed).contents() != call().contents()
    swapped = IDS.clone()
    swapped[0, :2] = swapped[0, :2].flip(0)
    assert call(ids=swapped).contents() != call().contents()
    assert call(mask=torch.ones_like(MASK)).contents() != call().contents()


def test_coefficients_count_by_where_they_are_0():
    g = torch.tensor([[0.5, 0.0, 7.0], [1.0, 2.0, 3.0]])
    assert call(dlogps=g).contents() == call(dlogps=-2 * g).contents()
    assert call(dlogps=g).contents() != call(dlogps=g + 1).contents()
    masked = g.clone()
    masked[0, 2] = 0.0
    assert call(dlogps=g).contents() == call(dlogps=masked).contents()


def test_checksums_are_numbers_that_a_collective_can_carry():
    assert checksum(None, None) == 0
    huge = checksum(torch.full((1000,), torch.finfo(torch.float64).max, dtype=torch.float64), None)
    assert torch.tensor(huge, dtype=torch.int64) == huge
