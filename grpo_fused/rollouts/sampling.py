"""The draw of one token from each row of probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fused.rollouts.errors import DivergedError

BLOCK = 128
"""Tokens that are summed before a row is searched; sizes of vocabularies are often multiples of it."""


def draw(p: Tensor) -> Tensor:
    """`[R]` int64: a column of each row of p `[R, V]` fp32, with a probability in proportion to its value (>= 0).

    A column whose value is 0 is never drawn. Sums are in fp64 from blocks of fp32. `torch.multinomial` makes a random
    number for each column (on a CPU in one thread: 0.75 s for 64 rows of 262,144, twice the time of the model); here
    there is one for each row.

    Raises:
        DivergedError: A row has NaN or inf, or only zeros.
    """
    blocks = torch.nn.functional.pad(p, (0, -p.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    if not ((ends[:, -1] > 0) & ends[:, -1].isfinite()).all():
        raise DivergedError("each row of probabilities must be finite, with a sum > 0: the policy's logits are not")
    below_one = 1 - 2.0**-52  # an index beyond the last positive value must not be found
    at = torch.rand(len(p), 1, dtype=torch.float64, device=p.device) * below_one * ends[:, -1:]
    block = torch.searchsorted(ends, at, right=True)
    share = (at - (ends - sums).gather(1, block)) / sums.gather(1, block)
    inside = blocks[torch.arange(len(p), device=p.device), block[:, 0]].double().cumsum(-1)
    column = torch.searchsorted(inside, share.clamp(0, below_one) * inside[:, -1:], right=True)
    return (block * BLOCK + column)[:, 0]
