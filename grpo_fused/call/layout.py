"""Padded `[B, T]` and packed `[N]` inputs as one flat list of tokens, with the sequence of each token."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor


def values_are_checked(device: torch.device) -> bool:
    """Whether the values of tensors on `device` are checked: on the CPU always, elsewhere with `GRPO_FUSED_DEBUG=1`."""
    return device.type == "cpu" or os.environ.get("GRPO_FUSED_DEBUG") == "1"


def active_tokens(mask: Tensor | None, like: Tensor) -> Tensor:
    """bool, shaped like the ids: where the mask is not 0; all of `like` if there is none."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask != 0


def segments(x: Tensor, how: str, offsets: Tensor, initial: float = 0.0) -> Tensor:
    """`how` ("sum", "max") over each part offsets[s] <= k < offsets[s + 1] of x's rows."""
    # unsafe: skips a check that would synchronise; offsets were checked, where values are checked
    return torch.segment_reduce(x, how, offsets=offsets, axis=0, unsafe=True, initial=initial)


def blocks(count: int, size: int) -> list[slice]:
    """`count` rows or columns in blocks of `size`; the last one may be shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def offsets_of(sizes: Tensor) -> Tensor:
    """`[S + 1]` int64: where each of S parts of these sizes begins, and the last one ends."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def split_temperature(temperature: float | Tensor) -> tuple[float, Tensor | None]:
    """(number, None), or (1, the given tensor)."""
    return (1.0, temperature.detach()) if isinstance(temperature, Tensor) else (float(temperature), None)


class Layout(NamedTuple):
    """Which tokens belong to which sequence."""

    shape: torch.Size
    """`(B, T)` padded or `(N,)` packed: the shape of every per-token tensor."""
    num_sequences: int
    """B, or S if packed."""
    cu_seqlens: Tensor | None
    """`[S + 1]` int if packed: sequence s owns the tokens `cu_seqlens[s] : cu_seqlens[s + 1]`."""

    @classmethod
    def of(cls, token_ids: Tensor, cu_seqlens: Tensor | None = None) -> Layout:
        """The layout of validated ids: [B, T], or [N] with offsets; without, each of the N is its own sequence."""
        num_sequences = token_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return cls(token_ids.shape, num_sequences, cu_seqlens)

    @property
    def num_tokens(self) -> int:
        """All positions, masked ones included."""
        return self.shape.numel()

    def sequence_ids(self, device: torch.device) -> Tensor:
        """`[N]` int64, ascending: the sequence of each token."""
        tokens = torch.arange(self.num_tokens, device=device)
        if self.cu_seqlens is None:
            return tokens // max(self.shape[1], 1)
        owner = torch.searchsorted(self.cu_seqlens.to(device, torch.int64), tokens, right=True) - 1
        return owner.clamp(0, max(self.num_sequences - 1, 0))  # wrong offsets are reported by a later check

    def is_per_token(self, x: Tensor) -> bool:
        """Whether `x` has one value for each token, not one for each sequence.

        `[B, 1]` is one for each sequence; with T = 1 both are the same. A packed 1-d tensor is ambiguous if N = S:
        `check_reading` accepts it only if both readings are the same.
        """
        if self.cu_seqlens is None and len(self.shape) == 2:
            return x.dim() == 2 and x.shape[1] != 1
        return x.dim() == 1 and x.shape[0] != self.num_sequences

    def reading(self, x: Tensor) -> int:
        """How a checked `x` is read: 0 one for each sequence, 1 one for each token, 2 both are the same."""
        if self.num_tokens == 0 or x.numel() == 0:
            return 2
        if self.cu_seqlens is None:
            return 2 if x.dim() == 2 and x.shape[1] == 1 else int(self.is_per_token(x))
        return 2 if x.dim() == 1 and self.num_tokens == self.num_sequences else int(self.is_per_token(x))

    def check_reading(self, name: str, x: Tensor) -> None:
        """Raise `ValueError` if `x` could be one for each sequence or one for each token with different results.

        This happens in a packed call with as many tokens as sequences and an empty sequence. The check reads the
        offsets of a call with as many tokens as sequences, which synchronises the device.
        """
        if self.cu_seqlens is None or x.dim() != 1 or self.num_tokens != self.num_sequences:
            return
        if self.cu_seqlens.tolist() != list(range(self.num_sequences + 1)):
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} could be one for each of {self.num_tokens} tokens or one for each "
                "of as many sequences, and a sequence is empty; pass [S, 1] for one a sequence, or leave the empty "
                "sequences out of cu_seqlens"
            )

    def per_token(self, x: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
        """[N]: the value at each token of an `x` for the call (0-d), for each sequence or for each token.

        `sequence_ids` are those of the layout, if they are known.
        """
        if x.dim() == 0:
            return x.expand(self.num_tokens)
        if len(self.shape) == 2:
            return (x if x.dim() == 2 else x.unsqueeze(1)).expand(self.shape).reshape(-1)
        if x.shape == self.shape or self.cu_seqlens is None:
            return x.reshape(-1)
        return x.reshape(-1).index_select(0, self.sequence_ids(x.device) if sequence_ids is None else sequence_ids)
