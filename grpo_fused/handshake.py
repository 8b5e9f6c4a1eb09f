"""The handshake of ranks that share a call: they say what they are about to do, and all raise unless it is the same.

Ranks that do different things would wait for each other, or add up what does not belong together. What must be alike is
written down by each operator (`Call`): options and which tensors there are, on all ranks; on ranks with the same tokens
also what these hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fused.batch import LossInputs
from grpo_fused.layout import Layout
from grpo_fused.parallel import Groups, TokenParallel, VocabParallel, all_gather


@dataclass(frozen=True)
class Call:
    """What a rank is about to do, by the names that an error gives."""

    options: Mapping[str, object]
    """the same on all ranks"""
    tensors: Mapping[str, Tensor | None]
    """on all ranks or none; where tokens are the same, with the same values on active positions"""
    mask: Tensor | None
    """the active positions"""
    coefficients: Mapping[str, Tensor | None] = field(default_factory=dict)
    """like tensors, but only where they are 0 must be the same: that decides which rows a rank works on"""

    def form(self) -> dict[str, int | str]:
        """What ranks with other tokens must give alike."""
        there = [name for name, x in {**self.tensors, **self.coefficients}.items() if x is not None]
        return {**{name: str(value) for name, value in self.options.items()}, "tensors": ", ".join(there)}

    def contents(self) -> dict[str, int | str]:
        """What ranks with the same tokens must give alike besides."""
        sums = {name: checksum(x, self.mask) for name, x in self.tensors.items()}
        zeros = {name: checksum(None if x is None else x != 0, self.mask) for name, x in self.coefficients.items()}
        return {**sums, **zeros}


def vocab_ranks(groups: Groups, call: Call, ids: Tensor, weight: Tensor) -> VocabParallel | None:
    """The ranks with other slices of the head, once all have been seen to make the same call; None without such."""
    if groups.vocab is None:
        return None
    agree(groups.vocab, {**call.form(), "tokens": ids.numel(), **call.contents()}, weight.device)
    return VocabParallel(groups.vocab, weight.shape[0], ids.reshape(-1))


def token_ranks(
    groups: Groups, call: Call, inputs: LossInputs, layout: Layout, vocab_size: int
) -> TokenParallel | None:
    """The ranks with other tokens, once all have been seen to make the same call; None without such."""
    if groups.tokens is None:
        return None
    advantages, padded = inputs.advantages, layout.cu_seqlens is None
    # a padded [B, 1] may be one for each sequence or the only column of a rank, and no tokens may be anything
    either = (padded and advantages.dim() == 2 and advantages.shape[1] == 1) or layout.num_tokens == 0
    per_token = 2 if either else int(layout.is_per_token(advantages))
    what = {
        **call.form(),
        "split_sequences": int(groups.split_sequences),
        "num_items": checksum(inputs.num_items_in_batch, None),
        "vocabulary": vocab_size,
    }
    agree(groups.tokens, what, advantages.device)
    return TokenParallel(
        groups.tokens, layout.num_tokens, layout.num_sequences, groups.split_sequences, per_token, advantages.device
    )


def agree(group: dist.ProcessGroup, what: Mapping[str, int | str], device: torch.device) -> None:
    """Raise `ValueError` on every rank, naming ranks and values, unless all give the same for each of `what`."""
    numbers = [value if isinstance(value, int) else zlib.crc32(value.encode()) for value in what.values()]
    rows = all_gather("agreement", torch.tensor(numbers, dtype=torch.int64, device=device), group).tolist()
    if all(row == rows[0] for row in rows):
        return
    everything: list[Any] = [None] * len(rows)
    dist.all_gather_object(everything, dict(what), group=group)
    for name in what:
        values = [given.get(name) for given in everything]
        if any(value != values[0] for value in values):
            found = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"all ranks of a process group must give the same {name}; got {found}")


def checksum(x: Tensor | None, mask: Tensor | None) -> int:
    """Of the values that count, in their places; 0 where there is no tensor."""
    if x is None:
        return 0
    values = x.detach().to(torch.float64)
    if mask is not None and mask.shape == x.shape:
        values = torch.where(mask != 0, values, 0.0)
    bits = values.reshape(-1).contiguous().view(torch.int64)
    return int((bits * (2 * torch.arange(len(bits), device=x.device) + 1)).sum()) >> 1
